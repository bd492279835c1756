"""Prints the last part of the output of `make demo`: some commands, the calls for these commands,
and paths of files.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

import dlm_runtime

COMMANDS = (
    "remind me to call the garage at seven tomorrow",
    "could you turn the bedroom lights to forty percent please",
    "add oat milk, batteries and stamps to the shopping list",
    "take me to the harbour with a stop at the pharmacy",
    "set the seat heating for the driver to level two",
    "move forward three metres slowly",
)


def main(folder: Path) -> None:
    """Open the bundle, run the commands, and print their calls, passes and times."""
    with dlm_runtime.open(folder) as bundle:
        parameters = bundle.manifest["network"]["parameters"]
        print(
            f"{folder}: {bundle.manifest['network']['family']}, {parameters:,} parameters, {bundle.engine}\n"
        )
        times = []
        for command in COMMANDS:
            out = bundle.generate(prompt=command, max_new_tokens=64)
            times.append(out.timings["total"] * 1e3)
            print(
                f"  {command}\n    {out.text}   [{out.nfe} {'pass' if out.nfe == 1 else 'passes'}, {times[-1]:.0f} ms]"
            )
    print(f"\nMedian {statistics.median(times):.0f} ms a command. The files:")
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            print(f"  {path}  {path.stat().st_size:,} bytes")
    watch = (
        f".venv/bin/dlm-export run {folder} --max-new-tokens 64 --watch --prompt '{COMMANDS[0]}'"
    )
    print(f"\nWatch a canvas denoise:\n  {watch}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
