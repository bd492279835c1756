"""The program that runs what a bundle brings for text: a process of its own, started by ``text_process``, never imported.

A request is two lengths (8 bytes each), JSON of ``do`` (a method of ``Text``) and its arguments, and raw bytes; the answer one
length and JSON: ``value``, or ``refused`` with the library's reason (null: no memory). It ends when its input does, or by a
limit of the kernel's: address space from the command line, and processor time by a timer that is set for each request.
"""

from __future__ import annotations

import functools
import json
import os
import resource
import signal
import struct
import sys
from typing import Any, NoReturn

SECONDS, SECONDS_PER_BYTE = 1.0, 2.0**-20
REASON_LIMIT = 300  # characters of a library's message


class Text:
    """The tokenizer and the template of one bundle."""

    def load(self, tokenizer: bytes, template: str | None, special_tokens: dict[str, str]) -> None:
        import tokenizers

        self.tokenizer = tokenizers.Tokenizer.from_buffer(tokenizer)
        self.tokenizer.no_truncation()  # either would change prompts in silence
        self.tokenizer.no_padding()
        self.source, self.special_tokens = template or "", special_tokens

    def size(self, _: bytes) -> int:
        return max(self.tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def names(self, _: bytes, tokens: list[int]) -> list[str | None]:
        return [self.tokenizer.id_to_token(token) for token in tokens]

    def as_json(self, _: bytes) -> str:
        return str(self.tokenizer.to_str())

    def encode(self, _: bytes, text: str, add_special_tokens: bool) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def encode_each(self, _: bytes, texts: list[str]) -> list[list[int]]:
        return [self.encode(b"", text, False) for text in texts]

    def vocabulary(self, _: bytes) -> tuple[list[str], list[str | None]]:
        decoder = {} if self.tokenizer.decoder is None else json.loads(self.tokenizer.decoder.__getstate__())
        added = self.tokenizer.get_added_tokens_decoder()
        names = [None if token in added else self.tokenizer.id_to_token(token) for token in range(self.size(b""))]
        parts = decoder.get("decoders", [decoder] if decoder else [])
        return [str(each.get("type")) for each in parts], names

    def decode(self, _: bytes, tokens: list[int], skip_special_tokens: bool) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens))

    def decode_each(self, _: bytes, rows: list[list[int]]) -> list[str]:
        return [self.decode(b"", row, True) for row in rows]

    def encode_chat(self, _: bytes, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> list[int]:
        text = self.template.render(messages=messages, tools=tools, add_generation_prompt=True, **self.special_tokens)
        for message in messages:
            said = message.get("content")
            if message["role"] == "system" and isinstance(said, str) and said.strip() not in text:
                raise ValueError("it leaves the system message out, as this denoiser takes none")
        return self.encode(b"", text, False)

    def render_each(self, _: bytes, chats: list[list[dict[str, Any]]]) -> list[str | None]:
        return [self._rendered(messages) for messages in chats]

    def _rendered(self, messages: list[dict[str, Any]]) -> str | None:
        try:
            return str(self.template.render(messages=messages, tools=None, add_generation_prompt=True, **self.special_tokens))
        except MemoryError:
            raise
        except Exception:  # what a template raises, and what its expressions do
            return None

    @functools.cached_property
    def template(self) -> Any:
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def raise_exception(message: str) -> NoReturn:
            raise TemplateError(message)

        def tojson(
            value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
        ) -> str:
            # Jinja's own escapes for HTML, and sorts keys: transformers' templates mean this one.
            return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

        extensions = ["jinja2.ext.loopcontrols"]
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        environment.filters["tojson"] = tojson
        environment.globals["raise_exception"] = raise_exception
        return environment.from_string(self.source)


def answer(text: Text, do: str, arguments: dict[str, Any], data: bytes) -> bytes:
    """What a request gives, as JSON."""
    try:
        return json.dumps({"value": getattr(text, do)(data, **arguments)}).encode()
    except MemoryError:
        return b'{"refused": null}'
    except BaseException as err:  # a panic of tokenizers derives from nothing else
        return json.dumps({"refused": f"{type(err).__name__}: {err}"[:REASON_LIMIT]}).encode()


def main(limits: dict[str, Any]) -> None:
    sys.path[:] = limits["path"]
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}  # each thread reserves 64 MiB
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # What it inherits may be less; RLIM_INFINITY is -1.
    inherited = resource.getrlimit(resource.RLIMIT_AS)[1]
    memory_bytes = limits["memory_bytes"] if inherited < 0 else min(limits["memory_bytes"], inherited)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # both are inherited
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    source, out, text = sys.stdin.buffer, sys.stdout.buffer, Text()
    while len(sizes := source.read(16)) == 16:
        request, data = (source.read(size) for size in struct.unpack("<QQ", sizes))
        arguments = json.loads(request)
        signal.setitimer(signal.ITIMER_PROF, SECONDS + (len(request) + len(data)) * SECONDS_PER_BYTE)
        reply = answer(text, arguments.pop("do"), arguments, data)
        signal.setitimer(signal.ITIMER_PROF, 0)
        out.write(struct.pack("<Q", len(reply)) + reply)
        out.flush()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
