"""Compares two denoisers in worker processes.

The samples are split into pieces of ``SAMPLES`` samples, and each piece is one task of a worker. A
worker opens both denoisers from their paths, and uses the same open denoisers for further pieces.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import dlm_runtime
from dlm_calibration.samples import Sample, samples_sha256
from dlm_export import families
from dlm_export.distributed.workers import Shared, WorkerInputError, Workers, reading
from dlm_export.judging.accuracy.evidence import Pair, Part
from dlm_export.judging.sides.bundle import BundlePredictor, Spent
from dlm_export.judging.sides.layerwise import SweptPredictor
from dlm_export.judging.sides.prompts import decoder
from dlm_export.judging.sides.side import Scorer
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

    The reference is a bundle, or a source, which runs layer by layer.
    """

    reference: Opened | Shared
    candidate: Opened
    has_floor: bool
    policy: Policy
    candidate_policy: Policy
    max_new_tokens: int
    seed: int
    has_texts: bool
    canvases: int | None

    @property
    def key(self) -> str:
        """A hash of all fields that affect the results."""
        sides = [
            side.manifest if isinstance(side, Opened) else [str(side.path), side.config_sha256]
            for side in (self.reference, self.candidate)
        ]
        policies = [self.policy.as_dict(), self.candidate_policy.as_dict()]
        flags = [self.has_floor, self.has_texts]
        numbers = [self.max_new_tokens, self.seed, self.canvases]
        told = json.dumps([sides, policies, flags, numbers], sort_keys=True)
        return hashlib.sha256(told.encode()).hexdigest()

    def open(self) -> tuple[Pair, BundlePredictor]:
        """Open both denoisers in this process."""
        candidate = self.candidate.open()
        floor: Scorer | None = None
        if isinstance(self.reference, Opened):
            reference: Scorer = self.reference.open()
        else:
            source = self.reference
            parameters = source.parameters()

            def swept(name: str, dtype: torch.dtype) -> SweptPredictor:
                layered = families.layered(parameters, source.network, dtype, source.torch_device)
                return SweptPredictor(layered, name)

            reference = swept("fp32", torch.float32)
            floor = swept("bf16", torch.bfloat16) if self.has_floor else None
        pair = Pair(
            reference,
            candidate,
            policy=self.policy,
            candidate_policy=self.candidate_policy,
            max_new_tokens=self.max_new_tokens,
            decode=decoder(candidate.bundle),
            seed=self.seed,
            noise_floor=floor,
            has_texts=self.has_texts,
            canvases=self.canvases,
        )
        return pair, candidate


class RemotePair:
    """Implements ``Compute`` with workers."""

    def __init__(
        self,
        workers: Workers,
        comparison: Comparison,
        candidate: BundlePredictor,
        samples: Sequence[Sample],
    ) -> None:
        """``candidate`` is the denoiser of this process, which does not run. Only workers run."""
        self._workers, self._comparison, self._candidate = workers, comparison, candidate
        self._name = f"judge-{comparison.key}-{samples_sha256(samples)}"

    def compare(self, samples: Sequence[Numbered], on_done: Callable[[], None]) -> list[Part]:
        """See ``Compute``."""
        pieces = [samples[start : start + SAMPLES] for start in range(0, len(samples), SAMPLES)]
        parts: list[Part] = []
        results = self._workers.each(self._name, _compare, self._comparison, pieces)
        for (found, spent), _ in results:
            self._candidate.spent += spent
            parts += found
            for part in found:
                for _ in range(len(set(part.masked[0].sample)) + len(part.runs)):
                    on_done()
        return parts


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


def _compare(
    comparison: Comparison, piece: Sequence[Numbered], _: None
) -> tuple[tuple[list[Part], list[Spent]], None]:
    pair, candidate = _opened(comparison)
    candidate.spent = []
    return (pair.compare(piece, lambda: None), candidate.spent), None
