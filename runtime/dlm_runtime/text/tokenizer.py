"""Converts text to token ids and back, with a bundle's tokenizer and chat template.

The tokenizer and the template are not trusted, so they run in a separate process with limits on
time and memory (``text/process.py``). A chat template is a Jinja program. The template runs in
Jinja's immutable sandbox, and can access only messages and tools.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import re
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dlm_runtime.errors import BundleError, RequestError
from dlm_runtime.files import read_bytes, read_text
from dlm_runtime.text.process import Refused, TextProcess

TOKENIZER_LIMIT_BYTES = 64 << 20  # the largest released tokenizer.json (262,144 ids) has 33 MB
TEMPLATE_LIMIT_BYTES = 1 << 20
CHARACTERS_PER_TOKEN = 64
"""A text with more characters than this for each token of the denoiser's longest canvas is rejected
before it is tokenised. Tokens of real texts have 3 to 5 characters on average.
"""
_REFUSED_IDS = "the bundle's tokenizer rejects these token ids"


class AddedToken(str):
    """The name of an added token, such as ``<tool_call>``."""

    __slots__ = ()


class Tokenizer:
    """The tokenizer of a bundle, and its chat template if there is one.

    The tokenizer is a tokenizer.json for the library ``tokenizers``.
    """

    def __init__(
        self,
        tokenizer: bytes,
        template: str | None,
        special_tokens: Mapping[str, str],
        where: object = "tokenizer.json",
        added: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """``special_tokens`` contains the texts of special tokens that a template may use.

        The keys of ``special_tokens`` are the names that the template uses. ``added`` contains
        tokens to add to the tokenizer, each with ``content`` and flags as in tokenizer.json. Raises
        BundleError if the tokenizer is invalid. The message names the file ``where``.
        """
        self.template = template
        self.sha256 = hashlib.sha256(tokenizer).hexdigest()  # the hash of the tokenizer's file
        self.most_tokens: int | None = None
        """The length of the denoiser's longest canvas. ``encode``, ``encode_plain`` and
        ``encode_chat`` reject texts that are far longer. None means no limit.
        """
        self._texts: dict[int, str] = {}
        self._added: dict[int, Mapping[str, Any]] | None = None
        try:
            self._process = TextProcess(tokenizer, template, dict(special_tokens), list(added))
        except Refused as err:
            raise BundleError(
                f"{where}: not a tokenizer that the tokenizers library reads ({err})"
            ) from err

    @classmethod
    def from_files(
        cls,
        tokenizer: Path,
        template: Path | None = None,
        special_tokens: Mapping[str, str] | None = None,
        hashes: Mapping[str, str] | None = None,
    ) -> Tokenizer:
        """Read a tokenizer.json and, if ``template`` is not None, a chat template.

        ``hashes`` maps the names of the files to their expected SHA-256. Raises BundleError.
        """
        known = hashes or {}
        text = None
        if template is not None:
            text = read_text(
                template, TEMPLATE_LIMIT_BYTES, BundleError, sha256=known.get(template.name)
            )
        data = read_bytes(
            tokenizer, TOKENIZER_LIMIT_BYTES, BundleError, sha256=known.get(tokenizer.name)
        )
        return cls(data, text, special_tokens or {}, tokenizer)

    def close(self) -> None:
        """End the process of the tokenizer. A later call starts the process again."""
        self._process.close()

    @property
    def size(self) -> int:
        """The highest token id plus one. Added tokens are included. Raises RequestError."""
        return int(self._ask("size", "the tokenizer's vocabulary cannot be read"))

    def names(self, tokens: Sequence[int]) -> list[str | None]:
        """Return the text of each token id in the vocabulary, or None for an unknown id.

        Raises RequestError.
        """
        found: list[str | None] = self._ask("names", _REFUSED_IDS, tokens=list(tokens))
        return found

    def as_json(self) -> str:
        """Return this tokenizer as a tokenizer.json, with truncation and padding switched off.

        Raises RequestError.
        """
        return str(self._ask("as_json", "the tokenizer cannot be written"))

    def encode(self, text: str, special_tokens: bool = False) -> list[int]:
        """Encode a prompt. The tokenizer may add tokens at the start and the end.

        Raises RequestError.

        The text of a special token, such as ``<|eos|>``, is ordinary text unless ``special_tokens``
        is True.
        """
        return self._encode(text, True, special_tokens)

    def encode_plain(self, text: str, special_tokens: bool = False) -> list[int]:
        """Encode a text that follows a prompt. Unlike ``encode``, this method adds no tokens.
        Raises RequestError.
        """
        return self._encode(text, False, special_tokens)

    def encode_each(
        self, texts: Sequence[str], special_tokens: bool = False
    ) -> list[list[int] | None]:
        """Encode several texts like ``encode_plain``.

        For a text that the tokenizer rejects, the result is None. Raises RequestError.
        """
        what = "the bundle's tokenizer rejects these texts"
        found: list[list[int] | None] = self._ask(
            "encode_each", what, texts=list(texts), special_tokens=special_tokens
        )
        return found

    def vocabulary(self) -> tuple[list[dict[str, Any]], list[str | None]]:
        """Return the steps of the tokenizer's decoder, and the name of each token id.

        The name of an added token is None, unless the token is not special and consists of spaces
        or line breaks.
        """
        decoder, names = self._ask("vocabulary", "the tokenizer's vocabulary cannot be read")
        return decoder, names

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        special_tokens: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Encode a conversation, up to the start of the assistant's next reply.

        Raises RequestError.

        Messages and ``tools`` have the form that transformers uses. A message that makes calls may
        contain ``tool_calls`` instead of ``content``. Special tokens that the template writes are
        recognised. In messages, tools and options, the text of a special token is ordinary text
        unless ``special_tokens`` is True. ``options`` are more variables of the template, such as
        ``enable_thinking``. They cannot replace the variables that every template has.
        """
        if self.template is None:
            raise RequestError("this bundle has no chat template: give prompt or tokens")
        if (
            isinstance(messages, (str, Mapping))
            or not isinstance(messages, Sequence)
            or not messages
        ):
            raise RequestError(
                "chat: give a list of messages such as {'role': 'user', 'content': '...'}"
            )
        for message in messages:
            if (
                not isinstance(message, Mapping)
                or "role" not in message
                or not {"content", "tool_calls"} & message.keys()
            ):
                raise RequestError(
                    f"chat: {reprlib.repr(message)} is not a message with role and content"
                )
            content = message.get("content")
            if not isinstance(content, (str, list)) and not (
                content is None and message.get("tool_calls")
            ):
                raise RequestError(f"chat: the content of {reprlib.repr(message)} is not a text")
        try:
            written = json.dumps([list(messages), tools, options], ensure_ascii=False, default=str)
            written.encode()
        except UnicodeEncodeError as err:
            raise RequestError(
                "chat: a text has half of a surrogate pair, which UTF-8 cannot encode"
            ) from err
        except (TypeError, ValueError, RecursionError) as err:
            raise RequestError(f"chat: not JSON ({err})"[:300]) from err
        self._check_length("chat", len(written))
        chat, what = (
            [dict(message) for message in messages],
            "chat: the bundle's template rejects these messages",
        )
        found: list[int] = self._ask(
            "encode_chat",
            what,
            messages=chat,
            tools=tools,
            special_tokens=special_tokens,
            options=dict(options or {}),
        )
        return found

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """Render a conversation as text, up to the start of the assistant's next reply.

        Raises RequestError with the reason of the template. ``encode_chat`` explains ``options``.
        """
        chat = [dict(message) for message in messages]
        what = "the bundle's chat template rejects these messages"
        given = {"messages": chat, "tools": tools, "options": dict(options or {})}
        return str(self._ask("render", what, **given))

    def render_each(self, chats: Sequence[Sequence[Mapping[str, Any]]]) -> list[str | None]:
        """Render several conversations like ``render``.

        The result for a conversation is None if the template rejects the conversation.
        """
        given = [[dict(message) for message in messages] for messages in chats]
        found: list[str | None] = self._ask(
            "render_each", "the bundle's chat template cannot be run", chats=given
        )
        return found

    def decode_each(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """Decode several lists of token ids like ``decode``. Raises RequestError."""
        found: list[str] = self._ask(
            "decode_each", _REFUSED_IDS, rows=[list(map(int, row)) for row in rows]
        )
        return found

    def decode(self, tokens: Sequence[int]) -> str:
        """Decode token ids to text, without special tokens. Raises RequestError."""
        return self._decode(tokens, True)

    def token_text(self, token: int) -> str:
        """Return the text of one token, or the name of a special token. Raises RequestError."""
        if token not in self._texts:
            self._texts[token] = self._decode([token], False)
        return self._texts[token]

    def added_tokens(self) -> Mapping[int, Mapping[str, Any]]:
        """Return the added tokens by their ids. Raises RequestError.

        Each token has ``content``, and the flags ``lstrip``, ``rstrip`` and ``special`` of
        tokenizer.json.
        """
        if self._added is None:
            found = self._ask("added_tokens", "the tokenizer's vocabulary cannot be read")
            self._added = {token["id"]: token for token in found}
        return self._added

    @functools.cached_property
    def _added_names(self) -> list[str]:
        """The names of the added tokens, the longest first. Vocabularies may have thousands."""
        names = (each["content"] for each in self.added_tokens().values())
        return sorted(names, key=len, reverse=True)

    def split(self, text: str) -> list[str | AddedToken]:
        """Split a text at the names of added tokens. Raises RequestError."""
        pattern = "|".join(re.escape(name) for name in self._added_names if name in text)
        parts = re.split(f"({pattern})", text) if pattern else [text]
        return [AddedToken(part) if at % 2 else part for at, part in enumerate(parts) if part]

    def pieces(self, tokens: Sequence[int]) -> list[str | AddedToken]:
        """Decode token ids to text, in which added tokens are separate pieces. Raises RequestError.

        Each text between two added tokens is decoded separately.
        """
        added, rows = self.added_tokens(), [list[int]()]
        found: list[AddedToken] = []
        for token in tokens:
            if token in added and added[token]["content"].strip():
                found.append(AddedToken(added[token]["content"]))
                rows.append([])
            else:
                rows[-1].append(token)
        made: list[str | AddedToken] = []
        for text, name in itertools.zip_longest(self.decode_each(rows), found, fillvalue=""):
            made += [each for each in (text, name) if each]
        return made

    def _encode(self, text: str, add_special_tokens: bool, special_tokens: bool) -> list[int]:
        self._check_length("the text", len(text))
        how = {"add_special_tokens": add_special_tokens, "special_tokens": special_tokens}
        found: list[int] = self._ask(
            "encode", "the bundle's tokenizer rejects this text", text=text, **how
        )
        return found

    def _check_length(self, what: str, characters: int) -> None:
        if self.most_tokens is None or characters <= CHARACTERS_PER_TOKEN * self.most_tokens:
            return
        most = CHARACTERS_PER_TOKEN * self.most_tokens
        raise RequestError(
            f"{what}: {characters} characters are more than {most}, which is {CHARACTERS_PER_TOKEN} for each of the "
            f"{self.most_tokens} tokens of the denoiser's longest canvas: shorten it"
        )

    def _decode(self, tokens: Sequence[int], skip_special_tokens: bool) -> str:
        ids = [int(token) for token in tokens]
        return str(
            self._ask("decode", _REFUSED_IDS, tokens=ids, skip_special_tokens=skip_special_tokens)
        )

    def _ask(self, do: str, refused: str, **arguments: Any) -> Any:
        try:
            return self._process.ask(do, **arguments)
        except (
            Refused,
            TypeError,
            ValueError,
            RecursionError,
        ) as err:  # a chat may contain values other than text and numbers
            raise RequestError(f"{refused} ({err})") from err
