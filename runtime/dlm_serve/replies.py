"""Converts results of the runtime into answers of the API."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

from dlm_runtime import Generation, ToolCall
from dlm_runtime.generation.infill import read
from dlm_serve.field_arguments import Ask
from dlm_serve.hosting import Model

FINISHES = {"stop": "stop", "constraint": "stop"}
"""Maps finish reasons of the runtime to OpenAI's finish reasons.

All reasons that are not listed here become "length".
"""


@dataclass(frozen=True)
class Head:
    """The fields at the start of a response, and at the start of each chunk of a stream."""

    prefix: str
    kind: str
    model: str
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def around(self, **fields: Any) -> dict[str, Any]:
        return {
            "id": f"{self.prefix}-{self.id}",
            "object": self.kind,
            "created": self.created,
            "model": self.model,
            **fields,
        }


class Spent(NamedTuple):
    """Numbers of prompt tokens, generated tokens and passes, and of reused prompt tokens."""

    prompt: int
    completion: int
    passes: int
    cached: int


@dataclass(frozen=True)
class Answer:
    """The text of one result, and the reason why the text ended.

    ``positions`` are the canvas positions of the answer's tokens, up to the first end token.
    """

    text: str
    finish: str
    calls: list[ToolCall]
    generation: Generation
    positions: range

    @property
    def spent(self) -> Spent:
        made = self.generation
        return Spent(made.prompt_tokens, len(self.positions), made.nfe, made.cached_tokens)


def answer(ask: Ask, model: Model, made: Generation) -> Answer:
    """Convert a result into an answer.

    If the result fills a hole, the text ends before the first stop string, and ``ask.fence``
    encloses it.
    """
    if ask.hole is None:
        calls = made.tool_calls
        finish = "tool_calls" if calls else FINISHES.get(made.finish, "length")
        first = made.prompt_tokens
        positions = range(first, first + made.completion_tokens)
        return Answer(made.text or "", finish, calls, made, positions)
    between, canvas = ask.hole
    text = read(model.bundle, canvas, between, made).holes[0]
    (hole,) = canvas.resized(len(made.tokens)).holes()
    ends = [at for at in hole if made.tokens[at] in model.bundle.eos_token_ids]
    positions = range(hole.start, min(ends, default=hole.stop))
    cuts = [at for stop in ask.stops if (at := text.find(stop)) >= 0]
    if cuts:
        text = text[: min(cuts)]
    if ask.fence:
        text = f"{ask.fence}\n{text}\n{ask.fence}"
    return Answer(text, "stop" if ends or cuts else "length", [], made, positions)


def usage(answers: Sequence[Answer], ask: Ask) -> dict[str, Any]:
    """Return the object ``usage`` for finished answers. See ``usage_of``."""
    return usage_of([each.spent for each in answers], ask)


def usage_of(spent: Sequence[Spent], ask: Ask) -> dict[str, Any]:
    """Add up tokens and passes. The tokens of a prompt with several answers are counted once."""
    prompts = spent[:: ask.choices]
    prompt, cached = (sum(getattr(each, name) for each in prompts) for name in ("prompt", "cached"))
    completion = sum(each.completion for each in spent)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": 0},
        "denoising_passes": sum(each.passes for each in spent),
    }


def tool_calls(calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    """Convert function calls for the API. The arguments of each call become JSON text."""
    return [
        {
            "index": index,
            "id": call.id,
            "type": "function",
            "function": {
                "name": call.name,
                "arguments": json.dumps(call.arguments, ensure_ascii=False),
            },
        }
        for index, call in enumerate(calls)
    ]


@dataclass(frozen=True)
class Choices:
    """Creates responses with ``choices``, which are either messages or texts.

    Args:
        head: The fields at the start of the body.
        is_chat: If True, each answer is a message. If False, each answer is a text.
        has_logprobs: If True, each answer contains the log probabilities of its tokens.
        has_both: If True, each answer is a text, and the same text as a message. Mercury's clients
            read the text of a gap, and Codestral's clients read the message.
    """

    head: Head
    is_chat: bool
    has_logprobs: bool = False
    has_both: bool = False

    def whole(self, ask: Ask, model: Model, answers: Sequence[Answer]) -> dict[str, Any]:
        choices = [self._choice(index, model, each) for index, each in enumerate(answers)]
        return self.head.around(choices=choices, usage=usage(answers, ask))

    def _choice(self, index: int, model: Model, found: Answer) -> dict[str, Any]:
        beside = {"logprobs": self.logprobs(model, found), "finish_reason": found.finish}
        if not self.is_chat:
            return {"index": index, **self.text("message", found.text), **beside}
        message: dict[str, Any] = {"role": "assistant", "content": found.text, "refusal": None}
        if found.calls:
            message |= {"content": None, "tool_calls": tool_calls(found.calls)}
        return {"index": index, "message": message, **beside}

    def text(self, name: str, text: str) -> dict[str, Any]:
        """Return the fields with a text. ``name`` is the field for a message."""
        return {"text": text} | (
            {name: {"role": "assistant", "content": text}} if self.has_both else {}
        )

    def logprobs(self, model: Model, found: Answer) -> dict[str, Any] | None:
        """Return the log probabilities of an answer's tokens, or None if they were not requested."""
        if not self.has_logprobs:
            return None
        if not self.is_chat:
            return _text_logprobs(model, found)
        return {"content": token_logprobs(model, found), "refusal": None}


Scored = tuple[str, float]
"""The text of a token, and the natural logarithm of its probability."""


def _chosen(model: Model, found: Answer) -> list[tuple[Scored, list[Scored]]]:
    """For each token of an answer and its alternatives, return the text and log probability."""
    tokenizer, made = model.bundle.tokenizer, found.generation
    assert tokenizer is not None
    return [
        (
            (tokenizer.token_text(made.tokens[at]), log_prob),
            [
                (tokenizer.token_text(token), other)
                for token, other in (made.top_log_probs[at] if made.top_log_probs else [])
            ],
        )
        for at in found.positions
        if (log_prob := made.log_probs[at]) is not None
    ]


def token_logprobs(model: Model, found: Answer) -> list[dict[str, Any]]:
    """Return the log probabilities of tokens and alternatives in the format of chat replies."""
    return [
        _token(*chosen) | {"top_logprobs": [_token(*each) for each in alternatives]}
        for chosen, alternatives in _chosen(model, found)
    ]


def _token(text: str, log_prob: float) -> dict[str, Any]:
    return {"token": text, "logprob": log_prob, "bytes": list(text.encode("utf-8", "replace"))}


def _text_logprobs(model: Model, found: Answer) -> dict[str, Any]:
    """Return the log probabilities of tokens and alternatives in the format of completions."""
    tokens = _chosen(model, found)
    texts = [text for (text, _), _ in tokens]
    top: list[dict[str, float]] = [{} for _ in tokens]
    for found_by_text, (chosen, others) in zip(top, tokens, strict=True):
        for text, log_prob in (*others, chosen):
            found_by_text.setdefault(text, log_prob)  # the first token with this text
    return {
        "tokens": texts,
        "token_logprobs": [log_prob for (_, log_prob), _ in tokens],
        "top_logprobs": top if found.generation.top_log_probs else None,
        "text_offset": [0, *accumulate(map(len, texts))][: len(texts)],
    }
