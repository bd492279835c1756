"""Compare builds of the 134 M denoiser with and without Ray.

    python -m benchmarks.speed.ray_calibration [--size 134M] [--precisions int8-static,int4]
        [--samples 32] [--states 8] [--judged 4] [--json FILE]

For each precision, the script makes three bundles: without Ray, with Ray on this machine, and with
Ray while a worker is killed during calibration. Ray runs one task per core. Each bundle is compared
with the bundle without Ray: the SHA-256 of each file, and each figure in accuracy.json. Figures
that contain a time are left out. The script prints the duration of each stage, and lists all
differences. Needs: pip install -c constraints.txt '.[ray]'
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from benchmarks.shapes import FOLDER, checkpoint, machine
from dlm_export.build import BuildOptions, BuildReport, QuantiseOptions, build
from dlm_export.distributed.ray_workers import LOCAL, connected
from dlm_export.judging.accuracy.effort import Effort
from dlm_export.quantising.samples import CalibrationOptions

TIMES = ("speed", "candidate")
STAGES = ("make states", "calibrate", "judge", "sweep layers")


def tasks() -> Iterator[tuple[int, str]]:
    """Yield the process ID and the task of each Ray worker that this process has started."""
    parents, titles = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            titles[int(folder.name)] = (folder / "cmdline").read_bytes().decode().strip("\0 ")
            parents[int(folder.name)] = int(fields[1])
        except (OSError, UnicodeDecodeError):  # the process has ended
            continue
    for process, title in titles.items():
        ancestor = process
        while ancestor in parents and ancestor != os.getpid():
            ancestor = parents[ancestor]
        if ancestor == os.getpid() and title.startswith("ray::"):
            yield process, title.removeprefix("ray::")


@contextmanager
def killer(killed: list[str]) -> Iterator[None]:
    """Kill one worker that runs a task of calibration, and append the task's name to ``killed``."""
    ended = threading.Event()

    def run() -> None:
        while not ended.is_set() and not killed:
            for process, title in tasks():
                if title.startswith("calibrate-") and not killed:
                    os.kill(process, signal.SIGKILL)
                    killed.append(title)
            time.sleep(0.05)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def made(source: Path, precision: str, name: str, given: argparse.Namespace) -> BuildReport:
    output = FOLDER / f"ray-{given.size}-{precision}-{name}"
    options = QuantiseOptions(
        CalibrationOptions(samples=given.samples, states_per_sample=given.states),
        effort=Effort(judged=given.judged) if given.judged else Effort("none"),
    )
    return build(
        source,
        output,
        BuildOptions(
            precision=precision,
            quantise=options,
            force=True,
            check_parity=given.judged > 0,
            ray=None if name == "none" else LOCAL,
        ),
    )


def hashes(bundle: Path) -> dict[str, str]:
    files = json.loads((bundle / "manifest.json").read_text())["files"]
    return {name: entry["sha256"] for name, entry in files.items()}


def figures(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and the value of each number or text in accuracy.json."""
    if isinstance(value, dict):
        for name, each in value.items():
            if name not in TIMES:
                yield from figures(each, f"{path}.{name}" if path else name)
    elif isinstance(value, list):
        for number, each in enumerate(value):
            yield from figures(each, f"{path}[{number}]")
    else:
        yield path, value


def differences(ours: Path, theirs: Path) -> dict[str, Any]:
    """List the files and the figures of ``ours`` that differ from ``theirs``."""
    found = hashes(ours), hashes(theirs)
    files = [name for name in found[1] if found[0].get(name) != found[1][name]]
    paths = [folder / "accuracy.json" for folder in (ours, theirs)]
    read = [dict(figures(json.loads(p.read_text()))) if p.is_file() else {} for p in paths]
    apart = {}
    for name, value in read[1].items():
        other = read[0].get(name)
        if other != value:
            numbers = isinstance(value, (int, float)) and isinstance(other, (int, float))
            scale = max(abs(value), abs(other)) if numbers else 0
            apart[name] = abs(value - other) / scale if scale else None
    return {"files": files, "figures": len(read[1]), "apart": apart}


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare builds with and without Ray.")
    parser.add_argument("--size", default="134M")
    parser.add_argument("--precisions", default="int8-static,int4")
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--states", type=int, default=8)
    parser.add_argument("--judged", type=int, default=4, help="0 does not check the bundles.")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    source, found = checkpoint(given.size), []
    for precision in given.precisions.split(","):
        plain = made(source, precision, "none", given)
        rows = [{"name": "none", "stages_s": plain.stages_s}]
        with connected(LOCAL):
            for name in ("ray", "killed"):
                killed: list[str] = []
                with killer(killed) if name == "killed" else nullcontext():
                    report = made(source, precision, name, given)
                rows.append(
                    {"name": name, "stages_s": report.stages_s, "killed": killed}
                    | differences(report.output, plain.output)
                )
        for row in rows:
            stages = ", ".join(f"{s} {row['stages_s'].get(s, 0):.1f} s" for s in STAGES)
            print(f"{precision}, {row['name']}: {stages}")
            if row["name"] == "none":
                continue
            print(f"  killed: {', '.join(row['killed']) or 'no worker'}")
            print(f"  files that differ: {', '.join(row['files']) or 'none'}")
            worst = max((each for each in row["apart"].values() if each is not None), default=0)
            print(
                f"  {len(row['apart'])} of {row['figures']} figures differ, by at most {worst:.1e}"
            )
            for figure, share in list(row["apart"].items())[:12]:
                print(f"    {figure}: {'not numbers' if share is None else f'{share:.1e}'}")
        found.append({"precision": precision, "builds": rows})
        for name in ("none", "ray", "killed"):
            shutil.rmtree(FOLDER / f"ray-{given.size}-{precision}-{name}")
    if given.json is not None:
        given.json.write_text(json.dumps({"machine": machine(), "found": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
