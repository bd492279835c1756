"""Compare this checkout's speed with that of another commit.

    python benchmarks/before_after.py OTHER [--size 134M] [--rounds 15] [--json FILE]

OTHER is a checkout of another commit with its own .venv (`make .venv/.installed`). Each side builds
its bundle and runs it with its own runtime. The two sides take turns on the passes of passes.py,
the generation of generation.py, and the first tokens of a process. Prints medians with quartiles,
and this side's time over the other's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from shapes import ROOT, machine

from dlm_runtime.abi import native as _native

PRECISIONS = ("int8", "fp32")
PASSES = ((32, 224, 32), (256, 0, 256))  # (T, S, R)
GIVEN, NEW_TOKENS = 128, 128  # of generations and first tokens
WORKER = """
import json, sys
import dlm_runtime
bundles = {name: dlm_runtime.open(path) for name, path in json.loads(sys.argv[1]).items()}
given = [(i * 7919) % 1000 for i in range(128)]
for line in sys.stdin:
    name, *sizes = json.loads(line)
    if sizes:
        seconds = bundles[name].time_passes(*sizes, 4)
    else:
        out = bundles[name].generate(tokens=given, max_new_tokens=128, preset="fast-dllm", stop="none", threshold=1.0)
        assert out.nfe == 128
        seconds = [out.timings["total"]]
    print(json.dumps(seconds), flush=True)
"""


class Side:
    """A checkout: a process that runs its runtime, and its C program."""

    def __init__(self, root: Path, size: str) -> None:
        python = root / ".venv" / "bin" / "python"
        say = f"from shapes import bundle_of; print(bundle_of({size!r}, PRECISION))"
        self.bundles = {}
        for precision in PRECISIONS:
            code = say.replace("PRECISION", repr(precision))
            done = subprocess.run(
                [python, "-c", code],
                cwd=root / "benchmarks",
                check=True,
                capture_output=True,
                text=True,
            )
            self.bundles[precision] = done.stdout.strip().splitlines()[-1]
        where = "from first_token import compiled; print(compiled())"
        done = subprocess.run(
            [python, "-c", where],
            cwd=root / "benchmarks",
            check=True,
            capture_output=True,
            text=True,
        )
        self.program = done.stdout.strip().splitlines()[-1]
        command = [str(python), "-c", WORKER, json.dumps(self.bundles)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, *what: object) -> list[float]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
        answer: list[float] = json.loads(self.process.stdout.readline())
        return [second * 1e3 for second in answer]

    def first_tokens(self) -> list[float]:
        """Milliseconds from the start of a process to its first committed tokens, with hashes
        checked.
        """
        environment = os.environ | {"DLM_ONNXRUNTIME": _native.onnxruntime_library() or ""}
        command = [
            self.program,
            self.bundles["int8"],
            "1",
            str(GIVEN),
            str(NEW_TOKENS),
            str(time.monotonic_ns()),
        ]
        done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
        return [float(done.stdout.split()[-1])]


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
    for number in range(arguments.rounds + 1):
        for name, side in sorted(
            sides.items(), reverse=number % 2 == 1
        ):  # neither is always the second
            rows = {
                f"{p}, pass of {sizes}": side.ask(p, *sizes) for p in PRECISIONS for sizes in PASSES
            }
            rows["int8, 128 given, 128 new, 128 passes"] = side.ask("int8")
            rows["int8, first tokens of a process"] = side.first_tokens()
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
        shown = (
            f"{name} {q[1]:.2f} ({q[0]:.2f} .. {q[2]:.2f}) ms" for name, q in quartiles.items()
        )
        print(f"{row}: {'; '.join(shown)}; {ratio:.3f} x", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    for side in sides.values():
        side.process.kill()


if __name__ == "__main__":
    sys.exit(main())
