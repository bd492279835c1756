"""Compiled constraints: made once for a tokenizer, kept in a folder by what they were made of, held
by the native library.
"""

from __future__ import annotations

import contextlib
import ctypes as C
import hashlib
import json
import os
import tempfile
import weakref
from collections.abc import Callable, Sequence
from dataclasses import astuple
from pathlib import Path

from dlm_runtime.abi import native as _native
from dlm_runtime.constraints.automaton import MADE_OF, compile_automaton
from dlm_runtime.constraints.byte_automaton import Budget, CompileLimits, between, byte_automaton
from dlm_runtime.constraints.vocabulary import Vocabulary
from dlm_runtime.errors import BundleError, DlmError, RequestError
from dlm_runtime.files import read_bytes

FILE_LIMIT_BYTES = 1 << 30
_FORMAT = (
    2  # Version of cached files. Raise it when the same constraint compiles to another automaton.
)


class Constraint:
    """A constraint as the native library holds it. ``data``: its file, for programs that open it
    themselves.
    """

    def __init__(self, data: bytes) -> None:
        """Raises BundleError for damaged data."""
        library, handle = _native.library(), C.c_void_p()
        message = C.create_string_buffer(_native.MESSAGE_BYTES)
        status = library.dlm_automaton_read(data, len(data), message, len(message), C.byref(handle))
        if status:
            raise _native.error(status, message.value)
        self.data, self.handle = data, handle
        weakref.finalize(self, library.dlm_automaton_destroy, handle)

    @property
    def shortest(self) -> int:
        """The tokens of its shortest text."""
        return int(_native.library().dlm_automaton_shortest(self.handle))


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


def compile_constraint(
    expression: str,
    is_of_json: bool,
    vocabulary: Callable[[], Vocabulary],
    vocabulary_sha256: str,
    vocab_size: int,
    eos_token_ids: Sequence[int],
    limits: CompileLimits,
    folder: Path | None,
    given: tuple[str, str] = ("", ""),
    hint: str = "",
) -> Constraint:
    """The constraint that an expression is, for a vocabulary of ``vocabulary_sha256``.

    ``given``: texts before and behind what it is of, which are part of what matches. ``folder`` is
    where it is kept, and looked for before anything is compiled; None: nowhere. ``vocabulary`` is
    asked for only then. ``hint`` ends the message about a given text that no constrained text
    starts with. Raises RequestError for what cannot be compiled within ``limits``.
    """
    if not eos_token_ids:
        raise RequestError(
            "constraints need an end token, to stand behind texts, and this bundle has none"
        )
    made_of = [
        _FORMAT,
        expression,
        is_of_json,
        vocabulary_sha256,
        vocab_size,
        list(eos_token_ids),
        astuple(limits),
        given,
    ]
    key = hashlib.sha256(json.dumps(made_of).encode()).digest()
    path = None if folder is None else folder / f"{key.hex()}.automaton"
    if path is not None and (kept := _kept(path, key)) is not None:
        return kept
    budget = Budget(limits)
    texts = byte_automaton(expression, limits, is_of_json, budget)
    if any(given):
        texts = between(texts, *given, budget, hint)
    data = compile_automaton(
        texts, vocabulary(), vocab_size, eos_token_ids, limits, budget
    ).as_bytes(key)
    if path is not None:
        _keep(path, data)
    return Constraint(data)


def _kept(path: Path, key: bytes) -> Constraint | None:
    """What a file holds; None where there is none, or not this."""
    try:
        data = read_bytes(path, FILE_LIMIT_BYTES, BundleError)
        return Constraint(data) if data[MADE_OF] == key else None
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
