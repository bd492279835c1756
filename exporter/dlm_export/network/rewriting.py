"""Rewrites a block: each pass may replace, delete and insert tokens (``remask`` "rewrite").

This is the loop of LLaDA2.2, as in SGLang's ``JointThresholdInDel``. A mask token is either a first
mask token, with which the block started, or an added one. ``decode/request_rewrite.cc`` is the native
loop.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from dlm_export.network.commit_rules import choose, score_of
from dlm_export.network.loop_turns import Turn
from dlm_export.network.proposers import Proposals
from dlm_export.network.spec import NetworkSpec
from dlm_runtime.policy import Policy


@dataclass(frozen=True, eq=False)
class Rewritten:
    """A block after a pass. Both arrays are int64 ``[M]``.

    ``guess`` contains the token of each position, and the proposed token for a mask token. It is -1
    for mask tokens that the pass added. ``is_last`` is true if the block is finished.
    """

    tokens: np.ndarray
    guess: np.ndarray
    is_last: bool


class Rewriting:
    """The passes over one block. They rewrite its M positions after the prompt."""

    def __init__(self, network: NetworkSpec, policy: Policy, positions: int) -> None:
        assert network.delete_token_id is not None
        assert network.split_token_id is not None
        self.mask, self.delete = network.mask_token_id, network.delete_token_id
        self.split, self.policy = network.split_token_id, policy
        self._is_added = np.zeros(positions, bool)
        # ``settled`` is the number of passes without first mask tokens.
        self._passes = self._settled = 0
        # The tokens of the block before each pass, and the tokens that were written at each position.
        self._seen: set[bytes] = set()
        self._written: list[set[int]] = [set() for _ in range(positions)]

    def step(
        self, turn: Turn, tokens: np.ndarray, proposals: Proposals, logits: Tensor
    ) -> Rewritten:
        """Rewrite the ``tokens`` of the turn's positions, int64 ``[M]``.

        ``logits`` ``[M, V]`` exclude the mask token.
        """
        is_last, chosen = self._choose(turn, tokens, proposals)
        found, special = proposals.tokens.copy(), (self.delete, self.split)
        if is_last:
            for row in np.flatnonzero(chosen & np.isin(found, special)).tolist():
                found[row] = _other(found[row], logits[row], special)
        elif tokens.tobytes() in self._seen:
            # The passes go round in circles, so the least certain change becomes another token.
            changed = np.flatnonzero(chosen & (found != tokens))
            if len(changed):
                least = int(changed[proposals.scores[changed].argmin()])
                found[least] = _other(found[least], logits[least], self._written[least])
        self._seen.add(tokens.tobytes())
        after: list[tuple[int, bool, int]] = []  # token, is added, guess
        for row, token in enumerate(tokens.tolist()):
            written, is_added = int(found[row]), bool(self._is_added[row])
            if chosen[row]:
                self._written[row].add(written)
                if written == self.delete:
                    continue
                if written == self.split:
                    after.append((self.mask, True, -1))
                else:
                    token = written
            after.append((token, is_added, written if token == self.mask else token))
        after += [(self.mask, True, -1)] * (len(tokens) - len(after))
        columns = zip(*after[: len(tokens)], strict=True)
        new, added, guess = (np.array(column) for column in columns)
        self._is_added = added
        return Rewritten(new, guess, is_last)

    def _choose(
        self, turn: Turn, tokens: np.ndarray, proposals: Proposals
    ) -> tuple[bool, np.ndarray]:
        """Return whether this is the last pass, and which positions it writes, bool ``[M]``."""
        policy, scores = self.policy, proposals.scores
        masked = tokens == self.mask
        first = masked & ~self._is_added
        self._passes += 1
        self._settled += not first.any()
        is_last = (
            not first.any() and self._settled >= policy.edit_passes
        ) or self._passes > turn.end - turn.start + policy.edit_passes
        chosen = masked.copy()
        if first.any() and not is_last:
            # At least as many first mask tokens as the schedule plans, however many were added.
            planned = turn.planned + int((masked & ~first).sum())
            chosen[masked] = choose(scores[masked], policy, planned)
            is_last = policy.edit_passes == 0 and not (first & ~chosen).any()
            if is_last:
                chosen = masked.copy()
        differs = ~masked & (proposals.tokens != tokens)
        chosen |= differs & (scores > score_of(policy.edit_threshold))
        return is_last or not chosen.any(), chosen


def _other(token: int, logits: Tensor, ruled_out: Collection[int]) -> int:
    """Return the most likely token of a row outside ``ruled_out``, or ``token`` if none is."""
    left = logits.clone()
    left[list(ruled_out)] = -np.inf
    return token if left.isneginf().all() else int(left.argmax())
