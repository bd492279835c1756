"""The program that runs a bundle's tokenizer and chat template in a separate process.

The module ``process`` starts this program and never imports it.

A request consists of two lengths (8 bytes each), a JSON object and raw bytes. The member ``do`` of
the object names a method of ``Text``, and the other members are the method's arguments. The raw
bytes are the argument ``tokenizer`` of ``load``. The answer consists of a length and a JSON object.
If the request succeeded, the object has the member ``value`` with the result. Otherwise, it has the
member ``refused`` with the error message of the library (null if memory ran out).

The program ends when its input is closed, or when the program exceeds a limit. The limit on address
space is passed on the command line. The limit on processor time is a timer, which is set again for
each request.
"""

from __future__ import annotations

import functools
import json
import os
import resource
import signal
import struct
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

SECONDS, SECONDS_PER_BYTE = 1.0, 2.0**-20
REASON_LIMIT = 300  # number of characters after which an error message of a library is cut off
PRIVATE_USE = range(0xF0000, 0xFFFFE)  # private-use code points, which have no assigned characters


class Text:
    """The tokenizer and the chat template of one bundle."""

    def load(
        self,
        tokenizer: bytes,
        template: str | None,
        special_tokens: dict[str, str],
        added: list[dict[str, Any]],
    ) -> None:
        import tokenizers

        self.tokenizer = tokenizers.Tokenizer.from_buffer(tokenizer)
        self.tokenizer.add_tokens([tokenizers.AddedToken(**token) for token in added])
        self.tokenizer.no_truncation()  # truncation and padding would silently change prompts
        self.tokenizer.no_padding()
        self.source, self.special_tokens = template or "", special_tokens

    def size(self) -> int:
        return max(self.tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def names(self, tokens: list[int]) -> list[str | None]:
        return [self.tokenizer.id_to_token(token) for token in tokens]

    def as_json(self) -> str:
        return str(self.tokenizer.to_str())

    def encode(self, text: str, add_special_tokens: bool, special_tokens: bool) -> list[int]:
        if special_tokens:
            return list(self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
        made = self._plain(text)
        return list((self.tokenizer.post_process(made) if add_special_tokens else made).ids)

    def encode_each(self, texts: list[str], special_tokens: bool) -> list[list[int] | None]:
        return [self._encoded(text, special_tokens) for text in texts]

    def _encoded(self, text: str, special_tokens: bool) -> list[int] | None:
        try:
            return self.encode(text, False, special_tokens)
        except ValueError:
            return None

    def _plain(self, text: str) -> Any:
        """Encode a text in which the names of special tokens are ordinary text.

        Raises ValueError if the result still contains a special token.
        """
        self.tokenizer.encode_special_tokens = True  # encode the names of special tokens as text
        try:
            made = self.tokenizer.encode(text, add_special_tokens=False)
        finally:
            self.tokenizer.encode_special_tokens = False
        # The vocabulary may contain an ordinary token with the same text as a special token.
        for token, (start, end) in zip(made.ids, made.offsets, strict=True):
            if self._is_special(token):
                raise ValueError(
                    f"{text[start:end]!r} encodes to the special token {self.specials[token]!r}, and the vocabulary has no "
                    "ordinary tokens for it: change the text, or allow special tokens in it (special_tokens)"
                )
        return made

    def _is_special(self, token: int) -> bool:
        return token in self.specials and token != self.unknown

    @functools.cached_property
    def specials(self) -> dict[int, str]:
        """The texts of the special tokens. The keys are token ids."""
        return {
            token: added.content
            for token, added in self.tokenizer.get_added_tokens_decoder().items()
            if added.special
        }

    @functools.cached_property
    def unknown(self) -> int | None:
        """The id of the unknown token, to which the tokenizer encodes text that it does not know.

        None if the tokenizer has no unknown token. The unknown token is a special token, but the
        tokenizer may return it for ordinary text.
        """
        model = self.tokenizer.model
        name = getattr(model, "unk_token", None)
        if type(model).__name__ == "Unigram":
            found: int | None = json.loads(model.__getstate__()).get("unk_id")
            return found
        return None if name is None else self.tokenizer.token_to_id(name)

    def added_tokens(self) -> list[dict[str, Any]]:
        flags = ("content", "lstrip", "rstrip", "special")
        return [
            {"id": token} | {flag: getattr(added, flag) for flag in flags}
            for token, added in self.tokenizer.get_added_tokens_decoder().items()
        ]

    def vocabulary(self) -> tuple[list[dict[str, Any]], list[str | None]]:
        decoder = (
            {}
            if self.tokenizer.decoder is None
            else json.loads(self.tokenizer.decoder.__getstate__())
        )
        added = self.tokenizer.get_added_tokens_decoder()
        names = [
            None
            if token in added and (added[token].special or added[token].content.strip())
            else self.tokenizer.id_to_token(token)
            for token in range(self.size())
        ]
        return decoder.get("decoders", [decoder] if decoder else []), names

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens))

    def decode_each(self, rows: list[list[int]]) -> list[str]:
        return [self.decode(row, True) for row in rows]

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        special_tokens: bool,
        options: dict[str, Any],
    ) -> list[int]:
        text = self.render(messages, tools, options)
        for message in messages:
            said = message.get("content")
            if message["role"] == "system" and isinstance(said, str) and said.strip() not in text:
                raise ValueError("it omits the system message, because this denoiser supports none")
        return (
            self.encode(text, False, True)
            if special_tokens
            else self._encode_rendered(text, messages, tools, options)
        )

    def _encode_rendered(
        self,
        text: str,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        options: dict[str, Any],
    ) -> list[int]:
        """Encode a chat that the template has rendered.

        Special tokens that the template writes are recognised. If a message contains the text of a
        special token, this text is ordinary text.

        To distinguish special tokens of the template from texts in messages, the first letter of
        each special token in a message, tool or option is replaced by a private-use character, and the chat
        is rendered again. All special tokens that remain were written by the template. These
        special tokens split the chat into pieces. A piece that contains a private-use character is
        encoded separately, as plain text with the letters restored.
        """
        marks = Marks(
            self.source + text + json.dumps([messages, tools, options], ensure_ascii=False)
        )

        def mark(text: str) -> str:
            while places := [
                at for at in self._spelled(text) if ord(text[at]) not in marks.letters
            ]:
                text = marks.put(text, places)  # overlapping special tokens may remain
            return text

        marked_messages = [
            {
                name: value if name == "role" else mapped(value, mark)
                for name, value in message.items()
            }
            for message in messages
        ]
        marked_tools, marked_options = mapped(tools, mark), mapped(options, mark)
        if not marks.letters:
            return self.encode(text, False, True)
        marked = self.render(marked_messages, marked_tools, marked_options)
        if marks.removed(marked) != text:
            raise ValueError("it changes the text of a special token in a message")
        made = self.tokenizer.encode(marked, add_special_tokens=False)
        found: list[int] = []
        for ids, start, end in self._between_specials(made, len(marked)):
            piece = marked[start:end]
            if (plain := marks.removed(piece)) == piece:
                found += ids
            elif self.encode(piece, False, True) != ids:
                raise ValueError(
                    "a message contains a special token, and this tokenizer cannot encode parts of a chat separately"
                )
            else:
                found += self._plain(plain).ids
        return found

    def _spelled(self, text: str) -> list[int]:
        """Return the positions at which the text of a special token starts.

        If the last characters of the text may be the start of a special token, the position of
        these characters is included.
        """
        made = self.tokenizer.encode(text, add_special_tokens=False)
        found = []
        for token, (start, end) in zip(made.ids, made.offsets, strict=True):
            # The tokenizer also returns the unknown token for text that it cannot encode.
            # Therefore, the unknown token counts as special only if the text contains the name of
            # this token.
            if token in self.specials and (
                token != self.unknown or text[start:end].strip() == self.specials[token]
            ):
                found.append(
                    next((at for at in range(start, end) if not text[at].isspace()), start)
                )
        end = len(text.rstrip())
        longest = max(map(len, self.specials.values()), default=0)
        starts = range(max(0, end - longest), end)
        return found + [
            at
            for at in starts
            if any(name.startswith(text[at:end]) for name in self.specials.values())
        ]

    def _between_specials(self, made: Any, length: int) -> Iterator[tuple[list[int], int, int]]:
        """Split an encoded text at its special tokens.

        Yields tuples: a list of token ids, and the start and the end of the text of these tokens. A
        list contains either one special token, or all tokens between two special tokens.
        """
        ids: list[int] = []
        done = 0
        for token, (start, end) in zip(made.ids, made.offsets, strict=True):
            if self._is_special(token):
                yield ids, done, start
                yield [token], start, end
                ids, done = [], end
            else:
                ids.append(token)
        yield ids, done, length

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        options: dict[str, Any],
    ) -> str:
        given: dict[str, Any] = {"messages": [_message(each) for each in messages], "tools": tools}
        given |= {"documents": None, "add_generation_prompt": True}
        return str(self.template.render(options | self.special_tokens | given))

    def render_each(self, chats: list[list[dict[str, Any]]]) -> list[str | None]:
        return [self._rendered(messages) for messages in chats]

    def _rendered(self, messages: list[dict[str, Any]]) -> str | None:
        try:
            return self.render(messages, None, {})
        except MemoryError:
            raise
        except Exception:  # any error of a template or its expressions
            return None

    @functools.cached_property
    def template(self) -> Any:
        return environment().from_string(self.source)


def _message(given: dict[str, Any]) -> dict[str, Any]:
    """Return a message as transformers gives it to a template.

    Members that are None are left out. The reasoning has the names of all released templates.
    """
    message = {name: value for name, value in given.items() if value is not None}
    names = ("reasoning_content", "thinking", "reasoning")
    reasoning = next((message[name] for name in names if name in message), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning} | message | {"reasoning_content": reasoning}


def environment() -> Any:
    """Return the Jinja environment for which chat templates are written, as in transformers."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The block ``generation``, which only marks the text of answers for training."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("unchanged"), [], [], body).set_lineno(line)

        def unchanged(self, caller: Callable[[], str]) -> str:
            return caller()

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    def strftime_now(form: str) -> str:
        from datetime import datetime

        return datetime.now().strftime(form)  # local time, as in transformers

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: Any = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        # Templates expect the tojson filter of transformers. Jinja's own filter escapes HTML and
        # sorts keys.
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    made.filters["tojson"] = tojson
    made.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    return made


class Marks:
    """Replaces letters in texts by private-use characters that do not occur in these texts."""

    def __init__(self, texts: str) -> None:
        """Choose private-use characters that do not occur in ``texts``."""
        used = {*texts}
        self._free = (point for point in map(chr, PRIVATE_USE) if point not in used)
        self._by_letter: dict[str, str] = {}
        self.letters: dict[int, str] = {}
        """The original letter of each private-use character in use, as a table for str.translate.
        """

    def put(self, text: str, places: list[int]) -> str:
        """Return the text with private-use characters in place of the letters at ``places``."""
        letters = list(text)
        for at in places:
            letter = text[at]
            if letter not in self._by_letter:
                self._by_letter[letter] = next(self._free)
                self.letters[ord(self._by_letter[letter])] = letter
            letters[at] = self._by_letter[letter]
        return "".join(letters)

    def removed(self, text: str) -> str:
        """Return the text with the original letters in place of the private-use characters."""
        return text.translate(self.letters)


def mapped(value: Any, change: Callable[[str], str]) -> Any:
    """Return a JSON value in which ``change`` was applied to each string.

    The names of object members are changed too.
    """
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [mapped(each, change) for each in value]
    if isinstance(value, dict):
        return {change(name): mapped(each, change) for name, each in value.items()}
    return value


def answer(text: Text, do: str, arguments: dict[str, Any]) -> bytes:
    """Carry out a request and return the answer as JSON."""
    try:
        return json.dumps({"value": getattr(text, do)(**arguments)}).encode()
    except MemoryError:
        return b'{"refused": null}'
    except BaseException as err:  # a panic of tokenizers derives from BaseException only
        return json.dumps({"refused": f"{type(err).__name__}: {err}"[:REASON_LIMIT]}).encode()


def main(limits: dict[str, Any]) -> None:
    sys.path[:] = limits["path"]
    os.environ |= {
        "TOKENIZERS_PARALLELISM": "false",
        "RAYON_NUM_THREADS": "1",
    }  # each thread would reserve 64 MiB of address space
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # The inherited limit may be lower than this program's limit. RLIM_INFINITY is -1.
    inherited = resource.getrlimit(resource.RLIMIT_AS)[1]
    memory_bytes = (
        limits["memory_bytes"] if inherited < 0 else min(limits["memory_bytes"], inherited)
    )
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # the parent process may ignore this signal
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    source, out, text = sys.stdin.buffer, sys.stdout.buffer, Text()
    while len(sizes := source.read(16)) == 16:
        request, data = (source.read(size) for size in struct.unpack("<QQ", sizes))
        arguments = json.loads(request)
        if arguments["do"] == "load":
            arguments["tokenizer"] = data
        signal.setitimer(
            signal.ITIMER_PROF, SECONDS + (len(request) + len(data)) * SECONDS_PER_BYTE
        )
        reply = answer(text, arguments.pop("do"), arguments)
        signal.setitimer(signal.ITIMER_PROF, 0)
        out.write(struct.pack("<Q", len(reply)) + reply)
        out.flush()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
