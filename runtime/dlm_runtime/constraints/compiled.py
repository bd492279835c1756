"""Compiled constraints: made by the native library for one vocabulary, and kept in a folder by what
they were made of.
"""

from __future__ import annotations

import contextlib
import ctypes as C
import hashlib
import json
import os
import tempfile
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path

from dlm_runtime.abi import native as _native
from dlm_runtime.constraints.layout import COMPACT, Layout
from dlm_runtime.constraints.vocabulary import Vocabulary
from dlm_runtime.errors import BundleError, DlmError, RequestError, SchemaWarning
from dlm_runtime.files import read_bytes

FILE_LIMIT_BYTES = 1 << 30
_FORMAT = 4  # of cached files. Raise it when equal content compiles to another automaton.
_HASH_BYTES = 32
_MADE_OF = slice(8 + 6 * 4, 8 + 6 * 4 + _HASH_BYTES)  # where a file says what it was made of


@dataclass(frozen=True)
class CompileLimits:
    """Limits of compiling one constraint.

    ``seconds``: processor time of all stages together. ``memory_bytes``: memory of each stage.
    ``states`` and ``edges``: size of the result.
    """

    seconds: float = 30
    memory_bytes: int = 192 << 20
    states: int = 1 << 17
    edges: int = 1 << 22


@dataclass(frozen=True)
class Content:
    """What a text may be.

    Args:
        kind: "regex", "schema", "enum", "json_object" or "tree": the values of ``DLM_CONSTRAINT_`` in ``dlm_runtime.h``.
        text: What the kind needs: an expression, or JSON.
        layout: Layout of JSON.
        max_depth: As of ``Bundle.constraint``.
        before, behind: Texts around the generated one, which are part of the constrained text.
    """

    kind: str
    text: str
    layout: Layout = COMPACT
    max_depth: int | None = None
    before: str = ""
    behind: str = ""


class Constraint:
    """A constraint as the native library holds it."""

    def __init__(self, data: bytes) -> None:
        """``data``: the content of its file. Raises BundleError for damaged data."""
        library, handle = _native.library(), C.c_void_p()
        message = C.create_string_buffer(_native.MESSAGE_BYTES)
        status = library.dlm_automaton_read(data, len(data), message, len(message), C.byref(handle))
        if status:
            raise _native.error(status, message.value)
        self._own(handle)

    @classmethod
    def of_handle(cls, handle: C.c_void_p) -> Constraint:
        """One that owns a ``dlm_automaton``."""
        made = cls.__new__(cls)
        made._own(handle)
        return made

    def _own(self, handle: C.c_void_p) -> None:
        self.handle = handle
        weakref.finalize(self, _native.library().dlm_automaton_destroy, handle)

    @property
    def data(self) -> bytes:
        """The content of its file, for programs that read it themselves."""
        library, size = _native.library(), C.c_size_t()
        message, data = C.create_string_buffer(_native.MESSAGE_BYTES), C.create_string_buffer(0)
        while True:
            status = library.dlm_automaton_write(
                self.handle, message, len(message), data, len(data), C.byref(size)
            )
            if status:
                raise _native.error(status, message.value)
            if size.value <= len(data):
                return data.raw
            data = C.create_string_buffer(size.value)

    @property
    def shortest(self) -> int:
        """The tokens of its shortest text."""
        return int(_native.library().dlm_automaton_describe(self.handle).contents.shortest)

    @property
    def states(self) -> int:
        """The states of its automaton."""
        return int(_native.library().dlm_automaton_describe(self.handle).contents.states)


def compile_content(
    content: Content,
    limits: CompileLimits | None = None,
    *,
    bundle: C.c_void_p | None = None,
    vocabulary: Vocabulary | None = None,
    vocab_size: int = 0,
    ends: Sequence[int] = (),
    made_of: bytes = bytes(_HASH_BYTES),
) -> Constraint:
    """Compile content for a native bundle's vocabulary, or for ``vocabulary``, of which ids below
    ``vocab_size`` count.

    ``made_of``: 32 bytes that the file keeps. Raises RequestError for what cannot be compiled
    within ``limits``. Warns (SchemaWarning) about keywords that look misspelled.
    """
    chosen = limits or CompileLimits()
    given = _native.initialised(_native.Constraint)
    text = _utf8(content.kind, content.text)
    given.kind = _native.HEADER.constants[f"DLM_CONSTRAINT_{content.kind.upper()}"]
    given.content = C.cast(C.c_char_p(text), C.POINTER(C.c_char))
    given.content_size = len(text)
    for name in ("before", "behind"):
        around = _utf8(name, getattr(content, name))
        if b"\0" in around:
            raise RequestError(f"{name}: no constrained text has a NUL")
        setattr(given, name, around)
    layout = content.layout
    given.item_separator = _utf8("json_layout", layout.item_separator)
    given.key_separator = _utf8("json_layout", layout.key_separator)
    given.indent = -1 if layout.indent is None else layout.indent
    given.has_lines = layout.has_lines
    given.max_depth = -1 if content.max_depth is None else content.max_depth
    given.seconds, given.memory_bytes = chosen.seconds, chosen.memory_bytes
    given.states, given.edges = chosen.states, chosen.edges
    given.made_of = (C.c_uint8 * _HASH_BYTES).from_buffer_copy(made_of)
    if vocabulary is not None:
        tokens = vocabulary.tokens[:vocab_size]
        given.tokens = (C.c_char_p * len(tokens))(*tokens)
        given.token_sizes = (C.c_size_t * len(tokens))(*(len(token or b"") for token in tokens))
        given.token_count, given.vocab_size = len(tokens), vocab_size
        given.eos_token_ids, given.eos_count = (C.c_int32 * len(ends))(*ends), len(ends)
        given.first_token = _asking(vocabulary)
    library, handle = _native.library(), C.c_void_p()
    message = C.create_string_buffer(_native.MESSAGE_BYTES)
    status = library.dlm_automaton_compile(
        bundle, C.byref(given), message, len(message), C.byref(handle)
    )
    if status:
        raise _native.error(status, message.value)
    made = Constraint.of_handle(handle)
    said = library.dlm_automaton_describe(handle).contents.warnings.decode()
    for warning in filter(None, said.split("\n")):
        warnings.warn(warning, SchemaWarning, stacklevel=2)
    return made


def _asking(vocabulary: Vocabulary) -> C._FuncPointer:
    def first_token(_: object, string: int, size: int) -> int:
        text = C.string_at(string, size).decode()
        try:
            return vocabulary.first_tokens([text])[0]
        except DlmError:
            return -1  # the tokenizer refuses it

    made: C._FuncPointer = _native.FirstTokenFn(first_token)
    return made


def _utf8(name: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as err:
        raise RequestError(
            f"{name}: half a surrogate pair at {err.start}: it cannot be written as UTF-8"
        ) from err


def default_folder() -> Path:
    """Where compiled constraints are kept: $DLM_CACHE_DIR, or dlm-export in the user's folder of
    caches.
    """
    chosen = os.environ.get("DLM_CACHE_DIR")
    base = (
        Path(chosen)
        if chosen
        else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dlm-export"
    )
    return base / "constraints"


def keep_compiled(
    content: Content,
    limits: CompileLimits,
    vocabulary: Sequence[object],
    folder: Path | None,
    compile_now: Callable[[bytes], Constraint],
) -> Constraint:
    """The constraint of a content: from ``folder`` if it is there, else from ``compile_now``, which
    takes the 32 bytes for its file.

    ``vocabulary``: what tells the vocabulary from others, as JSON. ``folder`` may be None.
    """
    if folder is None:
        return compile_now(bytes(_HASH_BYTES))
    made_of = [_FORMAT, asdict(content), astuple(limits), vocabulary]
    key = hashlib.sha256(json.dumps(made_of).encode()).digest()
    path = folder / f"{key.hex()}.automaton"
    kept = _kept(path, key)
    if kept is None:
        kept = compile_now(key)
        _keep(path, kept.data)
    return kept


def _kept(path: Path, key: bytes) -> Constraint | None:
    """What a file holds; None if there is none, or if it holds another one."""
    try:
        data = read_bytes(path, FILE_LIMIT_BYTES, BundleError)
        return Constraint(data) if data[_MADE_OF] == key else None
    except DlmError:
        return None  # it is made again, and written over


def _keep(path: Path, data: bytes) -> None:
    with contextlib.suppress(OSError):  # no room, no right: it is made again each time
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            try:
                file.write(data)
                file.close()
                os.replace(file.name, path)
            except OSError:
                os.unlink(file.name)
                raise
