"""Finds the bytes to which a tokenizer decodes each token.

Only byte-level vocabularies are supported. In a byte-level vocabulary, each token is a string of
bytes, and a text consists of the bytes of its tokens, one token after another.
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
    """For each token id, the bytes of the token. None for added tokens, which no text contains."""

    tokens: tuple[bytes | None, ...]
    tokenizer: Tokenizer | None = None

    def first_tokens(self, texts: Sequence[str]) -> list[int]:
        """Encode each text and return only its first token.

        The result for a text is -1 if there is no tokenizer, if the tokenizer rejects the text, or
        if the text does not start with the bytes of its first token.
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

        The values of the three fields are created once. The native library makes a lookup index for
        a vocabulary. If later constraints pass the same token array and the same callback, the
        library does not make a new index.
        """

        def first_token(_: object, string: int, size: int) -> int:
            text = C.string_at(string, size).decode()
            try:
                return self.first_tokens([text])[0]
            except DlmError:
                return -1  # the tokenizer rejects the text

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
    """Read the vocabulary of a bundle's tokenizer.

    Raises RequestError if the vocabulary is not byte-level.
    """
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
