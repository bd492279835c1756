"""``--precision auto``: finds the smallest or fastest formats that keep the loss within a budget.

``sensitivity`` measures what each layer loses at the frontier in each format. ``trade_off`` then
orders the changes from full precision to the cheapest formats. The cost is the size in bytes, or
the time on this machine. A bisection along this order measures the actual loss, with the same
random masks each time. Everything runs in torch on simulated values, so the target device is not
needed.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from dlm_calibration.recipes import FORMATS, HIGH, Recipe, RecipeError
from dlm_calibration.samples import Sample
from dlm_calibration.sensitivity import Choice, Point, trade_off
from dlm_calibration.states import State
from dlm_export.families import weights
from dlm_export.graph.quantise import misfit
from dlm_export.judging.accuracy.verdict import AccuracyError
from dlm_export.judging.parity.by_layer import read_rounded
from dlm_export.judging.precision_search import sensitivity
from dlm_export.judging.precision_search.masked_loss import MaskedLoss
from dlm_export.judging.sides.layerwise import SweptPredictor, shown_source
from dlm_export.network.denoiser import Block
from dlm_export.network.layered import Head, Layered, named
from dlm_export.network.spec import EMBEDDING, HEAD, LinearSpec, NetworkSpec
from dlm_export.quantising import calibrate
from dlm_export.quantising.numbers import Quantisation
from dlm_export.quantising.samples import FEWEST_TOKENS
from dlm_export.sources import Source
from dlm_export.targets import Target
from dlm_export.workplace import Workplace
from dlm_runtime.policy import Policy

if TYPE_CHECKING:
    from dlm_export.planning.tuning import Tuning

DEFAULT_BUDGET = 0.01  # relative increase of masked cross-entropy
# the same solver as in the build, so that the search measures the numbers that the build writes
SOLVER = "gptq"
PROBES = 8  # measurements in a bisection; enough for 2**7 changes


@dataclass(frozen=True)
class AutoOptions:
    """Options of the search.

    ``formats`` are the formats to choose from, besides full precision; ``None`` means those of the
    target. ``tune`` minimises measured time instead of bytes.
    """

    formats: tuple[str, ...] | None = None
    tune: bool = False


@dataclass(frozen=True)
class CurvePoint:
    """One choice of formats on the trade-off curve.

    ``ce_increase`` is relative, and ``None`` if it was not measured. ``seconds`` is the time that
    the layers take in a pass, and ``None`` if formats were not timed. ``formats`` has the number of
    layers in each format.
    """

    weight_bytes: int
    seconds: float | None
    predicted_kl: float
    ce_increase: float | None
    formats: dict[str, int]
    chosen: bool

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Found:
    """The recipe that was found, and the curve from which it was chosen."""

    recipe: Recipe
    curve: list[CurvePoint]


def formats_for(targets: Sequence[Target], options: AutoOptions) -> tuple[str, ...]:
    """Return the formats to try. Raises RecipeError for formats that a target does not support."""
    shared = [name for name in targets[0].auto if all(name in target.formats for target in targets)]
    for target in targets:
        for name in options.formats or ():
            if name not in target.formats:
                raise RecipeError(
                    f"--auto-formats: {name!r} is not supported by target {target.name}; choose {', '.join(target.formats)}"
                )
    return options.formats or tuple(shared)


def searched(network: NetworkSpec) -> dict[str, tuple[LinearSpec, ...]]:
    """Return the units that ``search`` chooses a format for: path -> layers.

    All experts of a layer are one unit. The table of a tied head is a unit too. A head that is not
    tied keeps full precision.
    """
    units = network.units()
    return {path: layers for path, layers in units.items() if path != HEAD or network.tied_head}


def units(network: NetworkSpec, formats: Sequence[str], *, exact: bool) -> int:
    """Return the largest number of times that ``search`` calls ``on_done``."""
    layers = len(formats) * len(searched(network))
    return (
        len(formats) * (len(network.layers) + 1)
        + sensitivity.units(network, layers, exact=exact)
        + PROBES
    )


def _bytes(table_bytes: int, layer: LinearSpec, format: str) -> int:
    """Return the bytes of a layer. ``table_bytes`` is the size of an element of a tied table in
    full precision.
    """
    if layer.is_tied and format == HIGH:
        return table_bytes * layer.inputs * layer.outputs
    return layer.count * FORMATS[format].weight_bytes(layer.inputs, layer.outputs)


def _by_layer(
    units: Mapping[str, Sequence[LinearSpec]], formats: Mapping[str, str]
) -> dict[str, str]:
    """Return the format of each layer, from the format of its unit."""
    return {layer.path: name for unit, name in formats.items() for layer in units[unit]}


class _RoundedHead(Head):
    """A tied head with its table in a quantised format.

    Features are rounded as the format rounds activations.
    """

    def __init__(self, head: Head, done: Quantisation) -> None:
        super().__init__(head.weight, head.device)
        self._done = done

    def __call__(self, features: Tensor) -> Tensor:
        """See ``Head``."""
        seen = calibrate.as_seen(self._done, HEAD, features.float().cpu().numpy())
        return super().__call__(torch.from_numpy(np.ascontiguousarray(seen)))


class _Assigned(Layered):
    """A source whose layers compute with the quantised values of the chosen formats."""

    def __init__(
        self,
        source: Source,
        ready: Mapping[str, Quantisation],
        formats: Mapping[str, str],
        device: torch.device,
    ) -> None:
        """``ready`` has the quantised numbers of all layers in each format, and ``formats`` the
        format of each layer.
        """
        super().__init__(
            functools.partial(weights.tensor, source.parameters), source.network, device=device
        )
        self._ready, self._formats = ready, formats
        table = formats.get(HEAD, HIGH)
        self._table = None if table == HIGH else ready[table]
        if self._table is not None:
            self.read = functools.partial(read_rounded, self._table, self.read)

    def head(self) -> Head:
        """See ``Layered``."""
        head = super().head()
        return head if self._table is None else _RoundedHead(head, self._table)

    def block(self, i: int) -> Block:
        """See ``Layered``."""
        block = super().block(i)
        modules = named(i, block)
        for name, done in self._ready.items():
            calibrate.simulate(
                modules, done, [layer for layer in modules if self._formats.get(layer) == name]
            )
        return block


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
    on_gpu: bool = False,
    tuning: Tuning | None = None,
    workplace: Workplace | None = None,
    fewest_tokens: int = FEWEST_TOKENS,
) -> Found:
    """Find the cheapest formats for which masked cross-entropy rises by at most ``budget``.

    The same arguments always give the same result.

    Args:
        source: The checkpoint to quantise.
        states: Calibration states.
        samples: Samples to measure the loss on.
        formats: Formats to choose from. A layer skips those that do not fit its shape.
        policy: Policy whose blocks the masked canvases use.
        budget: Largest relative increase; ``None`` uses ``DEFAULT_BUDGET``.
        seed: Seed of the random masks.
        on_done: Called at most ``units`` times.
        exact: Measure the loss of each layer instead of estimating it.
        on_gpu: Apply the shape rules of GPUs, which are stricter.
        tuning: Measured times. If present, time is minimised instead of bytes.
        workplace: Memory and device to use.
        fewest_tokens: See ``calibrate``.

    Raises:
        AccuracyError: Even the first change exceeds the budget.
    """
    budget, place = DEFAULT_BUDGET if budget is None else budget, workplace or Workplace()
    layers = searched(source.network)
    ready = {}
    for name in formats:
        suited = {
            unit: name
            for unit, members in layers.items()
            if all(misfit(layer, name, on_gpu=on_gpu) is None for layer in members)
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
            is_dense=on_gpu,
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
    table = source.parameters.stored_type(EMBEDDING).itemsize
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
    loss = MaskedLoss(reference, samples, policy, seed)

    def measure(point: Point) -> float:
        layered = _Assigned(source, ready, _by_layer(layers, point.formats), place.device)
        increase = loss.of(
            SweptPredictor(
                layered, "auto", memory_bytes=place.activation_bytes, folder=place.folder
            )
        )
        on_done()
        return increase

    measured: dict[int, float] = {}
    low, high = 0, len(path) - 1  # ``low`` always meets the budget; it starts at full precision
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
