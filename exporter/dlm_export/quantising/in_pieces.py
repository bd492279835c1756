"""Makes calibration states, and observes the inputs of layers, in worker processes.

One task of a worker is called a piece. To make trajectory states, a piece generates text for a few
samples. To observe the inputs of a layer, a piece runs the layer on a part of the states. The
workers keep the hidden states of each part, because the next layer needs them as input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dlm_calibration.errors import CalibrationError
from dlm_calibration.observers import Observers
from dlm_calibration.samples import Sample
from dlm_calibration.states import State, Trajectories
from dlm_export import families
from dlm_export.distributed.workers import Kept, Shared, Workers
from dlm_export.quantising import observing, samples
from dlm_export.quantising.gptq import Gram
from dlm_export.quantising.numbers import Folded, Quantisation
from dlm_export.quantising.observing import Observed, Part, Run, Wanted
from dlm_runtime.policy import Policy

SAMPLES = 8  # number of samples in a piece of trajectory states
PARTS = 8
"""The states are divided into about this many parts, unless a limit of ``PART_TOKENS`` applies."""
PART_TOKENS = (2048, 16384)
"""The smallest and the largest number of tokens of a part, unless a single batch has more."""


# ---- Trajectory states ----


@dataclass(frozen=True)
class _Generating:
    source: Shared
    dtype: torch.dtype
    policy: Policy


def trajectories(
    workers: Workers,
    source: Shared,
    dtype: torch.dtype,
    policy: Policy,
    name: str,
    on_done: Callable[[], None],
) -> Trajectories:
    """Like ``samples.trajectories``, but the workers generate the texts.

    The workers record results under ``name``, so ``name`` must be unique for the samples, the
    policy and the source.
    """

    def run(wanted: Sequence[Sample]) -> Iterator[Sequence[np.ndarray | State]]:
        pieces = [wanted[start : start + SAMPLES] for start in range(0, len(wanted), SAMPLES)]
        shared = _Generating(source, dtype, policy)
        for courses, _ in workers.each(f"{name}/states", _generate, shared, pieces):
            for course in courses:
                on_done()
                yield course

    return run


def _generate(
    shared: _Generating, piece: Sequence[Sample], _: None
) -> tuple[list[Sequence[np.ndarray | State]], None]:
    source = shared.source
    layered = families.layered(
        source.parameters(), source.network, shared.dtype, source.torch_device
    )
    run = samples.trajectories(layered, shared.policy, None, lambda: None)
    return list(run(piece)), None


# ---- Runs of layers ----


@dataclass(frozen=True)
class _Observing:
    source: Shared
    dtype: torch.dtype
    wanted: Wanted
    rows: dict[str, np.ndarray]
    columns: dict[str, np.ndarray]


@dataclass
class Observation:
    """The picklable form of ``Observed``: the observers, and the Gram matrices as fp32 arrays."""

    observers: Observers
    grams: dict[str, np.ndarray]

    def opened(self) -> Observed:
        found = Observed(self.observers)
        for of, matrix in self.grams.items():
            found.grams[of] = Gram(len(matrix), torch.device("cpu"))
            found.grams[of].matrix = torch.from_numpy(matrix)
        return found


class Remote:
    """Runs layers with workers. ``calibrate`` calls the method ``observe``."""

    def __init__(
        self,
        workers: Workers,
        source: Shared,
        dtype: torch.dtype,
        done: Quantisation,
        states: Sequence[State],
        name: str,
    ) -> None:
        """Store the arguments, and split the states into parts.

        The workers record results under ``name``, so ``name`` must be unique for the source, the
        recipe and the states.
        """
        self._workers, self._source, self._dtype, self._done = workers, source, dtype, done
        positions = observing.predicted_positions(states, source.network.mask_token_id)
        least, most = PART_TOKENS
        tokens = sum(len(state.canvas) for state in states)
        self._parts = observing.split(states, positions, min(most, max(least, tokens // PARTS)))
        self._kept: list[Kept] | None = None
        self._name = name

    def observe(self, wanted: Wanted) -> Observed:
        """Run a layer on all parts, and merge the results in the order of the parts.

        The method records the merged observers. It then removes the results of the previous layer
        from the record, because that layer's matrices are already rounded.
        """
        i, record = wanted.layer, self._workers.record
        if not wanted.sites and i == len(self._source.network.layers):
            return Observed(Observers())
        stage = f"{self._name}/{i}" if wanted.keep else f"{self._name}/{i}-scales"
        keep = wanted.keep and i < len(self._source.network.layers)
        done = f"{stage}-merged"
        if record is not None and done in record and not wanted.grams:
            if keep:
                self._kept = self._workers.held(stage, len(self._parts))
            return Observed(record[done])
        if i and self._kept is None and not self._is_finished(stage):
            raise CalibrationError(
                f"--resume: the results of layer {i - 1} are missing. Remove the folder's subfolder pieces, and build again."
            )
        merged, kept = self._run(stage, wanted, keep=keep)
        if keep:
            self._kept = kept
        if record is not None:
            record[done] = merged.observers
            if wanted.keep and i:
                record.remove(f"{self._name}/{i - 1}")
                record.remove(f"{self._name}/{i - 1}-scales")
        return merged

    def _is_finished(self, stage: str) -> bool:
        """Return True if the record contains the results of all pieces of a stage."""
        record = self._workers.record
        names = [f"{stage}/{number}" for number in range(len(self._parts))]
        return record is not None and all(name in record for name in names)

    def _run(self, stage: str, wanted: Wanted, *, keep: bool) -> tuple[Observed, list[Kept]]:
        folded = self._done.parameters
        shared = _Observing(
            self._source, self._dtype, wanted, dict(folded.rows), dict(folded.columns)
        )
        merged: Observed | None = None
        kept: list[Kept] = []
        for found, handle in self._workers.each(
            stage, _observe, shared, self._parts, self._kept, keep=keep
        ):
            kept.append(handle)
            if merged is None:
                merged = found.opened()
            else:
                merged.merge(found.opened())
        assert merged is not None
        return merged, kept


def _observe(shared: _Observing, part: Part, kept: Any) -> tuple[Observation, np.ndarray | None]:
    source, wanted = shared.source, shared.wanted
    parameters = Folded(source.parameters(), source.network, shared.rows, shared.columns)
    layered = families.layered(parameters, source.network, shared.dtype, source.torch_device)
    run = Run(layered, part, entering=None if kept is None else _as_tensor(kept, shared.dtype))
    found = run.observe(wanted)
    grams = {of: gram.matrix.cpu().numpy() for of, gram in found.grams.items()}
    return Observation(found.observers, grams), _as_array(run.hidden) if wanted.keep else None


def _as_array(x: torch.Tensor) -> np.ndarray:
    """Convert hidden states to an array. numpy has no bf16, so bf16 becomes int16."""
    found: np.ndarray = (x.view(torch.int16) if x.dtype == torch.bfloat16 else x).numpy()
    return found


def _as_tensor(x: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """Undo ``_as_array``. The result is a copy, because Ray's arrays must not be changed."""
    return torch.from_numpy(np.array(x)).view(dtype)
