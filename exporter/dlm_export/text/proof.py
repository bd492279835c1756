"""Whether a compiled text file is equal to the libraries it stands for: token ids, decoded text, and chats, one by one."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Sequence
from itertools import islice

from dlm_export.text import samples
from dlm_export.text.chat import Chat
from dlm_export.text.native import CompiledText
from dlm_export.text.refusal import NotCompiled
from dlm_runtime.errors import RequestError
from dlm_runtime.tokenizer import Tokenizer

LINES, ROWS, CHATS = 1500, 300, 200
_AT_ONCE = 250  # what the tokenizer's process is asked at once


def prove_tokens(
    compiled: CompiledText, tokenizer: Tokenizer, vocabulary: Sequence[str], added: Sequence[str], lines: int = LINES
) -> None:
    """Raises NotCompiled at the first text that is encoded, or row of ids that is decoded, in another way."""
    for texts in _parts(samples.lines(lines, vocabulary, added)):
        for text, expected in zip(texts, tokenizer.encode_each(texts), strict=True):
            found = compiled.encode(text)
            if found != expected:
                raise NotCompiled(
                    f"the compiled form encodes {reprlib.repr(text)} to {found[:12]}, and tokenizers to {expected[:12]}"
                )
    for text in samples.lines(3):
        if compiled.encode(text, is_prompt=True) != tokenizer.encode(text):
            raise NotCompiled(f"the compiled form puts other tokens around {reprlib.repr(text)} than tokenizers")
    for ids in _parts(samples.rows(ROWS, tokenizer.size)):
        for row, text in zip(ids, tokenizer.decode_each(ids), strict=True):
            if compiled.decode(row) != text:
                raise NotCompiled(
                    f"the compiled form decodes {row} to {compiled.decode(row)!r:.80}, and tokenizers to {text!r:.80}"
                )


def prove_chats(compiled: CompiledText, tokenizer: Tokenizer, chat: Chat, chats: int = CHATS) -> int:
    """How many conversations were rendered, and not refused. Raises NotCompiled at the first that comes out in another way."""
    rendered = 0
    literals = sorted({text for _, text in chat.literals})
    for some in _parts(samples.chats(chats, chat.roles, literals)):
        for messages, expected in zip(some, tokenizer.render_each(some), strict=True):
            try:
                found = compiled.render(messages)
            except RequestError:
                continue
            rendered += 1
            if found != expected:
                raise NotCompiled(f"the compiled chat renders {reprlib.repr(messages)} in another way than Jinja")
    return rendered


def _parts(items: Iterable) -> Iterable[list]:  # type: ignore[type-arg]
    iterator = iter(items)
    while part := [*islice(iterator, _AT_ONCE)]:
        yield part
