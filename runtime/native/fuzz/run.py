"""Runs the fuzz targets with libFuzzer: ``python runtime/native/fuzz/run.py [--seconds 60]
[TARGET...]``, or ``make fuzz``.

The targets are built in build/native-fuzz. New interesting inputs are stored in build/fuzz/TARGET.
If an input makes a target fail, the input is stored in build/fuzz, and its path is printed. After
you have fixed the failure, move the input to runtime/native/fuzz/found/TARGET. This program needs
clang. The exit status is 1 if a target failed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[2]
TARGETS = sorted(path.stem.removeprefix("fuzz_") for path in HERE.glob("fuzz_*.cc"))
TOOLS = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])


def find_clang() -> str | None:
    """Return the name of the compiler: clang++, or the newest clang++-N (Debian).

    Returns None if clang is not installed.
    """
    names = ("clang++", *(f"clang++-{version}" for version in range(30, 13, -1)))
    return next((name for name in names if shutil.which(name, path=TOOLS)), None)


def build(names: list[str]) -> Path:
    """Build the fuzz targets ``names``, and return the folder of the programs."""
    clang = find_clang()
    if clang is None:
        raise SystemExit(
            "clang++ is not installed: libFuzzer comes with it (Debian: apt-get install clang)"
        )
    folder = REPOSITORY / "build" / "native-fuzz"
    compilers = [f"-DCMAKE_CXX_COMPILER={clang}", f"-DCMAKE_C_COMPILER={clang.replace('++', '')}"]
    options = [
        "-DCMAKE_BUILD_TYPE=RelWithDebInfo",
        "-DDLM_SANITIZE=address",
        "-DDLM_BUILD_FUZZERS=ON",
    ]
    configure = [
        "cmake",
        "-S",
        str(HERE.parent),
        "-B",
        str(folder),
        "-G",
        "Ninja",
        *compilers,
        *options,
    ]
    targets = [f"fuzz_{name}" for name in names]
    for command in (configure, ["cmake", "--build", str(folder), "--target", *targets]):
        subprocess.run(command, check=True, env=os.environ | {"PATH": TOOLS}, stdout=sys.stderr)
    return folder


def run(folder: Path, target: str, seconds: int, corpus: Path) -> bool:
    """Run a target, and print the number of inputs. Returns False if the target failed."""
    new = corpus / target
    new.mkdir(parents=True, exist_ok=True)
    given = [HERE / "found" / target] if (HERE / "found" / target).exists() else []
    limits = [
        f"-max_total_time={seconds}",
        "-timeout=20",
        "-rss_limit_mb=1024",
        "-print_final_stats=1",
    ]
    options = [*limits, f"-artifact_prefix={corpus}/{target}-", f"-dict={corpus / 'words.dict'}"]
    command = [str(folder / f"fuzz_{target}"), str(new), *map(str, given), *options]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, errors="replace", check=False)
    made = re.search(r"number_of_executed_units: (\d+)", done.stderr)
    covered = re.findall(r"cov: (\d+)", done.stderr)
    print(
        f"{target}: {int(made[1]) if made else 0:,} executions, {covered[-1] if covered else 0} edges",
        flush=True,
    )
    if done.returncode:
        print(done.stderr[-6000:], file=sys.stderr)
    return done.returncode == 0


def main() -> int:
    arguments = argparse.ArgumentParser(description="Run the fuzz targets with libFuzzer.")
    arguments.add_argument(
        "targets", nargs="*", choices=[*TARGETS, []], help="all targets if no target is named"
    )
    arguments.add_argument("--seconds", type=int, default=60, help="seconds per target")
    chosen = arguments.parse_args()
    names = chosen.targets or TARGETS
    folder, corpus = build(names), REPOSITORY / "build" / "fuzz"
    subprocess.run([sys.executable, str(HERE / "seeds.py"), str(corpus)], check=True)
    held = [run(folder, target, chosen.seconds, corpus) for target in names]
    return int(not all(held))


if __name__ == "__main__":
    raise SystemExit(main())
