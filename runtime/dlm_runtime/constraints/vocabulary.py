"""Finds the bytes of each token of a tokenizer, as its decoder writes them.

This is only exact for byte-level vocabularies. There, each token is a string of bytes, and the
bytes of a text are those of its tokens, one after another.
"""

from __future__ import annotations

import ctypes as C
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dlm_runtime.abi import native as _native
from dlm_runtime.errors import DlmError, RequestError
from dlm_runtime.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Vocabulary:
    """The bytes of each token, by token id. They are None for added tokens, which never occur in a
    text.
    """

    tokens: tuple[bytes | None, ...]
    tokenizer: Tokenizer | None = None

    def first_tokens(self, texts: Sequence[str]) -> list[int]:
        """The first token of each text. It is -1 if the tokenizer is missing or rejects the text,
        or if the token's bytes are not the start of the text.
        """
        if self.tokenizer is None:
            return [-1] * len(texts)
        found = (ids[0] if ids else -1 for ids in self.tokenizer.encode_each(texts))
        return [
            token if self._starts(token, text) else -1
            for token, text in zip(found, texts, strict=True)
        ]

    @functools.cached_property
    def native(self) -> tuple[Any, Any, Any]:
        """The fields ``tokens``, ``token_sizes`` and ``first_token`` of a ``dlm_constraint``.

        They are created once and reused. The native library keeps its index of a vocabulary as long
        as the constraints of a bundle pass the same tokens and the same callback.
        """

        def first_token(_: object, string: int, size: int) -> int:
            text = C.string_at(string, size).decode()
            try:
                return self.first_tokens([text])[0]
            except DlmError:
                return -1  # the tokenizer refuses it

        sizes = (len(token or b"") for token in self.tokens)
        return (
            (C.c_char_p * len(self.tokens))(*self.tokens),
            (C.c_size_t * len(self.tokens))(*sizes),
            _native.FirstTokenFn(first_token),
        )

    def _starts(self, token: int, text: str) -> bool:
        spelled = self.tokens[token] if 0 <= token < len(self.tokens) else None
        return bool(spelled) and text.encode().startswith(spelled or b"")


def read_vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    """Read the vocabulary of a bundle's tokenizer. Raises RequestError if it is not byte-level."""
    decoder, names = tokenizer.vocabulary()
    if decoder != ["ByteLevel"]:
        raise RequestError(
            f"constraints need a byte-level tokenizer, but this one's decoder is {', '.join(decoder) or 'missing'}: its texts "
            "are not the concatenation of its tokens"
        )
    return Vocabulary(tuple(None if name is None else _spelled(name) for name in names), tokenizer)


def _spelled(name: str) -> bytes | None:
    try:
        return bytes(BYTES[letter] for letter in name)
    except KeyError:
        return None  # not a token of a byte-level encoder


def _byte_letters() -> dict[str, int]:
    """The byte for each letter in the spelling of GPT-2. Printable bytes are spelled as themselves.
    The other bytes are spelled as the letters from U+0100 on, in ascending order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + number): byte for number, byte in enumerate(others)
    }


BYTES = _byte_letters()
"""The byte that each letter stands for in a byte-level vocabulary."""
