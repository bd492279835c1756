"""From a recipe and states to the numbers of a quantised graph: ranges, foldings, solved weights.

All states go through the denoiser a layer at a time (``network.layered``), with an observer at the input of each quantised
matrix. Smoothing and AWQ fold scales into norms and neighbouring matrices of the layer first; then the folded layer, which
computes the same function, is observed, and its matrices are solved before the next layer is read. Which matrices share an
input and where its scale can go is said by the network's ``LinearSpec``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from dlm_calibration import solvers
from dlm_calibration.errors import CalibrationError
from dlm_calibration.formats import FP16, FP32, QuantisedWeight, ScaleType, quantise_activation, quantise_weight, with_scales
from dlm_calibration.observers import Method, Observer, Observers
from dlm_calibration.pieces import Index, Lazy
from dlm_calibration.recipes import FORMATS, HIGH, LayerFormat, Recipe
from dlm_calibration.states import State
from dlm_export import families
from dlm_export.families.base import Parameters, later
from dlm_export.memory import give_back
from dlm_export.network.denoiser import Denoiser
from dlm_export.network.experts import Stacked
from dlm_export.network.layered import Carried, named
from dlm_export.network.linear import has_bf16_kernels
from dlm_export.network.spec import LinearSpec, NetworkSpec
from dlm_export.quantising import gptq, modelopt
from dlm_export.quantising.gptq import Gram
from dlm_export.quantising.solved import Solved
from dlm_export.workplace import Workplace

AWQ_ROWS = 256


LARGE = 500_000_000
"""Parameters from which calibration computes in bf16 where the device can: ranges need no more. Judging takes fp32."""


def computing_dtype(network: NetworkSpec, device: torch.device) -> torch.dtype:
    """The element type that calibration computes in."""
    return torch.bfloat16 if network.parameter_count() > LARGE and has_bf16_kernels(device) else torch.float32


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

    def read(self, parameter: str, dtype: np.dtype, at: Index = ()) -> np.ndarray:
        """See ``Parameters.read``; scaled in fp32."""
        if parameter not in self.rows and parameter not in self.columns:
            return self.source.read(parameter, dtype, at)
        array = self.source.read(parameter, np.dtype(np.float32), at)
        if parameter in self.rows:
            array = array * self.rows[parameter][at[array.ndim - 2 : array.ndim - 1]][:, None]
        if parameter in self.columns:
            array = array * self.columns[parameter][at[array.ndim - 1 :]]
        return np.asarray(array, dtype=dtype)

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
    """What the graph holds scales in, but those of formats that always have them in fp16."""
    solved: Solved = field(default_factory=Solved)

    def matrix(self, layer: str) -> np.ndarray:
        """A layer's full-precision weight ``[K, N]``, fp32, foldings and rotation applied."""
        w = self.parameters.read(f"{layer}.weight", np.dtype(np.float32))
        return solvers.rotate_rows(w) if layer in self.rotated else w

    def expert(self, layer: str, expert: int) -> QuantisedWeight:
        """The quantised weight of one of a layer's experts: they are rounded to nearest, whatever the solver."""
        stack = self._later(f"{layer}.weight")

        def read(at: Index) -> np.ndarray:
            of_stack = (slice(expert, expert + 1), *at)
            found: np.ndarray = stack[of_stack][0]
            return found

        return self.rounded(Lazy(stack.shape[1:], read), FORMATS[self.formats[layer]])

    def weight(self, layer: str) -> QuantisedWeight:
        """A layer's quantised weight: solved during calibration, or rounded to nearest now."""
        chosen = FORMATS[self.formats[layer]]
        assert chosen.weights is not None
        if self.stored is not None:
            found = self.stored.stored(f"{layer}.weight")
            assert found is not None
            return with_scales(found.weight, self._scales_in(chosen))
        if layer in self.solved:
            return self.solved[layer]
        w = self.matrix(layer) if layer in self.rotated else self._later(f"{layer}.weight")
        return self.rounded(w, chosen)

    def rounded(self, w: np.ndarray | Lazy, chosen: LayerFormat) -> QuantisedWeight:
        """A matrix rounded to nearest in a layer format."""
        assert chosen.weights is not None
        return quantise_weight(w, chosen.weights, group_size=chosen.group_size, scale_dtype=self._scales_in(chosen))

    def _scales_in(self, chosen: LayerFormat) -> ScaleType:
        return FP16 if chosen.has_half_scales else self.scale_dtype

    def solve(self, layer: str, factor: Tensor) -> None:
        """Round a layer's weight by GPTQ; ``factor`` is of its input (``gptq.inverse_factor``)."""
        chosen = FORMATS[self.formats[layer]]
        assert chosen.weights is not None
        scale_dtype = self._scales_in(chosen)
        self.solved[layer] = gptq.gptq(
            self.matrix(layer), factor, format=chosen.weights, group_size=chosen.group_size, scale_dtype=scale_dtype
        )

    def embedding(self) -> QuantisedWeight:
        """The embedding table's codes ``[V, hidden]``, one scale a row: as the transposed matrix's columns."""
        assert self.recipe.embedding is not None
        table = self._later("embed.weight")
        return quantise_weight(Lazy(table.shape[::-1], lambda at: table[at[::-1]].T), self.recipe.embedding)

    def _later(self, parameter: str) -> Lazy:
        return later(self.parameters, self.parameters.network, parameter)

    def summary(self) -> dict[str, Any]:
        """What the manifest says: recipe, format of every layer."""
        return {"recipe": self.recipe.as_dict(), "layers": self.formats}


def calibrate(
    parameters: Parameters,
    network: NetworkSpec,
    recipe: Recipe,
    formats: Mapping[str, str],
    states: Sequence[State],
    on_done: Callable[[], None],
    calibrator: str = "own",
    scale_dtype: ScaleType = FP32,
    workplace: Workplace | None = None,
) -> Quantisation:
    """Find a recipe's numbers. ``states`` may be empty where ``recipe.needs_states`` says so.

    ``calibrator`` ``modelopt`` takes ranges and folded scales from NVIDIA's package, which holds the whole denoiser; the rest
    stays ours. ``on_done`` is called ``units(...)`` times. Raises CalibrationError, ModeloptError, MemoryLimitError.
    """
    workplace = workplace or Workplace()
    done = Quantisation(recipe, dict(formats), Folded(parameters, network), scale_dtype=scale_dtype)
    done.solved = Solved(workplace.solved)
    quantised = [layer for layer in _quantised(network, formats) if not layer.is_stacked]
    if recipe.rotate_down:
        done.rotated = {layer.path: len(solvers.hadamard(layer.inputs)) for layer in quantised if layer.role == "down"}
    if not recipe.needs_states(formats):
        return done
    is_ours = calibrator == "own"
    if not is_ours and (recipe.smoothing is not None or recipe.solver == "awq"):
        groups = {of: [layer.path for layer in readers] for of, readers in by_site(quantised).items() if readers[0].fold}
        found = modelopt.scales(_load(done), states, formats, groups, alpha=recipe.smoothing, on_state=on_done)
        for of, scales in found.items():
            done.parameters.fold(of, scales)
    _sweep(done, by_site(quantised), states, workplace, on_done, is_folding=is_ours)
    if is_ours:
        for layer in quantised:
            chosen = FORMATS[formats[layer.path]]
            if chosen.is_static:
                assert done.observers is not None
                done.amax[layer.path] = _range(done.observers[layer.site], chosen, recipe)
    else:
        done.amax = modelopt.amaxes(_load(done), states, formats, rotated=done.rotated, on_state=on_done)
    return done


def units(recipe: Recipe, formats: Mapping[str, str], network: NetworkSpec, states: int, calibrator: str = "own") -> int:
    """How often ``calibrate`` calls ``on_done``."""
    if not recipe.needs_states(formats):
        return 0
    theirs = 0
    if calibrator == "modelopt":
        is_folded = recipe.smoothing is not None or recipe.solver == "awq"
        theirs = 1 + (0 if not is_folded else 1 if recipe.smoothing is not None else modelopt.AWQ_SWEEPS)
    return len(network.layers) + 1 + theirs * states


@torch.no_grad()
def _sweep(
    done: Quantisation,
    sites: Mapping[str, Sequence[LinearSpec]],
    states: Sequence[State],
    workplace: Workplace,
    on_done: Callable[[], None],
    *,
    is_folding: bool,
) -> None:
    """Fold, observe and solve, layer by layer; what follows the last one is the head's."""
    c, recipe = done.parameters.network, done.recipe
    layered = families.layered(done.parameters, c, computing_dtype(c, workplace.device), workplace.device)
    canvases = [state.canvas for state in states]
    carried = Carried(layered, canvases, memory_bytes=workplace.activation_bytes, folder=workplace.folder)
    seen = _Seen(states, c.mask_token_id, layered.device)
    numbers = {of: number for number, of in enumerate(sites)}
    done.observers = Observers()
    is_folding = is_folding and (recipe.smoothing is not None or recipe.solver == "awq")

    def observed(here: Mapping[str, Sequence[LinearSpec]], keep_rows: int = 0) -> Observers:
        return Observers(
            {of: Observer(of, readers[0].inputs, keep_rows=keep_rows, seed=numbers[of]) for of, readers in here.items()}
        )

    def through(
        i: int, here: Mapping[str, Sequence[LinearSpec]], observers: Observers, grams: Mapping[str, Gram], *, keep: bool
    ) -> None:
        """Layer ``i``, or the head behind the last one, with those who look on."""
        if i < len(c.layers):
            block = layered.block(i)
            modules = named(i, block)
            for of in here:
                turn = keep and of in done.rotated  # scales are found in front of the rotation
                look = functools.partial(seen.look, observers[of], grams.get(of), turn)
                modules[of].register_forward_pre_hook(lambda _, inputs, look=look: look(inputs[0], carried.now.numbers))
            carried.through(i, block, keep=keep)
        elif here:
            masked = [np.flatnonzero(is_masked) for is_masked in seen.is_masked]
            for number, features in enumerate(carried.features(masked)):
                seen.look(observers["head"], grams.get("head"), False, features[None], (number,), rows=masked[number])
        observers.check(here)

    for i in range(len(c.layers) + 1):
        inside = f"blocks.{i}." if i < len(c.layers) else "head"
        here = {of: readers for of, readers in sites.items() if of.startswith(inside)}
        solvable = {of: readers for of, readers in here.items() if not _is_byte_head(done, readers[0])}
        foldable = here if recipe.smoothing is not None else solvable
        if is_folding and foldable:
            observers = observed(foldable, AWQ_ROWS)
            through(i, foldable, observers, {}, keep=False)
            _fold(done, observers, foldable)
        observers = observed(here)
        grams = {}
        if recipe.solver == "gptq":
            unsolved = (of for of, readers in solvable.items() if any(layer.path not in done.solved for layer in readers))
            grams = {of: Gram(here[of][0].inputs, layered.device) for of in unsolved}
        through(i, here, observers, grams, keep=True)
        done.observers |= observers
        while grams:
            of, gram = grams.popitem()
            factor = gptq.inverse_factor(gram.matrix)
            del gram
            for layer in here[of]:
                done.solve(layer.path, factor)
            del factor
            give_back()
        on_done()


def _is_byte_head(done: Quantisation, layer: LinearSpec) -> bool:
    """Whether a layer is a head with a byte a weight: the largest matrix, which solvers hold in fp32 several times, is rounded
    to nearest, for eight bits leave them little to win.
    """
    return layer.role == "head" and FORMATS[done.formats[layer.path]].weights == "int8"


class _Seen:
    """Inputs of layers as observers take them: a canvas's vectors with what is masked of them."""

    def __init__(self, states: Sequence[State], mask_token_id: int, device: torch.device) -> None:
        self.states = states
        self.is_masked = [state.canvas == mask_token_id for state in states]
        self.device = device

    def look(
        self,
        observer: Observer,
        gram: Gram | None,
        turn: bool,
        x: Tensor,
        numbers: Sequence[int],
        rows: np.ndarray | slice = slice(None),
    ) -> None:
        """Show ``x`` ``[B, L, K]`` of the canvases ``numbers`` to a site's observer, of a canvas its ``rows``; ``turn``: what
        the layer sees is rotated.
        """
        wide = x.float().cpu().numpy()
        if turn:
            wide = solvers.rotate(wide)
        for number, vectors in zip(numbers, wide, strict=True):
            observer.add(vectors, self.is_masked[number][rows], self.states[number].bucket)
        if gram is not None:
            weights = [np.where(self.is_masked[number][rows], 1.0, gptq.COMMITTED_WEIGHT) for number in numbers]
            weight = torch.from_numpy(np.concatenate(weights).astype(np.float32)).to(self.device)
            gram.add((torch.from_numpy(wide).to(self.device) if turn else x.float()).flatten(0, 1), weight)


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
    return families.load(done.parameters, c, computing_dtype(c, torch.device("cpu")))


def batch(state: State) -> tuple[Tensor, Tensor]:
    """A state's ids and positions, ``[1, L]``."""
    ids = torch.from_numpy(state.canvas).unsqueeze(0)
    return ids, torch.arange(ids.shape[1]).unsqueeze(0)


@torch.no_grad()
def simulate(modules: Mapping[str, nn.Module], done: Quantisation, layers: Iterable[str] | None = None) -> Callable[[], None]:
    """Make a folded torch denoiser compute with quantised values, in place; returns what undoes it.

    ``modules``: it or parts of it, by their paths in the whole one. ``layers`` limits it to some layers; None takes all of
    them, and the embedding table if that is quantised. Weights and inputs are quantised and dequantised, products are fp32:
    what the graph computes, but for the order of sums.
    """
    undo: list[Callable[[], object]] = []
    for layer, name in done.formats.items():
        chosen = FORMATS[name]
        if chosen.weights is None or (layers is not None and layer not in layers):
            continue
        linear: Any = modules[layer]
        undo.append(linear.register_forward_pre_hook(_fake(done, chosen, layer)).remove)
        if isinstance(linear, Stacked):
            undo.append(functools.partial(setattr, linear, "read", linear.read))
            linear.read = functools.partial(_dequantised_expert, done, layer)
            continue
        undo.append(functools.partial(setattr, linear.weight, "data", linear.weight.data))
        linear.weight.data = torch.from_numpy(done.weight(layer).dequantise()).to(linear.weight.device)
    if layers is None and done.recipe.embedding is not None:
        table: Any = modules["embed"].weight
        undo.append(functools.partial(setattr, table, "data", table.data))
        table.data = torch.from_numpy(np.ascontiguousarray(done.embedding().dequantise().T))

    def restore() -> None:
        for step in undo:
            step()

    return restore


def _dequantised_expert(done: Quantisation, layer: str, expert: int) -> Tensor:
    return torch.from_numpy(done.expert(layer, expert).dequantise())


def as_seen(done: Quantisation, layer: str, x: np.ndarray) -> np.ndarray:
    """A quantised layer's input as the layer multiplies it: turned where it is, quantised and dequantised."""
    chosen = FORMATS[done.formats[layer]]
    if layer in done.rotated:
        x = solvers.rotate(x)
    return (
        x if chosen.activations is None else quantise_activation(x, chosen.activations, done.amax.get(layer), done.scale_dtype)
    )


def _fake(done: Quantisation, chosen: LayerFormat, layer: str) -> Callable[..., tuple[Any, ...] | None]:
    if layer not in done.rotated and chosen.activations is None:
        return lambda *_: None

    def before(_: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *expert = inputs
        return (torch.from_numpy(np.ascontiguousarray(as_seen(done, layer, x.cpu().numpy()))).to(x.device), *expert)

    return before
