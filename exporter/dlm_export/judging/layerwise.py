"""Parity of a quantised graph, layer by layer from equal inputs, with one part of it in memory.

A value near a rounding boundary takes one code here and the next one there, and every later layer carries that on: two right
computations of a whole pass may end far apart. So the graph runs part by part, a part handing its values on by name to the
next, and shows what goes into every quantised layer and what comes out. Torch runs beside it, a block at a time. At each layer
its own input is compared, which proves what lies between two layers; it goes on with the graph's input, and its output is
compared, which proves the layer; and it goes on with the graph's output. By induction the whole graph is proven, and no
difference is carried on.

Beside that torch carries the same canvases on by itself: how far the logits of two whole passes end apart is shown, and held to
nothing.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from dlm_calibration.formats import quantise_activation, quantise_weight
from dlm_calibration.recipes import FORMATS, HIGH
from dlm_calibration.solvers import rotate
from dlm_export import families
from dlm_export.graph import GRAPH_FILE
from dlm_export.graph.parts import END, Part, cut
from dlm_export.graph.taps import ROUTES, SHOWN, Tap, show
from dlm_export.judging.parity import (
    LOGITS,
    PART_TOLERANCES,
    Canvas,
    LayerRow,
    Parity,
    graph_rows,
    make_canvases,
    random_prompts,
)
from dlm_export.judging.part_runs import Values, full_pass, run_parts
from dlm_export.memory import give_back
from dlm_export.network.experts import RoutedMLPs
from dlm_export.network.layered import HEAD_COLUMNS, Carried, ReadTensor, named
from dlm_export.network.spec import NetworkSpec
from dlm_export.quantising import calibrate
from dlm_export.quantising.calibrate import Quantisation
from dlm_export.workplace import Workplace

# How far an input may be from a boundary for either code to be right: a few roundings of fp32, in which codes are found.
_BOUNDARY = 2.0**-20


def units(network: NetworkSpec) -> int:
    """How often ``check_layers`` calls ``on_done``."""
    return len(network.layers) + 2


def largest_bytes(network: NetworkSpec) -> int:
    """What ``check_layers`` holds of a denoiser at most: its largest part in fp32, twice while it is quantised."""
    sizes: dict[str, int] = defaultdict(int)
    for name, shape in network.parameters().items():
        sizes[".".join(name.split(".")[:2])] += math.prod(shape)
    return 2 * 4 * max(sizes.values())


@torch.no_grad()
def check_layers(
    folder: Path,
    network: NetworkSpec,
    done: Quantisation,
    base: str,
    taps: Mapping[str, Tap],
    *,
    cache_dtype: str,
    is_simulated: bool,
    on_done: Callable[[], None],
    seed: int = 0,
    workplace: Workplace | None = None,
) -> Parity:
    """Compare the graph of the bundle in ``folder`` with torch on random canvases, one a mask ratio.

    ``done``: the numbers it was made of; ``base``: its full precision; ``taps``: where layers stand in the graph;
    ``cache_dtype`` and ``is_simulated`` are the manifest's. ``on_done`` is called ``units`` times, once a part.

    Raises DlmError.
    """
    canvases = make_canvases(network, random_prompts(network, 1, seed), seed)
    parts = cut(ir.load(folder / GRAPH_FILE))
    for part in parts:
        show(part.model, taps)
    wanted = {name for part in parts for name in part.outputs if name.startswith(SHOWN)} | {LOGITS}
    beside = _Beside(done, taps, canvases, workplace or Workplace())
    passes = [
        full_pass(network, cache_dtype, batch.ids.numpy(), np.stack([canvases[number].rows for number in batch.numbers]))
        for batch in beside.equal.batches
    ]
    for part, shown in run_parts(folder, parts, passes, wanted, is_simulated=is_simulated):
        beside.run(part, shown)
        on_done()
    graph = graph_rows(canvases, beside.found, beside.expected)
    return Parity(f"quantised, {base}", PART_TOLERANCES[base], graph, [], layers=list(beside.rows.values()))


class _Beside:
    """Torch beside a graph, part by part: ``equal`` goes on with the graph's values, ``alone`` with its own.

    ``rows`` are found as parts go by, one a quantised layer and one for the logits where the head is none; ``found`` and
    ``expected`` are the logits ``[R, V]`` of the graph's whole pass and of torch's, once the last part has run.
    """

    def __init__(self, done: Quantisation, taps: Mapping[str, Tap], canvases: Sequence[Canvas], workplace: Workplace) -> None:
        self.done, self.taps, self.canvases = done, taps, canvases
        self.layered = families.layered(done.parameters, done.parameters.network, device=workplace.device)
        if done.recipe.embedding is not None:
            self.layered.read = functools.partial(_read_rounded, done.recipe.embedding, self.layered.read)
        tokens = [canvas.tokens for canvas in canvases]
        self.equal, self.alone = Carried(self.layered, tokens), Carried(self.layered, tokens)
        self.rows: dict[str, LayerRow] = {}
        self.found: list[np.ndarray] = []
        self.expected: list[np.ndarray] = []
        self._now: dict[str, np.ndarray] = {}

    def run(self, part: Part, shown: Sequence[Values]) -> None:
        """Torch's side of a part. ``shown``: what the graph showed of it, a batch of canvases each."""
        # A value that crosses is shown by the part that makes it and again by the one that reads it.
        values = [{name.removeprefix(SHOWN): value for name, value in each.items()} for each in shown]
        if part.block is not None:
            self._block(part.block, values)
        elif part.name == END:
            self._end(values)

    def _block(self, i: int, shown: Sequence[Values]) -> None:
        block = self.layered.block(i)
        modules = named(i, block)
        layers = [layer for layer in self.done.formats if layer in modules]
        calibrate.simulate(modules, self.done, layers)
        give_back()
        self.alone.through(i, block)
        for path, module in modules.items():
            if isinstance(module, RoutedMLPs) and self._format_of(path) != HIGH:
                layers = [layer for layer in layers if not layer.startswith(f"{path}.")]
                module.register_forward_pre_hook(functools.partial(self._before_experts, path, shown))
                module.register_forward_hook(functools.partial(self._after_experts, path, shown))
        for layer in layers:
            if self.done.formats[layer] != HIGH:
                # Before the quantisation that ``simulate`` put there.
                modules[layer].register_forward_pre_hook(functools.partial(self._before, layer, shown), prepend=True)
                modules[layer].register_forward_hook(functools.partial(self._after, layer, shown))
        self.equal.through(i, block)

    def _before(self, layer: str, shown: Sequence[Values], _: Any, inputs: tuple[Tensor, ...]) -> Tensor | None:
        theirs = self._shown_now(shown)[self.taps[layer].input]
        self._note_input(layer, inputs[0].cpu().numpy(), theirs)
        return torch.from_numpy(theirs).to(inputs[0].device) if np.isfinite(theirs).all() else None

    def _after(self, layer: str, shown: Sequence[Values], module: Any, _: Any, output: Tensor) -> Tensor | None:
        values, tap = self._shown_now(shown), self.taps[layer]
        if tap.output not in values:
            return None
        x, theirs = values[tap.input], values[tap.output]
        if np.isfinite(x).all() and np.isfinite(theirs).all():
            slack = _slack(self.done, layer, x, module.weight.cpu().numpy())
            self._note_output(layer, output.cpu().numpy(), theirs, slack)
            return torch.from_numpy(theirs).to(output.device)
        self._note(layer, 0.0, float("inf"))
        return None

    def _before_experts(self, path: str, shown: Sequence[Values], _: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Who goes where is compared by weight: of two equally good experts either may be chosen."""
        values, routes = self._shown_now(shown), self.taps[f"{path}{ROUTES}"]
        x, weights = values[self.taps[path].input], values[routes.output]
        self._note_input(path, inputs[0].cpu().numpy(), x)
        self._note_input(path, inputs[2].sort().values.cpu().numpy(), np.sort(weights))
        device = inputs[0].device
        chosen = torch.from_numpy(values[routes.input]).to(device, torch.int64)
        return torch.from_numpy(x).to(device), chosen, torch.from_numpy(weights).to(device)

    def _after_experts(
        self, path: str, shown: Sequence[Values], module: RoutedMLPs, inputs: tuple[Tensor, ...], output: Tensor
    ) -> Tensor:
        theirs = self._shown_now(shown)[self.taps[path].output]
        slack = torch.zeros_like(output)
        for step in (_BOUNDARY, -_BOUNDARY):  # inputs that lie on a boundary between codes, and what comes of them
            slack += 2 * (module.routed(inputs[0] * (1 + step), *inputs[1:]) - output).abs()
        self._note_output(path, output.cpu().numpy(), theirs, slack.cpu().numpy())
        return torch.from_numpy(theirs).to(output.device)

    def _format_of(self, layer: str) -> str:
        """The format of a layer, or of the experts of a mixture."""
        return self.done.formats.get(layer, self.done.formats.get(f"{layer}.gate", HIGH))

    def _shown_now(self, shown: Sequence[Values]) -> Values:
        return shown[self.equal.batches.index(self.equal.now)]

    def _end(self, shown: Sequence[Values]) -> None:
        rows = [canvas.rows for canvas in self.canvases]
        places = {number: (i, row) for i, batch in enumerate(self.equal.batches) for row, number in enumerate(batch.numbers)}
        values = [{name: value[row] for name, value in shown[i].items()} for _, (i, row) in sorted(places.items())]
        self.found = [each[LOGITS] for each in values]
        equal, alone = self.equal.features(rows), self.alone.features(rows)
        if self.done.formats.get("head", HIGH) == HIGH:
            project = self.layered.head()
            for ours, each in zip(equal, values, strict=True):
                self._note_input(LOGITS, project(ours).numpy()[None], each[LOGITS][None])
            self.expected = [project(features).numpy() for features in alone]
            return
        tap = self.taps["head"]
        x = []
        for ours, each in zip(equal, values, strict=True):
            theirs = each[tap.input]
            self._note_input("head", ours.numpy()[None], theirs[None])
            x.append(theirs if np.isfinite(theirs).all() else ours.numpy())
        counts = np.cumsum([len(each) for each in x])[:-1]
        together = _project(self.done, np.concatenate(x), np.concatenate(alone))
        results, slack, self.expected = (np.split(each, counts) for each in together)
        for mine, room, each in zip(results, slack, values, strict=True):
            self._note_output("head", mine[None], each[tap.output][None], room[None])

    def _note_input(self, layer: str, ours: np.ndarray, theirs: np.ndarray) -> None:
        self._note(layer, max(map(_relative, ours, theirs)), None)

    def _note_output(self, layer: str, ours: np.ndarray, theirs: np.ndarray, slack: np.ndarray) -> None:
        self._note(layer, 0.0, max(map(_relative, ours, theirs, slack)))

    def _note(self, layer: str, input_relative: float, output_relative: float | None) -> None:
        row = self.rows.get(layer, LayerRow(layer, self._format_of(layer), 0.0, None))
        outputs = [each for each in (row.output_relative, output_relative) if each is not None]
        self.rows[layer] = LayerRow(layer, row.format, max(row.input_relative, input_relative), max(outputs, default=None))


def _read_rounded(format: str, read: ReadTensor, name: str, dtype: torch.dtype | None, rows: Tensor | None = None) -> Tensor:
    """``Layered.read`` where the embedding table is quantised: it has one scale a row."""
    if name != "embed.weight":
        return read(name, dtype, rows)
    table = read(name, torch.float32, rows)
    return torch.from_numpy(np.ascontiguousarray(quantise_weight(table.numpy().T, format).dequantise().T))


def _project(done: Quantisation, x: np.ndarray, others: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A quantised head's results ``[R, V]`` for ``x`` ``[R, hidden]``, their slack, and its results for ``others``.

    Its matrix is dequantised a few columns at a time.
    """
    stored = done.weight("head")
    seen, others_seen = (calibrate.as_seen(done, "head", each) for each in (x, others))
    found, slack, whole = (np.zeros((len(each), stored.shape[1]), np.float32) for each in (x, x, others))
    apart = _apart(done, "head", x)
    for start in range(0, stored.shape[1], HEAD_COLUMNS):
        columns = slice(start, start + HEAD_COLUMNS)
        weight = stored.columns(columns).dequantise()
        found[:, columns], whole[:, columns] = seen @ weight, others_seen @ weight
        if apart is not None:
            slack[:, columns] = apart @ np.abs(weight)
    return found, slack, whole


def _relative(ours: np.ndarray, theirs: np.ndarray, slack: np.ndarray | float = 0.0) -> float:
    """The worst difference, less what ``slack`` allows each element, over the range of values; infinite for NaN."""
    worst = float(np.maximum(np.abs(ours - theirs) - slack, 0).max())
    return worst / max(float(theirs.max() - theirs.min()), 1e-30) if np.isfinite(worst) else float("inf")


def _slack(done: Quantisation, layer: str, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """By how much each output may differ because inputs lie on a boundary between codes: those take one code or the next."""
    apart = _apart(done, layer, x)
    return np.zeros((*x.shape[:-1], weight.shape[1]), np.float32) if apart is None else apart @ np.abs(weight)


def _apart(done: Quantisation, layer: str, x: np.ndarray) -> np.ndarray | None:
    """How far the codes are apart that each input may take; None where none has a choice.

    Inputs are moved by a few roundings, all of them and all but the largest of a row, whose range they would move as well.
    """
    chosen = FORMATS[done.formats[layer]]
    if chosen.activations is None:
        return None
    if layer in done.rotated:
        x = rotate(x)
    size = np.abs(x)
    inner = np.where(size < size.max(-1, keepdims=True), _BOUNDARY, 0.0).astype(np.float32)

    def rounded(moved: np.ndarray) -> np.ndarray:
        return quantise_activation(moved, chosen.activations or "", done.amax.get(layer), done.scale_dtype)

    apart = np.zeros_like(x)
    for step in (inner, np.full_like(x, _BOUNDARY)):
        apart = np.maximum(apart, np.abs(rounded(x * (1 + step)) - rounded(x * (1 - step))))
    # Moving a range moves every code with it by as little: what counts is a whole code's step.
    apart[apart <= 4 * _BOUNDARY * np.abs(x)] = 0
    return apart if apart.any() else None
