"""Compare the speed of this checkout with the speed of another commit.

    python -m benchmarks.speed.before_after OTHER [--size 134M] [--rounds 15] [--json FILE]

OTHER is a checkout of another commit with a .venv in it (`make .venv/.installed`). Each checkout
builds a bundle and runs the bundle with its own runtime. The two checkouts take turns. The script
times single passes, a generation, and the first token of a new process.

The script prints medians with quartiles in milliseconds, and the ratio of the two medians. It also
prints the number of passes and the peak memory of each checkout's generation, and how many tokens
of the two generations are equal.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.shapes import ROOT, machine

PRECISIONS = ("int8", "fp32")
PASSES = ((32, 224, 32), (256, 0, 256))  # tokens in the pass, cached tokens, scored rows
NEW_TOKENS = 128  # number of generated tokens, after a prompt of 128 tokens
# A program that each checkout runs. It only calls functions that exist in old and new versions of
# the runtime.
WORKER = """
import json, sys
import dlm_runtime
bundles = {name: dlm_runtime.open(path) for name, path in json.loads(sys.argv[1]).items()}
given = [(i * 7919) % 1000 for i in range(128)]
for line in sys.stdin:
    name, *sizes = json.loads(line)
    if sizes:
        answer = bundles[name].time_passes(*sizes, 4)
    else:
        out = bundles[name].generate(
            tokens=given, max_new_tokens=128, preset="fast-dllm", stop="none", threshold=1.0
        )
        status = open("/proc/self/status").read().split("VmHWM:")[1]
        answer = [out.timings["total"], out.nfe, int(status.split()[0]), list(out.tokens)]
    print(json.dumps(answer), flush=True)
"""
FIRST = """
import sys
import dlm_runtime
given = [(i * 7919) % 1000 for i in range(128)]
dlm_runtime.open(sys.argv[1]).generate(
    tokens=given, max_new_tokens=1, preset="fast-dllm", stop="none"
)
"""


class Side:
    """A checkout, with its bundles and with a process that uses its runtime."""

    def __init__(self, root: Path, size: str) -> None:
        self.python = str(root / ".venv" / "bin" / "python")
        say = f"from shapes import bundle_of; print(bundle_of({size!r}, PRECISION))"
        self.bundles = {}
        for precision in PRECISIONS:
            code = say.replace("PRECISION", repr(precision))
            done = subprocess.run(
                [self.python, "-c", code],
                cwd=root / "benchmarks",
                check=True,
                capture_output=True,
                text=True,
            )
            self.bundles[precision] = done.stdout.strip().splitlines()[-1]
        self.process = subprocess.Popen(
            [self.python, "-c", WORKER, json.dumps(self.bundles)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, *what: object) -> list[Any]:
        """Send a line to the process and return the answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
        answer: list[Any] = json.loads(self.process.stdout.readline())
        return answer

    def passes(self, precision: str, sizes: tuple[int, ...]) -> list[float]:
        """Return the milliseconds of each pass."""
        return [second * 1e3 for second in self.ask(precision, *sizes)]

    def first_token(self) -> float:
        """Return the milliseconds from the start of a Python process to its first token."""
        began = time.perf_counter()
        subprocess.run([self.python, "-c", FIRST, self.bundles["int8"]], check=True)
        return (time.perf_counter() - began) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("other", type=Path)
    parser.add_argument("--size", default="134M")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    sides = {
        "this": Side(ROOT, arguments.size),
        "other": Side(arguments.other.resolve(), arguments.size),
    }
    found: dict[str, dict[str, list[float]]] = {}
    canvases: dict[tuple[str, str], list[int]] = {}
    for number in range(arguments.rounds + 1):
        for name, side in sorted(
            sides.items(), reverse=number % 2 == 1
        ):  # the order of the two checkouts changes in every round
            rows = {
                f"{p}, pass of {sizes}": side.passes(p, sizes)
                for p in PRECISIONS
                for sizes in PASSES
            }
            for precision in PRECISIONS:
                seconds, nfe, peak, tokens = side.ask(precision)
                rows[f"{precision}, generation of {NEW_TOKENS}"] = [seconds * 1e3]
                rows[f"{precision}, passes of a generation"] = [nfe]
                rows["peak resident, KiB"] = [peak]
                canvases[name, precision] = tokens[-NEW_TOKENS:]
            rows["int8, first token of a process"] = [side.first_token()]
            for row, values in rows.items():
                if number:  # the first round warms up
                    found.setdefault(row, {}).setdefault(name, []).extend(values)
    result: dict[str, Any] = {
        "machine": machine(),
        "size": arguments.size,
        "rounds": arguments.rounds,
        "rows": {},
    }
    for row, by_side in found.items():
        quartiles = {name: statistics.quantiles(values, n=4) for name, values in by_side.items()}
        ratio = quartiles["this"][1] / quartiles["other"][1]
        result["rows"][row] = {"ratio": ratio} | {
            name: {"quartiles_ms": values} for name, values in quartiles.items()
        }
        shown = (f"{name} {q[1]:.2f} ({q[0]:.2f} .. {q[2]:.2f})" for name, q in quartiles.items())
        print(f"{row}: {'; '.join(shown)}; {ratio:.3f} x", flush=True)
    for precision in PRECISIONS:
        pairs = zip(canvases["this", precision], canvases["other", precision], strict=True)
        result["rows"][f"{precision}, equal tokens"] = equal = sum(a == b for a, b in pairs)
        print(f"{precision}: {equal} of {NEW_TOKENS} new tokens are equal")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    for side in sides.values():
        side.process.kill()


if __name__ == "__main__":
    sys.exit(main())
