"""Tests of the runtime's records of verified files.

When the hash of a large file is right, the runtime stores a record. With a record, the runtime does
not hash the file again until the file changes. Damaged files must be rejected.

The tests forge a record, which says that a damaged file has the hash in the manifest. If the bundle
can be opened, the runtime trusted the record. Otherwise, the runtime hashed the file.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import dlm_runtime
from dlm_export.bundle.manifest import read_manifest
from dlm_runtime import BundleError, RequestError

LARGE = "large.bin"
BYTES = (16 << 20) + 1  # smaller files are always hashed
OFFSET = BYTES // 2
SETTLED_S = 2.1  # seconds; the runtime does not record a file that changed in the last two seconds
LISTED = ("ext2/ext3", "xfs", "btrfs", "f2fs", "overlayfs")  # file systems, as `stat -f` names them
is_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give files away")


@pytest.fixture
def bundle(llada_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bundle with a large file. $XDG_CACHE_HOME names an empty folder for the records."""
    copied = Path(shutil.copytree(llada_bundle, tmp_path / "bundle"))
    add_large_file(copied)
    (tmp_path / "cache").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("DLM_HASH_FILES", raising=False)
    return copied


def add_large_file(bundle: Path) -> None:
    content = b"\x5a" * BYTES
    (bundle / LARGE).write_bytes(content)
    manifest = json.loads((bundle / "manifest.json").read_text())
    manifest["files"][LARGE] = {"bytes": BYTES, "sha256": hashlib.sha256(content).hexdigest()}
    (bundle / "manifest.json").write_text(json.dumps(manifest))


@pytest.fixture
def recorded(bundle: Path, tmp_path: Path) -> Path:
    """A bundle whose large file has a record.

    The fixture waits until the file is old enough for a record. Then it opens the bundle, and the
    runtime writes the record.
    """
    kind = subprocess.run(
        ["stat", "-f", "-c", "%T", str(tmp_path)], check=True, capture_output=True, text=True
    ).stdout.strip()
    if kind not in LISTED:
        pytest.skip(f"files on {kind} are never recorded")
    time.sleep(SETTLED_S)
    open_bundle(bundle)
    assert record_of(bundle).is_file()
    return bundle


def open_bundle(bundle: Path) -> None:
    dlm_runtime.open(bundle, threads=1).close()


def is_refused(bundle: Path) -> bool:
    try:
        open_bundle(bundle)
    except BundleError as err:
        sentence = str(err)
    else:
        return False
    assert f"{LARGE}: its SHA-256 differs from the manifest's" in sentence
    return True


def folder_of(bundle: Path) -> Path:
    return bundle.parent / "cache" / "dlm-runtime"


def record_of(bundle: Path) -> Path:
    """Return the path at which file_check.cc stores the record of the large file."""
    found = (bundle / LARGE).stat()
    return folder_of(bundle) / f"{(found.st_dev + found.st_ino) & 0xFFFF:04x}"


def record_text(bundle: Path) -> str:
    """Return a record that says that the large file, as it is now, has the hash in the manifest."""
    found = (bundle / LARGE).stat()
    modified, changed = (divmod(ns, 10**9) for ns in (found.st_mtime_ns, found.st_ctime_ns))
    manifest = json.loads((bundle / "manifest.json").read_text())
    return (
        f"verified file 1\ndevice {found.st_dev}\ninode {found.st_ino}\nbytes {found.st_size}\n"
        f"modified {modified[0]}.{modified[1]:09}\nchanged {changed[0]}.{changed[1]:09}\n"
        f"sha256 {manifest['files'][LARGE]['sha256']}\n"
    )


def damage(bundle: Path) -> None:
    with (bundle / LARGE).open("r+b") as file:
        file.seek(OFFSET)
        file.write(b"!")


def forge(bundle: Path) -> Path:
    """Damage the large file, and write a record that says that the file's hash is right."""
    damage(bundle)
    folder_of(bundle).mkdir(mode=0o700, exist_ok=True)
    record = record_of(bundle)
    record.write_text(record_text(bundle))
    record.chmod(0o600)
    return record


# ---- Records, and the hashing that they save ----


def test_a_record_holds_the_state_of_the_file(recorded: Path) -> None:
    assert record_of(recorded).read_text() == record_text(recorded)
    assert stat.S_IMODE(record_of(recorded).stat().st_mode) == 0o600
    assert stat.S_IMODE(folder_of(recorded).stat().st_mode) == 0o700
    names = [path.name for path in folder_of(recorded).iterdir()]
    assert names == [record_of(recorded).name], "small files have no record, and no part is left"


def test_a_recorded_file_is_not_hashed(bundle: Path) -> None:
    forge(bundle)
    assert not is_refused(bundle)


def test_a_bundle_keeps_its_record_where_it_is_and_where_it_moves(
    recorded: Path, tmp_path: Path
) -> None:
    before = record_of(recorded).stat()
    open_bundle(recorded)
    assert record_of(recorded).stat().st_ino == before.st_ino, "the file was hashed again"
    moved = recorded.rename(tmp_path / "moved")
    open_bundle(moved)
    assert record_of(moved).stat().st_ino == before.st_ino, "the file was hashed again"
    record_of(moved).unlink()
    read_manifest(moved)
    assert record_of(moved).read_text() == record_text(moved), "checking a bundle records it"


@pytest.mark.parametrize("engine", ["none", "onnxruntime"])
def test_a_file_that_just_changed_is_not_recorded(bundle: Path, engine: str) -> None:
    # On a slow machine, the file may already be old enough for a record when it is opened. The test
    # therefore tries several times.
    for _ in range(10):
        (bundle / LARGE).touch()
        dlm_runtime.open(bundle, engine=engine, threads=1).close()
        if time.time() - (bundle / LARGE).stat().st_ctime < SETTLED_S:
            break
        shutil.rmtree(folder_of(bundle), ignore_errors=True)
    assert not folder_of(bundle).exists()


def test_a_bundle_that_is_only_checked_is_hashed_in_full(bundle: Path) -> None:
    forge(bundle)
    with pytest.raises(BundleError, match="SHA-256"):
        read_manifest(bundle)


def test_the_variable_makes_every_open_hash_all(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forge(bundle)
    monkeypatch.setenv("DLM_HASH_FILES", "always")
    assert is_refused(bundle)
    monkeypatch.setenv("DLM_HASH_FILES", "changed")
    assert not is_refused(bundle)


def test_another_value_of_the_variable_is_rejected(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DLM_HASH_FILES", "1")
    with pytest.raises(RequestError, match='"1"; set "changed" or "always"'):
        open_bundle(bundle)


def test_without_hashes_nothing_is_recorded(bundle: Path) -> None:
    time.sleep(SETTLED_S)
    dlm_runtime.open(bundle, threads=1, check_hashes=False).close()
    assert not folder_of(bundle).exists()


# ---- Changes of the file ----


def test_a_file_written_in_place_is_refused(recorded: Path) -> None:
    damage(recorded)
    assert is_refused(recorded)


def test_another_file_of_the_same_size_and_time_is_refused(recorded: Path) -> None:
    old = (recorded / LARGE).stat()
    content = bytearray((recorded / LARGE).read_bytes())
    content[OFFSET] ^= 1
    (recorded / "new").write_bytes(content)
    os.utime(recorded / "new", ns=(old.st_atime_ns, old.st_mtime_ns))
    (recorded / "new").replace(recorded / LARGE)
    assert is_refused(recorded)


def test_a_file_whose_time_was_set_back_is_refused(recorded: Path) -> None:
    old = (recorded / LARGE).stat()
    damage(recorded)
    os.utime(recorded / LARGE, ns=(old.st_atime_ns, old.st_mtime_ns))
    found = (recorded / LARGE).stat()
    assert (found.st_ino, found.st_mtime_ns) == (old.st_ino, old.st_mtime_ns)
    assert is_refused(recorded)


def test_a_file_written_through_a_hard_link_is_refused(recorded: Path, tmp_path: Path) -> None:
    (tmp_path / "link").hardlink_to(recorded / LARGE)
    open_bundle(recorded)  # making the link changed the file's change time
    with (tmp_path / "link").open("r+b") as file:
        file.write(b"!")
    assert is_refused(recorded)


def test_a_file_written_through_a_mapping_is_refused(recorded: Path) -> None:
    with (recorded / LARGE).open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        mapped[OFFSET] = 0x21
        assert is_refused(recorded)


def test_a_page_that_was_dirty_before_the_record_is_not_written_unseen(
    recorded: Path,
) -> None:
    """A page of a mapped file is dirty if it was written but not yet flushed to disk.

    Further writes to a dirty page do not change the file's modification time. The runtime must
    therefore flush a file to disk before it records the file.
    """
    with (recorded / LARGE).open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        mapped[OFFSET] = 0x5A  # this byte does not change the content of the file
        time.sleep(SETTLED_S)
        open_bundle(recorded)
        assert record_of(recorded).read_text() == record_text(recorded)
        mapped[OFFSET] = 0x21
        assert is_refused(recorded)


def test_files_in_memory_are_not_recorded(llada_bundle: Path, bundle: Path) -> None:
    shared = Path("/dev/shm")
    if (
        "tmpfs"
        not in subprocess.run(
            ["stat", "-f", "-c", "%T", str(shared)], check=False, capture_output=True, text=True
        ).stdout
    ):
        pytest.skip("/dev/shm is not a tmpfs")
    copied = shared / f"dlm-test-{os.getpid()}"
    try:
        shutil.copytree(bundle, copied)
        time.sleep(SETTLED_S)
        open_bundle(copied)
        assert not folder_of(bundle).exists()
    finally:
        shutil.rmtree(copied, ignore_errors=True)


# ---- Hostile records ----


def _truncate(record: Path) -> None:
    os.truncate(record, record.stat().st_size - 1)


def _extend(record: Path) -> None:
    record.write_text(record.read_text() + "\n" * 1000)


def _binary(record: Path) -> None:
    record.write_bytes(bytes(range(256)) * 16)


def _let_others_write(record: Path) -> None:
    record.chmod(0o602)


def _let_the_group_write(record: Path) -> None:
    record.chmod(0o620)


def _let_others_write_the_folder(record: Path) -> None:
    record.parent.chmod(0o777)


def _link(record: Path) -> None:
    target = record.rename(record.with_name("elsewhere"))
    record.symlink_to(target)


def _link_the_folder(record: Path) -> None:
    target = record.parent.rename(record.parent.with_name("elsewhere"))
    record.parent.symlink_to(target)


def _pipe(record: Path) -> None:
    record.unlink()
    os.mkfifo(record, 0o600)


def _folder(record: Path) -> None:
    record.unlink()
    record.mkdir()


def _make_in_the_future(record: Path) -> None:
    """Set the record's modification time to one hour from now."""
    ahead = time.time() + 3600
    os.utime(record, (ahead, ahead))


def _give_away(record: Path) -> None:
    os.chown(record, 12345, -1)


def _give_the_folder_away(record: Path) -> None:
    os.chown(record.parent, 12345, -1)


@pytest.mark.parametrize(
    "spoil",
    [
        _truncate,
        _extend,
        _binary,
        _let_others_write,
        _let_the_group_write,
        _let_others_write_the_folder,
        _link,
        _link_the_folder,
        _pipe,
        _folder,
        _make_in_the_future,
        pytest.param(_give_away, marks=is_root),
        pytest.param(_give_the_folder_away, marks=is_root),
    ],
)
def test_a_record_that_cannot_be_trusted_is_ignored(
    bundle: Path, spoil: Callable[[Path], None]
) -> None:
    record = forge(bundle)
    assert not is_refused(bundle)
    spoil(record)
    assert is_refused(bundle)


@pytest.mark.parametrize(
    ("field", "value"),
    [("device", "1"), ("inode", "1"), ("bytes", "1"), ("modified", "1.0"), ("changed", "1.0")],
)
def test_a_record_of_another_state_is_ignored(bundle: Path, field: str, value: str) -> None:
    record = forge(bundle)
    lines = record.read_text().splitlines(keepends=True)
    changed = [f"{field} {value}\n" if line.startswith(f"{field} ") else line for line in lines]
    assert changed != lines
    record.write_text("".join(changed))
    assert is_refused(bundle)


def test_a_record_of_another_hash_does_not_refuse_a_right_file(recorded: Path) -> None:
    record = record_of(recorded)
    record.write_text(record.read_text().replace("sha256 ", "sha256 f")[:-2] + "\n")
    open_bundle(recorded)
    assert record.read_text() == record_text(recorded), "the wrong record was not replaced"


@pytest.mark.parametrize("spoil", [_let_others_write, _link, _make_in_the_future])
def test_a_bad_record_is_replaced(recorded: Path, spoil: Callable[[Path], None]) -> None:
    spoil(record_of(recorded))
    open_bundle(recorded)
    found = record_of(recorded).lstat()
    assert record_of(recorded).read_text() == record_text(recorded)
    assert (stat.S_IFMT(found.st_mode), stat.S_IMODE(found.st_mode)) == (stat.S_IFREG, 0o600)
    assert found.st_uid == os.geteuid()
    assert found.st_mtime <= time.time()


# ---- Records that cannot be stored ----


OPEN = """
import sys, dlm_runtime
dlm_runtime.open(sys.argv[1], threads=1).close()
"""


@pytest.mark.parametrize(
    "variables",
    [{}, {"HOME": "/proc"}, {"HOME": "", "XDG_CACHE_HOME": "relative"}],
    ids=["none", "read-only", "relative"],
)
def test_a_bundle_opens_without_a_place_for_records(
    bundle: Path, tmp_path: Path, variables: dict[str, str]
) -> None:
    time.sleep(SETTLED_S)
    (tmp_path / "relative").mkdir(mode=0o700)  # records are not stored under a relative path
    kept = {name: value for name, value in os.environ.items() if "HOME" not in name}
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", OPEN, str(bundle)],
            env=kept | variables,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
    assert list((tmp_path / "relative").iterdir()) == []


def test_the_cache_directory_is_found_below_home(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    open_bundle(recorded)
    (record,) = (tmp_path / ".cache" / "dlm-runtime").iterdir()
    assert record.read_text() == record_text(recorded)


@is_root
@pytest.mark.parametrize("variable", ["HOME", "XDG_CACHE_HOME"])
def test_nothing_is_made_in_a_folder_of_somebody_else(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    os.chown(home, 12345, -1)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv(variable, str(home))
    open_bundle(recorded)
    assert list(home.iterdir()) == []
