"""Finds the bytes to which a tokenizer decodes each token.

The bytes of a text must be the bytes of its tokens, one token after another. In some vocabularies,
the first token of a text is decoded to other bytes than the same token elsewhere. Then a
``Vocabulary`` contains both.
"""

from __future__ import annotations

import ctypes as C
import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dlm_runtime.abi import native as _native
from dlm_runtime.errors import DlmError, RequestError
from dlm_runtime.text.tokenizer import Tokenizer

NAMED = b"\xfe"
"""The byte before the name of an added token. It occurs in no text."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class Vocabulary:
    """For each token id, the bytes of the token. None for a token that no text contains.

    An added token has the byte ``NAMED`` and its name. Only a constraint that names the token
    allows it.

    ``starts`` contains the bytes of each token at the start of a text. It is None if they are the
    same.
    """

    tokens: tuple[bytes | None, ...]
    tokenizer: Tokenizer | None = None
    starts: tuple[bytes | None, ...] | None = None

    def first_tokens(self, texts: Sequence[str]) -> list[int]:
        """Encode each text and return only its first token.

        The result for a text is -1 if there is no tokenizer, or if the tokenizer rejects the text.
        """
        if self.tokenizer is None:
            return [-1] * len(texts)
        return [ids[0] if ids else -1 for ids in self.tokenizer.encode_each(texts)]

    @functools.cached_property
    def native(self) -> dict[str, Any]:
        """The fields of a ``dlm_constraint`` that describe the vocabulary.

        The values are created once. The native library makes a lookup index for a vocabulary. If
        later constraints pass the same arrays and the same callback, the library does not make a
        new index.
        """

        def first_token(_: object, string: int, size: int) -> int:
            text = C.string_at(string, size).decode()
            try:
                return self.first_tokens([text])[0]
            except DlmError:
                return -1  # the tokenizer rejects the text

        found: dict[str, Any] = {"first_token": _native.FirstTokenFn(first_token)}
        for name, texts in (("token", self.tokens), ("start_token", self.starts)):
            if texts is not None:
                sizes = (len(text or b"") for text in texts)
                found[f"{name}s"] = (C.c_char_p * len(texts))(*texts)
                found[f"{name}_sizes"] = (C.c_size_t * len(texts))(*sizes)
        return found


def read_vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    """Read the vocabulary of a bundle's tokenizer.

    Raises RequestError if the bytes of a token depend on more than whether the token is the first.
    """
    found = _read(tokenizer)
    named = {
        token: NAMED + each["content"].encode()
        for token, each in tokenizer.added_tokens().items()
        if each["special"] or each["content"].strip()
    }

    def with_names(texts: tuple[bytes | None, ...]) -> tuple[bytes | None, ...]:
        return tuple(
            named.get(token) if text is None else None if text != NAMED and NAMED in text else text
            for token, text in enumerate(texts)
        )

    starts = None if found.starts is None else with_names(found.starts)
    return replace(found, tokens=with_names(found.tokens), starts=starts)


def _read(tokenizer: Tokenizer) -> Vocabulary:
    """Read a vocabulary without the added tokens."""
    decoder, names = tokenizer.vocabulary()
    kinds = [part["type"] for part in decoder]
    if kinds == ["ByteLevel"]:
        return Vocabulary(tuple(map(_spelled, names)), tokenizer)
    if {"Replace", "Fuse"} <= {*kinds} <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        return _of_characters(tokenizer, decoder, names)
    if kinds in ([], ["Fuse"], ["Metaspace"], ["WordPiece"]):
        return _of_words(tokenizer, names)
    raise RequestError(
        f"constraints cannot be used with this tokenizer: it decodes by {', '.join(kinds)}, so the text of a token may "
        "depend on the tokens after it"
    )


def _of_characters(
    tokenizer: Tokenizer, decoder: Sequence[Mapping[str, Any]], names: Sequence[str | None]
) -> Vocabulary:
    """Read a SentencePiece vocabulary, whose tokens are characters or single bytes."""
    replaced = [part for part in decoder if part["type"] == "Replace"]
    if any("String" not in part["pattern"] for part in replaced):
        raise RequestError(
            "constraints cannot be used with this tokenizer: its decoder replaces a regular expression"
        )
    has_bytes = any(part["type"] == "ByteFallback" for part in decoder)
    strips = [part for part in decoder if part["type"] == "Strip"]
    if any((part["content"], part["stop"]) != (" ", 0) for part in strips):
        raise RequestError(
            "constraints cannot be used with this tokenizer: its decoder strips more than spaces at the start"
        )

    def text_of(name: str | None) -> bytes | None:
        if name is None:
            return None
        if has_bytes and (match := _BYTE_TOKEN.fullmatch(name)):
            return bytes([int(match[1], 16)])
        for part in replaced:
            name = name.replace(part["pattern"]["String"], part["content"])
        return name.encode()

    tokens = tuple(map(text_of, names))
    if not strips:
        return Vocabulary(tokens, tokenizer)
    most = sum(part["start"] for part in strips)

    def start_of(text: bytes | None) -> bytes | None:
        return text and text[min(most, len(text) - len(text.lstrip(b" "))) :]

    return Vocabulary(tokens, tokenizer, tuple(map(start_of, tokens)))


def _of_words(tokenizer: Tokenizer, names: Sequence[str | None]) -> Vocabulary:
    """Read a vocabulary whose decoder treats each token alone, except the first token."""
    known = [token for token, name in enumerate(names) if name is not None]
    rows = [[token] for token in known] + [[known[0], token] for token in known]
    texts = tokenizer.decode_each(rows)
    tokens: list[bytes | None] = [None] * len(names)
    starts: list[bytes | None] = [None] * len(names)
    before = texts[0]
    for token, start, both in zip(known, texts, texts[len(known) :], strict=False):
        if not both.startswith(before):
            raise RequestError(
                f"constraints cannot be used with this tokenizer: its token {names[token]!r} changes the text before it"
            )
        tokens[token] = both.removeprefix(before).encode()
        starts[token] = start.encode()
    return Vocabulary(tuple(tokens), tokenizer, None if tokens == starts else tuple(starts))


def _spelled(name: str | None) -> bytes | None:
    try:
        return None if name is None else bytes(BYTES[letter] for letter in name)
    except KeyError:
        return None  # a byte-level vocabulary has no such token


def _byte_letters() -> dict[str, int]:
    """Return a dict that maps each letter in GPT-2's vocabulary files to its byte.

    For a printable byte, the letter is the character whose code point equals the byte. For the
    other bytes, in ascending order, the letters are the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + number): byte for number, byte in enumerate(others)
    }


BYTES = _byte_letters()
"""The byte for which each letter stands in a byte-level vocabulary."""
