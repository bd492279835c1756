"""Measures the losses of layers and of whole recipes in worker processes.

One task of a worker is called a piece:

- To estimate the losses of layers, a piece processes a few calibration states.
- To measure the losses of layers exactly, a piece measures one layer.
- To measure the loss of a recipe, a piece compares the predictions for a few samples.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from dlm_calibration.recipes import HIGH
from dlm_calibration.states import State
from dlm_export import families
from dlm_export.distributed.workers import Shared
from dlm_export.families.base import Parameters
from dlm_export.judging.accuracy.masked import Masked, MaskedCanvas, compare_masked
from dlm_export.judging.precision_search import sensitivity
from dlm_export.judging.precision_search.assigned import Assigned
from dlm_export.judging.precision_search.sensitivity import Losses, Sums
from dlm_export.judging.sides.layerwise import SweptPredictor
from dlm_export.network.denoiser import Denoiser
from dlm_export.quantising.numbers import Quantisation
from dlm_export.workplace import Remote

PIECES = 4  # largest number of pieces of the estimate
SAMPLES = 4  # number of samples in a piece of a recipe's loss


@dataclass(frozen=True)
class _Portable:
    """A quantisation without the source's parameters. Each worker opens the source itself."""

    done: Quantisation
    is_stored: bool

    @classmethod
    def of(cls, done: Quantisation) -> _Portable:
        folded = replace(done.parameters, source=None)  # type: ignore[arg-type]
        without = replace(done, parameters=folded, stored=None, observers=None)
        return cls(without, done.stored is not None)

    def opened(self, parameters: Parameters) -> Quantisation:
        folded = replace(self.done.parameters, source=parameters)
        if not self.is_stored:
            return replace(self.done, parameters=folded)
        assert isinstance(parameters, families.Weights)
        return replace(self.done, parameters=folded, stored=parameters)


@dataclass(frozen=True)
class _Sweep:
    source: Shared
    choices: tuple[_Portable, ...]
    states: tuple[State, ...]
    key: str


def _key(remote: Remote, choices: Iterable[Quantisation], told: Iterable[str]) -> str:
    """Return a hash of the source, of the quantisations, and of the strings in ``told``."""
    described = [[done.recipe.as_dict(), sorted(done.formats.items())] for done in choices]
    digest = hashlib.sha256(json.dumps([remote.solving, described]).encode())
    for text in told:
        digest.update(text.encode())
    return digest.hexdigest()


# ---- The losses of layers ----


def losses(
    remote: Remote,
    choices: Sequence[Quantisation],
    states: Sequence[State],
    on_done: Callable[[], None],
    *,
    exact: bool,
) -> list[Losses]:
    """Measure the loss of each quantised layer on ``states`` (see ``sensitivity.losses``)."""
    key = _key(remote, choices, (state.sha256 for state in states))
    portable = tuple(_Portable.of(done) for done in choices)
    shared = _Sweep(remote.source, portable, tuple(states), key)
    network, each = remote.source.network, remote.workers.each
    if not exact:
        size = -(-len(states) // PIECES)
        starts = range(0, len(states), size)
        merged: Sums | None = None
        for sums, _ in each(
            f"sweep-{key}", _estimate, shared, [slice(start, start + size) for start in starts]
        ):
            merged = sums if merged is None else merged.merged(sums)
        assert merged is not None
        for _ in range(sensitivity.units(network, 0, exact=False)):
            on_done()
        return merged.losses()
    pieces = [
        (number, unit, [layer.path for layer in layers])
        for number, done in enumerate(choices)
        for unit, layers in network.units().items()
        if done.formats.get(layers[0].path, HIGH) != HIGH
    ]
    found: list[Losses] = [{} for _ in choices]
    for (number, unit, _), (loss, _kept) in zip(
        pieces, each(f"sweep-exact-{key}", _exact, shared, pieces), strict=True
    ):
        found[number][unit] = loss
        on_done()
    return found


def _estimate(shared: _Sweep, piece: slice, _: None) -> tuple[Sums, None]:
    source = shared.source
    parameters = source.parameters()
    layered = families.layered(parameters, source.network, device=source.torch_device)
    choices = [choice.opened(parameters) for choice in shared.choices]
    some = shared.states[piece]
    return sensitivity.sums(layered, some, choices, lambda: None, first=piece.start), None


_last: dict[str, tuple[sensitivity.Sweep, list[Quantisation]]] = {}  # the last sweep here


def _exact(
    shared: _Sweep, piece: tuple[int, str, list[str]], _: None
) -> tuple[tuple[float, float], None]:
    if shared.key not in _last:
        _last.clear()
        parameters = shared.source.parameters()
        denoiser: Denoiser = families.load(parameters, shared.source.network)
        choices = [choice.opened(parameters) for choice in shared.choices]
        _last[shared.key] = sensitivity.Sweep(denoiser, shared.states), choices
    sweep, choices = _last[shared.key]
    return sweep.loss(choices[piece[0]], piece[2]), None


# ---- The loss of a recipe ----


@dataclass(frozen=True)
class _Assignment:
    source: Shared
    ready: dict[str, _Portable]
    formats: dict[str, str]


def masked(
    remote: Remote,
    ready: Mapping[str, Quantisation],
    formats: Mapping[str, str],
    canvases: Sequence[MaskedCanvas],
) -> Masked:
    """Compare a denoiser whose layers have the chosen formats with the source.

    ``ready`` maps each format to a quantisation of all layers in this format.
    """
    told = [json.dumps(sorted(formats.items()))]
    for seen in canvases:
        chosen = [each.tolist() for each in (seen.canvas, seen.positions, seen.truth)]
        told.append(json.dumps([*chosen, seen.draft]))
    stage = f"search-{_key(remote, ready.values(), told)}"
    portable = {name: _Portable.of(done) for name, done in ready.items()}
    shared = _Assignment(remote.source, portable, dict(formats))
    last = canvases[-1].sample
    pieces = [
        [seen for seen in canvases if start <= seen.sample < start + SAMPLES]
        for start in range(0, last + 1, SAMPLES)
    ]
    return Masked.join([found for found, _ in remote.workers.each(stage, _compare, shared, pieces)])


def _compare(shared: _Assignment, canvases: Sequence[MaskedCanvas], _: None) -> tuple[Masked, None]:
    source = shared.source
    parameters, views = source.parameters(), [seen.view for seen in canvases]
    plain = families.layered(parameters, source.network, torch.float32, source.torch_device)
    ready = {name: done.opened(parameters) for name, done in shared.ready.items()}
    chosen = Assigned(parameters, source.network, ready, shared.formats, source.torch_device)
    sides: list[Any] = [SweptPredictor(plain, "fp32"), SweptPredictor(chosen, "auto")]
    for side in sides:
        side.see(views)
    (found,) = compare_masked(sides[0], sides[1:], canvases)
    return found, None
