"""Rules that commit more tokens per pass, and that the runtime does not have.

``commit_rules.py`` compares them with the runtime's rules. The sources are the papers and the
authors' code, except for credit, whose code is in dInfer:

- credit: CreditDecoding, arXiv:2510.06133
- stability: KLASS, arXiv:2511.05664
- mean gap: Prophet, arXiv:2508.19982
- branches: LoPA, arXiv:2512.16229
- revoke: WINO, arXiv:2507.18578
- self-verification: S2D2, arXiv:2603.25702
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from dlm_export.network import denoiser as network_module
from dlm_export.network.commit_rules import score_of, score_of_log_odds
from dlm_export.network.denoiser import Denoiser
from dlm_export.network.loop_scores import log_odds
from dlm_export.network.loop_turns import Canvas, Turn
from dlm_export.network.proposers import Proposals, Proposer
from dlm_runtime import Policy

Result = tuple[list[int], int]  # the canvas and the number of passes


class Credit(Proposer):
    """Adds ``alpha`` ln(1 + credit) to logits.

    In each pass, the credit of all tokens decays by ``beta``, and the most likely token of a
    position gains its probability to the power ``gamma``.
    """

    def __init__(self, mask: int, policy: Policy, alpha: float, gamma: float, beta: float) -> None:
        super().__init__(mask, policy)
        self.alpha, self.gamma, self.beta = alpha, gamma, beta
        self.credits: dict[int, dict[int, float]] = {}

    def propose(self, turn: Turn, canvas: Canvas, logits: Tensor) -> Proposals:
        found = self.masked(logits)
        best = found.softmax(-1).max(-1)
        for row, at in enumerate(turn.positions.tolist()):
            credit = {k: v * self.beta for k, v in self.credits.get(at, {}).items()}
            token = int(best.indices[row])
            credit[token] = credit.get(token, 0.0) + float(best.values[row]) ** self.gamma
            self.credits[at] = credit
            for k, v in credit.items():
                found[row, k] += self.alpha * math.log1p(v)
        return super().propose(turn, canvas, found)


class Stability(Proposer):
    """Commits a token above the threshold ``low`` if its distribution is stable.

    A distribution is stable if its Kullback-Leibler divergence from that of the pass before was
    below ``bound`` in the last ``passes`` passes. Other tokens need the policy's threshold.
    """

    def __init__(self, mask: int, policy: Policy, low: float, bound: float, passes: int) -> None:
        super().__init__(mask, policy)
        self.low, self.bound, self.passes = low, bound, passes
        self.before: dict[int, tuple[np.ndarray, int]] = {}

    def propose(self, turn: Turn, canvas: Canvas, logits: Tensor) -> Proposals:
        made = super().propose(turn, canvas, logits)
        scores = made.scores.copy()
        ps = self.masked(logits).double().softmax(-1).numpy()
        for row, at in enumerate(turn.positions.tolist()):
            last, count = self.before.get(at, (None, 0))
            moved = (
                math.inf
                if last is None
                else float((ps[row] * np.log((ps[row] + 1e-12) / (last + 1e-12))).sum())
            )
            count = count + 1 if moved < self.bound else 0
            self.before[at] = ps[row], count
            if count >= self.passes and scores[row] >= score_of(self.low):
                scores[row] = max(scores[row], score_of(self.policy.threshold) * 1.001)
        return Proposals(made.tokens, scores)


def _blocks(denoiser: Denoiser, prompt: int, length: int) -> Iterator[tuple[int, int]]:
    """Yield the new positions of each block."""
    size = denoiser.network.visible_block
    start, size = (prompt, 32) if size is None else (prompt - prompt % size, size)
    for first in range(start, length, size):
        yield max(first, prompt), min(first + size, length)


def _scores(denoiser: Denoiser, logits: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return the most likely tokens and their scores, ``[..., T]``."""
    found = logits.clone()
    found[..., denoiser.network.mask_token_id] = -torch.inf
    rows = found.reshape(-1, found.shape[-1]).numpy()
    tokens = rows.argmax(-1)
    scores = score_of_log_odds(log_odds(rows, tokens))
    return tokens.reshape(found.shape[:-1]), scores.reshape(found.shape[:-1])


def _is_ended(denoiser: Denoiser, tokens: np.ndarray) -> bool:
    return bool(np.isin(tokens, denoiser.network.eos_token_ids).any())


def _find_open(denoiser: Denoiser, canvas: np.ndarray, prompt: int) -> tuple[int, int, np.ndarray]:
    """Return the first unfinished block, ``(first, last)``, and its open positions.

    The array is empty if all blocks are finished, or if a finished block contains an end token.
    """
    first = last = prompt
    for first, last in _blocks(denoiser, prompt, len(canvas)):
        at = first + np.flatnonzero(canvas[first:last] == denoiser.network.mask_token_id)
        if len(at):
            return first, last, at
        if _is_ended(denoiser, canvas[first:last]):
            break
    return first, last, np.zeros(0, np.int64)


def _rank(score: np.ndarray, threshold: float) -> tuple[np.ndarray, int]:
    """Return the order of scores, highest first, and how many are above the threshold, at least 1."""
    return np.argsort(-score, kind="stable"), max(1, int((score > score_of(threshold)).sum()))


def mean_gap(
    denoiser: Denoiser, tokens: Sequence[int], new: int, threshold: float, gap: float
) -> Result:
    """Decide a block if the mean difference of the two largest logits is at least ``gap``.

    The mean is over all positions of the block, decided ones too. If it is smaller, the tokens
    above the threshold commit. The authors' loop commits one token per pass (threshold 1).
    """
    canvas, passes = np.array([*tokens, *[denoiser.network.mask_token_id] * new]), 0
    while True:
        first, last, at = _find_open(denoiser, canvas, len(tokens))
        if not len(at):
            return canvas.tolist(), passes
        end = len(canvas) if denoiser.network.visible_block is None else last
        logits = denoiser(torch.from_numpy(canvas[None, :end]))[0]
        passes += 1
        guess, score = _scores(denoiser, logits[at])
        order, count = _rank(score, threshold)
        logits[:, denoiser.network.mask_token_id] = -torch.inf
        two = logits[first:last].topk(2).values
        chosen = order if float((two[:, 0] - two[:, 1]).mean()) >= gap else order[:count]
        canvas[at[chosen]] = guess[chosen]


def branches(
    denoiser: Denoiser, tokens: Sequence[int], new: int, threshold: float, width: int
) -> Result:
    """Continue the best of several branches after each pass.

    The last branch commits the tokens above the threshold. Each other branch also commits one of
    the next tokens by entropy. One batched pass computes all branches. The branch with the lowest
    mean entropy of its open positions is kept. If a branch finishes its block, the positions of its
    next block count. If it finishes the canvas, it is kept. The authors' runs of Dream use entropy.
    Their runs of DiffuCoder use the probability of the most likely token.
    """
    canvas, passes = np.array([*tokens, *[denoiser.network.mask_token_id] * new]), 0
    tried = [canvas]
    while True:
        found = [_find_open(denoiser, each, len(tokens)) for each in tried]
        if not len(found[-1][2]):
            return tried[-1].tolist(), passes
        is_causal = denoiser.network.visible_block is not None
        end = max(last for _, last, _ in found) if is_causal else len(canvas)
        logits = denoiser(torch.from_numpy(np.stack(tried)[:, :end]))
        logits[..., denoiser.network.mask_token_id] = -torch.inf
        passes += 1
        rows = [row[at] for row, (_, _, at) in zip(logits, found, strict=True)]
        entropies = [torch.special.entr(each.softmax(-1)).sum(-1).numpy() for each in rows]
        means = [each.mean() if len(each) else -1.0 for each in entropies]
        best = int(np.argmin(means))
        canvas, at = tried[best].copy(), found[best][2]
        order = np.argsort(entropies[best], kind="stable")
        guess, score = _scores(denoiser, rows[best])
        is_sure = score > score_of(threshold)
        if not is_sure.any():
            is_sure[order[:1]] = True
        canvas[at[is_sure]] = guess[is_sure]
        extras = order[~is_sure[order]][: width - 1]
        tried = [canvas.copy() for _ in extras]
        for each, extra in zip(tried, extras, strict=True):
            each[at[extra]] = guess[extra]
        tried.append(canvas)


def revoke(
    denoiser: Denoiser, tokens: Sequence[int], new: int, threshold: float, back: float
) -> Result:
    """Commit at a low threshold, and mask tokens again that the rest of the canvas contradicts.

    Each pass has a second row for each position of the block, which contains a mask token and sees
    all other positions. If its probability of the committed token is below ``back``, the position
    is masked again. For full attention.
    """
    network, length = denoiser.network, len(tokens) + new
    canvas, passes = np.array([*tokens, *[network.mask_token_id] * new]), 0
    for first, last in _blocks(denoiser, len(tokens), length):
        size = last - first
        hidden = torch.zeros(length + size, length + size)
        hidden[:, length:] = torch.finfo(torch.float32).min
        hidden[length:, length:] = 0
        hidden[length + torch.arange(size), first + torch.arange(size)] = hidden.min()
        places = torch.cat((torch.arange(length), torch.arange(first, last)))[None]
        is_open, accepted = np.ones(size, bool), 30
        while is_open.any():
            rows = np.concatenate((canvas, np.full(size, network.mask_token_id)))
            with mock.patch.object(network_module, "hiding", return_value=hidden[None, None]):
                features, _ = denoiser.hidden(torch.from_numpy(rows)[None], places)
            logits = denoiser.project(features[0]).float()
            passes += 1
            guess, score = _scores(denoiser, logits[first:last])
            order = [at for at in np.argsort(-score, kind="stable") if is_open[at]]
            most = min(max(int(is_open.sum() * 0.7), 5), 20)
            count = min(most, max(1, sum(score[at] > score_of(threshold) for at in order)))
            old = np.flatnonzero(~is_open)
            shares = logits[length + old].softmax(-1)
            kept = shares[torch.arange(len(old)), canvas[first + old]].numpy()
            canvas[first + np.array(order[:count])] = guess[order[:count]]
            is_open[order[:count]] = False
            if count > 1:
                again = old[np.argsort(kept)][: int((kept < back).sum())][: accepted - 1]
                canvas[first + again], is_open[again] = network.mask_token_id, True
            accepted = count
        if _is_ended(denoiser, canvas[first:last]):
            break
    return canvas.tolist(), passes


def self_verify(
    denoiser: Denoiser, tokens: Sequence[int], new: int, threshold: float, span: int
) -> Result:
    """Verify drafts of a block from left to right, with a second pass over the block.

    The first pass drafts the block. If at least ``span`` positions in a row are open from the first
    open one on, the second pass verifies them. Its rows of the block are causal. A second row for
    each position contains a mask token, and sees the tokens before the position. Drafts are accepted
    up to the first one that differs, which gets the token of the second pass (the authors' rejection
    sampling at a temperature near 0). Otherwise, the tokens above the threshold commit. For
    block-causal attention.
    """
    network = denoiser.network
    canvas, passes = np.array([*tokens, *[network.mask_token_id] * new]), 0
    while True:
        first, last, at = _find_open(denoiser, canvas, len(tokens))
        if not len(at):
            return canvas.tolist(), passes
        guess, score = _scores(denoiser, denoiser(torch.from_numpy(canvas[None, :last]))[0, at])
        passes += 1
        run = int((at == at[0] + np.arange(len(at))).sum())
        if run < span:
            order, count = _rank(score, threshold)
            canvas[at[order[:count]]] = guess[order[:count]]
            continue
        start = first - first % network.visible_block
        size = last - start
        draft = canvas[:last].copy()
        draft[at] = guess
        rows = torch.from_numpy(np.concatenate((draft, np.full(size, network.mask_token_id))))
        places = torch.cat((torch.arange(last), torch.arange(start, last)))
        blocks = places // network.visible_block
        is_seen = blocks[:, None] >= blocks[None, :]
        is_seen[start:, start:] = False
        is_seen[start:last, start:last] = torch.ones(size, size).tril().bool()
        is_seen[last:, start:last] = torch.ones(size, size).tril(-1).bool()
        is_seen[last:, last:] = torch.eye(size).bool()
        hidden = (~is_seen).float() * torch.finfo(torch.float32).min
        with mock.patch.object(network_module, "hiding", return_value=hidden[None, None]):
            features, _ = denoiser.hidden(rows[None], places[None])
        logits = denoiser.project(features[0, last + at[:run] - start]).float()
        verified, _ = _scores(denoiser, logits)
        passes += 1
        is_same = verified == guess[:run]
        count = run if is_same.all() else int(is_same.argmin()) + 1
        canvas[at[:count]] = verified[:count]
