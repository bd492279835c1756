"""Opens a compiled tokenizer in the native library, for checks, measurements and tests."""

from __future__ import annotations

import ctypes as C
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dlm_runtime.abi import native as _native

_PROMPT, _SPECIAL = 1, 2  # flags of dlm_text_encode


class CompiledText:
    """A compiled tokenizer and chat template in the native library, made from a file's bytes.

    Raises BundleError if the file is damaged, and RequestError if the library rejects an input.
    """

    def __init__(self, data: bytes) -> None:
        self._library, self._handle = _native.library(), C.c_void_p()
        # Buffers for results. The buffers grow as needed.
        self._ids_out, self._text = np.empty(1024, np.int32), np.empty(4096, np.uint8)
        _native.check(self._library.dlm_text_read, (data, len(data)), C.byref(self._handle))

    def __del__(self) -> None:
        self._library.dlm_text_destroy(self._handle)

    def encode(
        self, text: str | bytes, is_prompt: bool = False, special_tokens: bool = False
    ) -> list[int]:
        """Encode text to token ids.

        If ``is_prompt`` is true, the result includes the tokens that the tokenizer puts around a
        prompt. ``Options`` explains ``special_tokens``.
        """
        data = text.encode() if isinstance(text, str) else text
        flags = (_PROMPT if is_prompt else 0) | (_SPECIAL if special_tokens else 0)
        return self._ids(self._library.dlm_text_encode, data, len(data), flags)

    def encode_chat(
        self, messages: Sequence[Mapping[str, str]], special_tokens: bool = False
    ) -> list[int]:
        """Encode a chat to token ids."""
        return self._ids(
            self._library.dlm_chat_encode, *_chat(messages), _SPECIAL if special_tokens else 0
        )

    def _ids(self, function: Any, *given: Any) -> list[int]:
        """Call a function of the library that writes token ids, and return the ids."""
        count = C.c_size_t()
        while True:
            out = self._ids_out.ctypes.data_as(_native.i32p)
            after = (out, self._ids_out.size, C.byref(count))
            _native.check(function, (self._handle, *given), *after)
            if count.value <= self._ids_out.size:
                return self._ids_out[: count.value].tolist()  # type: ignore[no-any-return]
            self._ids_out = np.empty(2 * count.value, np.int32)

    def decode(self, tokens: Sequence[int]) -> str:
        """Decode token ids to text."""
        given = np.asarray(tokens, np.int32)
        return self._filled(
            self._library.dlm_text_decode, given.ctypes.data_as(_native.i32p), given.size
        )

    def _filled(self, function: Any, *given: Any) -> str:
        """Call a function of the library that writes text, and return the text."""
        size = C.c_size_t()
        while True:
            out = self._text.ctypes.data_as(C.c_char_p)
            after = (out, self._text.size, C.byref(size))
            _native.check(function, (self._handle, *given), *after)
            if size.value <= self._text.size:
                return self._text[: size.value].tobytes().decode()
            self._text = np.empty(2 * size.value, np.uint8)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Render a chat as text."""
        return self._filled(self._library.dlm_chat_render, *_chat(messages))


def _chat(messages: Sequence[Mapping[str, str]]) -> tuple[Any, int]:
    said = [(message["role"].encode(), message["content"].encode()) for message in messages]
    return (_native.Message * len(said))(
        *(
            _native.Message(role, C.cast(C.c_char_p(content), C.POINTER(C.c_char)), len(content))
            for role, content in said
        )
    ), len(said)
