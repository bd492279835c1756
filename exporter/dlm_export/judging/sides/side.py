"""Defines the interface of the two denoisers in a comparison, which are called sides."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from dlm_export.network.loop_turns import Canvas
from dlm_export.network.pass_plan import Looped, shift_of
from dlm_export.network.spec import NetworkSpec
from dlm_runtime import Policy
from dlm_runtime.errors import DlmError, ExitCode


class JudgeError(DlmError):
    """Raised if two denoisers cannot be compared, or if the data cannot be used to compare them."""

    exit_code = ExitCode.WRONG_INPUT


class DraftPass(NamedTuple):
    """A draft pass over the positions of a canvas from ``start`` on, after a causal pass.

    For a denoiser with ``blocks_after_prompt``, one pass computes the whole canvas, and ``start`` is
    the end of the prompt.

    - ``temperature``: with self-conditioning, there are two draft passes. The second pass reads the
      denoiser's own predictions of the first pass, whose logits are divided by ``temperature``.
      Other denoisers ignore the temperature.
    - ``is_updated``: True if the pass uses the denoiser's low-rank updates for draft passes, if it
      has any.
    """

    start: int
    temperature: float = 1.0
    is_updated: bool = False


class View(NamedTuple):
    """A canvas of L token IDs ``[L]``, and the P positions ``[P]`` to predict on this canvas.

    If ``draft`` is not ``None``, it is the pass that predicts. All positions to predict are in its
    block.
    """

    canvas: np.ndarray
    positions: np.ndarray
    draft: DraftPass | None = None


class Side(ABC):
    """A denoiser that takes part in a comparison.

    The attributes except ``name`` are fields of the denoiser's network.
    """

    def __init__(self, name: str, network: NetworkSpec) -> None:
        c = network
        self.name, self.shift = name, c.shift
        self.visible_block, self.draft_block = c.visible_block, c.draft_block
        self.vocab_size, self.mask_token_id = c.vocab_size, c.mask_token_id
        self.eos_token_ids, self.max_canvas_length = c.eos_token_ids, c.max_canvas_length
        self.has_mask_token, self.is_verifying = c.has_mask_token, c.is_verifying
        self.resizes = c.resizes
        self.has_shifted_drafts = c.has_shifted_drafts
        self.blocks_after_prompt = c.blocks_after_prompt

    def see(self, views: Sequence[View]) -> None:  # noqa: B027 (a side may need no call)
        """Compute the predictions for all canvases that will be requested later.

        Each element of ``views`` is a canvas and the positions to predict. Each call discards the
        results of earlier calls. A denoiser that is completely in memory needs no call.
        """

    @abstractmethod
    def logits(
        self, canvas: np.ndarray, rows: np.ndarray, draft: DraftPass | None = None
    ) -> np.ndarray:
        """Make one full pass over a canvas of L token IDs, and return the raw logits of ``rows``.

        The result is fp32 ``[R, V]``, for R rows and a vocabulary of V tokens. ``rows_of`` says
        which row predicts a position. The canvas is not changed.

        With ``draft``, the denoiser makes a causal pass over the positions before its start, and
        the draft pass over the others (see ``DraftPass``).
        """

    @abstractmethod
    def courses(
        self, asked: Sequence[tuple[Sequence[int], int]], policy: Policy
    ) -> Iterator[list[Canvas]]:
        """Generate text after each prompt. Yields the canvases of each run, in order.

        Each element of ``asked`` is a prompt, and the number of tokens to generate after it. A run
        consists of the canvas before each pass, and then the finished canvas.
        """

    def texts(
        self, asked: Sequence[tuple[Sequence[int], int]], policy: Policy
    ) -> Iterator[tuple[list[int], int]]:
        """Like ``courses``, but yields the tokens of each finished canvas, and the number of passes."""
        for canvases in self.courses(asked, policy):
            yield canvases[-1].tokens.tolist(), len(canvases) - 1

    def seconds(self) -> list[float]:
        """Return the time of each text so far. The list is empty if this class measures no time."""
        return []


def check_comparable(reference: Side, candidate: Side) -> None:
    """Raise JudgeError if two denoisers differ in their vocabulary or decoding rules."""
    for name in ("vocab_size", "mask_token_id", "eos_token_ids", "shift", "visible_block"):
        theirs, ours = getattr(reference, name), getattr(candidate, name)
        if theirs != ours:
            raise JudgeError(
                f"{candidate.name}: {name} is {ours}, but {theirs} in {reference.name}: these are different denoisers. "
                "Compare bundles of one checkpoint."
            )


def can_compare_commits(side: Side | NetworkSpec, policy: Policy) -> bool:
    """Return True if two denoisers can predict what they would commit on the same canvas.

    Without a mask token, a pass depends on the predictions of the pass before. With the commit rule
    "verify", a pass depends on the drafts of the pass before. With ``remask`` "rewrite", a pass
    depends on all earlier passes over the block.
    """
    return side.has_mask_token and policy.commit != "verify" and policy.remask != "rewrite"


def check_tuned(network: NetworkSpec) -> None:
    """Raise JudgeError if effort levels cannot be fitted to a network."""
    if not network.has_mask_token and not network.has_causal_drafts:
        raise JudgeError(
            f"{network.architecture} has no mask token, and effort levels cannot be fitted to such networks yet: "
            "change steps_per_block or entropy_bound instead"
        )
    if network.resizes or network.rewrites:
        raise JudgeError(
            f"{network.architecture} deletes and inserts tokens, and effort levels cannot be fitted to such networks yet: "
            "pass steps with a request instead"
        )


def finite_logits(
    predictor: Side, canvas: np.ndarray, positions: np.ndarray, draft: DraftPass | None = None
) -> np.ndarray:
    """Return the logits that predict P ``positions``, fp32 ``[P, V]``.

    The logit of the mask token is -inf. Raises JudgeError if the logit of any other token is NaN or
    infinite.
    """
    rows = rows_of(predictor, positions, is_draft=draft is not None)
    return finite(predictor, predictor.logits(canvas, rows, draft))


def rows_of(side: Looped, positions: np.ndarray, *, is_draft: bool = False) -> np.ndarray:
    """Return the rows of a denoiser's output that predict P ``positions``, as int ``[P]``.

    Each row predicts the position at the same place, or the next position (see ``shift_of``). In the
    second case, there is no row that predicts position 0. The function then returns row 0 for this
    position, as the decoding loop does.
    """
    rows: np.ndarray = np.maximum(positions - shift_of(side, is_draft=is_draft), 0)
    return rows


def finite(predictor: Side, found: np.ndarray) -> np.ndarray:
    """Copy logits ``[P, V]``, and set the logit of the mask token, if any, to -inf.

    Raises JudgeError if the logit of any other token is NaN or infinite.
    """
    logits = np.array(found, np.float32)
    of_mask = slice(predictor.mask_token_id, predictor.mask_token_id + 1)
    logits[:, of_mask] = 0
    bad = int((~np.isfinite(logits)).any(-1).sum())
    if bad:
        raise JudgeError(
            f"{predictor.name}: NaN or infinite logits at {bad} of {len(logits)} masked positions of a canvas. "
            "Its number format cannot hold this denoiser's activations."
        )
    logits[:, of_mask] = -np.inf
    return logits
