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
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlm_export.bundle.folder import sha256
from dlm_export.checkpoints.adapters import CONFIG_FILE, WEIGHTS_FILE
from dlm_export.checkpoints.hub import Hub, HubName, Located
from dlm_export.checkpoints.tokenizer import TEMPLATE_FILES
from dlm_runtime.errors import DlmError, ExitCode

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
OTHER_FILES = re.compile(
    rf"(?:\w[\w.-]*/)?(?:{re.escape(CONFIG_FILE)}|{re.escape(WEIGHTS_FILE)})"
    rf"|{re.escape(TEMPLATE_FILES['tool_use'])}"
)
"""Paths of all other files that this module downloads.

The files of an adapter may be in a folder of their own.
"""
HEADER_LIMIT_BYTES = 100_000_000
"""Largest header of a safetensors file, as the format specifies."""
TIMEOUT_S = 30.0


class HubError(DlmError):
    """Raised if a checkpoint on the hub is missing, not accessible, or damaged by the download.

    ``is_input`` is true if the user must correct the name or request access.
    """

    def __init__(self, message: str, *, is_input: bool) -> None:
        super().__init__(message)
        self.exit_code = ExitCode.WRONG_INPUT if is_input else ExitCode.COULD_NOT


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
    with _one_sentence(name):
        api = huggingface_hub.HfApi(library_name="dlm-export")
        info = api.model_info(name.repository, revision=name.revision, files_metadata=True)
    if info.sha is None:
        raise HubError(f"{name}: the hub names no commit for this revision", is_input=False)
    wanted = _wanted(name, info.siblings or [])
    if headers_only:
        with tempfile.TemporaryDirectory(prefix="dlm-export-") as made:
            folder = Path(made)
            for file in wanted:
                (folder / file.rfilename).parent.mkdir(exist_ok=True)
                if fnmatch.fnmatch(file.rfilename, WEIGHTS):
                    _fetch_header(name, info.sha, file, folder / file.rfilename)
                else:
                    path, _ = _fetch(name, info.sha, file)
                    shutil.copyfile(path, folder / file.rfilename)
            yield Located(folder, Hub(name.repository, info.sha, {}))
    else:
        found = {file.rfilename: _fetch(name, info.sha, file) for file in wanted}
        hashes = {file: digest for file, (_, digest) in found.items()}
        yield Located(found["config.json"][0].parent, Hub(name.repository, info.sha, hashes))


def _wanted(name: HubName, listed: Sequence[RepoSibling]) -> list[RepoSibling]:
    """Return the files to fetch, small files first.

    Raises HubError if the repository lacks a file that every checkpoint needs.
    """
    found = [
        file
        for file in listed
        if OTHER_FILES.fullmatch(file.rfilename)
        or (
            any(fnmatch.fnmatch(file.rfilename, pattern) for pattern in FILES)
            and "/" not in file.rfilename
        )
    ]
    names = {file.rfilename for file in found if OTHER_FILES.fullmatch(file.rfilename) is None}
    for pattern in ("config.json", WEIGHTS):
        if not fnmatch.filter(names, pattern):
            raise HubError(f"{name}: the repository has no {pattern}", is_input=True)
    return sorted(found, key=lambda file: (file.rfilename.endswith(".safetensors"), file.rfilename))


def _fetch(name: HubName, commit: str, file: RepoSibling) -> tuple[Path, str]:
    """Fetch a whole file. Returns the path of the file in the cache, and the file's SHA-256.

    Raises HubError. A damaged file is removed first.
    """
    import huggingface_hub

    with _one_sentence(name, file.rfilename):
        path = Path(
            huggingface_hub.hf_hub_download(
                name.repository, file.rfilename, revision=commit, library_name="dlm-export"
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
    data = path.read_bytes()
    # SHA-1 is git's identifier of a file, and is not used as a signature.
    found = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
    return found == file.blob_id


def _fetch_header(name: HubName, commit: str, file: RepoSibling, path: Path) -> None:
    """Write a sparse safetensors file with the header but without data. Raises HubError."""
    size = file.lfs.size if file.lfs is not None else file.size
    if size is None or size < 8:
        raise HubError(f"{name}: {file.rfilename} is not a safetensors file", is_input=True)
    start = _range(name, commit, file.rfilename, 0, 8)
    length = int.from_bytes(start, "little")
    if not 0 < length <= min(HEADER_LIMIT_BYTES, size - 8):
        raise HubError(f"{name}: {file.rfilename} is not a safetensors file", is_input=True)
    header = _range(name, commit, file.rfilename, 8, length)
    with open(path, "wb") as made:
        made.write(start + header)
        made.truncate(size)


def _range(name: HubName, commit: str, file: str, first: int, count: int) -> bytes:
    """Read ``count`` bytes of a file on the hub, starting at byte ``first``. Raises HubError."""
    import huggingface_hub
    from huggingface_hub import utils

    url = huggingface_hub.hf_hub_url(name.repository, file, revision=commit)
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


def _reason(err: Any) -> str:
    """Return the first line of an error message, without the identifier of the request."""
    lines = str(err).strip().splitlines()
    return lines[0][:200].rstrip(".") if lines else type(err).__name__
