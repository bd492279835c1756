"""From a recipe and states to the numbers of a quantised graph: ranges, foldings, solved weights.

The torch denoiser runs every state with an observer at the input of each quantised layer. Smoothing and AWQ fold scales into
norms and neighbouring matrices first; then the folded denoiser, which computes the same function, is observed. Which layers
share an input and where its scale can go is said by the network's ``LinearSpec``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from dlm_calibration import solvers
from dlm_calibration.errors import CalibrationError
from dlm_calibration.formats import FP32, QuantisedWeight, ScaleType, quantise_activation, quantise_weight, with_scales
from dlm_calibration.observers import Method, Observer, Observers
from dlm_calibration.recipes import FORMATS, HIGH, LayerFormat, Recipe
from dlm_calibration.states import State
from dlm_export import families
from dlm_export.families.base import Parameters
from dlm_export.network.denoiser import Denoiser
from dlm_export.network.spec import LinearSpec, NetworkSpec
from dlm_export.quantising import modelopt

COMMITTED_WEIGHT = 0.5
"""GPTQ's weight of a committed position; a masked one counts 1, because only its prediction is read."""
AWQ_ROWS = 256
GRAM_BYTES = 1 << 30  # of GPTQ's Gram matrices held at a time; more layers take another sweep


LARGE = 500_000_000
"""Parameters from which calibration holds a denoiser in bf16, half the memory: ranges need no more. Judging takes fp32."""


def holding_dtype(network: NetworkSpec) -> torch.dtype:
    """The element type that calibration holds a denoiser in."""
    return torch.bfloat16 if network.parameter_count() > LARGE else torch.float32


def by_site(layers: Iterable[LinearSpec]) -> dict[str, list[LinearSpec]]:
    """Site -> the layers that read that input, in order of the pass."""
    sites: dict[str, list[LinearSpec]] = {}
    for layer in layers:
        sites.setdefault(layer.site, []).append(layer)
    return sites


@dataclass
class Folded:
    """A source's parameters with scales folded in: rows are inputs, columns outputs (of a norm or bias: its elements)."""

    source: Parameters
    network: NetworkSpec
    rows: dict[str, np.ndarray] = field(default_factory=dict)
    columns: dict[str, np.ndarray] = field(default_factory=dict)

    def read(self, parameter: str, dtype: np.dtype) -> np.ndarray:
        """See ``Parameters.read``; scaled in fp32."""
        if parameter not in self.rows and parameter not in self.columns:
            return self.source.read(parameter, dtype)
        array = self.source.read(parameter, np.dtype(np.float32))
        if parameter in self.rows:
            array = array * self.rows[parameter][:, None]
        if parameter in self.columns:
            array = array * self.columns[parameter]
        return np.ascontiguousarray(array, dtype=dtype)

    def view(self, parameter: str) -> Tensor | None:
        """See ``Parameters.view``."""
        return None if parameter in self.rows or parameter in self.columns else self.source.view(parameter)

    @functools.cached_property
    def _readers(self) -> dict[str, list[LinearSpec]]:
        return by_site(self.network.linear_layers())

    def fold(self, of: str, scales: np.ndarray) -> None:
        """Divide the input at a site by ``scales`` ``[K]``, and multiply the rows of all matrices that read it."""
        readers = self._readers[of]
        fold = readers[0].fold
        assert fold is not None, of
        # Runs of inputs that read the same elements get one scale.
        shared = scales.reshape(-1, fold.repeats, fold.run).max(1)
        scales = np.repeat(shared, fold.repeats, 0).reshape(-1)
        for name in fold.parameters:
            self._divide(self.columns, name, shared.reshape(-1))
        for reader in readers:
            self.rows[reader.weight] = self.rows.get(reader.weight, np.float32(1)) * scales

    @staticmethod
    def _divide(into: dict[str, np.ndarray], name: str, scales: np.ndarray) -> None:
        into[name] = into.get(name, np.float32(1)) / scales


@dataclass
class Quantisation:
    """Everything that a quantised graph needs beside the trace; ``weight`` and ``embedding`` give its codes."""

    recipe: Recipe
    formats: dict[str, str]
    parameters: Folded
    amax: dict[str, float] = field(default_factory=dict)
    rotated: dict[str, int] = field(default_factory=dict)
    observers: Observers | None = None
    stored: families.Weights | None = None
    scale_dtype: ScaleType = FP32
    """What the graph holds scales in."""
    _solved: dict[str, QuantisedWeight] = field(default_factory=dict)

    def matrix(self, layer: str) -> np.ndarray:
        """A layer's full-precision weight ``[K, N]``, fp32, foldings and rotation applied."""
        w = self.parameters.read(f"{layer}.weight", np.dtype(np.float32))
        return solvers.rotate_rows(w) if layer in self.rotated else w

    def weight(self, layer: str) -> QuantisedWeight:
        """A layer's quantised weight: solved during calibration, or rounded to nearest now."""
        chosen = FORMATS[self.formats[layer]]
        assert chosen.weights is not None
        if self.stored is not None:
            found = self.stored.stored(f"{layer}.weight")
            assert found is not None
            return with_scales(found.weight, self.scale_dtype)
        if layer not in self._solved:
            return self.rounded(self.matrix(layer), chosen)
        return self._solved[layer]

    def rounded(self, w: np.ndarray, chosen: LayerFormat) -> QuantisedWeight:
        """A matrix rounded to nearest in a layer format."""
        assert chosen.weights is not None
        return quantise_weight(w, chosen.weights, group_size=chosen.group_size, scale_dtype=self.scale_dtype)

    def solve(self, layer: str, gram: np.ndarray) -> None:
        """Round a layer's weight by GPTQ; ``gram`` ``[K, K]`` is its input's."""
        chosen = FORMATS[self.formats[layer]]
        assert chosen.weights is not None
        self._solved[layer] = solvers.gptq(
            self.matrix(layer), gram, format=chosen.weights, group_size=chosen.group_size, scale_dtype=self.scale_dtype
        )

    def embedding(self) -> QuantisedWeight:
        """The embedding table's codes ``[V, hidden]``, one scale a row: as the transposed matrix's columns."""
        assert self.recipe.embedding is not None
        table = self.parameters.read("embed.weight", np.dtype(np.float32))
        return quantise_weight(table.T, self.recipe.embedding)

    def summary(self) -> dict[str, Any]:
        """What the manifest says: recipe, format of every layer."""
        return {"recipe": self.recipe.as_dict(), "layers": self.formats}


def calibrate(
    parameters: Parameters,
    network: NetworkSpec,
    recipe: Recipe,
    formats: Mapping[str, str],
    states: Sequence[State],
    on_state: Callable[[], None],
    calibrator: str = "own",
    scale_dtype: ScaleType = FP32,
) -> Quantisation:
    """Find a recipe's numbers. ``states`` may be empty where ``recipe.needs_states`` says so.

    ``calibrator`` ``modelopt`` takes ranges and folded scales from NVIDIA's package; the rest stays ours. ``on_state`` is
    called ``sweeps(...) * len(states)`` times. Raises CalibrationError, ModeloptError.
    """
    folded = Folded(parameters, network)
    done = Quantisation(recipe, dict(formats), folded, scale_dtype=scale_dtype)
    quantised = _quantised(network, formats)
    if recipe.rotate_down:
        done.rotated = {layer.path: len(solvers.hadamard(layer.inputs)) for layer in quantised if layer.role == "down"}
    if not recipe.needs_states(formats):
        return done
    sites = by_site(quantised)
    sizes = {of: readers[0].inputs for of, readers in sites.items()}

    if recipe.smoothing is not None or recipe.solver == "awq":
        observers = Observers({of: Observer(of, sizes[of], keep_rows=AWQ_ROWS, seed=i) for i, of in enumerate(sites)})
        observe(_load(done), observers, states, {}, on_state)
        observers.check(sites)
        if calibrator == "modelopt":
            groups = {of: [layer.path for layer in readers] for of, readers in sites.items() if readers[0].fold is not None}
            found = modelopt.scales(_load(done), states, formats, groups, alpha=recipe.smoothing, on_state=on_state)
            for of, scales in found.items():
                folded.fold(of, scales)
        else:
            _fold(done, observers, sites)
    grams = _groups(sizes) if recipe.solver == "gptq" else [[]]
    for group in grams:
        observers = Observers({of: Observer(of, sizes[of], gram=of in group, seed=i) for i, of in enumerate(sites)})
        observe(_load(done), observers, states, done.rotated, on_state)
        observers.check(sites)
        for of in group:
            gram = observers[of].gram
            assert gram is not None
            for layer in sites[of]:
                done.solve(layer.path, gram)
    done.observers = observers
    if calibrator == "modelopt":
        done.amax = modelopt.amaxes(_load(done), states, formats, rotated=done.rotated, on_state=on_state)
        return done
    for layer in quantised:
        chosen = FORMATS[formats[layer.path]]
        if chosen.is_static:
            done.amax[layer.path] = _range(observers[layer.site], chosen, recipe)
    return done


def _quantised(network: NetworkSpec, formats: Mapping[str, str]) -> list[LinearSpec]:
    """The layers that a recipe quantises, in order of the pass."""
    return [layer for path, layer in network.quantisable().items() if formats.get(path, HIGH) != HIGH]


def take_stored(
    parameters: Parameters,
    network: NetworkSpec,
    recipe: Recipe,
    formats: Mapping[str, str],
    scale_dtype: ScaleType = FP32,
) -> Quantisation:
    """A pre-quantised checkpoint's own codes, scales and ranges. Raises CalibrationError for a range that is not there."""
    assert isinstance(parameters, families.Weights)
    done = Quantisation(recipe, dict(formats), Folded(parameters, network), scale_dtype=scale_dtype)
    done.stored = parameters
    for layer, name in formats.items():
        if not FORMATS[name].is_static:
            continue
        stored = parameters.stored(f"{layer}.weight")
        assert stored is not None
        if stored.input_amax is None:
            raise CalibrationError(
                f"{layer}: the checkpoint has no input_scale for it, so its activations have no range. Quantise the "
                f"dequantised weights instead: --precision {name}"
            )
        done.amax[layer] = stored.input_amax
    return done


def sweeps(recipe: Recipe, formats: Mapping[str, str], network: NetworkSpec, calibrator: str = "own") -> int:
    """How often ``calibrate`` runs the states."""
    if not recipe.needs_states(formats):
        return 0
    sizes = {layer.site: layer.inputs for layer in _quantised(network, formats)}
    groups = len(_groups(sizes)) if recipe.solver == "gptq" else 1
    is_folded = recipe.smoothing is not None or recipe.solver == "awq"
    theirs = 0
    if calibrator == "modelopt":
        theirs = 1 + (0 if not is_folded else 1 if recipe.smoothing is not None else modelopt.AWQ_SWEEPS)
    return groups + is_folded + theirs


def _groups(sizes: Mapping[str, int]) -> list[list[str]]:
    """Sites, by the size of their input, whose Gram matrices fit ``GRAM_BYTES`` together."""
    groups: list[list[str]] = [[]]
    held = 0
    for of, size in sizes.items():
        need = 4 * size**2
        if groups[-1] and held + need > GRAM_BYTES:
            groups.append([])
            held = 0
        groups[-1].append(of)
        held += need
    return groups


def _range(observer: Observer, chosen: LayerFormat, recipe: Recipe) -> float:
    # NVFP4's groups take their own range from each pass: its tensor scale only has to hold the largest of them.
    if chosen.activations == "nvfp4":
        return observer.amax("max", levels="fp8")
    return observer.amax(cast(Method, recipe.observer), levels="int8" if chosen.activations == "int8" else "fp8")


def _fold(done: Quantisation, observers: Observers, sites: Mapping[str, Sequence[LinearSpec]]) -> None:
    """SmoothQuant's or AWQ's scales at every site with something in front that takes them, folded into ``done.parameters``."""
    found = {}
    for of, observer in observers.items():
        readers = sites[of]
        if readers[0].fold is None:
            continue
        weights = [done.parameters.read(layer.weight, np.dtype(np.float32)) for layer in readers]
        if done.recipe.smoothing is not None:
            amax = np.max([np.abs(w).max(1) for w in weights], 0)
            found[of] = solvers.smooth_scales(observer.channel_amax, amax, done.recipe.smoothing)
        else:
            chosen = FORMATS[done.formats[readers[0].path]]

            def rounded(w: np.ndarray, chosen: LayerFormat = chosen) -> np.ndarray:
                return done.rounded(w, chosen).dequantise()

            found[of] = solvers.awq_scales(observer.rows, weights, rounded)[0]
    for of, scales in found.items():
        done.parameters.fold(of, scales.astype(np.float32))


def _load(done: Quantisation) -> Denoiser:
    c = done.parameters.network
    return families.load(done.parameters, c, holding_dtype(c))


def batch(state: State) -> tuple[Tensor, Tensor]:
    """A state's ids and positions, ``[1, L]``."""
    ids = torch.from_numpy(state.canvas).unsqueeze(0)
    return ids, torch.arange(ids.shape[1]).unsqueeze(0)


@torch.no_grad()
def observe(
    denoiser: Denoiser,
    observers: Observers,
    states: Iterable[State],
    rotated: Mapping[str, int],
    on_state: Callable[[], None],
) -> None:
    """Run the states and show every observer its layer's input, the head's on the masked positions only."""
    mask_token_id = denoiser.network.mask_token_id
    now: dict[str, Any] = {}

    def hook(observer: Observer, turn: bool, rows: str) -> Callable[..., None]:
        def before(_: Any, inputs: tuple[Tensor, ...]) -> None:
            x = inputs[0].reshape(-1, inputs[0].shape[-1]).float().numpy()
            is_masked = now["is_masked"] if rows == "all" else np.ones(len(x), bool)
            weight = np.where(is_masked, 1.0, COMMITTED_WEIGHT).astype(np.float32)
            observer.add(solvers.rotate(x) if turn else x, is_masked, now["bucket"], weight)

        return before

    modules = dict(denoiser.named_modules())
    handles = [
        modules[of].register_forward_pre_hook(hook(observer, of in rotated, "masked" if of == "head" else "all"))
        for of, observer in observers.items()
    ]
    try:
        for state in states:
            is_masked = state.canvas == mask_token_id
            now |= {"is_masked": is_masked, "bucket": state.bucket}
            features, _ = denoiser.hidden(*batch(state))
            if "head" in observers and is_masked.any():
                denoiser.project(features[0, torch.from_numpy(is_masked)])
            on_state()
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def simulate(denoiser: Denoiser, done: Quantisation, layers: Iterable[str] | None = None) -> Callable[[], None]:
    """Make a folded torch denoiser compute with quantised values, in place; returns what undoes it.

    ``layers`` limits it to some layers; None takes all of them, and the embedding table if that is quantised. Weights and
    inputs are quantised and dequantised, products are fp32: what the graph computes, but for the order of sums.
    """
    modules: dict[str, Any] = dict(denoiser.named_modules())
    undo: list[Callable[[], object]] = []
    for layer, name in done.formats.items():
        chosen = FORMATS[name]
        if chosen.weights is None or (layers is not None and layer not in layers):
            continue
        linear = modules[layer]
        undo.append(functools.partial(setattr, linear.weight, "data", linear.weight.data))
        linear.weight.data = torch.from_numpy(done.weight(layer).dequantise())
        undo.append(linear.register_forward_pre_hook(_fake(done, chosen, layer)).remove)
    if layers is None and done.recipe.embedding is not None:
        table = modules["embed"].weight
        undo.append(functools.partial(setattr, table, "data", table.data))
        table.data = torch.from_numpy(np.ascontiguousarray(done.embedding().dequantise().T))

    def restore() -> None:
        for step in undo:
            step()

    return restore


def _fake(done: Quantisation, chosen: LayerFormat, layer: str) -> Callable[..., Tensor | None]:
    turn = layer in done.rotated

    def before(_: Any, inputs: tuple[Tensor, ...]) -> Tensor | None:
        x = inputs[0].numpy()
        if turn:
            x = solvers.rotate(x)
        if chosen.activations is not None:
            x = quantise_activation(x, chosen.activations, done.amax.get(layer), done.scale_dtype)
        return torch.from_numpy(np.ascontiguousarray(x)) if turn or chosen.activations is not None else None

    return before
