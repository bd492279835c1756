"""Compares two denoisers in worker processes.

The samples are split into pieces of ``SAMPLES`` samples, and each piece is one task of a worker. A
worker opens both denoisers from their paths, and uses the same open denoisers for further pieces.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import dlm_runtime
from dlm_calibration.samples import Sample, samples_sha256
from dlm_export import families
from dlm_export.distributed.workers import Shared, WorkerInputError, Workers, reading
from dlm_export.judging.accuracy.evidence import Pair, Part, Side
from dlm_export.judging.accuracy.frontier import Met
from dlm_export.judging.sides.bundle import BundlePredictor, Spent
from dlm_export.judging.sides.layerwise import SweptPredictor
from dlm_export.judging.sides.prompts import decoder
from dlm_export.judging.sides.side import Predictor, Scorer
from dlm_export.judging.sides.torch import TorchPredictor
from dlm_export.opening import Opening
from dlm_runtime.policy import Policy

SAMPLES = 4  # number of samples in a piece
Numbered = tuple[int, Sample]


@dataclass(frozen=True)
class Opened:
    """A bundle that workers open.

    The bundle that a worker finds at ``path`` must have the manifest ``manifest``.
    """

    path: Path
    opening: Opening
    name: str
    manifest: dict[str, Any]

    @classmethod
    def of(cls, side: BundlePredictor, path: Path, opening: Opening) -> Opened:
        # Ray reserves one core for each task.
        threads = opening.threads or 1
        return cls(
            path.resolve(), replace(opening, threads=threads), side.name, side.bundle.manifest
        )

    def open(self) -> BundlePredictor:
        """Raises WorkerInputError."""
        with reading(self.path):
            bundle = self.opening.open(self.path)
        if bundle.manifest != self.manifest:
            raise WorkerInputError(
                f"{self.path}: a Ray worker finds a different bundle there. Use paths that all machines share."
            )
        return BundlePredictor(bundle, self.name)


@dataclass(frozen=True)
class Comparison:
    """Everything that a worker needs to compare two denoisers, apart from the samples.

    The reference is a bundle, or a source. A source runs layer by layer, or as a whole if
    ``is_whole`` is true. If ``is_free`` is true, the source can generate texts.
    """

    reference: Opened | Shared
    candidate: Opened
    has_floor: bool
    is_whole: bool
    is_free: bool
    policy: Policy
    candidate_policy: Policy
    max_new_tokens: int
    seed: int
    states_of: Side

    @property
    def key(self) -> str:
        """A hash of all fields that affect the results."""
        sides = [
            side.manifest if isinstance(side, Opened) else [str(side.path), side.config_sha256]
            for side in (self.reference, self.candidate)
        ]
        policies = [self.policy.as_dict(), self.candidate_policy.as_dict()]
        flags = [self.has_floor, self.is_whole, self.is_free, self.states_of]
        numbers = [self.max_new_tokens, self.seed]
        told = json.dumps([sides, policies, flags, numbers], sort_keys=True)
        return hashlib.sha256(told.encode()).hexdigest()

    def open(self) -> tuple[Pair, BundlePredictor]:
        """Open both denoisers in this process."""
        candidate = self.candidate.open()
        floor: Scorer | None = None
        free: Predictor | None = None
        if isinstance(self.reference, Opened):
            reference: Scorer = self.reference.open()
            assert isinstance(reference, BundlePredictor)
            free = reference
        else:
            source = self.reference
            parameters = source.parameters()

            def swept(name: str, dtype: torch.dtype) -> SweptPredictor:
                layered = families.layered(parameters, source.network, dtype, source.torch_device)
                return SweptPredictor(layered, name)

            def whole(name: str, dtype: torch.dtype) -> TorchPredictor:
                loaded = families.load(parameters, source.network, dtype)
                return TorchPredictor(loaded.to(source.torch_device), name)

            make = whole if self.is_whole else swept
            reference = make("fp32", torch.float32)
            if isinstance(reference, TorchPredictor):
                free = reference
            elif self.is_free:
                free = whole("fp32", torch.float32)
            floor = make("bf16", torch.bfloat16) if self.has_floor else None
        pair = Pair(
            reference,
            candidate,
            policy=self.policy,
            candidate_policy=self.candidate_policy,
            max_new_tokens=self.max_new_tokens,
            decode=decoder(candidate.bundle),
            seed=self.seed,
            noise_floor=floor,
            states_of=self.states_of,
            free=free,
        )
        return pair, candidate


class RemotePair:
    """Implements ``Compute`` with workers."""

    def __init__(
        self,
        workers: Workers,
        comparison: Comparison,
        pair: Pair,
        candidate: BundlePredictor,
        pool: Sequence[Sample],
    ) -> None:
        """``pair`` and ``candidate`` are the denoisers of this process. Only the workers run."""
        self._workers, self._comparison, self._pair = workers, comparison, pair
        self._candidate = candidate
        self._name = f"judge-{comparison.key}-{samples_sha256(pool)}"

    def canvases(self, number: int, sample: Sample) -> int:
        """See ``Compute``."""
        return self._pair.canvases(number, sample)

    def runs(self, samples: Sequence[Numbered]) -> Generator[Met, None, None]:
        """See ``Compute``."""
        stage = f"{self._name}/runs-{_range(samples)}"
        for (run, spent), _ in self._workers.each(stage, _run, self._comparison, samples):
            self._candidate.spent += spent
            yield run

    def compare(
        self,
        samples: Sequence[Numbered],
        runs: Sequence[Met],
        freely: frozenset[int],
        on_done: Callable[[], None],
    ) -> list[Part]:
        """See ``Compute``."""
        pieces = []
        for start in range(0, len(samples), SAMPLES):
            some = samples[start : start + SAMPLES]
            numbers = {number for number, _ in some}
            pieces.append((some, [run for run in runs if run.number in numbers], freely))
        chosen = json.dumps([[run.number for run in runs], sorted(freely)])
        digest = hashlib.sha256(chosen.encode()).hexdigest()[:16]
        stage = f"{self._name}/compare-{_range(samples)}-{digest}"
        parts: list[Part] = []
        results = self._workers.each(stage, _compare, self._comparison, pieces)
        for (some, made, _), ((found, spent), _) in zip(pieces, results, strict=True):
            self._candidate.spent += spent
            parts += found
            for _ in range(len(some) + len(made)):
                on_done()
        return parts


def _range(samples: Sequence[Numbered]) -> str:
    return f"{samples[0][0]}-{samples[-1][0]}" if samples else "none"


_last: dict[str, tuple[Pair, BundlePredictor]] = {}  # what this process has opened last


def _opened(comparison: Comparison) -> tuple[Pair, BundlePredictor]:
    key = comparison.key
    if key not in _last:
        for _, candidate in _last.values():
            with suppress(dlm_runtime.DlmError):
                candidate.bundle.close()
        _last.clear()
        _last[key] = comparison.open()
    return _last[key]


def _run(comparison: Comparison, sample: Numbered, _: None) -> tuple[tuple[Met, list[Spent]], None]:
    pair, candidate = _opened(comparison)
    candidate.spent = []
    (run,) = pair.runs([sample])
    return (run, candidate.spent), None


def _compare(
    comparison: Comparison,
    piece: tuple[Sequence[Numbered], Sequence[Met], frozenset[int]],
    _: None,
) -> tuple[tuple[list[Part], list[Spent]], None]:
    pair, candidate = _opened(comparison)
    candidate.spent = []
    return (pair.compare(*piece, lambda: None), candidate.spent), None
