"""Reads and writes golden files, which contain the logits of a checkpoint's released code.

``capture`` creates a golden file by running the released code. ``against_golden`` compares a bundle
with the file on any machine, without torch and without the checkpoint. A golden file also records
the origin of its logits (``Provenance``).

A golden file may come from an untrusted machine, so this module reads the file without pickle. The
entries of the file must be uncompressed, so that no array can be larger than the file.

A golden file is an .npz file that contains N canvases in the arrays below. Each canvas consists of
L tokens. For each canvas, there are R rows of logits for a vocabulary of V tokens.

=================  ======================  ====================================================
``provenance``     uint8 ``[bytes]``       ``Provenance`` as JSON in UTF-8, with ``FORMAT``
``mask_ratios``    float64 ``[N]``         the mask ratio of each canvas
``tokens``         int64 ``[sum of L]``    the token IDs of all canvases, one after another
``lengths``        int64 ``[N]``           the number of token IDs of each canvas
``rows``           int64 ``[sum of R]``    the rows of each canvas that have logits, ascending
``row_counts``     int64 ``[N]``           the number of rows of each canvas that have logits
``logits``         fp32 ``[sum of R, V]``  raw logits, as the released code returns them
=================  ======================  ====================================================
"""

from __future__ import annotations

import json
import math
import zipfile
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import IO, Any

import numpy as np

from dlm_export import outputs
from dlm_export.judging.parity.canvases import Canvas
from dlm_runtime.errors import DlmError, ExitCode

SUFFIX = ".npz"
FORMAT = {"name": "dlm-export golden logits", "version": 1}
# Maximum size of a golden file in bytes. With 65,536 tokens, 4,000 rows take 1 GB.
LIMIT_BYTES = 32 << 30
PROVENANCE_LIMIT_BYTES = 1 << 20
TEXT_LIMIT = 300  # maximum number of characters of a text in the provenance
RELEASED, OWN, TRUNK = "released code", "transformers class", "transformers trunk"
KINDS = (RELEASED, OWN, TRUNK)
_ARRAYS = {
    "provenance": (np.uint8, 1),
    "mask_ratios": (np.float64, 1),
    "tokens": (np.int64, 1),
    "lengths": (np.int64, 1),
    "rows": (np.int64, 1),
    "row_counts": (np.int64, 1),
    "logits": (np.float32, 2),
}
"""Maps the name of each array to its element type and its number of dimensions."""


class GoldenError(DlmError):
    """Raised if a golden file is damaged, or does not match the version or the checkpoint."""

    exit_code = ExitCode.WRONG_INPUT


@dataclass(frozen=True)
class Provenance:
    """The origin of the logits in a golden file.

    - ``kind``: the kind of code that ran, which is one of ``KINDS``. The kinds are the checkpoint's
      own code, the transformers class with the same name, and a transformers class with the same
      layers.
    - ``module``: the Python module of the class that ran.
    - ``attention``: describes which positions each position attends to.
    - ``code``: SHA-256 of each Python file of the checkpoint that ran.
    - ``weights``: SHA-256 of each weight file of the checkpoint.
    - ``checkpoint``: name of the checkpoint's folder.
    - ``prompts``: name of the text file with prompts, or "random".
    """

    kind: str
    class_name: str
    module: str
    attention: str
    code: Mapping[str, str]
    checkpoint: str
    config_sha256: str
    weights: Mapping[str, str]
    mask_token_id: int
    seed: int
    prompts: str
    versions: Mapping[str, str]

    @property
    def reference(self) -> str:
        """Describe the code whose logits a bundle is compared with."""
        what = {
            RELEASED: f"the released code's logits ({self.class_name} of {self.module}",
            OWN: f"the logits of transformers' own class ({self.class_name}",
            TRUNK: f"the logits of transformers' trunk with {self.attention} ({self.class_name}",
        }[self.kind]
        return f"{what}, transformers {self.versions.get('transformers')}, torch {self.versions.get('torch')})"


@dataclass(frozen=True, eq=False)
class Golden:
    """The contents of a golden file: canvases, their logits, and the provenance of the logits.

    For each canvas, ``logits`` contains an fp32 array ``[R, V]``, for R rows and V tokens.
    """

    provenance: Provenance
    canvases: list[Canvas]
    logits: list[np.ndarray]

    @property
    def vocab_size(self) -> int:
        return int(self.logits[0].shape[1])

    @property
    def rows(self) -> int:
        return sum(len(canvas.rows) for canvas in self.canvases)

    @property
    def max_length(self) -> int:
        """The number of tokens of the longest canvas."""
        return max(len(canvas.tokens) for canvas in self.canvases)


# ---- Writing ----


def claimed(path: Path, *, force: bool) -> AbstractContextManager[Path]:
    """Prepare to write a golden file to ``path``, like ``outputs.claimed``.

    Raises GoldenError if the file's name does not end with ``SUFFIX``.
    """
    if path.suffix != SUFFIX:
        raise GoldenError(f"{path}: the name must end in {SUFFIX}")
    return outputs.claimed_file(path, force=force)


def save(path: Path, golden: Golden) -> None:
    """Write a golden file to a path that ``claimed`` returned. Raises OSError."""
    provenance = json.dumps(
        {"format": FORMAT, **asdict(golden.provenance)}, indent=1, ensure_ascii=False
    )
    arrays = {
        "provenance": np.frombuffer(provenance.encode(), np.uint8),
        "mask_ratios": np.array([canvas.mask_ratio for canvas in golden.canvases], np.float64),
        "tokens": np.concatenate([canvas.tokens for canvas in golden.canvases], dtype=np.int64),
        "lengths": np.array([len(canvas.tokens) for canvas in golden.canvases], np.int64),
        "rows": np.concatenate([canvas.rows for canvas in golden.canvases], dtype=np.int64),
        "row_counts": np.array([len(canvas.rows) for canvas in golden.canvases], np.int64),
        "logits": np.concatenate(golden.logits, dtype=np.float32),
    }
    with path.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]


# ---- Reading ----


def load(path: Path) -> Golden:
    """Read and check a golden file. Raises GoldenError."""
    try:
        if not path.is_file():
            raise GoldenError(f"{path}: no such file. `dlm-export capture` writes one.")
        if path.stat().st_size > LIMIT_BYTES:
            raise GoldenError(f"{path}: {path.stat().st_size} bytes is too large for a golden file")
        with zipfile.ZipFile(path) as archive:
            arrays = {name: _read_array(archive, name, path.stat().st_size) for name in _ARRAYS}
        provenance = _provenance(arrays["provenance"].tobytes())
        canvases, logits = _canvases(arrays)
    except GoldenError:
        raise
    except (
        Exception
        # If the file is damaged, zipfile and numpy may raise a dozen kinds of exceptions.
    ) as err:
        reason = " ".join(str(err).split())[:TEXT_LIMIT]
        raise GoldenError(
            f"{path}: not a golden file, or a damaged one ({reason}). Capture it again."
        ) from err
    return Golden(provenance, canvases, logits)


def _read_array(archive: zipfile.ZipFile, name: str, archive_bytes: int) -> np.ndarray:
    """Check the size of one array, and read the array. Raises ValueError or KeyError."""
    kind, dimensions = _ARRAYS[name]
    info = archive.getinfo(f"{name}.npy")
    if info.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{name} is compressed")
    if info.file_size > archive_bytes:
        raise ValueError(f"{name} claims to be larger than the file")
    with archive.open(info) as file:
        shape, is_fortran, dtype = _read_header(file)
        wanted = math.prod(shape) * np.dtype(kind).itemsize
        if dtype != kind or len(shape) != dimensions or (is_fortran and dimensions > 1):
            raise ValueError(
                f"{name} is {dtype} {list(shape)}, expected {np.dtype(kind)} with {dimensions} dimensions"
            )
        if info.file_size - file.tell() != wanted:
            raise ValueError(
                f"{name} claims shape {list(shape)}, but has {info.file_size - file.tell()} bytes"
            )
        # zipfile checks an entry's CRC only when the entry's last byte is read.
        return np.frombuffer(file.read(), kind).reshape(shape)


def _read_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    version = np.lib.format.read_magic(file)
    if version != (1, 0):
        raise ValueError(f"an array in .npy version {version}")
    shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(file)
    return shape, is_fortran, dtype


def _provenance(text: bytes) -> Provenance:
    """Read the provenance. Raises ValueError, or GoldenError if its version is unknown."""
    if len(text) > PROVENANCE_LIMIT_BYTES:
        raise ValueError(f"provenance has {len(text)} bytes")
    values = json.loads(text.decode())
    found = values.pop("format", None) if isinstance(values, dict) else None
    if not isinstance(found, dict) or found.get("name") != FORMAT["name"]:
        raise ValueError("its provenance is not that of a golden file")
    if found != FORMAT:
        raise GoldenError(
            f"golden file of version {str(found.get('version'))[:20]}; this dlm-export reads version {FORMAT['version']}: "
            "capture it again"
        )
    names = {field.name: field.type for field in fields(Provenance)}
    if values.keys() != names.keys():
        raise ValueError(f"provenance has {sorted(values)}, expected {sorted(names)}")
    for name, kind in names.items():
        value = values[name]
        is_right = {
            "str": _is_text(value),
            "int": type(value) is int and 0 <= value < 1 << 63,
            "Mapping[str, str]": isinstance(value, dict)
            and all(map(_is_text, (*value, *value.values()))),
        }
        if not is_right[str(kind)]:
            raise ValueError(f"provenance: {name} has a wrong type or value")
    if values["kind"] not in KINDS:
        raise ValueError(f"provenance: kind {values['kind']!r} is not one of {', '.join(KINDS)}")
    return Provenance(**values)


def _is_text(value: Any) -> bool:
    """Return True if a value is text that can be printed safely in a terminal."""
    return isinstance(value, str) and 0 < len(value) <= TEXT_LIMIT and value.isprintable()


def _canvases(arrays: Mapping[str, np.ndarray]) -> tuple[list[Canvas], list[np.ndarray]]:
    """Split a golden file's arrays into canvases and logits. Raises ValueError."""
    ratios, lengths, counts, logits = (
        arrays[name] for name in ("mask_ratios", "lengths", "row_counts", "logits")
    )
    if not len(ratios) == len(lengths) == len(counts) or not len(ratios):
        raise ValueError(
            f"{len(ratios)} mask ratios, {len(lengths)} canvases and {len(counts)} counts of rows"
        )
    if not ((ratios > 0) & (ratios <= 1)).all():
        raise ValueError("a mask ratio is outside (0, 1]")
    for name, sizes, total in (
        ("tokens", lengths, len(arrays["tokens"])),
        ("rows", counts, len(arrays["rows"])),
    ):
        if sizes.min() < 1 or sizes.max() > total or int(sizes.sum()) != total:
            raise ValueError(f"{name} has {total} entries, which do not match its canvases")
    if len(logits) != len(arrays["rows"]) or logits.shape[1] < 2:
        raise ValueError(f"logits {list(logits.shape)} for {len(arrays['rows'])} rows")
    if arrays["tokens"].min() < 0 or arrays["tokens"].max() >= logits.shape[1]:
        raise ValueError(f"a token is outside the vocabulary of {logits.shape[1]}")
    if not np.isfinite(logits).all():
        raise ValueError("NaN or infinite logits")
    tokens = np.split(arrays["tokens"], np.cumsum(lengths)[:-1])
    rows = np.split(arrays["rows"], np.cumsum(counts)[:-1])
    for canvas, kept in zip(tokens, rows, strict=True):
        if kept.min() < 0 or kept.max() >= len(canvas) or (np.diff(kept) < 1).any():
            raise ValueError("rows of a canvas are not ascending positions on it")
    canvases = [
        Canvas(float(ratio), canvas, kept)
        for ratio, canvas, kept in zip(ratios, tokens, rows, strict=True)
    ]
    return canvases, np.split(logits, np.cumsum(counts)[:-1])
