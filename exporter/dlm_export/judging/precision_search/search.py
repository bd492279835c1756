"""Implements ``--precision auto``: finds the cheapest formats whose loss is within a budget.

The search has three steps:

1. ``sensitivity`` measures how much accuracy each layer loses in each format.
2. ``trade_off`` makes an ordered list of changes, each of which gives one layer a cheaper format.
   Before the first change, all layers are in full precision. After the last change, all layers are
   in their cheapest formats. The cost of a format is its size in bytes or its measured time.
3. A bisection finds the largest number n for which the first n changes keep the loss within the
   budget. For each n that it tries, it makes the first n changes and measures the loss. All
   measurements use the same random masks.

Torch computes the effect of every format in fp32, so the target device is not needed.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from dlm_calibration.metrics import summarise
from dlm_calibration.precisions import FORMATS, HIGH, Recipe, RecipeError
from dlm_calibration.samples import Sample
from dlm_calibration.sensitivity import Choice, Point, trade_off
from dlm_calibration.states import State
from dlm_export.families.base import table_type
from dlm_export.graph.quantise import Form, misfit
from dlm_export.judging.accuracy.masked import all_masked, compare_masked
from dlm_export.judging.accuracy.verdict import AccuracyError
from dlm_export.judging.precision_search import sensitivity
from dlm_export.judging.precision_search.assigned import Assigned
from dlm_export.judging.sides.layerwise import SweptPredictor, shown_source
from dlm_export.network.spec import HEAD, LinearSpec, NetworkSpec
from dlm_export.quantising import calibrate
from dlm_export.quantising.samples import FEWEST_TOKENS
from dlm_export.sources import Source
from dlm_export.targets import Target
from dlm_export.workplace import Workplace
from dlm_runtime.policy import Policy

if TYPE_CHECKING:
    from dlm_export.judging.precision_search.layer_times import Tuning

DEFAULT_BUDGET = 0.01  # largest allowed relative increase of cross-entropy at masked positions
# The build uses the same solver, so the search measures the weights that the build will write.
SOLVER = "gptq"
PROBES = 8  # maximum number of loss measurements in the bisection; suffices for 2**7 changes


@dataclass(frozen=True)
class AutoOptions:
    """Options of the search.

    ``formats`` lists the formats that a layer may get instead of full precision. ``None`` means the
    formats that the target recommends. If ``tune`` is true, the search minimises the measured time
    instead of the size.
    """

    formats: tuple[str, ...] | None = None
    tune: bool = False


@dataclass(frozen=True)
class CurvePoint:
    """One combination of formats that the search considered.

    - ``weight_bytes``: total size of all layers in bytes.
    - ``seconds``: total time that all layers take in one pass. ``None`` if no times were measured.
    - ``predicted_kl``: sum of the losses of all layers. Each loss was measured while all other
      layers were unquantised.
    - ``ce_increase``: measured relative increase of cross-entropy. ``None`` if the bisection did
      not try this combination.
    - ``formats``: maps each format to the number of layers in this format.
    """

    weight_bytes: int
    seconds: float | None
    predicted_kl: float
    ce_increase: float | None
    formats: dict[str, int]
    chosen: bool


@dataclass(frozen=True)
class Found:
    """The chosen recipe, and all combinations of formats that the search considered."""

    recipe: Recipe
    curve: list[CurvePoint]


def formats_for(targets: Sequence[Target], options: AutoOptions) -> tuple[str, ...]:
    """Return the formats that the search may choose.

    Raises RecipeError if ``options`` contains a format that a target does not support.
    """
    shared = [name for name in targets[0].auto if all(name in target.formats for target in targets)]
    for target in targets:
        for name in options.formats or ():
            if name not in target.formats:
                raise RecipeError(
                    f"--auto-formats: {name!r} is not supported by target {target.name}; choose {', '.join(target.formats)}"
                )
    return options.formats or tuple(shared)


def searched(network: NetworkSpec) -> dict[str, tuple[LinearSpec, ...]]:
    """Group the layers whose formats the search chooses. All layers of a group get the same format.

    The gate, up and down matrices of all experts of a transformer block form one group. Every other
    layer is a group of its own. The head is included only if the head and the embedding table share
    a matrix. Otherwise, the head stays in full precision. Returns a mapping from the path of each
    group to its layers.
    """
    units = network.units()
    return {path: layers for path, layers in units.items() if path != HEAD or network.tied_head}


def units(network: NetworkSpec, formats: Sequence[str], *, exact: bool) -> int:
    """Return the maximum number of times that ``search`` calls ``on_done``."""
    layers = len(formats) * len(searched(network))
    return (
        len(formats) * (len(network.layers) + 1)
        + sensitivity.units(network, layers, exact=exact)
        + PROBES
    )


def _bytes(table_bytes: int, layer: LinearSpec, format: str) -> int:
    """Return the size of a layer. An unquantised table has elements of ``table_bytes`` bytes."""
    if layer.is_tied and format == HIGH:
        return table_bytes * layer.inputs * layer.outputs
    return layer.count * FORMATS[format].weight_bytes(layer.inputs, layer.outputs)


def _by_layer(
    units: Mapping[str, Sequence[LinearSpec]], formats: Mapping[str, str]
) -> dict[str, str]:
    """Convert a mapping from groups to formats into a mapping from layers to formats."""
    return {layer.path: name for unit, name in formats.items() for layer in units[unit]}


def search(
    source: Source,
    states: Sequence[State],
    samples: Sequence[Sample],
    formats: Sequence[str],
    policy: Policy,
    budget: float | None,
    seed: int,
    on_done: Callable[[], None],
    *,
    exact: bool = False,
    form: Form = "cpu",
    tuning: Tuning | None = None,
    workplace: Workplace | None = None,
    fewest_tokens: int = FEWEST_TOKENS,
) -> Found:
    """Find the cheapest formats that increase the cross-entropy by at most ``budget``.

    The search measures the cross-entropy at randomly masked positions. The same arguments always
    give the same result.

    Args:
        source: The checkpoint to quantise.
        states: Calibration states.
        samples: Samples on which cross-entropy is measured.
        formats: Formats to choose from. The search never chooses a format for a layer whose shape
            does not suit the format.
        policy: Policy that determines the block length.
        budget: Largest relative increase of cross-entropy. ``None`` uses ``DEFAULT_BUDGET``.
        seed: Seed of the random masks.
        on_done: Called at most ``units`` times.
        exact: Measure the loss of each single layer, instead of estimating it.
        form: The engine, which restricts the shapes of layers.
        tuning: Measured times of layers. If ``tuning`` is given, the search minimises the time
            instead of the size.
        workplace: The memory and device to use.
        fewest_tokens: See ``calibrate``.

    Raises:
        AccuracyError: The loss exceeds the budget even if only one layer is quantised.
    """
    budget, place = DEFAULT_BUDGET if budget is None else budget, workplace or Workplace()
    layers = searched(source.network)
    ready = {}
    for name in formats:
        suited = {
            unit: name
            for unit, members in layers.items()
            if all(misfit(layer, name, form) is None for layer in members)
        }
        fitting = _by_layer(layers, suited)
        recipe = Recipe("auto", tuple(fitting.items()), solver=SOLVER)
        here = replace(place, solved=None if place.solved is None else place.solved / name)
        ready[name] = calibrate.calibrate(
            source.parameters,
            source.network,
            recipe,
            fitting,
            states,
            on_done,
            workplace=here,
            fewest_tokens=fewest_tokens,
            is_dense=source.network.joins_experts(form),
        )
    found = sensitivity.losses(
        source.parameters,
        source.network,
        list(ready.values()),
        states,
        on_done,
        exact=exact,
        workplace=place,
    )
    table = table_type(source.network, source.parameters.stored_type).itemsize
    size = functools.partial(_bytes, table)
    cost = size if tuning is None else tuning.cost
    choices: dict[str, list[Choice]] = {}
    for unit, members in layers.items():
        choices[unit] = [Choice(HIGH, 0.0, sum(cost(layer, HIGH) for layer in members))]
        for name, lost in zip(ready, found, strict=True):
            if unit in lost:
                choices[unit].append(
                    Choice(name, lost[unit][1], sum(cost(layer, name) for layer in members))
                )
    path = trade_off(choices)
    reference = shown_source(source, "fp32", torch.float32, place)
    canvases = all_masked(samples, reference, policy=policy, seed=seed)
    views = [seen.view for seen in canvases]
    reference.see(views)

    def measure(point: Point) -> float:
        """Return the relative increase of cross-entropy.

        If the reference's cross-entropy is 0 and the candidate's cross-entropy is not 0, returns
        infinity.
        """
        chosen = _by_layer(layers, point.formats)
        layered = Assigned(source.parameters, source.network, ready, chosen, place.device)
        candidate = SweptPredictor(
            layered, "auto", memory_bytes=place.activation_bytes, folder=place.folder
        )
        candidate.see(views)
        (rows,) = compare_masked(reference, [candidate], canvases)
        increase = summarise(rows.rows, rows.sample, len(samples), seed)["ce_increase"]
        on_done()
        return float("inf") if increase is None else float(increase)

    measured: dict[int, float] = {}
    # ``path[low]`` always meets the budget: in ``path[0]``, all layers are in full precision.
    low, high = 0, len(path) - 1
    measured[high] = measure(path[high])
    if measured[high] <= budget:
        low = high
    while high - low > 1 and len(measured) < PROBES:
        middle = (low + high) // 2
        measured[middle] = measure(path[middle])
        low, high = (middle, high) if measured[middle] <= budget else (low, middle)
    if low == 0:
        raise AccuracyError(
            f"no assignment of {', '.join(formats)} keeps the masked cross-entropy increase within {budget:.2%}: raise the "
            "budget (--max-ce-increase) or allow other formats (--auto-formats)"
        )
    curve = [
        CurvePoint(
            sum(
                size(layer, name) for unit, name in point.formats.items() for layer in layers[unit]
            ),
            None if tuning is None else point.cost,
            point.loss,
            measured.get(i),
            dict(Counter(point.formats.values())),
            i == low,
        )
        for i, point in enumerate(path)
    ]
    held = _by_layer(layers, path[low].formats)
    recipe = Recipe(
        "auto", tuple((layer, name) for layer, name in held.items() if name != HIGH), solver=SOLVER
    )
    return Found(recipe, curve)
