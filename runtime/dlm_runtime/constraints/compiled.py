"""Compiles constraints for one vocabulary, and stores the results in a cache folder."""

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
MOST_FILES = 512  # in a cache folder; the file that was not used for longest is deleted first
# Version of the cached files. Increase this version when a change of the compiler makes the same
# source compile to a different automaton.
_FORMAT = 6
_HASH_BYTES = 32
_MADE_OF = slice(8 + 6 * 4, 8 + 6 * 4 + _HASH_BYTES)  # the position of made_of in a file


@dataclass(frozen=True)
class CompileLimits:
    """Limits on the resources for compiling one constraint.

    Args:
        seconds: Limit on the processor time of all stages together.
        memory_bytes: Limit on the memory of each stage.
        states: Limit on the number of states of the automaton.
        edges: Limit on the number of edges of the automaton.
    """

    seconds: float = 30
    memory_bytes: int = 192 << 20
    states: int = 1 << 17
    edges: int = 1 << 22


@dataclass(frozen=True)
class Content:
    """The source of a constraint, before it is compiled.

    Args:
        kind: "regex", "schema", "enum", "json_object", "tree", "grammar" or "decisions". These
            names match the constants ``DLM_CONSTRAINT_...`` in ``dlm_runtime.h``.
        text: The source text: a regular expression, a grammar, or JSON for the other kinds.
        layout: The layout of JSON texts.
        max_depth, any_order, more_properties: As in ``Bundle.constraint``.
        before, behind: Fixed texts before and after the generated text. The constraint covers these
            texts too.
    """

    kind: str
    text: str
    layout: Layout = COMPACT
    max_depth: int | None = None
    before: str = ""
    behind: str = ""
    any_order: bool = False
    more_properties: bool = False


class Constraint:
    """A compiled constraint, owned by the native library."""

    def __init__(self, data: bytes) -> None:
        """Load a constraint from the bytes of a file. Raises BundleError for damaged bytes."""
        given = _native.initialised(_native.Constraint)
        given.kind = _native.HEADER.constants["DLM_CONSTRAINT_COMPILED"]
        given.content = C.cast(C.c_char_p(data), C.POINTER(C.c_char))
        given.content_size = len(data)
        self._own(_compiled(None, given))

    @classmethod
    def of_handle(cls, handle: C.c_void_p) -> Constraint:
        """Create a constraint from a ``dlm_automaton``.

        The constraint owns the automaton, and will destroy it.
        """
        made = cls.__new__(cls)
        made._own(handle)
        return made

    def _own(self, handle: C.c_void_p) -> None:
        self.handle = handle
        weakref.finalize(self, _native.library().dlm_automaton_destroy, handle)

    @property
    def data(self) -> bytes:
        """Return the constraint as the bytes of a file, for programs that read automata."""
        write, size = _native.library().dlm_automaton_write, C.c_size_t()
        data = C.create_string_buffer(0)
        while True:
            _native.check(write, (self.handle,), data, len(data), C.byref(size))
            if size.value <= len(data):
                return data.raw
            data = C.create_string_buffer(size.value)

    @property
    def shortest(self) -> int:
        """The number of tokens of the shortest text that matches."""
        return int(_native.library().dlm_automaton_describe(self.handle).contents.shortest)

    @property
    def states(self) -> int:
        """The number of states of the automaton."""
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
    """Compile a constraint from its source, for one vocabulary.

    Pass a native ``bundle`` to use its vocabulary. Otherwise, pass ``vocabulary`` and
    ``vocab_size``. Tokens with an id of ``vocab_size`` or more are not used. The compiled
    constraint contains the 32 bytes ``made_of``, by which a cache recognises it.

    Raises RequestError if the constraint cannot be compiled within ``limits``. Warns with
    SchemaWarning about keywords that look misspelled.
    """
    chosen = limits or CompileLimits()
    given = _native.initialised(_native.Constraint)
    text = _utf8(content.kind, content.text)
    given.kind = _native.HEADER.constants[f"DLM_CONSTRAINT_{content.kind.upper()}"]
    if text:  # the library takes a pointer without a size for a mistake
        given.content = C.cast(C.c_char_p(text), C.POINTER(C.c_char))
        given.content_size = len(text)
    for name in ("before", "behind"):
        around = _utf8(name, getattr(content, name))
        if b"\0" in around:
            raise RequestError(f"{name}: a constrained text cannot contain NUL")
        setattr(given, name, around)
    layout = content.layout
    given.item_separator = _utf8("json_layout", layout.item_separator)
    given.key_separator = _utf8("json_layout", layout.key_separator)
    given.indent = -1 if layout.indent is None else layout.indent
    given.has_lines = layout.has_lines
    given.max_depth = -1 if content.max_depth is None else content.max_depth
    given.any_order, given.more_properties = content.any_order, content.more_properties
    given.seconds, given.memory_bytes = chosen.seconds, chosen.memory_bytes
    given.states, given.edges = chosen.states, chosen.edges
    given.made_of = (C.c_uint8 * _HASH_BYTES).from_buffer_copy(made_of)
    if vocabulary is not None:
        for name, value in vocabulary.native.items():
            setattr(given, name, value)
        given.token_count, given.vocab_size = min(len(vocabulary.tokens), vocab_size), vocab_size
        given.eos_token_ids, given.eos_count = (C.c_int32 * len(ends))(*ends), len(ends)
    made = Constraint.of_handle(_compiled(bundle, given))
    library = _native.library()
    said = library.dlm_automaton_describe(made.handle).contents.warnings.decode()
    for warning in filter(None, said.split("\n")):
        warnings.warn(warning, SchemaWarning, stacklevel=2)
    return made


def _compiled(bundle: C.c_void_p | None, given: C.Structure) -> C.c_void_p:
    """Call the native compiler with a ``dlm_constraint`` and return the new ``dlm_automaton``."""
    handle, compile_now = C.c_void_p(), _native.library().dlm_automaton_compile
    _native.check(compile_now, (bundle, C.byref(given)), C.byref(handle))
    return handle


def _utf8(name: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as err:
        raise RequestError(
            f"{name}: character {err.start} is half of a surrogate pair, which UTF-8 cannot encode"
        ) from err


def default_folder() -> Path:
    """Return the folder for compiled constraints.

    The folder is in $DLM_CACHE_DIR, or else in the folder dlm-export of the user's cache folder.
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
    """Load a compiled constraint from ``folder``.

    If the folder does not contain the constraint, compile the constraint and store it there.

    ``vocabulary`` is a list of JSON values that identifies the vocabulary. If ``folder`` is None,
    nothing is loaded or stored. The function ``compile_now`` compiles the constraint. The argument
    of ``compile_now`` is a hash of 32 bytes to store in the compiled constraint.
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
    """Load the constraint with the hash ``key``, or None if no valid file contains it."""
    try:
        data = read_bytes(path, FILE_LIMIT_BYTES, BundleError)
        with contextlib.suppress(OSError):  # the folder may be read-only
            os.utime(path)
        return Constraint(data) if data[_MADE_OF] == key else None
    except DlmError:
        return None  # the caller compiles the constraint again, and overwrites the file


def _keep(path: Path, data: bytes) -> None:
    # If the file cannot be written, the constraint is compiled again each time.
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            try:
                file.write(data)
                file.close()
                os.replace(file.name, path)
            except OSError:
                os.unlink(file.name)
                raise
        files = sorted(path.parent.glob("*.automaton"), key=lambda each: each.stat().st_mtime_ns)
        for oldest in files[:-MOST_FILES]:
            oldest.unlink(missing_ok=True)
