"""Interfaces of the sides of a comparison, and checks that two sides are comparable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np

from dlm_export.network.turns import Canvas, Turn, Walk
from dlm_runtime import Policy
from dlm_runtime.errors import DlmError, ExitCode


class JudgeError(DlmError):
    """The two denoisers cannot be compared, or the data cannot judge them."""

    exit_code = ExitCode.WRONG_INPUT


View: TypeAlias = tuple[np.ndarray, np.ndarray]
"""A canvas ``[L]`` and the positions ``[P]`` to predict."""


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
        """Raw logits fp32 ``[R, V]`` of the ``rows`` ``[R]`` of a canvas ``[L]``, from one full
        pass.

        Row ``i`` predicts position ``i + shift``; masked positions stay masked.
        """

    def scores(self, turn: Turn, logits: np.ndarray, policy: Policy) -> np.ndarray:
        """Scores float64 ``[M]`` of a turn's positions in this side's loop, from their logits fp32
        ``[M, V]``.
        """


class Generator(Side, Protocol):
    """A side that generates text."""

    def generate(
        self, tokens: Sequence[int], max_new_tokens: int, policy: Policy
    ) -> tuple[list[int], int]:
        """Generate, and return the finished canvas and the number of passes."""


class Predictor(Scorer, Generator, Protocol):
    """A side that runs its loop."""

    def states(self, tokens: Sequence[int], max_new_tokens: int, policy: Policy) -> list[Canvas]:
        """Generate, and return the canvas before each pass and the finished one: NFE + 1 canvases."""


@runtime_checkable
class Seer(Scorer, Protocol):
    """A side that predicts only on canvases given to it in advance, and runs no loop."""

    def see(self, views: Sequence[View], walks: Sequence[Walk] = ()) -> None:
        """Replace all results with those for these canvases and passes of other sides' loops."""

    def walked(self, walk: int, step: int) -> np.ndarray:
        """Raw logits fp32 ``[R, V]`` of a given pass, computed with this side's own cached keys and
        values.
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
    """Logits fp32 ``[P, V]`` that predict ``positions`` ``[P]``, with -inf for the mask token.

    Raises JudgeError for NaN and infinite values.
    """
    return finite(predictor, predictor.logits(canvas, rows_of(positions, predictor.shift)))


def rows_of(positions: np.ndarray, shift: int) -> np.ndarray:
    """The rows ``[P]`` that predict ``positions`` ``[P]``; position 0 of a shifted denoiser uses
    row 0, as in the loop.
    """
    rows: np.ndarray = np.maximum(positions - shift, 0)
    return rows


def finite(predictor: Scorer, found: np.ndarray) -> np.ndarray:
    """A copy of logits ``[P, V]`` with -inf for the mask token. Raises JudgeError for other
    non-finite ones.
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
