"""Defines the interfaces of the sides of a comparison, and checks that two sides are comparable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np

from dlm_export.network.turns import Canvas, Turn, Walk
from dlm_runtime import Policy
from dlm_runtime.errors import DlmError, ExitCode


class JudgeError(DlmError):
    """The two denoisers cannot be compared, or the data does not allow to judge them."""

    exit_code = ExitCode.WRONG_INPUT


View: TypeAlias = tuple[np.ndarray, np.ndarray]
"""A canvas ``[L]``, and the positions ``[P]`` to predict on it."""


class Side(Protocol):
    """Properties that must be the same on both sides of a comparison."""

    name: str
    shift: int
    visible_block: int | None
    vocab_size: int
    mask_token_id: int
    eos_token_ids: tuple[int, ...]
    max_canvas_length: int


class Scorer(Side, Protocol):
    """A side that predicts tokens on a canvas."""

    def logits(self, canvas: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Run one full pass over a canvas ``[L]``, and return raw logits fp32 ``[R, V]`` of
        ``rows``.

        Row ``i`` predicts position ``i + shift``. Masked positions stay masked.
        """

    def scores(self, turn: Turn, logits: np.ndarray, policy: Policy) -> np.ndarray:
        """Return scores float64 ``[M]`` of the positions that a loop may commit in one turn.

        The scores are computed as in this side's loop, from logits fp32 ``[M, V]``. A ``Turn``
        describes one pass of a loop and the commits after it.
        """


class Generator(Side, Protocol):
    """A side that generates text."""

    def generate(
        self, tokens: Sequence[int], max_new_tokens: int, policy: Policy
    ) -> tuple[list[int], int]:
        """Generate, and return the finished canvas and the number of passes."""


class Predictor(Scorer, Generator, Protocol):
    """A side that predicts tokens and runs its own loop."""

    def states(self, tokens: Sequence[int], max_new_tokens: int, policy: Policy) -> list[Canvas]:
        """Generate, and return the canvas before each pass, and the finished canvas at the end."""


@runtime_checkable
class Seer(Scorer, Protocol):
    """A side that runs no loop, and predicts only on canvases that it knows in advance."""

    def see(self, views: Sequence[View], walks: Sequence[Walk] = ()) -> None:
        """Compute the results for these canvases, and for the passes of other sides' loops
        (``walks``).

        These results replace all earlier ones.
        """

    def walked(self, walk: int, step: int) -> np.ndarray:
        """Return raw logits fp32 ``[R, V]`` of one pass in the ``walks`` that ``see`` got.

        A walk is the list of passes of another side's loop. The logits are computed with keys and
        values that this side cached in the earlier passes of the walk.
        """


def check_comparable(reference: Side, candidate: Side) -> None:
    """Raises JudgeError unless both sides read the same canvases and predict the same tokens."""
    for name in ("vocab_size", "mask_token_id", "eos_token_ids", "shift", "visible_block"):
        theirs, ours = getattr(reference, name), getattr(candidate, name)
        if theirs != ours:
            raise JudgeError(
                f"{candidate.name}: {name} is {ours}, but {theirs} in {reference.name}: these are different denoisers. "
                "Compare bundles of one checkpoint."
            )


def finite_logits(predictor: Scorer, canvas: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return logits fp32 ``[P, V]`` that predict ``positions`` ``[P]``; the mask token has -inf.

    Raises JudgeError if the side computes NaN or infinity.
    """
    return finite(predictor, predictor.logits(canvas, rows_of(positions, predictor.shift)))


def rows_of(positions: np.ndarray, shift: int) -> np.ndarray:
    """Return the rows ``[P]`` that predict ``positions`` ``[P]``.

    Position 0 of a shifted denoiser has no row of its own, so row 0 is used, as in the loop.
    """
    rows: np.ndarray = np.maximum(positions - shift, 0)
    return rows


def finite(predictor: Scorer, found: np.ndarray) -> np.ndarray:
    """Copy logits ``[P, V]``, and give the mask token -inf.

    Raises JudgeError if other values are NaN or infinite.
    """
    logits = np.array(found, np.float32)
    logits[:, predictor.mask_token_id] = 0
    bad = int((~np.isfinite(logits)).any(-1).sum())
    if bad:
        raise JudgeError(
            f"{predictor.name}: NaN or infinite logits at {bad} of {len(logits)} masked positions of a canvas. "
            "Its number format cannot hold this denoiser's activations."
        )
    logits[:, predictor.mask_token_id] = -np.inf
    return logits
