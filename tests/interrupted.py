"""Runs builds and ends them with a signal at a chosen file operation.

Each build runs in a process forked from this one, which has already imported all modules. The
command ``interrupted.py KIND FOLDER [CHECKPOINT]`` interrupts builds in FOLDER and prints one JSON
line per build.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dlm_export import outputs
from dlm_export.bundle.folder import staged
from dlm_export.signals import dying_by_signal

Build = Callable[[Path, str, bool], None]
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
EVENTS = {
    "open",
    "os.mkdir",
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.listdir",
    "os.scandir",
    "os.truncate",
    "fcntl.flock",
}
NEIGHBOURS = ("notes.txt", ".bundle.old", ".bundle.dlm-export.txt")


def fake_build(out: Path, name: str, force: bool) -> None:
    """Write a small fake bundle with the functions that a real build uses.

    The fake bundle contains ``name``, so that ``fake_name`` can tell two bundles apart.
    """
    with staged(out, force=force, needed_bytes=0) as folder:
        (folder / "denoiser.onnx").write_text(f"graph of {name}")
        (folder / "engines").mkdir()
        (folder / "engines" / "thor.engine").write_text(f"engine of {name}")
        files = {
            path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in folder.rglob("*")
            if path.is_file()
        }
        (folder / "manifest.json").write_text(
            json.dumps({"schema_version": 1, "loop": {}, "name": name, "files": files})
        )


def fake_name(out: Path) -> str:
    """Return the name that ``fake_build`` stored in the bundle at this path.

    Raises AssertionError if the path contains anything other than a complete fake bundle.
    """
    manifest = json.loads((out / "manifest.json").read_text())
    found = {path.relative_to(out).as_posix(): path for path in out.rglob("*") if path.is_file()}
    del found["manifest.json"]
    assert found.keys() == manifest["files"].keys(), sorted(found)
    for name, digest in manifest["files"].items():
        assert hashlib.sha256(found[name].read_bytes()).hexdigest() == digest, name
    return str(manifest["name"])


def in_child(work: Callable[[], None]) -> tuple[int, str]:
    """Run a function in a forked process, like the command line.

    Returns the exit status (negative for a signal) and the output.
    """
    read, write = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(read)
        # If a shell started this program in the background, SIGINT is ignored. Undo this.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        code, said = 0, ""
        try:
            with dying_by_signal():
                work()
        except outputs.OutputError as err:
            code, said = int(err.exit_code), str(err)
        except SystemExit as err:
            code = int(err.code or 0)
        except BaseException as err:
            code, said = 99, repr(err)
        os.write(write, said.encode())
        os._exit(code)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), said


def count_operations(folder: Path, on_operation: Callable[[int], None]) -> None:
    """Number this process's operations on files below ``folder``, and call ``on_operation`` with
    the number before each operation.

    After the move of a file, call it once more.
    """
    numbers, mine, busy = itertools.count(1), os.getpid(), []

    def happened() -> None:
        if os.getpid() == mine and not busy:
            busy.append(True)
            on_operation(next(numbers))
            busy.clear()

    def heard(event: str, arguments: tuple[Any, ...]) -> None:
        paths = [
            os.fsdecode(each) for each in arguments if isinstance(each, (str, bytes, os.PathLike))
        ]
        if event in EVENTS and (
            event == "fcntl.flock" or any(str(folder) in path for path in paths)
        ):
            happened()

    renamed = outputs._renameat2

    def rename(*arguments: Any) -> None:
        happened()
        renamed(*arguments)
        happened()

    outputs._renameat2 = rename
    sys.addaudithook(heard)


def operations(build: Build, out: Path, force: bool) -> int:
    """Return the number of file operations in a whole build."""
    log = out.parent.parent / "count"

    def work() -> None:
        count_operations(out.parent, lambda number: log.write_text(str(number)))
        build(out, "new", force)

    code, said = in_child(work)
    assert code == 0, said
    return int(log.read_text())


def end_at(
    build: Build, out: Path, number: int, sent: signal.Signals, force: bool, with_second: bool
) -> dict[str, Any]:
    """End a build with a signal before its operation ``number``.

    If ``with_second`` is true, a second build to the same path runs just before the signal is sent.
    """
    seen = out.parent.parent / "second"
    seen.unlink(missing_ok=True)

    def now(at: int) -> None:
        if at != number:
            return
        if with_second:
            seen.write_text(json.dumps(in_child(lambda: build(out, "second", force))))
        os.kill(os.getpid(), sent)

    def work() -> None:
        count_operations(out.parent, now)
        build(out, "new", force)

    code, said = in_child(work)
    second = json.loads(seen.read_text()) if seen.exists() else None
    return {
        "at": number,
        "signal": sent.name,
        "force": force,
        "code": code,
        "said": said,
        "second": second,
    }


def cases(kind: str, total: Mapping[bool, int]) -> Iterator[tuple[int, signal.Signals, bool, bool]]:
    """Yield all cases. A case is an operation, a signal, whether an old bundle exists, and whether
    a second build runs.

    ``total`` maps False to the number of operations of a build without an old bundle, and True to
    the number for a build with an old bundle. For a fake build, every operation is combined with
    SIGKILL and with one other signal. For a real build, the signals arrive at 50 chosen operations.
    """
    if kind == "fake":
        for force in (False, True):
            for at in range(1, total[force] + 1):
                yield at, signal.SIGKILL, force, at % 2 == 0
                yield at, (signal.SIGINT, signal.SIGTERM)[at // 2 % 2], force, at % 2 == 1
        return
    ways = [*itertools.product(SIGNALS, (False, True), (False, True))]
    for i in range(50):
        sent, force, with_second = ways[i % len(ways)]
        yield 1 + i * (total[force] - 1) // 49, sent, force, with_second


def run(kind: str, folder: Path, build: Build, name_of: Callable[[Path], str]) -> None:
    """Run every case of ``cases``: start a build and end it with a signal.

    For each case, prints the name of the bundle that is at the output path after the signal, and
    the name after one more build.
    """
    out = folder / "out" / "bundle"
    old, parent = folder / "old", out.parent
    build(old, "old", False)
    parent.mkdir()
    # The second build replaces the first bundle.
    total = {force: operations(build, out, force) for force in (False, True)}
    for number, sent, force, with_second in cases(kind, total):
        shutil.rmtree(parent)
        parent.mkdir()
        for neighbour in NEIGHBOURS:
            (parent / neighbour).write_text("mine")
        if force:
            shutil.copytree(old, out)
        found = end_at(build, out, number, sent, force, with_second)
        found["stands"] = name_of(out) if out.exists() else None
        found["neighbours"] = [name for name in NEIGHBOURS if (parent / name).read_text() == "mine"]
        build(out, "next", True)
        found["stands_then"] = name_of(out)
        found["left"] = sorted({*os.listdir(parent)} - {*NEIGHBOURS, out.name})
        print(json.dumps(found | {"total": total[force]}), flush=True)


def real_build(checkpoint: Path) -> tuple[Build, Callable[[Path], str]]:
    """Return a function that builds a bundle from a checkpoint, and a function that returns the
    name of a bundle.

    Each name of a build gives a different canvas length, so the second function can find the name
    of a bundle. The graphs are traced once, before any build, because tracing is slow.
    """
    import torch
    from traces import trace_once

    import dlm_runtime
    from dlm_export import families
    from dlm_export.build import BuildOptions, build
    from dlm_export.checkpoints.folder import Checkpoint
    from dlm_export.families.base import Overrides
    from dlm_export.graph import trace

    torch.set_num_threads(1)
    trace.trace_pass = trace_once
    lengths = {"old": 64, "new": 65, "second": 66, "next": 67}
    for length in lengths.values():
        trace_once(
            families.read_network(Checkpoint(checkpoint), Overrides(max_canvas_length=length)),
            "fp32",
        )

    def run_build(out: Path, name: str, force: bool) -> None:
        options = BuildOptions(force=force, check_parity=False)
        build(checkpoint, out, options, overrides=Overrides(max_canvas_length=lengths[name]))

    def name_of(out: Path) -> str:
        with dlm_runtime.open(out, engine="none") as bundle:  # opening checks every hash
            return next(
                name for name, length in lengths.items() if length == bundle.max_canvas_length
            )

    return run_build, name_of


if __name__ == "__main__":
    chosen, where = sys.argv[1], Path(sys.argv[2])
    run(
        chosen,
        where,
        *((fake_build, fake_name) if chosen == "fake" else real_build(Path(sys.argv[3]))),
    )
