"""Tests of how commands write their output paths.

No file may be lost, even if another process writes to the output path or a build is killed.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from interrupted import fake_build, fake_name, in_child

from dlm_export import outputs
from dlm_export.bundle.folder import staged
from dlm_export.outputs import OutputError, TakenError, claimed_file, locked
from dlm_runtime.errors import ExitCode

SCRIPT = Path(__file__).parent / "interrupted.py"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "bundle"


def _no_renameat2(*_: object) -> None:
    raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


@pytest.fixture(params=["renameat2", "two renames"])
def either_move(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the test twice: with renameat2, and with two renames instead.

    Two renames are used on file systems that do not support the flags of renameat2.
    """
    if request.param == "two renames":
        monkeypatch.setattr(outputs, "_renameat2", _no_renameat2)


# ---- Another process writes to the output path ----


def _loses() -> Any:
    return pytest.raises(OutputError, match="another process wrote there")


def _put_folder(out: Path) -> None:
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")


def _put_file(out: Path) -> None:
    out.write_text("years of work")


@pytest.mark.usefixtures("either_move")
@pytest.mark.parametrize("force", [False, True], ids=["fresh", "force"])
@pytest.mark.parametrize("put", [_put_folder, _put_file])
def test_what_appears_at_the_output_during_a_build_is_left_alone(
    out: Path, put: Callable[[Path], None], force: bool
) -> None:
    with _loses(), staged(out, force=force, needed_bytes=0) as folder:
        (folder / "new").touch()
        put(out)
    assert (out / "thesis.tex" if out.is_dir() else out).read_text() == "years of work"
    assert os.listdir(out.parent) == ["bundle"]


def _add_a_file(out: Path) -> None:
    (out / "notes.txt").write_text("mine")


def _rewrite_a_file(out: Path) -> None:
    (out / "denoiser.onnx").write_text("another graph")


def _replace_the_folder(out: Path) -> None:
    out.rename(out.parent / "moved")
    shutil.copytree(out.parent / "moved", out)


@pytest.mark.usefixtures("either_move")
@pytest.mark.parametrize("change", [_add_a_file, _rewrite_a_file, _replace_the_folder])
def test_a_bundle_that_changes_during_its_replacement_is_left_alone(
    out: Path, change: Callable[[Path], None]
) -> None:
    fake_build(out, "old", False)
    with _loses(), staged(out, force=True, needed_bytes=0) as folder:
        (folder / "new").touch()
        change(out)
        kept = {path.name: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert {path.name: path.read_bytes() for path in out.rglob("*") if path.is_file()} == kept
    assert not {*os.listdir(out.parent)} - {"bundle", "moved"}


@pytest.mark.usefixtures("either_move")
def test_what_comes_between_the_last_look_and_the_exchange_is_put_back(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_build(out, "old", False)
    exchange = outputs._exchange

    def late(source: Path, to: Path) -> None:
        (out / "notes.txt").write_text("mine")
        exchange(source, to)

    monkeypatch.setattr(outputs, "_exchange", late)
    with _loses():
        fake_build(out, "new", True)
    assert (out / "notes.txt").read_text() == "mine"
    assert "old" in (out / "manifest.json").read_text()


@pytest.mark.usefixtures("either_move")
def test_a_bundle_that_goes_away_during_its_replacement_is_not_missed(out: Path) -> None:
    fake_build(out, "old", False)
    with staged(out, force=True, needed_bytes=0) as folder:
        shutil.rmtree(out)
        (folder / "new").touch()
    assert os.listdir(out) == ["new"]


@pytest.mark.usefixtures("either_move")
@pytest.mark.parametrize("has_old", [False, True])
def test_an_empty_folder_or_a_bundle_is_replaced_with_force(out: Path, has_old: bool) -> None:
    if has_old:
        fake_build(out, "old", False)
    else:
        out.mkdir()
    fake_build(out, "new", True)
    assert fake_name(out) == "new"
    assert os.listdir(out.parent) == ["bundle"]


@pytest.mark.parametrize("name", ["notes.txt", "engines/notes.txt", "old.safetensors"])
def test_a_bundle_with_files_that_are_not_its_own_is_never_replaced(out: Path, name: str) -> None:
    fake_build(out, "old", False)
    (out / name).write_text("mine")
    with pytest.raises(
        TakenError,
        match=f"contains '{name}', which does not belong to the bundle, so it is never replaced",
    ):
        fake_build(out, "new", True)
    assert (out / name).read_text() == "mine"


def test_files_that_are_no_plain_files_are_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "folder.npz").mkdir()
    (tmp_path / "link.npz").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(tmp_path / "pipe.npz")
    for name in ("folder", "link", "pipe"):
        for force in (False, True):
            with (
                pytest.raises(TakenError, match="is not a plain file, so it is never replaced"),
                claimed_file(tmp_path / f"{name}.npz", force=force),
            ):
                pass


def test_folders_above_an_output_are_made_and_go_again_with_it(tmp_path: Path) -> None:
    out = tmp_path / "a" / "b" / "bundle"
    with pytest.raises(KeyboardInterrupt), staged(out, force=False, needed_bytes=0):
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == []
    fake_build(out, "new", False)
    assert os.listdir(tmp_path / "a" / "b") == ["bundle"]


# ---- Two builds at the same time ----


@pytest.mark.parametrize("force", [False, True])
def test_a_second_build_to_the_same_path_is_refused_before_it_starts(
    out: Path, force: bool
) -> None:
    with staged(out, force=False, needed_bytes=0) as folder:
        code, said = in_child(lambda: fake_build(out, "second", force))
        assert (code, said) == (
            1,
            f"{out}: process {os.getpid()} is writing it. Wait for it, or choose another name.",
        )
        (folder / "first").touch()
    assert os.listdir(out) == ["first"]
    assert os.listdir(out.parent) == ["bundle"]


def test_files_are_claimed_as_bundles_are(tmp_path: Path) -> None:
    path = tmp_path / "golden.npz"
    with claimed_file(path, force=False) as new:
        new.write_text("first")
        with (
            pytest.raises(OutputError, match=f"process {os.getpid()} is writing it"),
            claimed_file(path, force=True),
        ):
            pytest.fail("claimed twice")
    assert path.read_text() == "first"
    with pytest.raises(TakenError, match="Pass --force"), claimed_file(path, force=False):
        pass
    with claimed_file(path, force=True) as new:
        new.write_text("second")
    assert path.read_text() == "second"
    assert os.listdir(tmp_path) == ["golden.npz"]


def test_a_bundle_whose_engines_are_being_changed_is_not_replaced(out: Path) -> None:
    fake_build(out, "old", False)
    with locked(out), pytest.raises(OutputError, match="another dlm-export is changing it"):
        fake_build(out, "new", True)
    assert fake_name(out) == "old"
    with staged(out, force=True, needed_bytes=0) as folder:
        with pytest.raises(OutputError, match="another dlm-export is changing it"), locked(out):
            pass
        (folder / "new").touch()
    assert os.listdir(out) == ["new"]


# ---- Files of a killed build ----


def _leave(out: Path, name: str = "old") -> Path:
    """Start a build and kill it.

    The build leaves a claim file, which reserves the output path, and a folder with the unfinished
    output.
    """

    def work() -> None:
        with staged(out, force=True, needed_bytes=0) as folder:
            (folder / name).touch()
            os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(work)[0] == -signal.SIGKILL
    claim = out.with_name(f".{out.name}.dlm-export")
    assert {*os.listdir(claim)} == {"owner", "new"}
    return claim


def test_what_a_kill_left_is_cleared_by_the_next_build_to_that_path_alone(out: Path) -> None:
    claim = _leave(out)
    fake_build(out.with_name("other"), "other", False)
    assert claim.exists()
    fake_build(out, "new", False)
    assert {*os.listdir(out.parent)} == {"bundle", "other"}


def test_a_folder_in_the_claims_place_that_is_not_ours_is_left_alone(out: Path) -> None:
    claim = out.with_name(".bundle.dlm-export")
    claim.mkdir()
    (claim / "thesis.tex").write_text("years of work")
    with pytest.raises(
        OutputError, match=r"\.bundle\.dlm-export is in the way and does not belong to dlm-export"
    ):
        fake_build(out, "new", False)
    assert os.listdir(claim) == ["thesis.tex"]
    shutil.rmtree(claim)
    claim.symlink_to(out.parent / "nowhere")
    with pytest.raises(OutputError, match="is in the way"):
        fake_build(out, "new", False)


def test_nothing_is_cleared_where_the_file_system_has_no_locks(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = _leave(out)

    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with pytest.raises(
        OutputError,
        match=f"has no locks to tell which. If no process is writing it, remove {claim}",
    ):
        fake_build(out, "new", False)
    assert {*os.listdir(claim)} == {"owner", "new"}
    shutil.rmtree(claim)
    fake_build(out, "new", False)
    fake_build(out, "newer", True)
    assert fake_name(out) == "newer"
    assert os.listdir(out.parent) == ["bundle"]


@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_kill_between_two_renames_is_mended_by_the_next_build(
    out: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    """Some file systems cannot exchange two paths. The old bundle is then moved aside first.

    For a moment, the output path does not exist.
    """
    fake_build(out, "old", False)
    monkeypatch.setattr(outputs, "_renameat2", _no_renameat2)
    rename, calls = os.rename, []

    def killed(source: Path, to: Path) -> None:
        calls.append(to)
        if len(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        rename(source, to)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", killed)
        assert in_child(lambda: fake_build(out, "new", True))[0] == -signal.SIGKILL
    assert out.exists() == (call != 2)
    with pytest.raises(TakenError, match="Pass --force"):
        fake_build(out, "next", False)
    assert fake_name(out) == ("new" if call == 3 else "old")
    fake_build(out, "next", True)
    assert os.listdir(out.parent) == ["bundle"]


def _check(found: dict[str, Any]) -> None:
    """Check what ``interrupted.run`` found after one interrupted build."""
    sent, second = signal.Signals[found["signal"]], found["second"]
    assert found["code"] == -sent, found
    old = "old" if found["force"] else None
    if second is not None and second[0] == 0:
        # The second build succeeded, so the first build had not yet claimed the path, or was done.
        assert found["stands"] == "second", found
    else:
        assert found["stands"] in (old, "new"), found
        assert second is None or second[0] in (ExitCode.COULD_NOT, ExitCode.WRONG_INPUT), found
        assert (
            second is None
            or "is writing it" in second[1]
            or "exists" in second[1]
            or "changing it" in second[1]
        ), found
    assert len(found["neighbours"]) == 3, found
    assert (found["stands_then"], found["left"]) == ("next", []), found


def _ended_builds(*arguments: object) -> list[dict[str, Any]]:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_build_that_a_signal_ends_at_any_file_operation_leaves_the_old_bundle_or_the_new(
    tmp_path: Path,
) -> None:
    found = _ended_builds("fake", tmp_path)
    for each in found:
        _check(each)
    for force in (False, True):
        mine = [each for each in found if each["force"] == force]
        assert {each["at"] for each in mine} == {*range(1, mine[0]["total"] + 1)}
        assert {each["stands"] for each in mine} == {"old" if force else None, "new", "second"}
    assert len({(each["at"], each["force"]) for each in found}) >= 50


@pytest.mark.parametrize("is_failing", [False, True])
def test_ctrl_c_while_a_path_is_claimed_leaves_nothing_behind(
    out: Path, monkeypatch: pytest.MonkeyPatch, is_failing: bool
) -> None:
    lock = fcntl.flock

    def interrupted(held: int, operation: int) -> None:
        lock(held, operation)
        signal.raise_signal(signal.SIGINT)
        if is_failing:
            (out.parent / ".bundle.dlm-export" / "owner").unlink()
            (out.parent / ".bundle.dlm-export").rmdir()
            raise BlockingIOError

    monkeypatch.setattr(fcntl, "flock", interrupted)
    assert in_child(lambda: fake_build(out, "new", False)) == (-signal.SIGINT, "")
    assert os.listdir(out.parent) == []


@pytest.mark.slow
def test_a_real_build_ended_at_50_points_leaves_the_old_bundle_or_the_new(
    tmp_path: Path, llada_checkpoint: Path
) -> None:
    found = _ended_builds("real", tmp_path, llada_checkpoint)
    assert len(found) == 50
    for each in found:
        _check(each)
    assert {each["stands"] for each in found} == {None, "old", "new", "second"}
