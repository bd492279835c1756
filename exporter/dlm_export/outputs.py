"""Where output goes: claimed while it is made, moved into place in one step.

While something writes ``NAME``, a folder ``.NAME.dlm-export`` stands beside it: the claim. It holds
what is being made, and ``owner``, a file with the number of the process, locked (flock) as long as
that process lives. A kill takes the lock away and leaves the folder, so that the next one to write
``NAME`` tells what is in use from what was left, and clears that.

The move is renameat2(2): RENAME_NOREPLACE where nothing stood, else RENAME_EXCHANGE, so that the
old or the new one stands at the path at every moment; the old one is then removed from the claim.
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
"""What lies in a claim: the locked file, the folder of what is being made, and what it replaces
where that is not exchanged.
"""

_AT_FDCWD = -100
_NOREPLACE, _EXCHANGE = 1, 2  # linux/fs.h
# The kernel, the file system, or either of them lacks renameat2.
_NOT_OFFERED = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)
_LIBC = ctypes.CDLL(None, use_errno=True)

_Look = dict[str, tuple[int, ...]]


class OutputError(DlmError):
    """Output cannot be written where it was asked for: no room, no right, or another process is at
    it.
    """


class TakenError(OutputError):
    """What stands where output was asked for is not to be replaced."""

    exit_code = ExitCode.WRONG_INPUT


@contextlib.contextmanager
def claimed(
    output: Path, *, force: bool, kept_because: Callable[[Path], str | None], needed_bytes: int = 0
) -> Iterator[Path]:
    """A path for a new file or folder, which becomes ``output`` when the block ends well, and goes
    away when it does not.

    ``kept_because`` says of something that stands at ``output`` why it is never replaced; None: it
    is, with ``force``. Raises TakenError for what stands there; OutputError if another process
    writes there, if the disk has no room for ``needed_bytes`` or fails, and if something else
    stands at ``output`` at the end than at the start: that is left alone.
    """
    output = Path(os.path.abspath(output))
    _check(output, force, kept_because)
    missing = [parent for parent in output.parents if not os.path.lexists(parent)]
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(output.parent).free
    except OSError as err:
        is_wrong = isinstance(err, (FileExistsError, NotADirectoryError))  # a file in its way
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
        # Again under the claim, which may have restored an output after a kill.
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
    """``claimed`` for a file, which ``force`` lets replace a file and nothing else."""
    return claimed(
        output,
        force=force,
        kept_because=lambda path: (
            None if stat.S_ISREG(path.lstat().st_mode) else "is not a plain file"
        ),
    )


def check_outside(output: Path, *sources: Path) -> None:
    """Raise TakenError if ``output`` is one of the ``sources`` or inside one. Symbolic links are
    followed.
    """
    for source in sources:
        wanted, read = output.resolve(), source.resolve()
        if wanted == read:
            raise TakenError(f"{output}: is what is read from; choose another path")
        if read in wanted.parents:
            raise TakenError(
                f"{output}: lies inside {source}, which is read from and never written to; choose a path outside it"
            )


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A path beside ``path`` to write, which takes its place in one step when the block ends well:
    of files that are ours.
    """
    new = path.with_name(f"{path.name}.new")
    try:
        new.unlink(missing_ok=True)  # a link there would be followed
        yield new
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a bundle's folder, so that nothing else changes or replaces it. Raises OutputError:
    someone has it.
    """
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as err:
        os.close(held)
        raise OutputError(
            f"{folder}: another dlm-export is changing it. Wait for it, and try again."
        ) from err
    except OSError:  # a file system without locks: what changes meanwhile is found at the move
        pass
    try:
        if not os.path.samestat(os.fstat(held), os.stat(folder)):
            raise OutputError(f"{folder}: was replaced this moment. Try again.")
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
    """The folder beside ``output`` that says who writes there, emptied of what a kill left; gone
    when the block ends.
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
        _clear(claim, NEW)  # an old one that could not be put back stays, as the message says
        if not os.path.lexists(claim / OLD):
            os.unlink(claim / OWNER)  # last: a folder without it is nobody's to clear
            with contextlib.suppress(OSError):  # the next one is in already
                os.rmdir(claim)
        os.close(owner)


def _take(claim: Path, output: Path) -> int:
    """Make the claim or take over one whose process is gone: its ``owner``, open and locked. Raises
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
                raise OutputError(f"{claim} is in the way and not dlm-export's: move it elsewhere")
            owner = os.open(
                claim / OWNER, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
            )
        except FileNotFoundError:
            continue  # who had it is done, and took it away
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
            # No locks, as on some network file systems: a claim is still made by one process alone,
            # but nothing tells whether an old one is in use, so that none is cleared.
            if not is_new:
                os.close(owner)
                raise OutputError(
                    f"{output}: another process is writing it, or was killed; {claim.parent} has no locks to tell which. "
                    f"If nothing is at it, remove {claim}."
                ) from err
        try:
            if os.path.samestat(os.fstat(owner), os.stat(claim / OWNER)):
                os.ftruncate(owner, 0)
                os.pwrite(owner, str(os.getpid()).encode(), 0)
                return owner
        except FileNotFoundError:
            pass
        os.close(owner)  # of a claim that was taken away before it was locked


def _clear(claim: Path, *names: str) -> None:
    """Remove from a claim what was made there or moved aside, and nothing that others put in."""
    for path in (claim / name for name in names):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


# ---- The move ----


def _place(new: Path, output: Path, before: _Look | None) -> None:
    """Move ``new`` to ``output``, where ``before`` stood; in ``new``'s place is then what it
    replaced.

    Raises OutputError if something else stands there: it stays.
    """
    lost = f"{output}: something else was put there meanwhile. It was left alone, and what was made here was dropped."
    if not os.path.lexists(output):
        before = None  # whoever took the old one away wanted it gone
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
    finally:  # after Ctrl-C too: what came out is removed soon
        if not os.path.samestat(os.lstat(new), ours) and _look(new) != before:
            _exchange(new, output)
            raise OutputError(lost)


def _move(source: Path, to: Path) -> None:
    """Rename to where nothing stands. Raises FileExistsError."""
    try:
        _renameat2(source, to, _NOREPLACE)
    except OSError as err:
        if err.errno not in _NOT_OFFERED:
            raise
        # The next best: renaming a folder replaces nothing but an empty one; for a file a moment is
        # left in which it would.
        if os.path.lexists(to):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(to)) from err
        os.rename(source, to)


def _exchange(source: Path, to: Path) -> None:
    """Make both change places."""
    try:
        _renameat2(source, to, _EXCHANGE)
    except OSError as err:
        if err.errno not in _NOT_OFFERED:
            raise
        # Two renames, with nothing at the path between them; what a kill there leaves aside, the
        # next claim puts back.
        aside = source.parent.with_name(OLD)
        try:
            os.rename(to, aside)
            os.rename(source, to)
        finally:  # after Ctrl-C too, at either line
            if os.path.lexists(aside):
                os.rename(aside, to if os.path.lexists(source) else source)


def _renameat2(source: Path, to: Path, flags: int) -> None:
    """renameat2(2), in glibc since 2.28. Raises OSError; ENOSYS where the C library lacks it."""
    try:
        function = _LIBC.renameat2
    except AttributeError:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS)) from None
    if function(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(to), ctypes.c_uint(flags)):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(source), None, str(to))


def _look(path: Path) -> _Look | None:
    """What stands at a path: by name, which file it is, and of files their size and time; None:
    nothing.
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
