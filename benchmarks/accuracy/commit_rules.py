"""Compare rules that commit more tokens per pass, on the demos.

    python -m benchmarks.accuracy.commit_rules [--demos second,third] [--rules credit,...] [--json FILE]
    python -m benchmarks.accuracy.commit_rules --time build/several

For each rule, the script chooses the setting with the fewest passes that gives at least as many right
answers as one token per pass, on a demo's calibration data. If no setting does, it chooses the one
with the most right answers. It then counts right answers and passes on held-out data, in torch.

The runtime has the rules of ``SHIPPED``. The other rules are in ``published_rules.py`` only, because
they do not save at least 5% of the passes beside the runtime's rules.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer

import dlm_runtime
from benchmarks.accuracy.published_rules import (
    Credit,
    MeanGap,
    Result,
    Stability,
    branches,
    revoke,
    self_verify,
)
from benchmarks.shapes import ROOT, machine
from benchmarks.tables import table
from dlm_calibration import metrics
from dlm_export.families.weights import load
from dlm_export.network import reference
from dlm_export.network.denoiser import Denoiser
from dlm_export.network.proposers import Proposer
from dlm_export.sources import Source, open_source
from dlm_runtime import Policy

sys.path.insert(0, str(ROOT / "examples" / "demo"))
import sudoku

Setting = dict[str, Any]


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
