"""Compare rules that commit more tokens per pass, on the demos.

    python -m benchmarks.accuracy.commit_rules [--demos second,third] [--rules credit,...] [--json FILE]
    python -m benchmarks.accuracy.commit_rules --time build/several

For each rule, the script chooses the setting with the fewest passes that gives at least as many right
answers as one token per pass, on a demo's calibration data. If no setting does, it chooses the one
with the most right answers. It then counts right answers and passes on held-out data, in torch.

The runtime has the rules of ``SHIPPED``. The other rules are defined here only, because they do not
save at least 5% of the passes beside the runtime's rules. The sources are the papers and the authors'
code, except for credit, whose code is in dInfer:

- credit: CreditDecoding, arXiv:2510.06133
- stability: KLASS, arXiv:2511.05664
- mean gap: Prophet, arXiv:2508.19982
- branches: LoPA, arXiv:2512.16229
- revoke: WINO, arXiv:2507.18578
- self-verification: S2D2, arXiv:2603.25702
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

import dlm_runtime
from benchmarks.shapes import ROOT, machine
from benchmarks.tables import table
from dlm_calibration import metrics
from dlm_export.families.weights import load
from dlm_export.network import denoiser as network_module
from dlm_export.network import reference
from dlm_export.network.commit_rules import score_of, score_of_log_odds
from dlm_export.network.denoiser import Denoiser
from dlm_export.network.loop_scores import log_odds
from dlm_export.network.loop_turns import Canvas, Turn
from dlm_export.network.proposers import Proposals, Proposer
from dlm_export.sources import Source, open_source
from dlm_runtime import Policy

sys.path.insert(0, str(ROOT / "examples" / "demo"))
import sudoku

Setting = dict[str, Any]
Result = tuple[list[int], int]  # the canvas and the number of passes


class Demo(NamedTuple):
    """A demo: its folder, its held-out data and its published preset with changes."""

    folder: str
    held_out: str
    preset: str
    changes: Setting


DEMOS = {
    "first": Demo("demo-denoiser", "heldout.jsonl", "fast-dllm", {}),
    "second": Demo("demo-several", "heldout-several.jsonl", "sdar", {"store": "open"}),
    "third": Demo("demo-sudoku", "heldout-sudoku.jsonl", "fast-dllm", {}),
}
THRESHOLDS = (0.9, 0.95, 0.97, 0.99, 0.995)
CAREFUL = "one token per pass"
SHIPPED: dict[str, list[Setting]] = {
    CAREFUL: [{"commit": "static", "steps_per_block": 0}],
    "published": [{}],
    "threshold": [{"threshold": each} for each in THRESHOLDS],
    "finish": [
        {"threshold": each, "finish_threshold": finish}
        for each in (0.97, 0.99, 0.995)
        for finish in (0.8, 0.9, 0.95)
    ],
    "factor": [{"commit": "factor", "factor": each} for each in (0.05, 0.1, 0.2, 0.4)],
    "entropy bound": [
        {"commit": "entropy_bound", "entropy_bound": each} for each in (0.01, 0.03, 0.1, 0.3)
    ],
    "several blocks": [
        {"commit": "threshold", "compare": ">", "next_block": share, "threshold": each}
        | {"finish_threshold": 0.95, "store": "pass"}
        for share in (0.7, 0.8, 0.9)
        for each in (0.99, 0.995)
    ],
}


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


class MeanGap(Proposer):
    """Decides a block if the mean difference of the two largest logits is at least ``gap``."""

    def __init__(self, mask: int, policy: Policy, gap: float) -> None:
        super().__init__(mask, policy)
        self.gap = gap

    def propose(self, turn: Turn, canvas: Canvas, logits: Tensor) -> Proposals:
        made = super().propose(turn, canvas, logits)
        two = self.masked(logits).topk(2).values
        is_sure = len(two) > 0 and float((two[:, 0] - two[:, 1]).mean()) >= self.gap
        return Proposals(made.tokens, made.scores + 1e6) if is_sure else made


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


def branches(
    denoiser: Denoiser, tokens: Sequence[int], new: int, threshold: float, width: int
) -> Result:
    """Continue the best of several branches after each pass.

    The first branch commits the tokens that reach the threshold. Each other branch also commits one
    of the next tokens by confidence. One batched pass computes all branches, and the branch with the
    highest mean confidence of its open positions is kept.
    """
    canvas = np.array([*tokens, *[denoiser.network.mask_token_id] * new])
    is_causal, passes = denoiser.network.visible_block is not None, 0
    for first, last in _blocks(denoiser, len(tokens), len(canvas)):
        end = last if is_causal else len(canvas)
        tried = [(canvas[:end].copy(), np.ones(last - first, bool))]
        while True:
            batch = torch.from_numpy(np.stack([each for each, _ in tried]))
            logits = denoiser(batch)[:, first:last]
            passes += 1
            guesses, scores = _scores(denoiser, logits)
            means = [
                float(np.tanh(score[is_open]).mean())
                for score, (_, is_open) in zip(scores, tried, strict=True)
            ]
            best = int(np.argmax(means))
            (now, is_open), guess, score = tried[best], guesses[best], scores[best]
            order = [at for at in np.argsort(-score, kind="stable") if is_open[at]]
            count = max(1, sum(score[at] >= score_of(threshold) for at in order))
            tried = []
            for extra in [None, *order[count : count + width - 1]]:
                chosen = np.array([*order[:count], *([] if extra is None else [extra])])
                after, left = now.copy(), is_open.copy()
                after[first + chosen], left[chosen] = guess[chosen], False
                if extra is None or left.any():
                    tried.append((after, left))
            if not tried[0][1].any():
                break
        canvas[:end] = tried[0][0]
        if _is_ended(denoiser, canvas[first:last]):
            break
    return canvas.tolist(), passes


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
    up to the first one that differs, which gets the token of the second pass. Otherwise, the tokens
    that reach the threshold commit. For block-causal attention.
    """
    network = denoiser.network
    canvas, passes = np.array([*tokens, *[network.mask_token_id] * new]), 0
    for first, last in _blocks(denoiser, len(tokens), len(canvas)):
        size = last - first
        places = torch.cat((torch.arange(last), torch.arange(first, last)))
        blocks = places // network.visible_block
        is_seen = blocks[:, None] >= blocks[None, :]
        is_seen[:first, first:] = False
        is_seen[first:, first:] = False
        is_seen[first:last, first:last] = torch.ones(size, size).tril().bool()
        is_seen[last:, first:last] = torch.ones(size, size).tril(-1).bool()
        is_seen[last:, last:] = torch.eye(size).bool()
        hidden = (~is_seen).float() * torch.finfo(torch.float32).min
        is_open = np.ones(size, bool)
        while is_open.any():
            guess, score = _scores(denoiser, denoiser(torch.from_numpy(canvas[None, :last]))[0])
            guess, score = guess[first:], score[first:]
            passes += 1
            start = int(is_open.argmax())
            closed = np.flatnonzero(~is_open[start:])
            run = range(start, start + (int(closed[0]) if len(closed) else size - start))
            if len(run) < span:
                reached = is_open & (score >= score_of(threshold))
                reached[np.argmax(np.where(is_open, score, -np.inf))] = True
                canvas[first:last][reached] = guess[reached]
                is_open &= ~reached
                continue
            draft = np.where(is_open, guess, canvas[first:last])
            masks = np.full(size, network.mask_token_id)
            rows = torch.from_numpy(np.concatenate((canvas[:first], draft, masks)))
            with mock.patch.object(network_module, "hiding", return_value=hidden[None, None]):
                features, _ = denoiser.hidden(rows[None], places[None])
            verified, _ = _scores(denoiser, denoiser.project(features[0, last:]).float())
            passes += 1
            for at in run:
                canvas[first + at], is_open[at] = verified[at], False
                if verified[at] != guess[at]:
                    break
        if _is_ended(denoiser, canvas[first:last]):
            break
    return canvas.tolist(), passes


Loop = Callable[[Denoiser, Sequence[int], int, Policy, Setting], Result]


def _with_proposer(kind: type[Proposer]) -> Loop:
    def run(
        denoiser: Denoiser, tokens: Sequence[int], new: int, policy: Policy, setting: Setting
    ) -> Result:
        own = {key: value for key, value in setting.items() if key != "threshold"}
        policy = policy.with_fields({"commit": "threshold", "threshold": setting["threshold"]})
        proposer = kind(denoiser.network.mask_token_id, policy, **own)
        done = reference.generate(denoiser, tokens, policy, new, proposer=proposer)
        return done.tokens, done.nfe

    return run


def _shipped(
    denoiser: Denoiser, tokens: Sequence[int], new: int, policy: Policy, setting: Setting
) -> Result:
    done = reference.generate(denoiser, tokens, policy.with_fields(setting), new)
    return done.tokens, done.nfe


def _alone(loop: Callable[..., Result]) -> Loop:
    return lambda denoiser, tokens, new, _, setting: loop(denoiser, tokens, new, **setting)


def _grid(**values: Sequence[float]) -> list[Setting]:
    found: list[Setting] = [{}]
    for key, choices in values.items():
        found = [setting | {key: each} for setting in found for each in choices]
    return found


OTHERS: dict[str, tuple[Loop, list[Setting]]] = {
    "credit": (
        _with_proposer(Credit),
        _grid(alpha=(0.7, 1.5), gamma=(0.2,), beta=(0.8,), threshold=(0.95, 0.99, 0.995)),
    ),
    "stability": (
        _with_proposer(Stability),
        _grid(low=(0.8, 0.9), bound=(0.05,), passes=(1, 2), threshold=(0.99,)),
    ),
    "mean gap": (_with_proposer(MeanGap), _grid(gap=(5, 7, 9), threshold=(0.99,))),
    "branches": (_alone(branches), _grid(threshold=(0.97, 0.99), width=(4,))),
    "revoke": (_alone(revoke), _grid(threshold=(0.6, 0.8), back=(0.9,))),
    "self-verification": (_alone(self_verify), _grid(threshold=(0.99,), span=(4, 8))),
}
FULL_ATTENTION, BLOCK_CAUSAL = {"revoke"}, {"self-verification", "several blocks"}


class Trial:
    """Runs rules on the data of one demo."""

    def __init__(self, name: str) -> None:
        self.name, demo = name, DEMOS[name]
        folder = ROOT / "examples" / demo.folder
        self.source: Source = open_source(folder)
        self.denoiser = load(self.source.parameters, self.source.network)
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.policy = self.source.presets[demo.preset].with_fields(demo.changes)
        self.new = self.source.max_new_tokens or 64
        held_out = ROOT / "examples" / "demo" / demo.held_out
        self.data = {
            "fit": _lines(folder / "calibration.jsonl"),
            "held out": _lines(held_out),
        }

    @torch.no_grad()
    def run(self, loop: Loop, setting: Setting, part: str) -> tuple[int, float]:
        """Return the number of right answers, and the mean number of passes."""
        right, passes = 0, []
        for line in self.data[part]:
            prompt = self.tokenizer.encode(line["prompt"]).ids
            tokens, nfe = loop(self.denoiser, prompt, self.new, self.policy, setting)
            answer = metrics.until_end(tokens[len(prompt) :], self.source.network.eos_token_ids)
            text = self.tokenizer.decode(answer)
            right += (
                sudoku.is_right(line["prompt"], text)
                if self.name == "third"
                else metrics.same_answer(text, line["completion"])
            )
            passes.append(nfe)
        return right, float(np.mean(passes))

    def row(self, rule: str, careful: int | None) -> dict[str, Any]:
        """Choose the setting of a rule, and measure it on held-out data."""
        loop, settings = (_shipped, SHIPPED[rule]) if rule in SHIPPED else OTHERS[rule]
        fits = [(*self.run(loop, setting, "fit"), setting) for setting in settings]
        good = [fit for fit in fits if careful is None or fit[0] >= careful]
        right, _, setting = (
            min(good, key=lambda fit: fit[1]) if good else max(fits, key=lambda fit: fit[0])
        )
        found, passes = self.run(loop, setting, "held out")
        count = len(self.data["held out"])
        interval = metrics.wilson_interval(found / count, count)
        return {
            **{"demo": self.name, "rule": rule, "setting": setting, "fit": right},
            **{"right": found, "count": count, "interval": interval, "passes": passes},
        }


TIMED: dict[str, Setting] = {
    "threshold": {"threshold": 0.99, "store": "open"},
    "published": {},
    "finish": {"threshold": 0.99, "finish_threshold": 0.95, "store": "open"},
    "several blocks": {"commit": "threshold", "compare": ">", "next_block": 0.7}
    | {"threshold": 0.995, "finish_threshold": 0.95},
}
"""The fitted settings of the second demo. The first one is the base of the ratios."""


def print_times(bundle: Path, prompts: int = 100, rounds: int = 8) -> None:
    """Time the loops of ``TIMED`` in the native runtime, interleaved by prompt."""
    lines = _lines(ROOT / "examples" / "demo" / DEMOS["second"].held_out)[:prompts]
    order, found = random.Random(0), []
    with dlm_runtime.open(bundle, threads=2) as opened:
        for _ in range(rounds + 1):
            total = dict.fromkeys(TIMED, 0.0)
            for line in lines:
                for name in order.sample([*TIMED], len(TIMED)):
                    done = opened.generate(prompt=line["prompt"], preset="sdar", **TIMED[name])
                    total[name] += 1e3 * done.timings["total"] / len(lines)
            found.append(total)
    base = next(iter(TIMED))
    for name in TIMED:
        ms = [total[name] for total in found[1:]]  # the first round warms up
        ratios = [total[name] / total[base] for total in found[1:]]
        told = f"{np.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"{name}: {np.median(ms):.2f} ms, {told}")


def _lines(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--demos", default=",".join(DEMOS))
    parser.add_argument("--rules", default=",".join([*SHIPPED, *OTHERS]))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--time", type=Path, metavar="BUNDLE")
    options = parser.parse_args()
    if options.time is not None:
        print_times(options.time)
        return
    rows: list[dict[str, Any]] = []
    for name in options.demos.split(","):
        trial = Trial(name)
        is_causal = trial.source.network.visible_block is not None
        careful: int | None = None
        for rule in dict.fromkeys((CAREFUL, *options.rules.split(","))):
            if rule in (FULL_ATTENTION if is_causal else BLOCK_CAUSAL):
                continue
            rows.append(trial.row(rule, careful if rule != "published" else None))
            careful = rows[-1]["fit"] if careful is None else careful
            print(json.dumps(rows[-1]), flush=True)
            if options.json is not None:
                options.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=2))
    cells = [
        [
            *(row["demo"], row["rule"], ", ".join(f"{k} {v}" for k, v in row["setting"].items())),
            f"{row['right']} of {row['count']}",
            "{:.1%} to {:.1%}".format(*row["interval"]),
            f"{row['passes']:.2f}",
        ]
        for row in rows
    ]
    print(table(["demo", "rule", "setting", "right", "interval", "passes"], cells))


if __name__ == "__main__":
    main()
