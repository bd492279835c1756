"""What every side of a comparison offers, and what two sides must share to be compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np

from dlm_export.network.turns import Canvas, Turn, Walk
from dlm_runtime import Policy
from dlm_runtime.errors import DlmError, ExitCode


class JudgeError(DlmError):
    """Two denoisers that cannot be compared, or data that cannot judge them."""

    exit_code = ExitCode.WRONG_INPUT


View: TypeAlias = tuple[np.ndarray, np.ndarray]
"""A canvas ``[L]``, and the positions ``[P]`` whose predictions are asked for."""


class Side(Protocol):
    """One side of a comparison, by what has to be the same on both."""

    name: str
    shift: int
    visible_block: int | None
    vocab_size: int
    mask_token_id: int
    eos_token_ids: tuple[int, ...]
    max_canvas_length: int


class Scorer(Side, Protocol):
    """A side that says what it predicts on a canvas."""

    def logits(self, canvas: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Raw logits fp32 ``[R, V]`` of one full pass over a canvas ``[L]``, of its ``rows``
        ``[R]``.

        Row ``i`` predicts position ``i + shift``; masked positions stay masked.
        """

    def scores(self, turn: Turn, logits: np.ndarray, policy: Policy) -> np.ndarray:
        """How sure this side's loop is of a turn's positions, float64 ``[M]``, from their logits
        fp32 ``[M, V]``.
        """


class Generator(Side, Protocol):
    """A side that writes."""

    def generate(
        self, tokens: Sequence[int], max_new_tokens: int, policy: Policy
    ) -> tuple[list[int], int]:
        """The finished canvas and the passes it took."""


class Predictor(Scorer, Generator, Protocol):
    """A side that runs its loop."""

    def states(self, tokens: Sequence[int], max_new_tokens: int, policy: Policy) -> list[Canvas]:
        """The canvas that each pass saw, and behind them the finished one: NFE + 1 canvases."""


@runtime_checkable
class Seer(Scorer, Protocol):
    """A side that answers for what it was shown, all of it together, and runs no loop."""

    def see(self, views: Sequence[View], walks: Sequence[Walk] = ()) -> None:
        """Forget what was shown, and take in canvases and the passes of other sides' loops."""

    def walked(self, walk: int, step: int) -> np.ndarray:
        """Raw logits fp32 ``[R, V]`` of a pass that was shown, with the keys and values that this
        side would have cached.
        """


def check_comparable(reference: Side, candidate: Side) -> None:
    """Raise JudgeError unless both read the same canvases and predict the same tokens."""
    for name in ("vocab_size", "mask_token_id", "eos_token_ids", "shift", "visible_block"):
        theirs, ours = getattr(reference, name), getattr(candidate, name)
        if theirs != ours:
            raise JudgeError(
                f"{candidate.name}: {name} is {ours}, but {theirs} in {reference.name}: these are two different denoisers. "
                "Compare bundles of one checkpoint."
            )


def finite_logits(predictor: Scorer, canvas: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Logits fp32 ``[P, V]`` that predict ``positions`` ``[P]``, the mask token's -inf: it is never
    predicted.

    Raises JudgeError for NaN and infinite values.
    """
    return finite(predictor, predictor.logits(canvas, rows_of(positions, predictor.shift)))


def rows_of(positions: np.ndarray, shift: int) -> np.ndarray:
    """The rows ``[P]`` that predict ``positions`` ``[P]``; position 0 of a shifted denoiser takes
    row 0, as in the loop.
    """
    rows: np.ndarray = np.maximum(positions - shift, 0)
    return rows


def finite(predictor: Scorer, found: np.ndarray) -> np.ndarray:
    """A copy of logits ``[P, V]`` with -inf for the mask. Raises JudgeError for non-finite ones."""
    logits = np.array(found, np.float32)
    logits[:, predictor.mask_token_id] = 0
    bad = int((~np.isfinite(logits)).any(-1).sum())
    if bad:
        raise JudgeError(
            f"{predictor.name}: NaN or infinite logits at {bad} of {len(logits)} masked positions of a canvas. "
            "Its number format does not hold this denoiser's activations."
        )
    logits[:, predictor.mask_token_id] = -np.inf
    return logits
