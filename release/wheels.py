"""Builds the files of a release into dist/: the sdist, and wheels for x86-64 and aarch64 that
contain the compiled native library.

    python release/wheels.py [--architecture x86_64] [--architecture aarch64]

Wheels are built from the sdist, which proves that the sdist is complete. The C++ library
(libstdc++) is linked statically, so the only library that a wheel needs from the system is glibc.
The tag of the wheel names the required version of glibc. The script reads this version from the
symbols that the native library imports, and auditwheel checks it.

The aarch64 wheel needs Debian's cross compiler (g++-aarch64-linux-gnu). If the compiler is missing,
the script says so before it builds anything. It then builds the sdist and the other wheel, and
exits with 1.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
DIST = ROOT / "dist"
TOOLCHAIN = "runtime/native/cmake/aarch64-linux-gnu.cmake"  # the same path in the sdist
CROSS_COMPILER = "aarch64-linux-gnu-g++"
OBJDUMP = {"x86_64": "objdump", "aarch64": "aarch64-linux-gnu-objdump"}
STATIC = "DLM_STATIC_LIBSTDCXX"


def run(*command: str | Path, **variables: str) -> str:
    """Run a program and return its standard output. If the program fails, this script exits with
    that output as the message.
    """
    print("$", *command, file=sys.stderr, flush=True)
    words = [str(part) for part in command]
    done = subprocess.run(
        words, cwd=ROOT, env=os.environ | variables, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        sys.exit(f"{command[0]}: exit {done.returncode}\n{done.stdout}")
    return done.stdout


def glibc_of(wheel: Path, architecture: str) -> tuple[int, int]:
    """Return the oldest version of glibc that has every symbol that the wheel's libraries import.

    If a library imports symbols of a C++ library, this script ends.
    """
    versions = set()
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if not archive.read(name).startswith(b"\x7fELF"):
                continue
            library = archive.extract(name, folder)
            symbols = run(OBJDUMP[architecture], "-T", library)
            needed = re.findall(r"NEEDED +(\S+)", run(OBJDUMP[architecture], "-p", library))
            if "GLIBCXX_" in symbols or any(other.startswith("libstdc++") for other in needed):
                sys.exit(f"{name} needs libstdc++: {STATIC} did not reach CMake")
            print(f"{name} needs {', '.join(needed)}", file=sys.stderr)
            versions |= set(re.findall(r"GLIBC_(\d+)\.(\d+)", symbols))
    return max((int(major), int(minor)) for major, minor in versions)


def obstacle(architecture: str) -> str | None:
    """Return why this machine cannot build a wheel for the processor, and what to do about it.
    Returns None if it can build the wheel.
    """
    if architecture == platform.machine():
        return None
    if architecture != "aarch64":
        return f"a cross compiler to {architecture} is not supported: run this on {architecture}"
    if shutil.which(CROSS_COMPILER) is None:
        return f"{CROSS_COMPILER} is missing: apt-get install g++-aarch64-linux-gnu"
    return None


def build_wheel(sdist: Path, architecture: str, folder: Path) -> Path:
    """Build the wheel for a processor from the sdist. The tag names the lowest version of glibc."""
    settings = [f"cmake.define.{STATIC}=ON"]
    variables, isolation = {}, []
    if architecture != platform.machine():
        settings.append(f"cmake.define.CMAKE_TOOLCHAIN_FILE={ROOT / TOOLCHAIN}")
        # This variable sets the platform that sysconfig reports, which determines the tag. pip also
        # uses this variable, and would then download CMake for the other processor.
        variables, isolation = (
            {"_PYTHON_HOST_PLATFORM": f"linux-{architecture}"},
            ["--no-build-isolation"],
        )
    options = [part for setting in settings for part in ("-C", setting)]
    pip = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        *isolation,
        "--wheel-dir",
        folder,
    ]
    run(*pip, *options, sdist, **variables)
    plain = next(folder.glob("*.whl"))
    major, minor = glibc_of(plain, architecture)
    tag = f"manylinux_{major}_{minor}_{architecture}"
    name = (
        run(sys.executable, "-m", "wheel", "tags", "--remove", "--platform-tag", tag, plain)
        .strip()
        .splitlines()[-1]
    )
    said = run(sys.executable, "-m", "auditwheel", "show", folder / name)
    if tag not in said:
        sys.exit(f"{name}: auditwheel does not agree with its tag:\n{said}")
    return folder / name


def keep(path: Path) -> None:
    """Copy a finished file to dist/ at once, so that a later failure does not lose it."""
    DIST.mkdir(exist_ok=True)
    print(f"{shutil.copy(path, DIST)} {path.stat().st_size / 1e6:.1f} MB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--architecture", action="append", choices=sorted(OBJDUMP), help="[default: all]"
    )
    chosen = parser.parse_args().architecture or sorted(OBJDUMP, reverse=True)
    obstacles = {
        architecture: why for architecture in chosen if (why := obstacle(architecture)) is not None
    }
    for architecture, why in obstacles.items():
        print(f"No wheel for {architecture}: {why}", file=sys.stderr, flush=True)
    if len(obstacles) == len(chosen):
        sys.exit(1)
    with tempfile.TemporaryDirectory() as scratch:
        run(sys.executable, "-m", "build", "--sdist", "--outdir", scratch, ".")
        sdist = next(Path(scratch).glob("*.tar.gz"))
        keep(sdist)
        for architecture in chosen:
            if architecture not in obstacles:
                folder = Path(scratch) / architecture
                folder.mkdir()
                keep(build_wheel(sdist, architecture, folder))
    if obstacles:
        sys.exit(
            "Not built: "
            + "; ".join(
                f"the wheel for {architecture} ({why})" for architecture, why in obstacles.items()
            )
        )


if __name__ == "__main__":
    main()
