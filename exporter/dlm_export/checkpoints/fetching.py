"""Fetches a checkpoint from the hub, and checks every file against the hashes that the hub lists.

Files are stored in the cache of huggingface_hub, which resumes interrupted downloads. If the caller
needs only headers, the module fetches the configuration files, but no tensor data. Two range
requests fetch the header of a weight file. The module then writes a sparse weight file, whose
tensor data takes no disk space.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import re
import reprlib
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlm_export.bundle.folder import sha256
from dlm_export.checkpoints.adapters import CONFIG_FILE, WEIGHTS_FILE
from dlm_export.checkpoints.guard import COMMIT, Guard, HubError, guarded
from dlm_export.checkpoints.hub import Hub, HubName, Located
from dlm_export.checkpoints.tokenizer import TEMPLATE_FILES

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoSibling

WEIGHTS = "*.safetensors"
FILES = (
    WEIGHTS,
    "model.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "hf_quant_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
"""Names of the files in the top folder that this module downloads."""
NAME_LIMIT = 200  # characters in the name of a file
OTHER_FILES = re.compile(
    rf"(?:\w[\w.-]*/)?(?:{re.escape(CONFIG_FILE)}|{re.escape(WEIGHTS_FILE)})"
    rf"|{re.escape(TEMPLATE_FILES['tool_use'])}"
)
"""Paths of all other files that this module downloads.

The files of an adapter may be in a folder of their own.
"""
HEADER_LIMIT_BYTES = 100_000_000
"""Largest header of a safetensors file, as the format specifies."""
SIZE_LIMIT_BYTES = 1 << 44  # 16 TiB, the largest file of ext4
TIMEOUT_S = 30.0


@contextlib.contextmanager
def fetched(name: HubName, *, headers_only: bool = False) -> Iterator[Located]:
    """Yield a folder with the checkpoint's files. Raises HubError."""
    try:
        import huggingface_hub
        from huggingface_hub import utils
        from huggingface_hub.utils import logging
    except ModuleNotFoundError as err:
        raise HubError(
            f"{name}: needs the hub extra: pip install 'dlm-export[hub]'", is_input=False
        ) from err
    # Silence the log of huggingface_hub, because the message of HubError contains the reasons.
    # Change the level after the import of the logger, because the import sets the level.
    logging.set_verbosity(logging.CRITICAL)
    if not sys.stderr.isatty():
        utils.disable_progress_bars()
    with guarded(f"{name}") as guard:
        with _one_sentence(name):
            api = huggingface_hub.HfApi(library_name="dlm-export")
            info = api.model_info(name.repository, revision=name.revision, files_metadata=True)
        if not isinstance(info.sha, str) or COMMIT.fullmatch(info.sha) is None:
            raise HubError(f"{name}: the hub names no commit for this revision", is_input=False)
        guard.commit = info.sha
        wanted = _wanted(name, info.siblings or [])
        if headers_only:
            with tempfile.TemporaryDirectory(prefix="dlm-export-") as made:
                folder = Path(made)
                for file in wanted:
                    (folder / file.rfilename).parent.mkdir(exist_ok=True)
                    if fnmatch.fnmatch(file.rfilename, WEIGHTS):
                        _fetch_header(name, guard, file, folder / file.rfilename)
                    else:
                        path, _ = _fetch(name, guard, file)
                        shutil.copyfile(path, folder / file.rfilename)
                yield Located(folder, Hub(name.repository, info.sha, {}))
            return
        found = {file.rfilename: _fetch(name, guard, file) for file in wanted}
    hashes = {file: digest for file, (_, digest) in found.items()}
    yield Located(found["config.json"][0].parent, Hub(name.repository, info.sha, hashes))


def _wanted(name: HubName, listed: Sequence[RepoSibling]) -> list[RepoSibling]:
    """Return the files to fetch, small ones first. Raises HubError if a vital file is missing."""
    with _one_sentence(name):
        found = [file for file in listed if _is_wanted(file.rfilename)]
    paths = {file.rfilename for file in found}
    for file in found:
        size, text = _size(file), file.rfilename
        is_path = len(text) <= NAME_LIMIT and text.isprintable() and "\\" not in text
        if not is_path or str(Path(text).parent) in paths:
            raise HubError(f"{name}: the hub lists {reprlib.repr(text)} as a file", is_input=False)
        if type(size) is not int or not 0 <= size <= SIZE_LIMIT_BYTES:
            raise HubError(
                f"{name}: the hub lists {reprlib.repr(size)} as the size of {text}", is_input=False
            )
    names = {path for path in paths if OTHER_FILES.fullmatch(path) is None}
    for pattern in ("config.json", WEIGHTS):
        if not fnmatch.filter(names, pattern):
            raise HubError(f"{name}: the repository has no {pattern}", is_input=True)
    return sorted(found, key=lambda file: (file.rfilename.endswith(".safetensors"), file.rfilename))


def _is_wanted(file: str) -> bool:
    """Return True if this module downloads the file with this name."""
    is_listed = any(fnmatch.fnmatch(file, pattern) for pattern in FILES)
    return OTHER_FILES.fullmatch(file) is not None or (is_listed and "/" not in file)


def _size(file: RepoSibling) -> Any:
    return file.size if file.lfs is None else file.lfs.size


def _fetch(name: HubName, guard: Guard, file: RepoSibling) -> tuple[Path, str]:
    """Fetch a whole file. Returns the path of the file in the cache, and the file's SHA-256.

    Raises HubError. A damaged file is removed first.
    """
    import huggingface_hub

    guard.expect(f"{name}: {file.rfilename}", _size(file))
    with _one_sentence(name, file.rfilename):
        path = Path(
            huggingface_hub.hf_hub_download(
                name.repository, file.rfilename, revision=guard.commit, library_name="dlm-export"
            )
        )
    digest = sha256(path)
    if not _is_intact(path, digest, file):
        path.resolve().unlink()
        path.unlink(missing_ok=True)
        raise HubError(
            f"{name}: {file.rfilename} does not have the hash that the hub lists, and was removed: "
            "run the command again",
            is_input=False,
        )
    return path, digest


def _is_intact(path: Path, digest: str, file: RepoSibling) -> bool:
    """Return True if a file has the hash that the hub lists.

    The hub lists SHA-256 for large files, and git's SHA-1 for all other files.
    """
    if file.lfs is not None:
        return digest == file.lfs.sha256
    # SHA-1 is git's identifier of a file, and is not used as a signature.
    found = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    with open(path, "rb") as opened:
        while part := opened.read(1 << 20):
            found.update(part)
    return found.hexdigest() == file.blob_id


def _fetch_header(name: HubName, guard: Guard, file: RepoSibling, path: Path) -> None:
    """Write a sparse safetensors file with the header but without data. Raises HubError."""
    size = _size(file)
    start = _range(name, guard, file.rfilename, 0, 8)
    length = int.from_bytes(start, "little")
    if not 0 < length <= min(HEADER_LIMIT_BYTES, size - 8):
        raise HubError(f"{name}: {file.rfilename} is not a safetensors file", is_input=True)
    header = _range(name, guard, file.rfilename, 8, length)
    with _one_sentence(name, file.rfilename), open(path, "wb") as made:
        made.write(start + header)
        made.truncate(size)


def _range(name: HubName, guard: Guard, file: str, first: int, count: int) -> bytes:
    """Read ``count`` bytes of a file on the hub, starting at byte ``first``. Raises HubError."""
    import huggingface_hub
    from huggingface_hub import utils

    url = huggingface_hub.hf_hub_url(name.repository, file, revision=guard.commit)
    guard.expect(f"{name}: {file}", count)
    asked = f"bytes={first}-{first + count - 1}"
    headers = utils.build_hf_headers(library_name="dlm-export") | {"Range": asked}
    with (
        _one_sentence(name, file),
        utils.get_session().stream(
            "GET", url, headers=headers, timeout=TIMEOUT_S, follow_redirects=True
        ) as response,
    ):
        utils.hf_raise_for_status(response)
        # The server ignored the range. Stop, because reading the response would download all
        # weights.
        if response.status_code != 206:
            raise HubError(
                f"{name}: the server does not send parts of files, so headers cannot be read alone",
                is_input=False,
            )
        data: bytes = response.read()
    if len(data) != count:
        raise HubError(
            f"{name}: {file}: the server sent {len(data)} bytes instead of {count}", is_input=False
        )
    return data


@contextlib.contextmanager
def _one_sentence(name: HubName, file: str | None = None) -> Iterator[None]:
    """Convert exceptions of huggingface_hub and of the network to a HubError with one sentence."""
    from huggingface_hub import errors

    where = f"{name}" if file is None else f"{name}: {file}"
    try:
        yield
    except HubError:
        raise
    except errors.GatedRepoError as err:
        raise HubError(
            f"{where}: the repository is gated: accept its terms on the hub, then run `hf auth login`",
            is_input=True,
        ) from err
    except errors.RevisionNotFoundError as err:
        raise HubError(f"{where}: the repository has no such revision", is_input=True) from err
    except errors.RepositoryNotFoundError as err:
        raise HubError(
            f"{where}: no such repository, or a private one: check the name, or run `hf auth login`",
            is_input=True,
        ) from err
    except errors.EntryNotFoundError as err:
        raise HubError(f"{where}: the file is missing on the hub", is_input=True) from err
    except (errors.HTTPError, OSError) as err:
        raise HubError(
            f"{where}: the download failed ({_reason(err)}): run the command again to continue it",
            is_input=False,
        ) from err
    except Exception as err:  # huggingface_hub does not check the form of the answers
        raise HubError(
            f"{where}: the hub's answer is malformed ({type(err).__name__}: {_reason(err)})",
            is_input=False,
        ) from err


def _reason(err: Any) -> str:
    """Return the first line of an error message, without the identifier of the request."""
    lines = str(err).strip().splitlines()
    text = "".join(each for each in lines[0][:200] if each.isprintable()) if lines else ""
    return text.rstrip(".") or type(err).__name__
