"""Writes files and folders atomically, with a temporary folder and a final move in one step.

While a process writes ``NAME``, it owns a temporary folder ``.NAME.dlm-export`` beside ``NAME``.
This folder is called the claim. The claim contains the unfinished output, and a file ``owner`` with
the process number. The process locks ``owner`` (flock) until it exits. If the process is killed,
the system releases the lock, but the claim remains. The next process that writes ``NAME`` sees that
``owner`` is not locked. It then takes over the claim and deletes the unfinished output.

The process moves the finished output with renameat2(2). The flag is RENAME_NOREPLACE if the path
does not exist, and RENAME_EXCHANGE if old output is replaced. The path therefore always contains
either the old output or the complete new output. After an exchange, the old output is in the claim,
and the process deletes it.
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

from dlm_export.signals import postponed
from dlm_runtime.errors import DlmError, ExitCode

OWNER, NEW, OLD = "owner", "new", "old"
"""Names of the entries of a claim.

``owner`` is the locked file. ``new`` is the folder of the unfinished output. ``old`` is the
replaced output. The entry ``old`` exists only on file systems that cannot exchange two paths.
"""

_AT_FDCWD = -100
_NOREPLACE, _EXCHANGE = 1, 2  # flags of renameat2, from linux/fs.h
# The error codes that mean that the kernel or the file system does not support renameat2.
_NOT_OFFERED = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)
_LIBC = ctypes.CDLL(None, use_errno=True)

_Look = dict[str, tuple[int, ...]]


class OutputError(DlmError):
    """Raised if output cannot be written, for example because the disk is full.

    Also raised if another process is writing the same output.
    """


class TakenError(OutputError):
    """Raised if the output path exists, and its content must not be replaced."""

    exit_code = ExitCode.WRONG_INPUT


@contextlib.contextmanager
def claimed(
    output: Path, *, force: bool, kept_because: Callable[[Path], str | None], needed_bytes: int = 0
) -> Iterator[Path]:
    """Yield a path where the caller's ``with`` block writes a new file or folder.

    If the ``with`` block succeeds, the new file or folder becomes ``output``. Otherwise, the new
    file or folder is deleted.

    Args:
        output: Final path.
        force: Replace existing output.
        kept_because: A function of an existing path. It returns the reason why the path must never
            be replaced, or ``None`` if ``force`` may replace the path.
        needed_bytes: Disk space that must be free.

    Raises:
        TakenError: ``output`` exists and must not be replaced.
        OutputError: Another process is writing ``output``, or the disk is full or fails. This error
            is also raised if another process changes ``output`` during the ``with`` block. In this
            case, the changed ``output`` is kept.
    """
    output = Path(os.path.abspath(output))
    _check(output, force, kept_because)
    missing = [parent for parent in output.parents if not os.path.lexists(parent)]
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(output.parent).free
    except OSError as err:
        # True if a parent folder of the path is a file.
        is_wrong = isinstance(err, (FileExistsError, NotADirectoryError))
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
        # Check the path again. If this process took over the claim of a killed process, it may have
        # moved the old output back to this path.
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
    """Like ``claimed``, but for a single file. ``force`` replaces regular files only."""
    return claimed(
        output,
        force=force,
        kept_because=lambda path: (
            None if stat.S_ISREG(path.lstat().st_mode) else "is not a plain file"
        ),
    )


def check_outside(output: Path, *sources: Path) -> None:
    """Raise TakenError if ``output`` is one of ``sources`` or lies inside one of them.

    Symbolic links are followed.
    """
    for source in sources:
        wanted, read = output.resolve(), source.resolve()
        if wanted == read:
            raise TakenError(f"{output}: is the source that is read; choose another path")
        if read in wanted.parents:
            raise TakenError(
                f"{output}: is inside {source}, which must not be changed; choose a path outside it"
            )


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Yield a temporary path. If the ``with`` block succeeds, the new file replaces ``path``.

    An existing ``path`` is replaced without any check. Use this function only for files that
    dlm-export created.
    """
    new = path.with_name(f"{path.name}.new")
    try:
        new.unlink(missing_ok=True)  # a symbolic link at this path would redirect the output
        yield new
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a bundle's folder, so that no other process changes or replaces it.

    Raises OutputError if another process has locked the folder.
    """
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as err:
        os.close(held)
        raise OutputError(
            f"{folder}: another dlm-export is changing it. Wait for it, and try again."
        ) from err
    # Continue if the file system has no locks, because ``_place`` still detects changes by other
    # processes.
    except OSError:
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
    """Take the claim (temporary folder) of ``output`` for the ``with`` block, and yield its path.

    Before the block, files that a killed process left in the claim are removed.
    """
    claim = output.with_name(f".{output.name}.dlm-export")
    owner = None
    try:
        try:
            # A signal that arrives before ``owner`` is set would leave the claim behind.
            with postponed():
                owner = _take(claim, output)
        except OSError as err:
            raise OutputError(f"{output}: cannot write there ({err.strerror})") from err
        if os.path.lexists(claim / OLD) and not os.path.lexists(output):
            # Restore the old output. An earlier process was killed between the two renames of
            # ``_exchange``.
            os.rename(claim / OLD, output)
        _clear(claim, NEW, OLD)
        yield claim
    finally:
        if owner is not None:
            with postponed():
                _release(claim, owner)


def _take(claim: Path, output: Path) -> int:
    """Create the claim (temporary folder), or take over the claim of a process that was killed.

    Returns the descriptor of the file ``owner``, which is open and locked. Raises OutputError or
    OSError.
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
            continue  # the other process has finished and removed the claim
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
            # Some network file systems have no locks. Creating a new claim is still safe, because
            # only one process can create the folder. Taking over an existing claim is not safe,
            # because its owner may still be running.
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
        os.close(owner)  # try again: another process removed the claim before it was locked


def _release(claim: Path, owner: int) -> None:
    """Delete a claim, whose file ``owner`` this process has locked."""
    # Do not delete the entry "old". If this entry exists, the old output could not be moved back to
    # its path, and the entry is the user's only copy.
    _clear(claim, NEW)
    if not os.path.lexists(claim / OLD):
        # Remove "owner" after all other entries, because no process deletes the entries of a claim
        # that contains no "owner".
        os.unlink(claim / OWNER)
        with contextlib.suppress(OSError):  # raised if another process already uses the claim
            os.rmdir(claim)
    os.close(owner)


def _clear(claim: Path, *names: str) -> None:
    """Delete the entries ``names`` of a claim if they exist."""
    for path in (claim / name for name in names):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


# ---- The move ----


def _place(new: Path, output: Path, before: _Look | None) -> None:
    """Move ``new`` to ``output``, unless another process has changed ``output``.

    ``before`` is the result of an earlier call of ``_look(output)``. If ``_look(output)`` now
    returns a different result, the function raises OutputError, and leaves ``output`` in place.
    Otherwise, existing output is moved to the path ``new``.
    """
    lost = f"{output}: another process wrote there meanwhile. Its output was left alone, and the new one was discarded."
    if not os.path.lexists(output):
        # Continue as if ``output`` had never existed, because another process has deleted it.
        before = None
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
    finally:  # Check the replaced output before it is deleted, even after Ctrl-C.
        if not os.path.samestat(os.lstat(new), ours) and _look(new) != before:
            _exchange(new, output)
            raise OutputError(lost)


def _move(source: Path, to: Path) -> None:
    """Rename ``source`` to ``to``. Raises FileExistsError if ``to`` exists."""
    try:
        _renameat2(source, to, _NOREPLACE)
    except OSError as err:
        if err.errno not in _NOT_OFFERED:
            raise
        # Check that ``to`` does not exist, and then rename. Another process may create ``to``
        # between these two steps. If ``source`` is a folder, the rename could then replace only an
        # empty folder. If ``source`` is a file, the rename would replace the other process's file.
        if os.path.lexists(to):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(to)) from err
        os.rename(source, to)


def _exchange(source: Path, to: Path) -> None:
    try:
        _renameat2(source, to, _EXCHANGE)
    except OSError as err:
        if err.errno not in _NOT_OFFERED:
            raise
        # The file system cannot exchange paths, so rename twice. Between the two renames, the path
        # ``to`` does not exist. If the process is killed at this moment, the next process that
        # takes over the claim restores the old output.
        aside = source.parent.with_name(OLD)
        try:
            os.rename(to, aside)
            os.rename(source, to)
        finally:  # If Ctrl-C prevented the second rename, move the old output back.
            if os.path.lexists(aside):
                os.rename(aside, to if os.path.lexists(source) else source)


def _renameat2(source: Path, to: Path, flags: int) -> None:
    """Call renameat2(2). Raises OSError, with ENOSYS if the C library is glibc before 2.28."""
    try:
        function = _LIBC.renameat2
    except AttributeError:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS)) from None
    if function(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(to), ctypes.c_uint(flags)):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(source), None, str(to))


def _look(path: Path) -> _Look | None:
    """Record the inode, size and time of each file at ``path``, or ``None`` if it is missing."""
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
