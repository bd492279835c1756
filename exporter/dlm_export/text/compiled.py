"""Compiles a checkpoint's tokenizer and chat template into one file.

The results of the compiled file are compared with the results of the original tokenizer. If the
results differ, no file is written, and the manifest records the reason.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dlm_export.text.chat_segments import Chat, constants, read_chat
from dlm_export.text.layout import (
    BYTE_FALLBACK,
    SPECIAL,
    WHOLE,
    WORD_PIECES,
    TextTables,
    as_bytes,
)
from dlm_export.text.native import CompiledText
from dlm_export.text.proof import prove_chats, prove_tokens
from dlm_export.text.refusal import NotCompiled
from dlm_export.text.supported import chat_failure
from dlm_export.text.vocabulary import read_tables
from dlm_runtime.errors import BundleError, RequestError
from dlm_runtime.text.tokenizer import Tokenizer

TEXT_FILE = "text.bin"
MOST_TOKENS = 1 << 20  # maximum number of tokens; the largest released vocabulary has 262,144
_CHATS_AT_ONCE = 200
_REASON_LIMIT = 400  # maximum number of characters in a recorded reason


@dataclass(frozen=True)
class Compiled:
    """The compiled file, and its record in the manifest.

    ``data`` is the content of the file, or ``None`` if the tokenizer cannot be compiled. ``entry``
    is the record for the manifest.
    """

    data: bytes | None
    entry: dict[str, str]


def compile_text(tokenizer: Tokenizer, template: str | None) -> Compiled:
    """Compile a tokenizer and its chat template (``None`` if there is no chat template)."""
    try:
        tables = _tables(json.loads(tokenizer.as_json()), tokenizer)
    except (NotCompiled, BundleError, RequestError) as err:
        return Compiled(None, {"refused": _reason(err)})
    chat, reason = Chat(), "it has no chat template"
    if template is not None:
        try:
            chat = _chat(template, tables, tokenizer)
        except (NotCompiled, RequestError) as err:
            reason = _reason(err)
    if chat.roles:
        return Compiled(as_bytes(replace(tables, chat=chat)), {"file": TEXT_FILE})
    refused = {} if template is None else {"chat_refused": reason}
    return Compiled(
        as_bytes(replace(tables, chat=Chat(reason=reason))), {"file": TEXT_FILE} | refused
    )


def _tables(found: Mapping[str, Any], tokenizer: Tokenizer) -> TextTables:
    if tokenizer.size > MOST_TOKENS:
        raise NotCompiled(f"its highest token id is {tokenizer.size - 1}, above {MOST_TOKENS - 1}")
    tables = read_tables(found, tokenizer.names(range(tokenizer.size)))
    if not tables.flags & (BYTE_FALLBACK | WORD_PIECES):
        tables = _with_wholes(tables)
    added = [token["content"] for token in found["added_tokens"]]
    vocabulary = [text for token in tables.tokens if (text := token.decode("utf-8", "ignore"))]
    prove_tokens(CompiledText(as_bytes(tables)), tokenizer, vocabulary, added)
    return tables


def _with_wholes(tables: TextTables) -> TextTables:
    """Mark tokens to which their own text is encoded. The runtime does not merge such words."""
    compiled, token_flags = CompiledText(as_bytes(tables)), tables.token_flags.copy()
    # Do not mark added tokens. If the text of an added token appears as ordinary text, it is
    # encoded to other tokens.
    added = {each.token for each in tables.added}
    for token, text in enumerate(tables.tokens):
        if (
            text
            and text.isascii()
            and token not in added
            and compiled.encode(text, special_tokens=True) == [token]
        ):
            token_flags[token] |= WHOLE
    return replace(tables, token_flags=token_flags)


def _chat(template: str, tables: TextTables, tokenizer: Tokenizer) -> Chat:
    def render(chats: Any) -> list[str | None]:
        parts = (
            chats[first : first + _CHATS_AT_ONCE] for first in range(0, len(chats), _CHATS_AT_ONCE)
        )
        return [text for part in parts for text in tokenizer.render_each(part)]

    if (failure := chat_failure(tokenizer)) is not None:
        raise NotCompiled(f"its chat template {failure}")
    found = constants(template)
    chat = read_chat(found, render)
    special = [
        each.text.decode() for each in tables.added if tables.token_flags[each.token] & SPECIAL
    ]
    compiled = CompiledText(as_bytes(replace(tables, chat=chat)))
    if not prove_chats(compiled, tokenizer, chat, special, found.numbers):
        raise NotCompiled("its compiled chat template rejects all test conversations")
    return chat


def _reason(err: Exception) -> str:
    text = " ".join(str(err).split())
    return text if len(text) <= _REASON_LIMIT else text[: _REASON_LIMIT - 3] + "..."
