"""Computes the activation ranges, folded scales and quantised weights of a graph.

The inputs are a recipe and calibration states. The denoiser runs layer by layer on all states
(``network.layered``), and observers record the input of each quantised matrix. Each layer is
processed in three steps before the next layer is loaded:

- Smoothing or AWQ finds scales. The scales are folded into norms and neighbouring matrices, so that
  the folded layer computes the same function as before.
- The observers record the inputs of the folded layer.
- A solver rounds the layer's matrices.

The network's ``LinearSpec`` describes which matrices have the same input, and into which parameters
the input's scales can be folded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from dlm_calibration import solvers
from dlm_calibration.errors import CalibrationError
from dlm_calibration.observers import Method, Observer, Observers
from dlm_calibration.precision_rounding import FP32, ScaleType, quantise_activation
from dlm_calibration.precisions import FORMATS, HIGH, LayerFormat, Recipe
from dlm_calibration.states import State
from dlm_export import families
from dlm_export.families.base import Parameters
from dlm_export.memory import give_back
from dlm_export.network.denoiser import Denoiser
from dlm_export.network.experts import Stacked
from dlm_export.network.linear import TiedHead, has_bf16_kernels
from dlm_export.network.spec import STACKS, LinearSpec, NetworkSpec
from dlm_export.quantising import experts, gptq, modelopt
from dlm_export.quantising.experts import Entered, Reached, member
from dlm_export.quantising.folding import AWQ_ROWS, fold
from dlm_export.quantising.observing import Observed, Run, Wanted
from dlm_export.quantising.quantisation import Folded, Quantisation, by_site
from dlm_export.quantising.samples import FEWEST_TOKENS
from dlm_export.quantising.solved import Solved
from dlm_export.workplace import Workplace

LARGE = 500_000_000
"""Denoisers with more parameters than this are calibrated in bf16, if bf16 is fast on the device.

bf16 is exact enough for activation ranges. Accuracy is measured in fp32.
"""


def computing_dtype(network: NetworkSpec, device: torch.device) -> torch.dtype:
    """Return the data type in which calibration computes."""
    return (
        torch.bfloat16
        if network.parameter_count() > LARGE and has_bf16_kernels(device)
        else torch.float32
    )


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
    *,
    fewest_tokens: int = FEWEST_TOKENS,
    is_dense: bool = False,
) -> Quantisation:
    """Find the activation ranges, scales and weights that a recipe needs.

    Args:
        parameters: The parameters of the source.
        network: The description of the source.
        recipe: The quantisation recipe.
        formats: The format of each layer.
        states: Calibration states. May be empty if ``recipe.needs_states`` is false.
        on_done: Called ``units(...)`` times.
        calibrator: Either ``own`` or ``modelopt``. With ``modelopt``, NVIDIA's package finds ranges
            and folded scales, and the whole denoiser is loaded into memory. Experts are always
            calibrated by dlm-export's own code.
        scale_dtype: Type of scales in the graph.
        workplace: The memory and device to use.
        fewest_tokens: A solver rounds an expert's weights only if at least this many calibration
            tokens are routed to the expert.
        is_dense: See the field ``is_dense`` of ``Quantisation``.

    Raises:
        CalibrationError, ModeloptError, MemoryLimitError: The ranges, scales or weights cannot be
            found.
    """
    workplace = workplace or Workplace()
    done = Quantisation(
        recipe,
        dict(formats),
        Folded(parameters, network),
        scale_dtype=scale_dtype,
        is_dense=is_dense,
    )
    done.solved = Solved(workplace.solved)
    quantised = _quantised(network, formats)
    plain = [layer for layer in quantised if not layer.is_stacked]
    if recipe.rotate_down:
        done.rotated = {
            layer.path: len(solvers.hadamard(layer.inputs))
            for layer in plain
            if layer.role == "down"
        }
    if not recipe.needs_states(formats):
        return done
    is_ours = calibrator == "own"
    if not is_ours and (recipe.smoothing is not None or recipe.solver == "awq"):
        groups = {
            of: [layer.path for layer in readers]
            for of, readers in by_site(plain).items()
            if readers[0].fold
        }
        found = modelopt.scales(
            _load(done), states, formats, groups, alpha=recipe.smoothing, on_state=on_done
        )
        for of, scales in found.items():
            done.parameters.fold(of, scales)
    sites = by_site(quantised)
    has_experts = any(readers[0].is_stacked for readers in sites.values())
    run = _run(done, states, workplace, has_experts=has_experts)
    _sweep(done, sites, run, workplace.device, on_done, fewest_tokens, is_folding=is_ours)
    for layer in quantised:
        chosen = FORMATS[formats[layer.path]]
        if chosen.is_static and (is_ours or layer.is_stacked):
            assert done.observers is not None
            done.amax[layer.path] = _range(done.observers[layer.site], chosen, recipe)
    if not is_ours:
        theirs = {layer.path: formats[layer.path] for layer in plain}
        done.amax |= modelopt.amaxes(
            _load(done), states, theirs, rotated=done.rotated, on_state=on_done
        )
    return done


def units(
    recipe: Recipe,
    formats: Mapping[str, str],
    network: NetworkSpec,
    states: int,
    calibrator: str = "own",
) -> int:
    """Return the number of times that ``calibrate`` calls ``on_done``."""
    if not recipe.needs_states(formats):
        return 0
    theirs = 0
    if calibrator == "modelopt":
        is_folded = recipe.smoothing is not None or recipe.solver == "awq"
        theirs = 1 + (
            0 if not is_folded else 1 if recipe.smoothing is not None else modelopt.AWQ_SWEEPS
        )
    return len(network.layers) + 1 + theirs * states


@torch.no_grad()
def _sweep(
    done: Quantisation,
    sites: Mapping[str, Sequence[LinearSpec]],
    run: Run,
    device: torch.device,
    on_done: Callable[[], None],
    fewest_tokens: int,
    *,
    is_folding: bool,
) -> None:
    """Fold scales, observe inputs and round matrices, layer by layer, and finally in the head."""
    c, recipe = done.parameters.network, done.recipe
    seeds = {of: number for number, of in enumerate(sites)}
    done.observers = Observers()
    is_folding = is_folding and (recipe.smoothing is not None or recipe.solver == "awq")

    def observed(wanted: Wanted) -> Observed:
        found = run.observe(wanted)
        found.observers.check(wanted.sites)
        return found

    for i in range(len(c.layers) + 1):
        inside = f"blocks.{i}." if i < len(c.layers) else "head"
        here = {of: readers for of, readers in sites.items() if of.startswith(inside)}
        solvable = {
            of: readers for of, readers in here.items() if not _is_byte_head(done, readers[0])
        }
        foldable = here if recipe.smoothing is not None else solvable
        if is_folding and foldable:
            # Do not rotate inputs (multiply them by a Hadamard matrix) here, because the scales
            # apply to inputs that are not rotated.
            met = observed(Wanted(i, foldable, seeds, AWQ_ROWS, keep=False))
            fold(done, met.observers, foldable, met.entered, fewest_tokens)
            del met
        # Layers with the same input share a Gram matrix. Each expert needs its own Gram matrix.
        unsolved = (
            of
            for of, readers in solvable.items()
            if any(layer.path not in done.solved for layer in readers if not layer.is_stacked)
        )
        wanted_grams = tuple(unsolved) if recipe.solver == "gptq" else ()
        rotated = frozenset(done.rotated) & here.keys()
        wanted = Wanted(i, here, seeds, grams=wanted_grams, rotated=rotated)
        found = observed(wanted)
        done.observers |= found.observers
        grams, entered = found.grams, found.entered
        del found
        while grams:
            of, gram = grams.popitem()
            factor = gptq.inverse_factor(gram.matrix.to(device))
            del gram
            for layer in here[of]:
                if not layer.is_stacked:
                    done.solve(layer.path, factor)
            del factor
            give_back()
        if entered is not None:
            mixture_path = f"{inside}mlp.experts"
            done.reached[mixture_path] = Reached(
                mixture_path, tuple(entered.tokens.tolist()), fewest_tokens
            )
            if recipe.solver == "gptq":
                _solve_experts(done, entered, mixture_path)
            del entered
        on_done()


def _run(
    done: Quantisation, states: Sequence[State], workplace: Workplace, *, has_experts: bool
) -> Run:
    """Prepare to run the layers on all states, in order."""
    c, memory = done.parameters.network, workplace.activation_bytes
    layered = families.layered(
        done.parameters, c, computing_dtype(c, workplace.device), workplace.device
    )
    # The inputs of mixtures of experts need memory in addition to the hidden states.
    if memory is not None and has_experts:
        memory //= 2
    return Run(layered, states, memory_bytes=memory, folder=workplace.folder)


@torch.no_grad()
def _solve_experts(done: Quantisation, entered: Entered, path: str) -> None:
    """Round each expert's weights with the solver, from the tokens that are routed to the expert.

    Experts with too few tokens are skipped.
    """
    gate, up, down = (f"{path}.{role}" for role in STACKS)
    few, device = done.reached[path].few, entered.device
    for expert in range(entered.module.count):
        if expert in few or all(member(layer, expert) in done.solved for layer in (gate, up, down)):
            continue
        rows, share = entered.rows(expert)
        factor = experts.factor_of(entered.inputs(rows), entered.module.gate.inputs, device)
        done.solve(gate, factor, expert)
        done.solve(up, factor, expert)
        hidden = experts.hidden_of(entered, expert, rows, share)
        done.solve(down, experts.factor_of(hidden, entered.module.down.inputs, device), expert)


def _is_byte_head(done: Quantisation, layer: LinearSpec) -> bool:
    """Return True if a layer is a head in INT8, which is rounded to nearest without a solver.

    The head is the largest matrix, and a solver would need several fp32 copies of the head. With
    eight bits, a solver would improve accuracy very little.
    """
    return layer.role == "head" and FORMATS[done.formats[layer.path]].weights == "int8"


def _quantised(network: NetworkSpec, formats: Mapping[str, str]) -> list[LinearSpec]:
    """Return the layers that a recipe quantises, in the order in which a pass computes them."""
    return [
        layer for path, layer in network.quantisable().items() if formats.get(path, HIGH) != HIGH
    ]


def take_stored(
    parameters: Parameters,
    network: NetworkSpec,
    recipe: Recipe,
    formats: Mapping[str, str],
    scale_dtype: ScaleType = FP32,
) -> Quantisation:
    """Use the codes, scales and ranges of a pre-quantised checkpoint.

    Raises CalibrationError if an activation range is missing.
    """
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
    # In NVFP4, each pass computes the ranges of the groups. The static scale of the whole tensor
    # must only be large enough for the largest of these ranges.
    if chosen.activations == "nvfp4":
        return observer.amax("max", levels="fp8")
    return observer.amax(
        cast(Method, recipe.observer), levels="int8" if chosen.activations == "int8" else "fp8"
    )


def _load(done: Quantisation) -> Denoiser:
    c = done.parameters.network
    return families.load(done.parameters, c, computing_dtype(c, torch.device("cpu")))


@torch.no_grad()
def simulate(
    modules: Mapping[str, nn.Module], done: Quantisation, layers: Iterable[str] | None = None
) -> None:
    """Make a torch denoiser compute with quantised weights and inputs. Changes it in place.

    The denoiser's parameters must already include the folded scales. Weights and inputs are
    quantised, dequantised and multiplied in fp32. The results are equal to the graph's results,
    except that sums are added in a different order.

    Args:
        modules: The modules of the denoiser. The keys are paths in the denoiser.
        done: The result of ``calibrate`` or ``take_stored``.
        layers: Layers to change. If ``None``, all layers are changed, and also the embedding table,
            if the table is quantised.
    """
    for layer, name in done.formats.items():
        chosen = FORMATS[name]
        if chosen.weights is None or (layers is not None and layer not in layers):
            continue
        linear: Any = modules[layer]
        linear.register_forward_pre_hook(_fake(done, chosen, layer))
        if isinstance(linear, Stacked):
            linear.read = functools.partial(_dequantised_expert, done, layer)
            continue
        matrix = done.weight(layer).dequantise()
        if isinstance(linear, TiedHead):
            matrix, linear = np.ascontiguousarray(matrix.T), modules["embed"]
        linear.weight.data = torch.from_numpy(matrix).to(linear.weight.device)
    if layers is None and done.recipe.embedding is not None and not done.has_tied_table:
        table: Any = modules["embed"].weight
        table.data = torch.from_numpy(np.ascontiguousarray(done.embedding().dequantise().T))


def _dequantised_expert(done: Quantisation, layer: str, expert: int) -> Tensor:
    return torch.from_numpy(done.expert(layer, expert).dequantise())


def as_seen(done: Quantisation, layer: str, x: np.ndarray) -> np.ndarray:
    """Return a layer's input ``x`` after rotation (if needed), quantisation and dequantisation."""
    chosen = FORMATS[done.formats[layer]]
    if layer in done.rotated:
        x = solvers.rotate(x)
    return (
        x
        if chosen.activations is None
        else quantise_activation(x, chosen.activations, done.amax.get(layer), done.scale_dtype)
    )


def _fake(
    done: Quantisation, chosen: LayerFormat, layer: str
) -> Callable[..., tuple[Any, ...] | None]:
    if layer not in done.rotated and chosen.activations is None:
        return lambda *_: None

    def before(_: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *expert = inputs
        return (
            torch.from_numpy(np.ascontiguousarray(as_seen(done, layer, x.cpu().numpy()))).to(
                x.device
            ),
            *expert,
        )

    return before
