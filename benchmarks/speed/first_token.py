"""Measure the milliseconds from the start of a process to its first token, in C and in Python.

    python -m benchmarks.speed.first_token [BUNDLE] [--prompt-tokens 4,32] [--threads N] [--rounds 15]

Each run is a new process. The files of the bundle are in the kernel's page cache. The script
compares three ways to open the bundle. Each round tries all three ways. "recorded" opens a bundle
whose hashes were checked and recorded earlier. "hashed" hashes all files, as the first process that
opens a bundle does. "sizes" checks only the sizes of the files.

The script prints when the process reaches the following moments, in milliseconds. The time starts
just before the process is created:

    main         the first statement of the program runs
    import       Python has imported dlm_runtime
    open         the bundle is open
    first pass   the first pass is done
    first token the first token is committed; if the first pass only stores the prompt, a later pass
        commits this token

The script also prints the resident memory at the end of a run, separately for mapped files and for
anonymous memory. The weights are in mapped files. Copies of the weights would be in anonymous
memory. Without BUNDLE, the script builds a bundle with random weights (--size, --precision).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.shapes import ROOT, bundle_of, machine
from benchmarks.timing import cell, spread
from dlm_runtime.abi import native as _native

WAYS = {"recorded": (1, "changed"), "hashed": (1, "always"), "sizes": (0, "changed")}
"""The values of check_hashes and $DLM_HASH_FILES for each way to open a bundle."""

PYTHON = """
import json, sys, time
path, check, prompt, new, threads, started = sys.argv[1], *map(int, sys.argv[2:])
ms = lambda: (time.monotonic_ns() - started) / 1e6
found = {"main": ms()}
import dlm_runtime
found["import"] = ms()
bundle = dlm_runtime.open(path, threads=threads, check_hashes=bool(check))
found["open"] = ms()
tokens = [i % 1000 for i in range(prompt)]
for event in bundle.stream(tokens=tokens, new_tokens=new):
    found.setdefault("first_pass", ms())
    if event.committed:
        break
found |= {"first_token": ms(), "passes": event.nfe}
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
found["anonymous_kib"] = int(status["RssAnon"].split()[0])
found["file_kib"] = int(status["RssFile"].split()[0])
print(json.dumps(found))
"""


def compiled() -> Path:
    """Compile the C program with the header and library of the installed package."""
    library = Path(_native.library()._name)
    program = ROOT / "build" / "benchmarks" / "first_token"
    program.parent.mkdir(parents=True, exist_ok=True)
    source = ROOT / "benchmarks" / "speed" / "first_token.c"
    include = ROOT / "runtime" / "native" / "include"
    command = ["cc", "-O2", "-std=c99", f"-I{include}", source, "-o", program, library]
    subprocess.run([*command, f"-Wl,-rpath,{library.parent}"], check=True)
    return program


def read(bundle: Path) -> None:
    """Read the files of the bundle, to put them into the kernel's page cache."""
    buffer = bytearray(1 << 23)
    for path in filter(Path.is_file, bundle.rglob("*")):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def measure(
    command: list[str], bundle: Path, way: str, sizes: tuple[int, int, int], records: str
) -> dict[str, Any]:
    """Run one process, and return when it reached each moment."""
    check_hashes, hash_files = WAYS[way]
    environment = os.environ | {
        "DLM_ONNXRUNTIME": _native.onnxruntime_library() or "",
        "DLM_HASH_FILES": hash_files,
        "XDG_CACHE_HOME": records,
    }
    arguments = [str(bundle), str(check_hashes), *map(str, sizes)]
    done = subprocess.run(
        [*command, *arguments, str(time.monotonic_ns())],
        env=environment,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return median and quartiles of each moment, and the passes and memory of the last run."""
    last = runs[-1]
    facts = ("passes", "anonymous_kib", "file_kib")
    phases = {name: spread([run[name] / 1e3 for run in runs]) for name in last if name not in facts}
    return {"phases": phases} | {name: last[name] for name in facts}


def show(title: str, row: dict[str, Any]) -> None:
    """Print the row of one way to open the bundle."""
    phases = "; ".join(
        f"{name.replace('_', ' ')} {cell(values)}" for name, values in row["phases"].items()
    )
    print(
        f"{title}: {phases} ms; {row['passes']} passes; anonymous {row['anonymous_kib'] / 1024:.0f}, "
        f"files {row['file_kib'] / 1024:.0f} MiB",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", type=Path, nargs="?")
    parser.add_argument("--size", default="134M")
    parser.add_argument("--precision", default="int8")
    parser.add_argument("--prompt-tokens", default="4,32", help="lengths of prompts, with commas")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=0, help="0: all cores")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    bundle = arguments.bundle or bundle_of(arguments.size, arguments.precision)
    programs = {"C": [str(compiled())], "Python": [sys.executable, "-c", PYTHON]}
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as records:
        for prompt in map(int, arguments.prompt_tokens.split(",")):
            sizes = (prompt, arguments.new_tokens, arguments.threads)
            runs: dict[tuple[str, str], list[dict[str, Any]]] = {}
            for number in range(2 + arguments.rounds):  # the first two rounds are warm-ups
                for language, command in programs.items():
                    for way in WAYS:
                        read(bundle)
                        found = measure(command, bundle, way, sizes, records)
                        if number >= 2:
                            runs.setdefault((language, way), []).append(found)
            for (language, way), values in runs.items():
                title = f"prompt of {prompt}, {language}, {way}"
                rows[title] = summary(values)
                show(title, rows[title])
        if not list(Path(records).rglob("dlm-runtime/*")):
            print(
                "No file was recorded, so 'recorded' hashed all of them: see docs/reference/bundle.md."
            )
    if arguments.json:
        result = {"machine": machine(), "bundle": str(bundle), "rows": rows}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
