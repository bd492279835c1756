"""Text to token ids and back, with the tokenizer and the chat template that a bundle carries.

A chat template is a Jinja program from outside: it runs in Jinja's immutable sandbox and sees only the messages.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from dlm_runtime.errors import BundleError, RequestError

if TYPE_CHECKING:
    import jinja2
    import tokenizers

TEMPLATE_LIMIT_BYTES = 1 << 20


class Tokenizer:
    """A ``tokenizers`` tokenizer and, where the checkpoint had one, its chat template."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, template: str | None, special_tokens: Mapping[str, str]) -> None:
        self._tokenizer = tokenizer
        self._template_source = template
        self._special_tokens = dict(special_tokens)

    @classmethod
    def from_files(
        cls, tokenizer: Path, template: Path | None = None, special_tokens: Mapping[str, str] | None = None
    ) -> Tokenizer:
        """Read tokenizer.json and, if given, a Jinja file.

        ``special_tokens`` are the texts that a template may name, such as ``bos_token``. Raises BundleError.
        """
        import tokenizers

        try:
            loaded = tokenizers.Tokenizer.from_file(str(tokenizer))
        except Exception as err:  # the library raises plain Exception
            raise BundleError(f"{tokenizer}: not a tokenizer that the tokenizers library reads ({err})") from err
        loaded.no_truncation()  # either would change prompts in silence
        loaded.no_padding()
        text = None
        if template is not None:
            if template.stat().st_size > TEMPLATE_LIMIT_BYTES:
                raise BundleError(f"{template}: {template.stat().st_size} bytes is too large for a chat template")
            try:
                text = template.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as err:
                raise BundleError(f"{template}: not readable as UTF-8 text ({err})") from err
        return cls(loaded, text, special_tokens or {})

    @property
    def has_chat_template(self) -> bool:
        return self._template_source is not None

    @property
    def size(self) -> int:
        """Highest token id plus one, added tokens included."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt, with what the tokenizer itself puts around it."""
        return self._encode(text, True)

    def encode_plain(self, text: str) -> list[int]:
        """Ids of text that stands behind a prompt: nothing put around it."""
        return self._encode(text, False)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
        except Exception as err:  # the library raises plain Exception, and TypeError for half a character
            raise RequestError(f"the bundle's tokenizer refuses this text ({err})") from err

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Ids of a conversation up to where the assistant answers. Raises RequestError."""
        if not messages:
            raise RequestError("chat is empty: give messages such as {'role': 'user', 'content': '...'}")
        for message in messages:
            if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
                raise RequestError(f"chat: {message!r} is not a message with role and content")
        template = self._template
        try:
            text = template.render(
                messages=[dict(message) for message in messages], add_generation_prompt=True, **self._special_tokens
            )
        except Exception as err:  # a template is a program: it may divide by zero or fill the memory
            raise RequestError(f"chat: the bundle's template refuses these messages ({type(err).__name__}: {err})") from err
        return self.encode_plain(text)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def token_text(self, token: int) -> str:
        """Text of one token by itself, special tokens by their names."""
        return str(self._tokenizer.decode([token], skip_special_tokens=False))

    @functools.cached_property
    def _template(self) -> jinja2.Template:
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        if self._template_source is None:
            raise RequestError("this bundle has no chat template: give prompt or tokens")

        def raise_exception(message: str) -> NoReturn:
            raise TemplateError(message)

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = raise_exception
        try:
            return environment.from_string(self._template_source)
        except Exception as err:  # TemplateError, RecursionError
            raise BundleError(f"the bundle's chat template is not valid ({err})") from err
