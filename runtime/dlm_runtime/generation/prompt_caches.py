"""Prompt caches: files with the keys and values of prompts that were computed earlier."""

from __future__ import annotations

import ctypes as C
import os
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlm_runtime.abi import native as _native
from dlm_runtime.errors import RequestError
from dlm_runtime.generation.request import text_of, token_ids

if TYPE_CHECKING:
    from dlm_runtime.generation.handle import Handle
    from dlm_runtime.text.tokenizer import Tokenizer


def common_start(one: Sequence[int], other: Sequence[int]) -> list[int]:
    """Return the longest list of tokens with which both ``one`` and ``other`` start."""
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return [token for token, _ in pairs]


class UsesPromptCaches:
    """The methods of ``Bundle`` that save and load prompt caches.

    ``Bundle`` inherits this class.
    """

    if TYPE_CHECKING:
        _handle: Handle

        @property
        def tokenizer(self) -> Tokenizer | None: ...

    def save_prompt_cache(
        self,
        path: str | Path,
        *,
        prompt: str | None = None,
        tokens: Sequence[int] | None = None,
        chat: Sequence[Mapping[str, Any]] | None = None,
    ) -> int:
        """Compute the keys and values of a prompt, and write them to a file.

        Later requests whose prompts start with the same tokens reuse the keys and values in the
        file, instead of computing them again. The denoiser's attention must be block-causal, and
        the engine must run on a CPU. Pass exactly one of ``prompt``, ``tokens`` and ``chat``.

        Args:
            path: The file to write. An existing file is replaced when the new file is complete.
            prompt: The prompt as text.
            tokens: Token ids, 0..vocab_size-1.
            chat: Messages for the chat template. If the last message comes from the system or the
                assistant, the file covers only the tokens at the start that do not depend on the
                user's next message.

        Returns:
            The number of tokens that the file covers. This number is a multiple of the page size. A
            page is the smallest whole number of blocks that contains at least 16 tokens.

        Raises:
            RequestError: Attention is full, the engine cannot share passes, the prompt is shorter
                than a page, or the file cannot be written.
        """
        given = self._prompt_tokens(prompt, tokens, chat)
        saved = C.c_size_t()
        with self._handle.session() as session:
            status = _native.library().dlm_session_save_prompt_cache(
                session,
                (C.c_int32 * max(1, len(given)))(*given),
                len(given),
                os.fsencode(path),
                C.byref(saved),
            )
            self._handle.check(status, session)
        return saved.value

    def load_prompt_cache(self, path: str | Path) -> None:
        """Use a prompt cache that ``save_prompt_cache`` wrote with the same bundle.

        All later requests of this bundle and of its schedulers use the file, if their prompts start
        with the tokens of the file. The file is mapped into memory. It must not change while the
        bundle is open.

        Raises:
            BundleError: The file is missing or damaged, or was saved with a different bundle.
            RequestError: The bundle or its engine cannot use prompt caches.
        """
        self._handle.begin()
        try:
            load = _native.library().dlm_bundle_load_prompt_cache
            _native.check(load, (self._handle.pointer, os.fsencode(path)))
        finally:
            self._handle.end()

    def _prompt_tokens(
        self,
        prompt: str | None,
        tokens: Sequence[int] | None,
        chat: Sequence[Mapping[str, Any]] | None,
    ) -> list[int]:
        if sum(given is not None for given in (prompt, tokens, chat)) != 1:
            raise RequestError("give one of prompt, tokens and chat")
        if tokens is not None:
            return token_ids(tokens)
        if self.tokenizer is None:
            raise RequestError("this bundle has no tokenizer: give tokens")
        if prompt is not None:
            return self.tokenizer.encode(text_of("prompt", prompt))
        assert chat is not None
        messages = list(chat)
        if messages and messages[-1].get("role") not in ("system", "assistant"):
            return self.tokenizer.encode_chat(messages)
        # Render the chat twice, each time with a different next message. The tokens with which both
        # renderings start do not depend on the next message.
        first, second = (
            self.tokenizer.encode_chat([*messages, {"role": "user", "content": content}])
            for content in ("a", "1")
        )
        return common_start(first, second)
