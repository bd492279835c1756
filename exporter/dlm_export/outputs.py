"""Writes output atomically: it is claimed while it is made, then moved into place in one step.

While a process writes ``NAME``, the folder ``.NAME.dlm-export`` beside it is the claim. It contains
the unfinished output and ``owner``, a file with the process's number, which is locked (flock) as
long as the process lives. If the process is killed, the lock ends but the folder stays. The next
process that writes ``NAME`` can therefore tell abandoned claims from active ones, and clears them.

The move uses renameat2(2): RENAME_NOREPLACE for new output, RENAME_EXCHANGE to replace old output.
The path thus always has either the old or the new output; the old one is then deleted from the
claim.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from dlm_runtime.errors import DlmError, ExitCode

OWNER, NEW, OLD = "owner", "new", "old"
"""Entries of a claim: the locked file, the unfinished output, and the replaced output if it could
not be exchanged.
"""

_AT_FDCWD = -100
_NOREPLACE, _EXCHANGE = 1, 2  # linux/fs.h
# The kernel or the file system lacks renameat2.
_NOT_OFFERED = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)
_LIBC = ctypes.CDLL(None, use_errno=True)

_Look = dict[str, tuple[int, ...]]


class OutputError(DlmError):
    """Output cannot be written: no space, no permission, or another process is writing it."""


class TakenError(OutputError):
    """The existing output must not be replaced."""

    exit_code = ExitCode.WRONG_INPUT


@contextlib.contextmanager
def claimed(
    output: Path, *, force: bool, kept_because: Callable[[Path], str | None], needed_bytes: int = 0
) -> Iterator[Path]:
    """Yield a path for a new file or folder, which becomes ``output`` if the block succeeds, and is
    deleted otherwise.

    Args:
        output: Final path.
        force: Replace existing output.
        kept_because: Says why an existing path must never be replaced, or ``None`` if ``force`` may
            replace it.
        needed_bytes: Disk space to check for.

    Raises:
        TakenError: Existing output must not be replaced.
        OutputError: Another process is writing there, the disk is full or fails, or the existing
            output changed meanwhile; it is then left alone.
    """
    output = Path(os.path.abspath(output))
    _check(output, force, kept_because)
    missing = [parent for parent in output.parents if not os.path.lexists(parent)]
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(output.parent).free
    except OSError as err:
        is_wrong = isinstance(err, (FileExistsError, NotADirectoryError))  # a file is in the way
        raise (TakenError if is_wrong else OutputError)(
            f"{output}: cannot write there ({err.strerror})"
        ) from err
    with contextlib.ExitStack() as held:
        held.callback(_remove_empty, missing)
        if free < needed_bytes:
            raise OutputError(
                f"{output}: needs {needed_bytes:,} bytes of disk, only {free:,} are free"
            )
        claim = held.enter_context(_claim(output))
        # Check again under the claim, which may have restored output after a kill.
        _check(output, force, kept_because)
        try:
            before = _look(output)
            if output.is_dir():
                held.enter_context(locked(output))
            new = claim / NEW / output.name
            new.parent.mkdir()
            yield new
            _place(new, output, before)
        except OSError as err:
            if err.errno in (errno.ENOSPC, errno.EDQUOT):
                needed = f"; {needed_bytes:,} bytes are needed" if needed_bytes else ""
                raise OutputError(
                    f"{output}: the disk is full{needed}. Nothing was left behind."
                ) from err
            raise OutputError(f"{output}: cannot write ({err})") from err


def claimed_file(output: Path, *, force: bool) -> contextlib.AbstractContextManager[Path]:
    """``claimed`` for a file; ``force`` allows replacing a file, but nothing else."""
    return claimed(
        output,
        force=force,
        kept_because=lambda path: (
            None if stat.S_ISREG(path.lstat().st_mode) else "is not a plain file"
        ),
    )


def check_outside(output: Path, *sources: Path) -> None:
    """Raises TakenError if ``output`` is one of the ``sources`` or inside one; follows links."""
    for source in sources:
        wanted, read = output.resolve(), source.resolve()
        if wanted == read:
            raise TakenError(f"{output}: is the source that is read; choose another path")
        if read in wanted.parents:
            raise TakenError(
                f"{output}: is inside {source}, which is only read, never written; choose a path outside it"
            )


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Yield a path beside ``path`` to write, which replaces ``path`` if the block succeeds. For our
    own files only.
    """
    new = path.with_name(f"{path.name}.new")
    try:
        new.unlink(missing_ok=True)  # a symbolic link there would be followed
        yield new
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a bundle's folder, so that no other process changes or replaces it. Raises OutputError
    if it is locked.
    """
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as err:
        os.close(held)
        raise OutputError(
            f"{folder}: another dlm-export is changing it. Wait for it, and try again."
        ) from err
    except OSError:  # a file system without locks; changes are detected when moving
        pass
    try:
        if not os.path.samestat(os.fstat(held), os.stat(folder)):
            raise OutputError(f"{folder}: another process has just replaced it. Try again.")
        yield
    finally:
        os.close(held)


def _check(output: Path, force: bool, kept_because: Callable[[Path], str | None]) -> None:
    if not os.path.lexists(output):
        return
    why = kept_because(output)
    if why is not None:
        raise TakenError(f"{output} {why}, so it is never replaced. Choose another name.")
    if not force:
        raise TakenError(f"{output} exists. Pass --force to replace it, or choose another name.")


def _remove_empty(folders: Iterable[Path]) -> None:
    with contextlib.suppress(OSError):
        for folder in folders:
            folder.rmdir()


# ---- The claim ----


@contextlib.contextmanager
def _claim(output: Path) -> Iterator[Path]:
    """Hold the claim of ``output``, cleared of a killed process's leftovers, within the block."""
    claim = output.with_name(f".{output.name}.dlm-export")
    try:
        owner = _take(claim, output)
    except OSError as err:
        raise OutputError(f"{output}: cannot write there ({err.strerror})") from err
    try:
        if os.path.lexists(claim / OLD) and not os.path.lexists(output):
            # An earlier process was killed between the two renames of ``_exchange``.
            os.rename(claim / OLD, output)
        _clear(claim, NEW, OLD)
        yield claim
    finally:
        _clear(claim, NEW)  # old output that could not be restored stays, as the message says
        if not os.path.lexists(claim / OLD):
            os.unlink(claim / OWNER)  # last, because a folder without it is never cleared
            with contextlib.suppress(OSError):  # another process is using it already
                os.rmdir(claim)
        os.close(owner)


def _take(claim: Path, output: Path) -> int:
    """Create the claim, or take over an abandoned one; returns ``owner``, open and locked. Raises
    OutputError, OSError.
    """
    while True:
        try:
            os.mkdir(claim, 0o700)
            is_new = True
        except FileExistsError:
            is_new = False
        try:
            is_ours = stat.S_ISDIR(os.lstat(claim).st_mode) and OWNER in (
                os.listdir(claim) or [OWNER]
            )
            if not is_ours:
                raise OutputError(
                    f"{claim} is in the way and does not belong to dlm-export: move it elsewhere"
                )
            owner = os.open(
                claim / OWNER, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
            )
        except FileNotFoundError:
            continue  # its owner has finished and removed it
        try:
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as err:
            process = os.pread(owner, 20, 0).decode("ascii", "replace")
            os.close(owner)
            who = f"process {process}" if process.isdigit() else "another process"
            raise OutputError(
                f"{output}: {who} is writing it. Wait for it, or choose another name."
            ) from err
        except OSError as err:
            # No locks, as on some network file systems. Only one process can create a claim, but an
            # existing one may be active or abandoned, so it is not cleared.
            if not is_new:
                os.close(owner)
                raise OutputError(
                    f"{output}: another process is writing it, or was killed; {claim.parent} has no locks to tell which. "
                    f"If no process is writing it, remove {claim}."
                ) from err
        try:
            if os.path.samestat(os.fstat(owner), os.stat(claim / OWNER)):
                os.ftruncate(owner, 0)
                os.pwrite(owner, str(os.getpid()).encode(), 0)
                return owner
        except FileNotFoundError:
            pass
        os.close(owner)  # the claim was removed before it was locked


def _clear(claim: Path, *names: str) -> None:
    """Remove unfinished or replaced output from a claim, and nothing else."""
    for path in (claim / name for name in names):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


# ---- The move ----


def _place(new: Path, output: Path, before: _Look | None) -> None:
    """Move ``new`` to ``output``, if that is still in the state ``before``; the replaced output is
    then at ``new``.

    Raises OutputError if other output is there, which stays.
    """
    lost = f"{output}: another process wrote there meanwhile. Its output was left alone, and the new one was discarded."
    if not os.path.lexists(output):
        before = None  # the old output was deleted on purpose
    if before is None:
        try:
            _move(new, output)
        except FileExistsError as err:
            raise OutputError(lost) from err
        return
    if _look(output) != before:
        raise OutputError(lost)
    ours = os.lstat(new)
    try:
        _exchange(new, output)
    finally:  # also after Ctrl-C: the replaced output is deleted soon
        if not os.path.samestat(os.lstat(new), ours) and _look(new) != before:
            _exchange(new, output)
            raise OutputError(lost)


def _move(source: Path, to: Path) -> None:
    """Rename to a path that does not exist. Raises FileExistsError."""
    try:
        _renameat2(source, to, _NOREPLACE)
    except OSError as err:
        if err.errno not in _NOT_OFFERED:
            raise
        # Next best: renaming a folder can replace only an empty folder; for a file there is a short
        # race.
        if os.path.lexists(to):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(to)) from err
        os.rename(source, to)


def _exchange(source: Path, to: Path) -> None:
    """Exchange two paths."""
    try:
        _renameat2(source, to, _EXCHANGE)
    except OSError as err:
        if err.errno not in _NOT_OFFERED:
            raise
        # Two renames, between which the path does not exist. After a kill there, the next claim
        # restores it.
        aside = source.parent.with_name(OLD)
        try:
            os.rename(to, aside)
            os.rename(source, to)
        finally:  # also after Ctrl-C between the renames
            if os.path.lexists(aside):
                os.rename(aside, to if os.path.lexists(source) else source)


def _renameat2(source: Path, to: Path, flags: int) -> None:
    """renameat2(2), in glibc since 2.28. Raises OSError; ENOSYS if the C library lacks it."""
    try:
        function = _LIBC.renameat2
    except AttributeError:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS)) from None
    if function(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(to), ctypes.c_uint(flags)):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(source), None, str(to))


def _look(path: Path) -> _Look | None:
    """The state of a path: identity, size and time of its files, or ``None`` if it does not exist."""
    if not os.path.lexists(path):
        return None
    found = {"": _mark(path)}
    for folder, folders, files in os.walk(path):
        for name in (*folders, *files):
            each = os.path.join(folder, name)
            found[os.path.relpath(each, path)] = _mark(each)
    return found


def _mark(path: str | Path) -> tuple[int, ...]:
    found = os.lstat(path)
    which = (found.st_dev, found.st_ino)
    return which if stat.S_ISDIR(found.st_mode) else (*which, found.st_size, found.st_mtime_ns)
