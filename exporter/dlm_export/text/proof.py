"""Checks that a compiled tokenizer gives the same ids, texts and chats as Python's libraries."""

from __future__ import annotations

import contextlib
import reprlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from dlm_export.text import samples
from dlm_export.text.chat_segments import Chat
from dlm_export.text.native import CompiledText
from dlm_export.text.refusal import NotCompiled
from dlm_runtime.errors import RequestError
from dlm_runtime.text.tokenizer import Tokenizer

LINES, ROWS, CHATS = 1500, 300, 200
_AT_ONCE = 250  # number of texts or lists in a request to the tokenizer's process


def prove_tokens(
    compiled: CompiledText,
    tokenizer: Tokenizer,
    vocabulary: Sequence[str],
    added: Sequence[str],
) -> None:
    """Compare the compiled tokenizer with Python's tokenizer on generated texts and token ids.

    Raises NotCompiled at the first text that the two tokenizers encode differently, or at the first
    list of ids that they decode differently.
    """
    for special_tokens in (True, False):
        for texts in _parts(samples.lines(LINES, vocabulary, added)):
            for text, expected in zip(
                texts, tokenizer.encode_each(texts, special_tokens), strict=True
            ):
                found = _encoded(compiled, text, special_tokens)
                if found != expected:
                    how = "with special tokens" if special_tokens else "as plain text"
                    raise NotCompiled(
                        f"the compiled form encodes {reprlib.repr(text)} {how} to {_shown(found)}, and tokenizers to "
                        f"{_shown(expected)}"
                    )
    for text in samples.lines(3):
        if compiled.encode(text, is_prompt=True) != tokenizer.encode(text):
            raise NotCompiled(
                f"the compiled form puts other tokens around {reprlib.repr(text)} than tokenizers"
            )
    for ids in _parts(samples.rows(ROWS, tokenizer.size)):
        for row, text in zip(ids, tokenizer.decode_each(ids), strict=True):
            if compiled.decode(row) != text:
                raise NotCompiled(
                    f"the compiled form decodes {row} to {compiled.decode(row)!r:.80}, and tokenizers to {text!r:.80}"
                )


def prove_chats(
    compiled: CompiledText,
    tokenizer: Tokenizer,
    chat: Chat,
    special: Sequence[str] = (),
    numbers: Sequence[int] = (),
) -> int:
    """Render and encode generated conversations, and compare the results with Python's results.

    Messages may contain the texts in ``special``. ``numbers`` are constants of the template: some
    conversations have about as many messages, and some messages about as many characters.

    Returns the number of conversations that the compiled template rendered and did not reject.
    Raises NotCompiled at the first conversation whose text or token ids differ.
    """
    rendered = 0
    literals = sorted({*special, *(text for _, text in chat.literals)})
    if numbers and numbers[-1] > samples.MOST_LETTERS:
        raise NotCompiled(
            f"its chat template has the number {numbers[-1]}, and chats are compared up to {samples.MOST_LETTERS} characters"
        )
    for _ in _alike(compiled, tokenizer, samples.counted(chat.roles, numbers)):
        pass
    for messages in _alike(compiled, tokenizer, samples.chats(CHATS, chat.roles, literals)):
        rendered += 1
        ids = expected = compiled.encode_chat(messages)
        with contextlib.suppress(RequestError):  # Python may reject a conversation
            expected = tokenizer.encode_chat(messages)
        if ids != expected:
            raise NotCompiled(
                f"the compiled chat encodes {reprlib.repr(messages)} in another way than tokenizers"
            )
    return rendered


def _alike(
    compiled: CompiledText, tokenizer: Tokenizer, chats: Iterable[list[dict[str, str]]]
) -> Iterator[list[dict[str, str]]]:
    """Yield the conversations that the compiled template renders, like Jinja, and does not reject.

    Raises NotCompiled at the first conversation whose text differs.
    """
    for some in _parts(chats):
        for messages, expected in zip(some, tokenizer.render_each(some), strict=True):
            try:
                found = compiled.render(messages)
            except RequestError:
                continue
            if found != expected:
                longest = max(len(message["content"]) for message in messages)
                raise NotCompiled(
                    f"the compiled chat renders {reprlib.repr(messages)} ({len(messages)} messages of up to {longest} "
                    "characters) in another way than Jinja"
                )
            yield messages


def _encoded(compiled: CompiledText, text: str, special_tokens: bool) -> list[int] | None:
    """Return the token ids of a text, or ``None`` if the library rejects the text."""
    try:
        return compiled.encode(text, special_tokens=special_tokens)
    except RequestError:
        return None


def _shown(ids: list[int] | None) -> str:
    return "nothing" if ids is None else str(ids[:12])


def _parts(items: Iterable) -> Iterable[list]:  # type: ignore[type-arg]
    iterator = iter(items)
    while part := [*islice(iterator, _AT_ONCE)]:
        yield part
