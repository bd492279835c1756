"""Writes output atomically. New output is made in a temporary folder and moved into place in one
step.

While a process writes ``NAME``, the temporary folder is ``.NAME.dlm-export`` in the same parent
folder. It is called the claim. It contains the unfinished output and a file ``owner`` with the
process's number. The process keeps ``owner`` locked (flock) as long as it lives. If the process is
killed, the system releases the lock but the folder remains. The next process that writes ``NAME``
can therefore tell abandoned claims from active ones, and removes the contents of abandoned ones.

The move uses renameat2(2): RENAME_NOREPLACE for new output, and RENAME_EXCHANGE to replace old
output. At any time, the path thus has either the old or the complete new output. After an exchange
the old output is in the claim, and is deleted there.
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
"""Entries of a claim: the locked file, the unfinished output, and the replaced output on a file
system that cannot exchange two paths.
"""

_AT_FDCWD = -100
_NOREPLACE, _EXCHANGE = 1, 2  # linux/fs.h
# The kernel or the file system lacks renameat2.
_NOT_OFFERED = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)
_LIBC = ctypes.CDLL(None, use_errno=True)

_Look = dict[str, tuple[int, ...]]


class OutputError(DlmError):
    """Raised if output cannot be written: no space, no permission, or another process is writing
    it.
    """


class TakenError(OutputError):
    """Raised if output exists already and must not be replaced."""

    exit_code = ExitCode.WRONG_INPUT


@contextlib.contextmanager
def claimed(
    output: Path, *, force: bool, kept_because: Callable[[Path], str | None], needed_bytes: int = 0
) -> Iterator[Path]:
    """Yield a path where the block writes a new file or folder.

    If the block succeeds, the new file or folder becomes ``output``. Otherwise it is deleted.

    Args:
        output: Final path.
        force: Replace existing output.
        kept_because: A function that says why an existing path must never be replaced. It returns
            ``None`` if ``force`` may replace the path.
        needed_bytes: Disk space that must be free.

    Raises:
        TakenError: Existing output must not be replaced.
        OutputError: Another process is writing there, or the disk is full or fails. Also raised if
            another process has changed the existing output in the meantime; that output is then
            kept.
    """
    output = Path(os.path.abspath(output))
    _check(output, force, kept_because)
    missing = [parent for parent in output.parents if not os.path.lexists(parent)]
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(output.parent).free
    except OSError as err:
        # A file is where a folder is needed.
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
        # Check again now that this process holds the claim: taking the claim may have restored
        # output of a process that was killed.
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
    """``claimed`` for a file. ``force`` allows replacing a regular file, and nothing else."""
    return claimed(
        output,
        force=force,
        kept_because=lambda path: (
            None if stat.S_ISREG(path.lstat().st_mode) else "is not a plain file"
        ),
    )


def check_outside(output: Path, *sources: Path) -> None:
    """Raises TakenError if ``output`` is one of the ``sources`` or is inside one of them.

    Symbolic links are followed.
    """
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
    """Yield a path next to ``path``. If the block succeeds, the file written there replaces
    ``path``.

    Use this for files that belong to dlm-export only, because ``path`` is replaced without a check.
    """
    new = path.with_name(f"{path.name}.new")
    try:
        new.unlink(missing_ok=True)  # writing would follow a symbolic link
        yield new
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a bundle's folder, so that no other process changes or replaces it.

    Raises OutputError if another process has locked it.
    """
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as err:
        os.close(held)
        raise OutputError(
            f"{folder}: another dlm-export is changing it. Wait for it, and try again."
        ) from err
    # The file system has no locks. Changes by others are still detected when output is moved.
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
    """Hold the claim of ``output`` within the block. Files that a killed process left in the claim
    are removed first.
    """
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
        # Old output that could not be restored is kept, as the error message says.
        _clear(claim, NEW)
        if not os.path.lexists(claim / OLD):
            # Removed last, because a claim without this file is never cleared.
            os.unlink(claim / OWNER)
            with contextlib.suppress(OSError):  # another process is using it already
                os.rmdir(claim)
        os.close(owner)


def _take(claim: Path, output: Path) -> int:
    """Create the claim, or take over an abandoned one. Returns the file ``owner``, open and locked.

    Raises OutputError, OSError.
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
            continue  # the owner has finished and removed the claim
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
            # The file system has no locks, which is true of some network file systems. Creating a
            # claim is safe there, because only one process can create it. A claim that exists
            # already may be active or abandoned, so it is not taken over.
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
        os.close(owner)  # another process removed the claim before this one locked it


def _clear(claim: Path, *names: str) -> None:
    """Remove the entries ``names`` from a claim."""
    for path in (claim / name for name in names):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


# ---- The move ----


def _place(new: Path, output: Path, before: _Look | None) -> None:
    """Move ``new`` to ``output``, provided that ``output`` has not changed since ``before`` was
    recorded.

    Replaced output is then at the path ``new``. Raises OutputError if another process has written
    ``output`` in the meantime. Its output is then kept.
    """
    lost = f"{output}: another process wrote there meanwhile. Its output was left alone, and the new one was discarded."
    if not os.path.lexists(output):
        before = None  # someone has deleted the old output, so nothing is replaced
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
    finally:  # This must run after Ctrl-C too, because the replaced output is deleted soon.
        if not os.path.samestat(os.lstat(new), ours) and _look(new) != before:
            _exchange(new, output)
            raise OutputError(lost)


def _move(source: Path, to: Path) -> None:
    """Rename ``source`` to a path that does not exist. Raises FileExistsError if it does."""
    try:
        _renameat2(source, to, _NOREPLACE)
    except OSError as err:
        if err.errno not in _NOT_OFFERED:
            raise
        # The next best method. Renaming a folder can replace an empty folder and nothing else. For
        # a file, another process may create the path between this check and the renaming.
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
        # Two renames. Between them the path does not exist. If the process is killed there, the
        # next claim restores the old output.
        aside = source.parent.with_name(OLD)
        try:
            os.rename(to, aside)
            os.rename(source, to)
        finally:  # runs after Ctrl-C between the renames too
            if os.path.lexists(aside):
                os.rename(aside, to if os.path.lexists(source) else source)


def _renameat2(source: Path, to: Path, flags: int) -> None:
    """Call renameat2(2), which glibc has since version 2.28.

    Raises OSError, with ENOSYS if the C library lacks the function.
    """
    try:
        function = _LIBC.renameat2
    except AttributeError:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS)) from None
    if function(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(to), ctypes.c_uint(flags)):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(source), None, str(to))


def _look(path: Path) -> _Look | None:
    """Record the state of a path: the identity, size and time of each of its files. ``None`` if
    there is no such path.
    """
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
