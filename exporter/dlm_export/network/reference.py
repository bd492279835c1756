"""Implements the unmasking loop in plain torch, as the reference for tests of the native loop.

A ``Policy`` selects the algorithm. The algorithms are from these papers:

- LLaDA (arXiv:2502.09992), algorithms 4 and 5;
- Fast-dLLM (arXiv:2505.22618): threshold, factor, prefix cache and dual cache;
- Dream (arXiv:2508.15487): timestep schedule, entropy and margin scores;
- SDAR (arXiv:2510.06303): the commit rule "dynamic";
- entropy-bounded sampling (arXiv:2505.24857);
- d3LLM (arXiv:2601.07568): positions of several blocks in one pass;
- SDLM (arXiv:2509.24007): the longest prefix of confident tokens;
- the released code of DiffusionGemma: blocks that start from random tokens;
- LLaDA2.2, as in SGLang's code: passes that rewrite a block (``rewriting``).

This module runs the passes of one request. ``loop_turns`` schedules the passes, and
``commit_rules`` decides which positions commit. ``proposers`` chooses the tokens of these positions.
``lockstep`` runs many requests together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from dlm_export.network.cache_dtypes import read_back
from dlm_export.network.commit_rules import choose_in
from dlm_export.network.denoiser import Denoiser, Past
from dlm_export.network.loop_random import random_tokens, soft_temperature
from dlm_export.network.loop_turns import Canvas, Turn, reserve_end, start_canvas, turns
from dlm_export.network.pass_plan import Span, shift_of
from dlm_export.network.proposers import Proposals, Proposer, make_proposer
from dlm_export.network.rewriting import Rewriting
from dlm_export.network.spec import NetworkSpec
from dlm_runtime.policy import Policy


@dataclass(frozen=True)
class Reference:
    """Result of the loop: the complete canvas, and the number of passes (NFE)."""

    tokens: list[int]
    nfe: int


def outside(past: Past | None, span: Span) -> Past | None:
    """Return the cached keys and values of the rows that a pass does not compute.

    Returns ``None`` if the cache contains no such rows.
    """
    if past is None:
        return None
    last = past[0].shape[2] if span.kept == "append" else span.last
    keys, values = (torch.cat((rows[:, :, : span.first], rows[:, :, last:]), 2) for rows in past)
    return (keys, values) if keys.shape[2] else None


def store(past: Past | None, new: Past, span: Span) -> Past:
    """Store the keys and values ``new`` of a pass, and return the resulting cache.

    The function may modify ``past``, the cache before the pass, in place.
    """
    if past is None:
        return new[0].clone(), new[1].clone()
    if span.kept == "append":
        keys, values = (
            torch.cat((kept[:, :, : span.first], rows), 2)
            for kept, rows in zip(past, new, strict=True)
        )
        return keys, values
    for kept, rows in zip(past, new, strict=True):
        kept[:, :, span.first : span.last] = rows
    return past


class Run:
    """A running request, between two passes.

    The caller repeats three steps: call ``advance`` to get the next pass, run that pass, and call
    ``commit`` with the logits of ``rows``. ``turn`` is the turn of the pass that ``advance`` returned.
    """

    def __init__(
        self,
        network: NetworkSpec,
        canvas: Canvas,
        policy: Policy,
        steps: int = 0,
        proposer: Proposer | None = None,
        longest: int | None = None,
    ) -> None:
        """``generate`` explains ``steps``, and ``fill`` explains ``longest``.

        If ``proposer`` is ``None``, the policy's default proposer is used.
        """
        self.network, self.policy = network, policy
        self.proposer = proposer or make_proposer(network.mask_token_id, policy)
        if proposer is None:
            canvas = reserve_end(canvas, policy, network.eos_token_ids)
        self._now = Canvas(canvas.tokens.copy(), canvas.undecided.copy())
        self._longest = longest or len(canvas.tokens)
        # The number of expand tokens that may still lengthen the canvas. The authors' limit.
        prompt = int(canvas.undecided.argmax())
        self._expansions = 2 * (self._longest - prompt)
        self.nfe = 0
        # The tokens that the last pass proposed, and -1 for positions that it did not score.
        self.guess = np.full(len(self.tokens), -1)
        # For ``remask`` "noise": the positions that contain random tokens.
        self.is_noised = np.zeros(len(self.tokens), bool)
        # For ``remask`` "noise": the number of consecutive passes, up to the last pass, in which
        # the most likely tokens of the block did not change.
        self._stable = 0
        # For ``remask`` "rewrite": the passes over the current block, after its first pass.
        self._rewriting: Rewriting | None = None
        self._turns = turns(self._now, policy, network, steps, self._scaffold)

    @property
    def tokens(self) -> np.ndarray:
        """The token ids of the current canvas, int64 ``[L]``."""
        return self._now.tokens

    @property
    def undecided(self) -> np.ndarray:
        """The undecided positions of the current canvas, bool ``[L]``."""
        return self._now.undecided

    def _scaffold(self, first: int, last: int) -> None:
        if self.policy.remask == "noise":
            return  # a block is decided only as a whole
        positions, tokens = self.proposer.scaffold(self.canvas, first, last)
        self.tokens[positions] = tokens
        self.undecided[positions] = False
        self.proposer.note(positions, tokens)

    @property
    def canvas(self) -> Canvas:
        """A copy of the current canvas."""
        return Canvas(self.tokens.copy(), self.undecided.copy())

    def advance(self) -> Span | None:
        """Return the span that the next pass computes, or ``None`` if the request is finished."""
        before = self.undecided.copy()
        turn = next(self._turns, None)
        if turn is None:
            ended = np.flatnonzero(before & ~self.undecided)
            self.proposer.note(ended, self.tokens[ended])
            return None
        self.turn = turn
        if self.policy.remask == "noise":
            if turn.step == 0 and len(turn.positions):
                self._write_noise(0)
        elif turn.span.draft_rows is not None and not self.network.has_mask_token:
            self._write_random(np.arange(turn.span.draft_rows, turn.span.last), 0)
        return turn.span

    def _write_random(self, positions: np.ndarray, step: int) -> None:
        network = self.network
        self.tokens[positions] = random_tokens(
            self.policy.seed, step, positions, network.vocab_size, network.mask_token_id
        )

    def _write_noise(self, step: int) -> None:
        """Write the noise of pass ``step``, and scaffold tokens, to the turn's positions."""
        positions = self.turn.positions
        self._write_random(positions, step)
        self.is_noised[positions] = True
        first, last = int(positions[0]), int(positions[-1]) + 1
        certain, tokens = self.proposer.scaffold(self.canvas, first, last)
        self.tokens[certain], self.is_noised[certain] = tokens, False

    @property
    def temperature(self) -> float:
        """The temperature of the next pass, for self-conditioning."""
        turn = self.turn
        return soft_temperature(self.policy, turn.step, turn.steps)

    @property
    def is_first(self) -> bool:
        """True if the next pass is the first pass over its positions."""
        return self.turn.step == 0

    @property
    def rows(self) -> Tensor:
        """The rows whose logits ``commit`` needs, int64 ``[M]``.

        Row 0 is the first row of the pass.
        """
        span, shift = self.turn.span, shift_of(self.network, is_draft=self.turn.span.is_draft)
        positions = np.concatenate((self.turn.positions, self.turn.drafts))
        return torch.from_numpy((positions - shift).clip(min=0) - span.first)

    def commit(self, logits: Tensor) -> Proposals:
        """Commit the tokens that the policy chooses, and return the tokens proposed for the turn's
        positions.

        ``logits`` are the raw logits of ``rows``, fp32 ``[M, V]``.
        """
        turn, proposer = self.turn, self.proposer
        self.nfe += 1
        logits = logits.clone()
        for first, last in self.network.unused_tokens:
            logits[:, first:last] = -torch.inf
        if self.network.resizes and self._room() == 0:
            logits[:, self.network.expand_token_id] = -torch.inf
        logits, later = logits[: len(turn.positions)], logits[len(turn.positions) :]
        proposals = proposer.propose(turn, self.canvas, logits)
        if self.policy.remask == "noise":
            if len(turn.positions):
                self._renoise(proposals, logits)
            return proposals
        if self.policy.remask == "rewrite":
            if len(turn.positions):
                self._rewrite(proposals, logits)
            return proposals
        chosen = choose_in(turn, proposals.tokens, proposals.scores, self.policy)
        is_verified = self.policy.commit == "verify"
        is_cut = is_verified or self.policy.commit == "longest_prefix"
        if is_cut and self.policy.stop != "none":
            ends = np.isin(proposals.tokens, self.network.eos_token_ids)
            chosen &= np.cumsum(ends) - ends == 0  # nothing is decided after an end token
        committed = turn.positions[chosen]
        self.guess[:] = -1
        self.guess[turn.positions] = proposals.tokens
        if is_verified:
            # After a draft pass, write the drafted tokens to the canvas, because the next pass
            # verifies them. After the verifying pass, mask these positions again.
            if turn.span.is_draft:
                self.tokens[turn.positions] = proposals.tokens
            else:
                self.tokens[self.undecided] = self.network.mask_token_id
        self.tokens[committed] = proposals.tokens[chosen]
        self.undecided[committed] = False
        proposer.note(committed, proposals.tokens[chosen])
        if len(turn.drafts) and chosen.all():
            block = replace(
                turn,
                start=turn.end,
                end=int(turn.drafts[-1]) + 2,
                positions=turn.drafts,
                drafted=None,
            )
            drafts = proposer.propose(block, self.canvas, later).tokens
            self.tokens[turn.drafts] = self.guess[turn.drafts] = drafts
        if self.network.resizes:
            self._resize(committed)
        return proposals

    def _room(self) -> int:
        """Return how many expand tokens may lengthen the canvas now."""
        return min(self._longest - len(self.tokens), self._expansions)

    def _resize(self, committed: np.ndarray) -> None:
        """Remove delete tokens at ``committed``, and replace each expand token by two mask tokens.

        If there is too little room, the leftmost expand tokens become one mask token.
        """
        network, tokens = self.network, self.tokens[committed]
        deleted = committed[tokens == network.delete_token_id]
        expanded = committed[tokens == network.expand_token_id]
        self.tokens[expanded], self.undecided[expanded] = network.mask_token_id, True
        self.guess[committed] = -1
        room = min(self._longest - len(self.tokens) + len(deleted), self._expansions)
        doubled = expanded[max(0, len(expanded) - room) :]
        self._expansions -= len(doubled)
        counts = np.ones(len(self.tokens), np.int64)
        counts[deleted], counts[doubled] = 0, 2
        self._repeat(counts)

    def _repeat(self, counts: np.ndarray) -> None:
        """Repeat every position of the canvas as often as ``counts`` says."""
        self._now.tokens = np.repeat(self.tokens, counts)
        self._now.undecided = np.repeat(self.undecided, counts)
        self.guess = np.repeat(self.guess, counts)

    def _renoise(self, proposals: Proposals, logits: Tensor) -> None:
        """Accept the chosen positions of a block, and draw new random tokens for all others.

        After the last pass over the block, all positions get their most likely text.
        """
        turn, policy = self.turn, self.policy
        best = self.proposer.find_best(turn, self.canvas, logits)
        is_equal = turn.step > 0 and np.array_equal(best, self.guess[turn.positions])
        self._stable = self._stable + 1 if is_equal else 0
        is_stable = (
            self._stable >= policy.stable_passes
            and -proposals.scores.mean() < policy.stable_entropy
        )
        self.guess[:] = -1
        self.guess[turn.positions] = best
        if (is_stable and policy.stable_entropy) or turn.step + 1 >= turn.steps:
            self.tokens[turn.positions] = best
            self.undecided[turn.positions] = self.is_noised[turn.positions] = False
            self.proposer.note(turn.positions, best)
            return
        chosen = choose_in(turn, proposals.tokens, proposals.scores, policy)
        self._write_noise(turn.step + 1)
        self.tokens[turn.positions[chosen]] = proposals.tokens[chosen]
        self.is_noised[turn.positions[chosen]] = False

    def _rewrite(self, proposals: Proposals, logits: Tensor) -> None:
        """Replace, delete and insert tokens of the block. The last pass decides the whole block."""
        at = self.turn.positions
        if self._rewriting is None:
            self._rewriting = Rewriting(self.network, self.policy, len(at))
        logits = self.proposer.masked(logits)
        made = self._rewriting.step(self.turn, self.tokens[at], proposals, logits)
        self.tokens[at], self.guess[:] = made.tokens, -1
        if made.is_last:
            self.undecided[at], self._rewriting = False, None
        else:
            self.guess[at] = made.guess

    def end(self) -> None:
        """Stop early, and fill the undecided positions with the result of ``Proposer.complete``.

        If the network changes the length of canvases, a position without a token is removed.
        """
        network = self.network
        for special in (network.expand_token_id, network.delete_token_id, network.split_token_id):
            self.guess[self.guess == special] = -1
        if network.resizes:
            self._repeat(np.where(self.undecided & (self.guess < 0), 0, 1))
        found = self.proposer.complete(self.canvas, self.guess)
        self.tokens[self.undecided] = np.where(found < 0, network.eos_token_ids[0], found)[
            self.undecided
        ]


def generate(
    denoiser: Denoiser,
    tokens: Sequence[int],
    policy: Policy,
    max_new_tokens: int,
    steps: int = 0,
    on_step: Callable[[Canvas], None] | None = None,
    *,
    cache_dtype: str = "float32",
    proposer: Proposer | None = None,
) -> Reference:
    """Generate ``max_new_tokens`` tokens after the prompt, and fill the mask tokens in the prompt.

    Args:
        denoiser: The network to run.
        tokens: Token ids of the prompt, which may include mask tokens.
        policy: The rules of scoring, committing and caching.
        max_new_tokens: Number of positions to generate after ``tokens``.
        steps: Number of passes planned for the whole generation. The passes are divided evenly
            among the blocks. If ``steps`` is 0, the number of passes in the policy is used.
        on_step: A function that is called with the canvas after each step.
        cache_dtype: Type of stored keys and values, as the manifest names it.
        proposer: The object that chooses tokens. If ``None``, the policy's default proposer is
            used.
    """
    canvas = start_canvas(tokens, max_new_tokens, denoiser.network.mask_token_id)
    return fill(
        denoiser, canvas, policy, steps, on_step, cache_dtype=cache_dtype, proposer=proposer
    )


@torch.no_grad()
def fill(
    denoiser: Denoiser,
    canvas: Canvas,
    policy: Policy,
    steps: int = 0,
    on_step: Callable[[Canvas], None] | None = None,
    *,
    cache_dtype: str = "float32",
    proposer: Proposer | None = None,
    max_steps: int = 0,
    longest: int | None = None,
    on_pass: Callable[[Turn, Proposals, Tensor], None] | None = None,
) -> Reference:
    """Fill the undecided positions of a canvas. ``generate`` explains the arguments.

    If the network changes the length of canvases, ``longest`` is the largest length. By default,
    the canvas never becomes longer than at the start.
    ``on_pass`` is called with the turn, the proposals and the logits of each pass. The loop stops
    after ``max_steps`` passes. If ``max_steps`` is 0, there is no limit.
    """
    run = Run(denoiser.network, canvas, policy, steps, proposer, longest)
    given = torch.from_numpy(~run.undecided)
    conditional, unconditional = _Passes(denoiser, cache_dtype), _Passes(denoiser, cache_dtype)
    is_conditioned = denoiser.network.conditioning is not None
    conditioning: Tensor | None = None
    while (span := run.advance()) is not None:
        if max_steps and run.nfe == max_steps:
            run.end()
            break
        tokens = torch.from_numpy(run.tokens)
        if run.is_first or not span.is_draft:
            conditioning = None
        logits = conditional.logits(tokens, span, run.rows, conditioning)
        if policy.cfg_scale:
            without = unconditional.logits(
                tokens.masked_fill(given, denoiser.network.mask_token_id), span, run.rows
            )
            ruled_out = logits.isneginf() | without.isneginf()
            logits = (
                without.double() + (policy.cfg_scale + 1) * (logits.double() - without.double())
            ).float()
            logits = logits.masked_fill(ruled_out, -torch.inf)
        if is_conditioned and span.is_draft:
            temperature = torch.tensor(run.temperature, device=logits.device)
            conditioning = denoiser.soft_embedding(logits, temperature)[None]
        proposals = run.commit(logits)
        if on_pass is not None:
            positions = len(run.turn.positions)
            on_pass(run.turn, proposals, run.proposer.masked(logits[:positions]))
        if on_step is not None:
            on_step(run.canvas)
    return Reference(run.tokens.tolist(), run.nfe)


class _Passes:
    """Runs the passes of one canvas, and stores the canvas's cache."""

    def __init__(self, denoiser: Denoiser, cache_dtype: str) -> None:
        self.denoiser, self.cache_dtype = denoiser, cache_dtype
        self.cache: list[Past | None] = [None] * len(denoiser.network.layers)

    def logits(
        self, tokens: Tensor, span: Span, rows: Tensor, conditioning: Tensor | None = None
    ) -> Tensor:
        """Run a pass over a span of the canvas ``tokens`` ``[L]``.

        ``conditioning`` is the self-conditioning of the span, ``[1, T, d]``. ``None`` means zeros.
        Returns raw logits, fp32 ``[M, V]``.
        """
        device = self.denoiser.embed.weight.device
        past = [read for kept in self.cache if (read := outside(kept, span)) is not None] or None
        ids = tokens[span.first : span.last].to(device)
        positions = torch.from_numpy(span.ids(self.denoiser.network)).to(device)
        hidden, presents = self.denoiser.hidden(
            ids.unsqueeze(0), positions.unsqueeze(0), past, self.cache_dtype, conditioning
        )
        if span.is_stored:
            rounded = (
                (read_back(keys, self.cache_dtype), read_back(values, self.cache_dtype))
                for keys, values in presents
            )
            self.cache = [
                store(kept, new, span) for kept, new in zip(self.cache, rounded, strict=True)
            ]
        return self.denoiser.project(hidden[0, rows.to(device)]).float()
