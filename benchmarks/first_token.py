"""Milliseconds from the start of a C process to the first committed tokens of a bundle, its files
in the page cache.

python benchmarks/first_token.py [--size 134M] [--precision int8] [--rounds 15] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

from shapes import ROOT, bundle_of, machine

from dlm_runtime.abi import native as _native

STAGES = ("main began", "bundle open", "first tokens")


def compiled() -> Path:
    """The C program, against the installed package's header and library."""
    library = Path(_native.library()._name)
    program = ROOT / "build" / "benchmarks" / "first_token"
    source = ROOT / "benchmarks" / "first_token.c"
    command = [
        "cc",
        "-O2",
        "-std=c99",
        "-I",
        str(ROOT / "runtime/native/include"),
        str(source),
        "-o",
        str(program),
        str(library),
    ]
    subprocess.run([*command, f"-Wl,-rpath,{library.parent}"], check=True)
    return program


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", default="134M")
    parser.add_argument("--precision", default="int8")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    bundle, program = bundle_of(arguments.size, arguments.precision), compiled()
    environment = os.environ | {"DLM_ONNXRUNTIME": _native.onnxruntime_library() or ""}
    rows: dict[str, Any] = {}
    for prompt, new_tokens in ((32, 32), (32, 128), (128, 128)):
        for check in (1, 0):
            runs = []
            for _ in range(2 + arguments.rounds):
                command = [
                    str(program),
                    str(bundle),
                    str(check),
                    str(prompt),
                    str(new_tokens),
                    str(time.monotonic_ns()),
                ]
                text = subprocess.run(
                    command, env=environment, check=True, capture_output=True, text=True
                ).stdout
                runs.append([float(value) for value in text.split()])
            name = (
                f"{prompt} given, {new_tokens} new, {'hashes checked' if check else 'sizes only'}"
            )
            rows[name] = {}
            for stage, values in zip(STAGES, zip(*runs[2:], strict=True), strict=True):
                low, median, high = statistics.quantiles(values, n=4)
                rows[name][stage] = {"median_ms": median, "q1_ms": low, "q3_ms": high}
            print(
                name,
                *(f"{stage} {row['median_ms']:.0f} ms" for stage, row in rows[name].items()),
                sep="; ",
                flush=True,
            )
    if arguments.json:
        result = {
            "machine": machine(),
            "size": arguments.size,
            "precision": arguments.precision,
            "rows": rows,
        }
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
