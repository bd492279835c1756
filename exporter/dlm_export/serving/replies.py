"""The answers of the API, from results of the runtime."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dlm_export.serving.conversation import Ask
from dlm_export.serving.hosting import Model
from dlm_runtime import Generation, ToolCall
from dlm_runtime.generation.infill import read

FINISHES = {"stop": "stop", "constraint": "stop"}
"""OpenAI's reason for each of the runtime's; all others are "length"."""


@dataclass(frozen=True)
class Head:
    """The fields with which every answer and every chunk of a request begins."""

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


@dataclass(frozen=True)
class Answer:
    """The text of one result, and why it ended."""

    text: str
    finish: str
    calls: list[ToolCall]
    generation: Generation
    completion_tokens: int


def answer(ask: Ask, model: Model, made: Generation) -> Answer:
    """Read a result. The text of a hole ends at its first stop string."""
    if ask.hole is None:
        calls = made.tool_calls
        finish = "tool_calls" if calls else FINISHES.get(made.finish, "length")
        return Answer(made.text or "", finish, calls, made, made.completion_tokens)
    between, canvas = ask.hole
    text = read(model.bundle, canvas, between, made).holes[0]
    tokens = made.tokens[canvas.holes()[0].start : canvas.holes()[0].stop]
    is_short = any(token in model.bundle.eos_token_ids for token in tokens)
    cuts = [at for stop in ask.stops if (at := text.find(stop)) >= 0]
    if cuts:
        text = text[: min(cuts)]
    is_whole = is_short or bool(cuts)
    return Answer(text, "stop" if is_whole else "length", [], made, len(tokens))


def usage(answers: Sequence[Answer], ask: Ask) -> dict[str, Any]:
    """Counts of tokens and passes. The tokens of a prompt count once for all of its answers."""
    prompts = answers[:: ask.choices]
    prompt = sum(each.generation.prompt_tokens for each in prompts)
    completion = sum(each.completion_tokens for each in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
        "denoising_passes": sum(each.generation.nfe for each in answers),
    }


def tool_calls(calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    """Calls of functions, with their arguments as JSON text."""
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
class Form:
    """The form of answers: messages of a chat or texts, with or without log probabilities."""

    is_chat: bool
    has_logprobs: bool

    def choice(self, index: int, model: Model, found: Answer) -> dict[str, Any]:
        """Return one entry of ``choices``."""
        logprobs = None
        if self.has_logprobs:
            read_logprobs = _chat_logprobs if self.is_chat else _text_logprobs
            logprobs = read_logprobs(model, found.generation)
        beside = {"logprobs": logprobs, "finish_reason": found.finish}
        if not self.is_chat:
            return {"index": index, "text": found.text, **beside}
        message: dict[str, Any] = {"role": "assistant", "content": found.text, "refusal": None}
        if found.calls:
            message |= {"content": None, "tool_calls": tool_calls(found.calls)}
        return {"index": index, "message": message, **beside}


def _chosen(model: Model, made: Generation) -> list[tuple[str, float]]:
    """The text and ln p of each token of a completion."""
    tokenizer, first = model.bundle.tokenizer, made.prompt_tokens
    assert tokenizer is not None
    return [
        (tokenizer.token_text(made.tokens[at]), log_prob)
        for at in range(first, first + made.completion_tokens)
        if (log_prob := made.log_probs[at]) is not None
    ]


def _chat_logprobs(model: Model, made: Generation) -> dict[str, Any]:
    """The probability of each token of a chat's answer, without alternatives."""
    content = [
        {
            "token": text,
            "logprob": log_prob,
            "bytes": list(text.encode("utf-8", "replace")),
            "top_logprobs": [],
        }
        for text, log_prob in _chosen(model, made)
    ]
    return {"content": content, "refusal": None}


def _text_logprobs(model: Model, made: Generation) -> dict[str, Any]:
    """The probability of each token of a completion, without alternatives."""
    chosen, offsets, at = _chosen(model, made), [], 0
    for text, _ in chosen:
        offsets.append(at)
        at += len(text)
    return {
        "tokens": [text for text, _ in chosen],
        "token_logprobs": [log_prob for _, log_prob in chosen],
        "top_logprobs": None,
        "text_offset": offsets,
    }
