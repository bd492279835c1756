"""Writes the answers of ``/v1/responses``.

An answer is an object that contains a list of items, or a stream of named events.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any

from dlm_runtime import ToolCall
from dlm_serve.errors import ApiError
from dlm_serve.field_arguments import Ask
from dlm_serve.hosting import Model
from dlm_serve.replies import Answer, token_logprobs, tool_calls, usage
from dlm_serve.response_fields import ResponsesBody
from dlm_serve.streams import Writer, sse


class ResponseForm:
    """Creates one response, which contains one answer.

    Args:
        body: The body of the request. The response repeats several fields of ``body``.
    """

    def __init__(self, body: ResponsesBody) -> None:
        self._id, self._created = f"resp_{secrets.token_hex(12)}", int(time.time())
        self.message_id = f"msg_{secrets.token_hex(12)}"
        self._has_logprobs = body.has_logprobs
        given = body.model_dump(by_alias=True)
        self._repeated = {
            "model": body.model,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": given["reasoning"] or {"effort": None, "summary": None},
            "store": False,
            "temperature": body.temperature,
            "text": {"format": _shown(given["text"]["format"])},
            "tool_choice": given["tool_choice"] or "auto",
            "tools": given["tools"] or [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": body.top_p,
            "truncation": "disabled",
            "user": body.user,
        }

    def whole(self, ask: Ask, model: Model, answers: Sequence[Answer]) -> dict[str, Any]:
        """Return the finished response with its answer."""
        (found,) = answers
        is_whole = found.finish != "length"
        counts = usage(answers, ask)
        return self.response(
            "completed" if is_whole else "incomplete",
            output=self._output(model, found),
            incomplete_details=None if is_whole else {"reason": "max_output_tokens"},
            usage={
                "input_tokens": counts["prompt_tokens"],
                "input_tokens_details": counts["prompt_tokens_details"],
                "output_tokens": counts["completion_tokens"],
                "output_tokens_details": counts["completion_tokens_details"],
                "total_tokens": counts["total_tokens"],
                "denoising_passes": counts["denoising_passes"],
            },
        )

    def response(self, status: str, **changes: Any) -> dict[str, Any]:
        """Return a response with this status, in which ``changes`` replaces the default fields."""
        new: dict[str, Any] = {
            "output": [],
            "error": None,
            "incomplete_details": None,
            "usage": None,
        }
        about: dict[str, Any] = {"id": self._id, "object": "response", "created_at": self._created}
        return {**about, "status": status, "background": False, **self._repeated, **new, **changes}

    def _output(self, model: Model, found: Answer) -> list[dict[str, Any]]:
        if found.calls:
            return [self.call(each) for each in tool_calls(found.calls)]
        status = "incomplete" if found.finish == "length" else "completed"
        logprobs = token_logprobs(model, found) if self._has_logprobs else []
        return [self.message(status, [self.part(found.text, logprobs)])]

    def message(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the item that contains the text of the answer."""
        about = {"id": self.message_id, "type": "message", "status": status}
        return {**about, "role": "assistant", "content": content}

    @staticmethod
    def part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the content of the message item."""
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    @staticmethod
    def call(given: dict[str, Any]) -> dict[str, Any]:
        """Convert a function call from the format of chats to an item of the response."""
        return {
            "id": f"fc_{given['id']}",
            "type": "function_call",
            "status": "completed",
            "call_id": given["id"],
            **given["function"],
        }


def _shown(wanted: dict[str, Any] | None) -> dict[str, Any]:
    """Return the text format that the request asked for. The response repeats this format.

    Only the format "json_schema" contains more fields than its type, such as the schema's name.
    """
    if wanted is None or wanted["type"] != "json_schema":
        return {"type": "text" if wanted is None else wanted["type"]}
    return wanted


class ResponseWriter(Writer):
    """Writes the events of one response. The log probabilities follow the whole text.

    Args:
        form: Creates the response.
        ask, model: See ``Writer``.
    """

    def __init__(self, form: ResponseForm, ask: Ask, model: Model) -> None:
        super().__init__(ask, model, is_diffusing=False)
        self._form = form
        self._number = 0  # number of events sent so far
        self._is_open = False  # True after the message has begun

    def _event(self, kind: str, **fields: Any) -> bytes:
        content = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return sse(content, kind)

    def _opening(self, index: int) -> Iterator[bytes]:
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self._form.response("in_progress"))

    def _text(self, index: int, text: str, **beside: Any) -> Iterator[bytes]:
        yield from self._begun()
        yield self._event("response.output_text.delta", **self._place(), delta=text, logprobs=[])

    def _begun(self) -> Iterator[bytes]:
        """If the message has not begun yet, yield the events that begin it."""
        if self._is_open:
            return
        self._is_open = True
        item = self._form.message("in_progress", [])
        yield self._event("response.output_item.added", output_index=0, item=item)
        part = self._form.part("", [])
        yield self._event("response.content_part.added", **self._place(), part=part)

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._form.message_id, "output_index": 0, "content_index": 0}

    def _calls(self, index: int, calls: Sequence[ToolCall]) -> Iterator[bytes]:
        for at, given in enumerate(tool_calls(calls)):
            item = self._form.call(given)
            arguments = item["arguments"]
            place = {"item_id": item["id"], "output_index": at}
            added = item | {"arguments": "", "status": "in_progress"}
            yield self._event("response.output_item.added", output_index=at, item=added)
            kind = "response.function_call_arguments"
            yield self._event(f"{kind}.delta", **place, delta=arguments)
            yield self._event(f"{kind}.done", **place, name=item["name"], arguments=arguments)
            yield self._event("response.output_item.done", output_index=at, item=item)

    def _end(self, index: int, end: Answer) -> Iterator[bytes]:
        whole = self._form.whole(self._ask, self._model, [end])
        if not end.calls:
            yield from self._begun()
            part = whole["output"][0]["content"][0]
            said = {"text": part["text"], "logprobs": part["logprobs"]}
            yield self._event("response.output_text.done", **self._place(), **said)
            yield self._event("response.content_part.done", **self._place(), part=part)
            item = whole["output"][0]
            yield self._event("response.output_item.done", output_index=0, item=item)
        yield self._event(f"response.{whole['status']}", response=whole)

    def _closing(self) -> Iterator[bytes]:
        return iter(())

    def _failure(self, error: ApiError) -> Iterator[bytes]:
        said = {"code": "server_error", "message": error.message}
        yield self._event("response.failed", response=self._form.response("failed", error=said))
