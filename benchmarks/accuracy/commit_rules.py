"""Compare rules that commit more tokens per pass, on the demos.

    python -m benchmarks.accuracy.commit_rules --json FILE [--demos second,third] [--rules credit,...]
    python -m benchmarks.accuracy.commit_rules --json FILE --time

For each rule, the script chooses the setting with the fewest passes that gives at least as many right
answers as one token per pass, on a demo's calibration data. If no setting does, it chooses the one
with the most right answers. It then counts right answers, passes and tokens on held-out data, in
torch. The third demo is fitted on puzzles with three clues, because its held-out puzzles have three.

``--time`` measures the chosen settings of FILE in torch and, if ``make demos`` was run, in the native
runtime, which has the rules of ``SHIPPED``. The other rules are in ``published_rules.py`` only,
because they do not save at least 5% of the passes beside the runtime's rules, or of the time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer

import dlm_runtime
from benchmarks.accuracy.published_rules import (
    Credit,
    Result,
    Stability,
    branches,
    mean_gap,
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
    """A demo: its folder, its held-out data, its published preset with changes, and its bundle."""

    folder: str
    held_out: str
    preset: str
    changes: Setting
    bundle: str


DEMOS = {
    "first": Demo("demo-denoiser", "heldout.jsonl", "fast-dllm", {}, "demo"),
    "second": Demo("demo-several", "heldout-several.jsonl", "sdar", {"store": "open"}, "several"),
    "third": Demo("demo-sudoku", "heldout-sudoku.jsonl", "fast-dllm", {}, "sudoku"),
}
THRESHOLDS = (0.9, 0.95, 0.97, 0.99, 0.995)
CAREFUL, BASE = "one token per pass", "threshold"
FAST_DLLM: Setting = {"commit": "threshold", "compare": ">", "threshold": 0.9}
FINISHES = (0.8, 0.9, 0.95)
SHIPPED: dict[str, list[Setting]] = {
    CAREFUL: [{"commit": "static", "steps_per_block": 0}],
    "published": [{}],
    "fast-dllm": [FAST_DLLM],
    "threshold": [{"threshold": each} for each in THRESHOLDS],
    "finish": [
        {"threshold": each, "finish_threshold": finish}
        for each in (0.97, 0.99, 0.995)
        for finish in FINISHES
    ],
    "factor": [{"commit": "factor", "factor": each} for each in (0.05, 0.1, 0.2, 0.4)],
    "factor + finish": [
        {"commit": "factor", "factor": each, "finish_threshold": finish}
        for each in (0.05, 0.1)
        for finish in FINISHES
    ],
    "entropy bound": [
        {"commit": "entropy_bound", "entropy_bound": each} for each in (0.01, 0.03, 0.1, 0.3)
    ],
    "several blocks": [
        FAST_DLLM
        | {"next_block": share, "threshold": each, "finish_threshold": 0.95, "store": "pass"}
        for share in (0.7, 0.8, 0.9)
        for each in (0.99, 0.995)
    ],
}


Loop = Callable[[Denoiser, Sequence[int], int, Policy, Setting], Result]


def _with_proposer(kind: type[Proposer]) -> Loop:
    def run(
        denoiser: Denoiser, tokens: Sequence[int], new: int, policy: Policy, setting: Setting
    ) -> Result:
        fields = {key: value for key, value in setting.items() if key.endswith("threshold")}
        own = {key: value for key, value in setting.items() if key not in fields}
        policy = policy.with_fields({"commit": "threshold"} | fields)
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
    "stability + finish": (
        _with_proposer(Stability),
        _grid(low=(0.8, 0.9), bound=(0.05,), passes=(1,), threshold=(0.99,))
        + _grid(
            low=(0.8,), bound=(0.05,), passes=(1,), threshold=(0.99,), finish_threshold=FINISHES
        ),
    ),
    "mean gap": (_alone(mean_gap), _grid(gap=(5, 7, 9), threshold=(0.99,))),
    "branches": (_alone(branches), _grid(threshold=(0.97, 0.99), width=(4,))),
    "revoke": (_alone(revoke), _grid(threshold=(0.6, 0.8), back=(0.9,))),
    "self-verification": (_alone(self_verify), _grid(threshold=(0.99,), span=(4, 8))),
}
FULL_ATTENTION, BLOCK_CAUSAL = {"revoke"}, {"self-verification", "several blocks", "fast-dllm"}


class Trial:
    """Runs rules on the data of one demo."""

    def __init__(self, name: str) -> None:
        self.name, self.demo = name, DEMOS[name]
        folder = ROOT / "examples" / self.demo.folder
        self.source: Source = open_source(folder)
        self.denoiser = load(self.source.parameters, self.source.network)
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.policy = self.source.presets[self.demo.preset].with_fields(self.demo.changes)
        self.new = self.source.max_new_tokens or 64
        puzzles = dict(itertools.islice(sudoku.puzzles(7, sudoku.CLUES, held_out=False), 256))
        self.data = {
            "fit": [*puzzles.items()] if name == "third" else _lines(folder / "calibration.jsonl"),
            "held out": _lines(ROOT / "examples" / "demo" / self.demo.held_out),
        }

    @torch.no_grad()
    def generate(self, rule: str, setting: Setting, prompt: str) -> tuple[list[int], int]:
        """Return the tokens before the end token, and the number of passes."""
        loop = OTHERS[rule][0] if rule in OTHERS else _shipped
        ids = self.tokenizer.encode(prompt).ids
        tokens, nfe = loop(self.denoiser, ids, self.new, self.policy, setting)
        return metrics.until_end(tokens[len(ids) :], self.source.network.eos_token_ids), nfe

    def run(self, rule: str, setting: Setting, part: str) -> tuple[int, float, float]:
        """Return the number of right answers, and the mean numbers of passes and tokens."""
        right, passes, counts = 0, [], []
        for prompt, completion in self.data[part]:
            answer, nfe = self.generate(rule, setting, prompt)
            text = self.tokenizer.decode(answer)
            right += (
                sudoku.is_right(prompt, text)
                if self.name == "third"
                else metrics.same_answer(text, completion)
            )
            passes.append(nfe)
            counts.append(len(answer))
        return right, float(np.mean(passes)), float(np.mean(counts))

    def row(self, rule: str, careful: int | None) -> dict[str, Any]:
        """Choose the setting of a rule, and measure it on held-out data."""
        settings = OTHERS[rule][1] if rule in OTHERS else SHIPPED[rule]
        fits = [(*self.run(rule, setting, "fit"), setting) for setting in settings]
        good = [fit for fit in fits if careful is None or fit[0] >= careful]
        right, *_, setting = (
            min(good, key=lambda fit: fit[1]) if good else max(fits, key=lambda fit: fit[0])
        )
        found, passes, tokens = self.run(rule, setting, "held out")
        count = len(self.data["held out"])
        return {
            **{"demo": self.name, "rule": rule, "setting": setting, "fit": right, "right": found},
            **{"count": count, "interval": metrics.wilson_interval(found / count, count)},
            **{"passes": passes, "tokens_per_pass": tokens / passes},
        }

    def add_times(self, rows: list[dict[str, Any]], prompts: int = 40, rounds: int = 4) -> None:
        """Time the loops of ``rows``, interleaved by prompt, and add ms per request to ``rows``.

        Torch and the native runtime are timed one after the other, because idle threads of torch
        slow the runtime down.
        """
        lines = self.data["held out"][:prompts]

        def in_torch(row: dict[str, Any], prompt: str) -> float:
            began = time.perf_counter()
            self.generate(row["rule"], row["setting"], prompt)
            return time.perf_counter() - began

        _add_times(rows, "torch", in_torch, lines, rounds)
        folder = ROOT / "build" / self.demo.bundle
        if not folder.is_dir():
            return
        with dlm_runtime.open(folder, threads=2) as bundle:

            def native(row: dict[str, Any], prompt: str) -> float:
                fields = self.demo.changes | row["setting"]
                made = bundle.generate(prompt=prompt, preset=self.demo.preset, **fields)
                return made.timings["total"]

            shipped = [row for row in rows if row["rule"] in SHIPPED]
            _add_times(shipped, "native", native, lines, rounds)


def _add_times(
    rows: list[dict[str, Any]],
    which: str,
    run: Callable[[dict[str, Any], str], float],
    lines: Sequence[tuple[str, str]],
    rounds: int,
) -> None:
    """Add ms per request, and the ratio to the rule ``BASE``, for the loops of ``rows``."""
    order, found = random.Random(0), []
    for _ in range(rounds + 1):
        total = [0.0] * len(rows)
        for prompt, _ in lines:
            for at in order.sample(range(len(rows)), len(rows)):
                total[at] += 1e3 * run(rows[at], prompt) / len(lines)
        found.append(total)
    ms = np.array(found[1:])  # the first round warms up
    ratios = ms / ms[:, [row["rule"] for row in rows].index(BASE)][:, None]
    for row, times, each in zip(rows, ms.T, ratios.T, strict=True):
        told = f"{np.median(each):.2f} ({each.min():.2f} to {each.max():.2f})"
        row |= {f"{which}_ms": float(np.median(times)), f"{which}_time": told}


def _lines(path: Path) -> list[tuple[str, str]]:
    found = map(json.loads, path.read_text().splitlines())
    return [(line["prompt"], line["completion"]) for line in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--demos", default=",".join(DEMOS))
    parser.add_argument("--rules", default=",".join([*SHIPPED, *OTHERS]))
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--time", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(2 if options.time else torch.get_num_threads())
    found = json.loads(options.json.read_text()) if options.json.is_file() else {"rows": []}
    rows: list[dict[str, Any]] = found["rows"]
    for name in options.demos.split(","):
        trial = Trial(name)
        if options.time:
            found["machine"] = machine()
            trial.add_times([row for row in rows if row["demo"] == name])
            options.json.write_text(json.dumps(found, indent=2))
            continue
        is_causal = trial.source.network.visible_block is not None
        fits = {row["rule"]: row["fit"] for row in rows if row["demo"] == name}
        careful: int | None = fits.get(CAREFUL)
        wanted = options.rules.split(",")
        for rule in wanted if CAREFUL in fits else dict.fromkeys((CAREFUL, *wanted)):
            if rule in (FULL_ATTENTION if is_causal else BLOCK_CAUSAL):
                continue
            is_published = rule in ("published", "fast-dllm")
            row = trial.row(rule, None if is_published else careful)
            careful = row["fit"] if careful is None else careful
            print(json.dumps(row), flush=True)
            rows[:] = [each for each in rows if (each["demo"], each["rule"]) != (name, rule)]
            rows.append(row)
            options.json.write_text(json.dumps(found, indent=2))
    cells = [
        [
            *(row["demo"], row["rule"], ", ".join(f"{k} {v}" for k, v in row["setting"].items())),
            f"{row['right']} of {row['count']}",
            "{:.1%} to {:.1%}".format(*row["interval"]),
            *(f"{row['passes']:.2f}", f"{row['tokens_per_pass']:.1f}"),
            *(
                f"{row[f'{which}_ms']:.1f}: {row[f'{which}_time']}" if f"{which}_ms" in row else ""
                for which in ("torch", "native")
            ),
        ]
        for row in rows
    ]
    head = ["demo", "rule", "setting", "right", "interval", "passes", "tokens per pass"]
    print(table([*head, "torch: ms, ratio", "native: ms, ratio"], cells))


if __name__ == "__main__":
    main()
