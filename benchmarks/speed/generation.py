"""Compare how fast this runtime, the reference loop in torch, and llama.cpp generate text.

    python -m benchmarks.speed.generation --quick
    python -m benchmarks.speed.generation [--sizes 134M,1B] [--contestants ..] [--prompts 128] [--new 128] [--batch 1]
        [--rounds 3] [--sampled-passes 4] [--demo 600] [--json FILE] [--markdown FILE]

Each contestant runs in a separate process. In each round, every process has one turn. While a
process has its turn, the other processes are stopped. Otherwise, their threads would use processor
time even while they wait. Before the rounds, the script finds the fastest settings of each
contestant: the number of threads (all cores or half of the cores) and the OMP_WAIT_POLICY. If a
process ends, the script prints the reason and continues with the other contestants.

The random denoisers run LLaDA's static loop, which commits one token per pass. Blocks have 32
tokens. All contestants therefore make the same number of passes. This runtime and torch use the
dual cache. llama.cpp has no cache for LLaDA and computes the whole canvas in each pass. Each
contestant also runs the trained demo with the commit threshold 0.9, and with the dual cache if the
contestant has one. The script checks the answers.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import math
import os
import random
import shlex
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gguf_files import gguf_of
from benchmarks.shapes import DEMO, ROOT, bundle_of, checkpoint, machine
from benchmarks.speed.contestants import LLAMA_NAMES, NATIVE, TORCH_NAMES
from benchmarks.tables import markdown, ratio
from benchmarks.timing import interleave, spread
from dlm_runtime.presets import PRESETS

BLOCK = 32
STATIC = (
    PRESETS["llada"].with_fields({"cache": "dual", "stop": "none", "block_length": BLOCK}).as_dict()
)
THRESHOLD = PRESETS["fast-dllm"].as_dict()
NATIVE_NAMES = (f"{NATIVE}-fp32", f"{NATIVE}-int8", f"{NATIVE}-int4-rtn")
ALL = NATIVE_NAMES + TORCH_NAMES + LLAMA_NAMES
KNOWN = f"{NATIVE}-PRECISION, {', '.join(TORCH_NAMES + LLAMA_NAMES)}"
WAIT_POLICIES = ("passive", "active")  # values of OMP_WAIT_POLICY to try
TRIED = {"B": 1, "T": 64, "S": 0, "R": 64}  # the size of the pass that is timed to compare settings
QUICK = (*NATIVE_NAMES[:2], "torch-fp32", "torch-bf16", "llama.cpp-Q8_0")
# For each pass: computed tokens, cached tokens, and scored rows.
PASSES = ((32, 224, 32), (32, 0, 32), (256, 0, 256))
DEMO_NEW = 64  # number of tokens of a demo answer, eos included, as in examples/demo/evaluate.py
# Number of commands that a contestant answers per turn. The number is so large that the processor's
# caches contain the contestant's data most of the time.
DEMO_TURN = 50


@dataclass(frozen=True)
class Scenario:
    """A generation of ``batch`` sequences, with ``prompt`` given and ``new`` generated tokens."""

    prompt: int
    new: int
    batch: int


@dataclass(frozen=True)
class Settings:
    """The settings of a contestant's threads."""

    threads: int
    wait: str

    def __str__(self) -> str:
        return f"{self.threads} threads, {self.wait}"


class Worker:
    """The process of a contestant. The process is stopped while another contestant has its turn."""

    def __init__(self, name: str, size: str, settings: Settings) -> None:
        self.log = ROOT / "build" / "benchmarks" / f"worker-{size}-{name}.log"
        self.name, self.ended = name, ""
        command = [
            sys.executable,
            "-m",
            "benchmarks.speed.worker",
            size,
            name,
            str(settings.threads),
        ]
        environment = os.environ | {
            "OMP_NUM_THREADS": str(settings.threads),
            "OMP_WAIT_POLICY": settings.wait,
        }
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
            )
        self.about = self.ask(do="about")

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send a request and return the answer.

        If the process has ended, the answer is ``not_offered`` with the reason.
        """
        if self.ended:
            return {"not_offered": self.ended}
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.send_signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            status, last = self.process.wait(), self.log.read_text().splitlines()[-1:]
            cause = (
                signal.Signals(-status).name
                if status < 0
                else f"with status {status}: {' '.join(last)}"
            )
            self.ended = f"its process ended, {cause}"
            print(f"{self.name}: {self.ended}; {self.log} has what it said", file=sys.stderr)
            return {"not_offered": self.ended}
        self.process.send_signal(signal.SIGSTOP)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.communicate()


def settle(name: str, size: str, threads: int) -> tuple[Settings, dict[str, float | None]]:
    """Find the fastest settings of a contestant.

    Returns the fastest settings, and a dict that maps all settings to the milliseconds of a pass.
    The value is None for settings with which the process ended.
    """
    waits = WAIT_POLICIES[:1] if name.startswith(NATIVE) else WAIT_POLICIES
    tried = {}
    for settings in (
        Settings(count, wait)
        for count in dict.fromkeys((threads, max(1, threads // 2)))
        for wait in waits
    ):
        with contextlib.closing(Worker(name, size, settings)) as worker:
            answers = [worker.ask(do="pass", **TRIED) for _ in range(4)]
        times = [answer["seconds"] for answer in answers[1:] if "seconds" in answer]
        tried[settings] = statistics.median(times) * 1e3 if times else None
    best = min(tried, key=lambda settings: math.inf if tried[settings] is None else tried[settings])
    return best, {str(settings): ms for settings, ms in tried.items()}


class Fleet:
    """The processes of all contestants for denoisers of one size, in the order of their names.

    Each worker uses the fastest of its ``tried`` settings.
    """

    def __init__(self, names: list[str], size: str, threads: int) -> None:
        for name in names:
            prepare(name, size)
        found = {name: settle(name, size, threads) for name in names}
        self.settings = {
            name: {"chosen": str(best), "ms": tried} for name, (best, tried) in found.items()
        }
        self.workers: list[Worker] = []
        try:
            for name in names:
                self.workers.append(Worker(name, size, found[name][0]))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End all processes."""
        for worker in self.workers:
            worker.close()


def prepare(name: str, size: str) -> None:
    """Write the files that a contestant opens.

    The main process writes the contestant's files, so that the contestant's peak memory does not
    include the memory for writing.
    """
    engine, _, kind = name.partition("-")
    if engine == NATIVE:
        bundle_of(size, kind)
    elif name in TORCH_NAMES:
        checkpoint(size)
    else:
        gguf_of(size, kind)


def available(names: list[str]) -> tuple[list[str], str | None]:
    """Return the contestants that can run on this machine, and why the others cannot run."""
    missing = [
        module for module in ("llama_cpp", "gguf") if importlib.util.find_spec(module) is None
    ]
    left = [name for name in names if not (missing and name in LLAMA_NAMES)]
    if len(left) == len(names):
        return names, None
    skipped = ", ".join(name for name in names if name not in left)
    return (
        left,
        f"{skipped}: left out, {' and '.join(missing)} not installed (pip install -r benchmarks/requirements.txt)",
    )


def with_ratios(rows: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Add to each row its median divided by the median of native int8.

    The ratio is None if native int8 was not measured.
    """
    base = rows.get(NATIVE_NAMES[1], {}).get("median_ms")
    for row in rows.values():
        if "median_ms" in row:
            row["ratio"] = None if base is None else row["median_ms"] / base
    return rows


def generations(
    workers: list[Worker], scenario: Scenario, rounds: int, sampled: int | None
) -> dict[str, dict[str, Any]]:
    """Measure a whole generation of each contestant.

    Returns a row for each contestant. A row contains the median and the quartiles in ms, the tokens
    per second, the number of timed passes, and the memory.
    """
    # A pass over a batch takes about ``batch`` times as long as a pass over one sequence.
    # Therefore, time fewer passes.
    sampled = sampled and max(1, sampled // scenario.batch)
    numbers = random.Random(1)
    prompts = [
        [numbers.randrange(1000) for _ in range(scenario.prompt)] for _ in range(scenario.batch)
    ]
    request = {"do": "generate", "prompts": prompts, "new": scenario.new, "policy": STATIC}
    rows: dict[str, dict[str, Any]] = {}
    answers: dict[str, dict[str, Any]] = {}

    def turn(worker: Worker) -> float:
        answer = answers[worker.name] = worker.ask(**request, passes=sampled)
        return (
            math.nan
            if worker.ended
            else float(answer["seconds"] * answer["nfe"] / answer["timed_passes"])
        )

    for worker in workers:
        # This call warms up compilers, allocators and caches. If the loop can be ended early, the
        # call runs one pass or one block. Otherwise, it runs the whole loop.
        first = worker.ask(**request, passes=1)
        rows[worker.name] = first if "not_offered" in first else {"first_s": first["seconds"]}
    for name, times in in_turns(workers, rows, turn, rounds, warm_ups=0).items():
        answer = answers[name]
        rows[name] |= times | {
            "tokens_per_s": scenario.batch * scenario.new / times["median_ms"] * 1e3,
            "nfe": answer["nfe"],
            "timed_passes": answer["timed_passes"],
            "selection_share": answer["selection_s"] / answer["seconds"]
            if "selection_s" in answer
            else None,
            "peak_rss_bytes": answer["peak_rss_bytes"],
            "cache_bytes": answer.get("cache_bytes"),
        }
    return with_ratios(rows)


def in_turns(
    workers: list[Worker],
    rows: dict[str, dict[str, Any]],
    turn: Callable[[Worker], float],
    rounds: int,
    warm_ups: int,
) -> dict[str, dict[str, float]]:
    """Time the contestants in turns.

    Returns the times of the contestants that answered in all rounds. For the other contestants, the
    function puts the reason into ``rows``.
    """
    runs = {
        worker.name: partial(turn, worker)
        for worker in workers
        if "not_offered" not in rows[worker.name]
    }
    times = interleave(runs, rounds, warm_ups)
    for worker in workers:
        if worker.ended:
            rows[worker.name] = {"not_offered": worker.ended}
            times.pop(worker.name, None)
    return times


def passes(
    workers: list[Worker], batch: int, T: int, S: int, R: int, rounds: int
) -> dict[str, dict[str, Any]]:
    """Return a row for each contestant: the median and the quartiles of a pass in ms."""
    request = {"do": "pass", "B": batch, "T": T, "S": S, "R": R}
    rows = {worker.name: worker.ask(**request) for worker in workers}

    def turn(worker: Worker) -> float:
        return float(worker.ask(**request).get("seconds", math.nan))

    times = in_turns(workers, rows, turn, rounds, warm_ups=1)
    return with_ratios(rows | times)


def agreement(workers: list[Worker], size: str) -> dict[str, float]:
    """Return how often each contestant predicts the same token as the first contestant.

    The result is a share of the positions of one canvas. The canvas has 256 positions, and half of
    them are masked.
    """
    numbers = random.Random(2)
    mask = json.loads((checkpoint(size) / "config.json").read_text())["mask_token_id"]
    canvas = [numbers.randrange(1000) for _ in range(128)] + [mask] * 128
    answers = {worker.name: worker.ask(do="best_tokens", canvas=canvas) for worker in workers}
    found = {name: answer["tokens"] for name, answer in answers.items() if "tokens" in answer}
    wanted = next(iter(found.values()), [])
    return {
        name: sum(a == b for a, b in zip(tokens, wanted, strict=True)) / len(wanted)
        for name, tokens in found.items()
    }


def demo(names: list[str], count: int, threads: int) -> dict[str, dict[str, Any]]:
    """Let the contestants take turns to answer the demo's held-out commands.

    Returns for each contestant the ms per command, the tokens per second (including end tokens),
    the mean number of passes, and the number of right answers.
    """
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    eos = json.loads((DEMO / "config.json").read_text())["eos_token_id"]
    lines = [
        json.loads(line)
        for line in (ROOT / "examples" / "demo" / "heldout.jsonl").read_text().splitlines()[:count]
    ]
    entered = [name for name in names if not name.endswith("-compile")]
    rows: dict[str, dict[str, Any]] = {
        name: {"not_offered": "it would compile anew for every length of a prompt"}
        for name in names
        if name not in entered
    }
    with contextlib.closing(Fleet(entered, "demo", threads)) as fleet:
        done: dict[str, list[dict[str, Any]]] = {name: [] for name in entered}
        for first in range(0, len(lines), DEMO_TURN):
            for worker in fleet.workers:
                for line in lines[first : first + DEMO_TURN]:
                    prompt = tokenizer.encode(line["prompt"]).ids
                    answer = worker.ask(
                        do="generate", prompts=[prompt], new=DEMO_NEW, policy=THRESHOLD, passes=None
                    )
                    if worker.ended:
                        break
                    given = answer["canvases"][0][len(prompt) :]
                    call = given[: given.index(eos)] if eos in given else given
                    done[worker.name].append(
                        {
                            "seconds": answer["seconds"],
                            "nfe": answer["nfe"],
                            "tokens": min(len(call) + 1, len(given)),
                            "right": _is_same_call(tokenizer.decode(call), line["completion"]),
                        }
                    )
        rows |= {
            worker.name: {"not_offered": worker.ended} for worker in fleet.workers if worker.ended
        }
    for name, answers in done.items():
        if name in rows:
            continue
        total = {
            key: sum(answer[key] for answer in answers)
            for key in ("seconds", "nfe", "tokens", "right")
        }
        rows[name] = spread([answer["seconds"] for answer in answers]) | {
            "tokens_per_s": total["tokens"] / total["seconds"],
            "nfe": total["nfe"] / len(answers),
            "right": total["right"],
            "commands": len(answers),
        }
    return with_ratios(rows)


def _is_same_call(answer: str, wanted: str) -> bool:
    """Return True if both texts are JSON with equal values."""
    try:
        return bool(json.loads(answer) == json.loads(wanted))
    except json.JSONDecodeError:
        return False


def measure(
    size: str, names: list[str], scenarios: list[Scenario], options: argparse.Namespace
) -> dict[str, Any]:
    """Measure random denoisers of one size. Memory is measured after the first scenario."""
    result: dict[str, Any] = {"size": size, "scenarios": [], "passes": []}
    with contextlib.closing(Fleet(names, size, options.threads)) as fleet:
        result["about"] = {worker.name: worker.about for worker in fleet.workers}
        result["settings"] = fleet.settings
        for scenario in scenarios:
            rows = generations(
                fleet.workers, scenario, options.rounds, options.sampled_passes or None
            )
            result["scenarios"].append(asdict(scenario) | {"rows": rows})
            _tell(f"{size}, {scenario}", rows)
        for batch in options.batch:
            for T, S, R in PASSES:
                rows = passes(fleet.workers, batch, T, S, R, max(options.rounds, 5))
                result["passes"].append({"B": batch, "T": T, "S": S, "R": R, "rows": rows})
                _tell(f"{size}, pass of B {batch}, T {T}, S {S}, R {R}", rows)
        result["agreement"] = agreement(fleet.workers, size)
    return result


def _tell(title: str, rows: dict[str, dict[str, Any]]) -> None:
    """Print the rows on stderr, as progress."""
    print(title, file=sys.stderr)
    for name, row in rows.items():
        text = (
            f"{row['median_ms']:10.1f} ms {ratio(row)}"
            if "median_ms" in row
            else f"not offered: {row['not_offered']}"
        )
        print(f"  {name:20} {text}", file=sys.stderr, flush=True)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="134M alone, fewer contestants")
    parser.add_argument("--sizes", default="134M,1B")
    parser.add_argument(
        "--contestants", help=f"with commas, of {KNOWN}; agreement is with the first"
    )
    parser.add_argument("--prompts", type=_numbers, default=[128])
    parser.add_argument("--new", type=_numbers, default=[128])
    parser.add_argument("--batch", type=_numbers, default=[1])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--sampled-passes",
        type=int,
        default=0,
        help="passes to time if all cost the same, divided by batch; 0: all",
    )
    parser.add_argument(
        "--demo", type=int, default=600, help="held-out commands of the trained demo; 0: none"
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    if options.quick:
        options.sizes = "134M"
    wanted = (
        options.contestants.split(",")
        if options.contestants
        else list(QUICK if options.quick else ALL)
    )
    for name in wanted:
        if not name.startswith(f"{NATIVE}-") and name not in TORCH_NAMES + LLAMA_NAMES:
            raise SystemExit(f"{name!r} is no contestant: one of {KNOWN}")
    names, note = available(wanted)
    if note:
        print(note, file=sys.stderr)
    scenarios = [
        Scenario(p, n, b) for b in options.batch for n in options.new for p in options.prompts
    ]
    # This scenario comes first, because the memory is reported after the first scenario.
    scenarios.sort(key=lambda s: s != Scenario(128, 128, 1))
    result: dict[str, Any] = {
        "date": date.today().isoformat(),
        "command": shlex.join(["python", "-m", "benchmarks.speed.generation", *sys.argv[1:]]),
        "machine": machine(),
        "threads": options.threads,
        "rounds": options.rounds,
        "left_out": note,
    }
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the stopped workers end too
    sizes = [size for size in options.sizes.split(",") if size]
    result["sizes"] = [measure(size, names, scenarios, options) for size in sizes]
    result["demo"] = demo(names, options.demo, options.threads) if options.demo else None
    text = markdown(result)
    print(text)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if options.markdown:
        options.markdown.write_text(text)


if __name__ == "__main__":
    main()
