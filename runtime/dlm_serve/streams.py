"""Streams server-sent events.

The events contain either text that is already final, or the whole canvas after each pass.
"""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from dlm_runtime import DlmError, Event, Generation, Job, ToolCall
from dlm_serve.errors import ApiError, of_runtime
from dlm_serve.field_arguments import Ask
from dlm_serve.fields import Counts
from dlm_serve.hosting import Model
from dlm_serve.replies import Answer, Choices, Spent, answer, tool_calls, usage, usage_of

UNDECIDED = "░"
"""The character that represents an undecided position in the text of a canvas."""
DONE = b"data: [DONE]\n\n"


def sse(content: Any, name: str | None = None) -> bytes:
    """Encode one server-sent event. ``name`` is optional."""
    begin = b"" if name is None else f"event: {name}\n".encode()
    return begin + b"data: " + json.dumps(content, ensure_ascii=False).encode() + b"\n\n"


class EventStream(StreamingResponse):
    """A response that consists of server-sent events.

    Args:
        chunks: The encoded events.
        release: A function that is called once when the response has ended, even if the client
            disconnects before the first event.
    """

    def __init__(self, chunks: AsyncIterator[bytes], release: Callable[[], None]) -> None:
        super().__init__(
            chunks,
            media_type="text/event-stream",
            headers={"cache-control": "no-cache", "x-accel-buffering": "no"},
        )
        self._release = release

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._release()


class Writer(ABC):
    """Writes events with the texts of the answers of a request while its jobs run.

    Subclasses define the format of the events. ``answers`` contains the finished answers.

    Args:
        ask: The request.
        model: The model that answers the request.
        is_diffusing: If True, each event contains the whole canvas, which replaces the previous
            text. If False, each event adds text to the answer.
    """

    def __init__(self, ask: Ask, model: Model, is_diffusing: bool) -> None:
        self._ask, self._model, self._is_diffusing = ask, model, is_diffusing
        self.answers: dict[int, Answer] = {}
        self.has_text = False  # True after the first event with a text or a function call

    @abstractmethod
    def _opening(self, index: int) -> Iterator[bytes]:
        """Yield the events before the first text of an answer."""

    @abstractmethod
    def _text(self, index: int, text: str, **beside: Any) -> Iterator[bytes]:
        """Yield the events for a text. ``beside`` contains additional fields for the events."""

    @abstractmethod
    def _calls(self, index: int, calls: Sequence[ToolCall]) -> Iterator[bytes]:
        """Yield the events for function calls."""

    @abstractmethod
    def _end(self, index: int, end: Answer) -> Iterator[bytes]:
        """Yield the events at the end of an answer."""

    @abstractmethod
    def _closing(self) -> Iterator[bytes]:
        """Yield the events after all answers."""

    @abstractmethod
    def _failure(self, error: ApiError) -> Iterator[bytes]:
        """Yield the events that end the stream after a job has failed."""

    def _note(self, index: int, job: Job, event: Event | None) -> None:  # noqa: B027
        """Record a job's progress before its event is written. The first ``event`` is None."""

    async def chunks(self, jobs: Sequence[Job]) -> AsyncGenerator[bytes, None]:
        """Yield all events of the stream. Closing the iterator cancels the jobs."""
        for index, job in enumerate(jobs):
            self._note(index, job, None)
        found: asyncio.Queue[bytes | None] = asyncio.Queue()
        tasks = [
            asyncio.create_task(self._follow(index, job, found)) for index, job in enumerate(jobs)
        ]
        running = len(tasks)
        try:
            while running:
                chunk = await found.get()
                if chunk is None:
                    running -= 1
                else:
                    yield chunk
            for task in tasks:
                task.result()
            for chunk in self._closing():
                yield chunk
        except DlmError as err:
            for chunk in self._failure(of_runtime(err)):
                yield chunk
        finally:
            for job, task in zip(jobs, tasks, strict=True):
                job.cancel()
                task.cancel()

    async def _follow(self, index: int, job: Job, found: asyncio.Queue[bytes | None]) -> None:
        """Put the events of one answer into the queue, and then put None into the queue."""
        try:
            for chunk in self._opening(index):
                found.put_nowait(chunk)
            sent = 0
            async for event in job:
                self._note(index, job, event)
                end = None
                if event.result is not None:
                    end = await self._answered(index, event.result)
                chunks: Iterable[bytes] = ()
                if end is not None and end.calls:
                    chunks = self._calls(index, end.calls)
                elif self._is_diffusing:
                    chunks = await self._whole(index, job, event, end)
                elif len(text := self._final_text(event, end)) > sent:
                    chunks = self._text(index, text[sent:])
                    sent = len(text)
                for chunk in chunks:
                    self.has_text = True
                    found.put_nowait(chunk)
                for chunk in () if end is None else self._end(index, end):
                    found.put_nowait(chunk)
        finally:
            found.put_nowait(None)

    def _final_text(self, event: Event, end: Answer | None) -> str:
        """Return the text that is final. While it may become a function call, return no text."""
        if end is not None:
            return end.text
        text = event.text or ""
        return "" if self._ask.hole is not None or self._may_call(text) else text

    def in_order(self) -> list[Answer]:
        """Return the finished answers in the order of their jobs."""
        return [self.answers[index] for index in sorted(self.answers)]

    async def _answered(self, index: int, made: Generation) -> Answer:
        self.answers[index] = await asyncio.to_thread(answer, self._ask, self._model, made)
        return self.answers[index]

    def _may_call(self, text: str) -> bool:
        """Return True if the text may become a function call, or may contain a function call."""
        tools = self._ask.tools
        if tools is None or tools.choice == "none":
            return False
        before = tools.written.before.strip()
        if tools.is_forced or before:
            return True
        start = text.lstrip()
        return not start or start[0] in "{["

    async def _whole(
        self, index: int, job: Job, event: Event, end: Answer | None
    ) -> Iterator[bytes]:
        """Return the events for the whole text after a pass, which replaces the previous text."""
        if end is None:
            content, guess, progress = await asyncio.to_thread(self._snapshot, job, event)
        else:
            content, guess, progress = end.text, end.text, 1.0
        meta = {"diffusion_content": guess, "diffusion_progress": progress}
        return self._text(index, content, diffusion_meta=meta)

    def _snapshot(self, job: Job, event: Event) -> tuple[str, str, float]:
        """Return the canvas as text, the text with guesses, and the share of decided positions.

        In the first text, ``UNDECIDED`` represents each undecided position. In the second text, the
        denoiser's guesses replace undecided positions.
        """
        tokenizer, bundle = self._model.bundle.tokenizer, self._model.bundle
        assert tokenizer is not None
        positions = self._positions(job, event)
        ends = set(bundle.eos_token_ids)
        runs: list[list[int]] = []
        # One element for each sequence of adjacent decided tokens: the number of undecided
        # positions directly before the sequence.
        marks: list[int] = []
        gap, guessed, decided = 0, [], 0
        is_past_end = False
        for at in positions:
            token = event.canvas[at]
            is_open = event.undecided[at]
            decided += not is_open
            if is_past_end:
                continue
            if is_open:
                gap += 1
                if event.guess[at] >= 0 and event.guess[at] not in ends:
                    guessed.append(event.guess[at])
                continue
            if token in ends:
                is_past_end = True
                continue
            if gap or not runs:
                runs.append([])
                marks.append(gap)
                gap = 0
            runs[-1].append(token)
            guessed.append(token)
        *texts, guess = tokenizer.decode_each([*runs, guessed])
        shown = "".join(UNDECIDED * mark + text for mark, text in zip(marks, texts, strict=True))
        return shown + UNDECIDED * gap, guess, decided / max(1, len(positions))

    def _positions(self, job: Job, event: Event) -> range:
        if self._ask.hole is not None:
            return self._ask.hole[1].resized(len(event.canvas)).holes()[0]
        return range(job.prompt_tokens, len(event.canvas))


class ChoicesWriter(Writer):
    """Writes events with ``choices``, which contain parts of messages or of texts.

    Args:
        form: The format of the answers. Log probabilities are sent at the end of an answer.
        counts: Which events contain the token counts.
        ask, model, is_diffusing: See ``Writer``.
    """

    def __init__(
        self, form: Choices, counts: Counts, ask: Ask, model: Model, is_diffusing: bool
    ) -> None:
        super().__init__(ask, model, is_diffusing)
        kind = f"{form.head.kind}.chunk" if form.is_chat else form.head.kind
        self._form, self._counts = form, counts
        self._so_far: dict[int, Spent] = {}  # by the index of a choice
        self._head = replace(form.head, kind=kind)

    def _note(self, index: int, job: Job, event: Event | None) -> None:
        if self._counts != "each":
            return
        made = passes = 0
        if event is not None:
            ends, passes = self._model.bundle.eos_token_ids, event.nfe
            decided = [at for at in self._positions(job, event) if not event.undecided[at]]
            first_end = next((at for at in decided if event.canvas[at] in ends), None)
            made = sum(first_end is None or at < first_end for at in decided)
        self._so_far[index] = Spent(job.prompt_tokens, made, passes, 0)

    def _opening(self, index: int) -> Iterator[bytes]:
        if self._form.is_chat:
            yield self._delta(index, {"role": "assistant", "content": ""})

    def _text(self, index: int, text: str, **beside: Any) -> Iterator[bytes]:
        if self._form.is_chat:
            yield self._delta(index, {"content": text}, **beside)
        else:
            choice = {"index": index, **self._form.text("delta", text)}
            yield self._chunk([choice | {"logprobs": None, "finish_reason": None}], **beside)

    def _calls(self, index: int, calls: Sequence[ToolCall]) -> Iterator[bytes]:
        for call in tool_calls(calls):
            yield self._delta(index, {"tool_calls": [call]})

    def _end(self, index: int, end: Answer) -> Iterator[bytes]:
        text = {"delta": {}} if self._form.is_chat else self._form.text("delta", "")
        beside = {"logprobs": self._form.logprobs(self._model, end), "finish_reason": end.finish}
        yield self._chunk([{"index": index, **text, **beside}])

    def _closing(self) -> Iterator[bytes]:
        if self._counts != "none":
            yield self._chunk([], usage=usage(self.in_order(), self._ask))
        yield DONE

    def _failure(self, error: ApiError) -> Iterator[bytes]:
        yield sse(error.body)

    def _delta(self, index: int, delta: dict[str, Any], **beside: Any) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._chunk([choice], **beside)

    def _chunk(self, choices: list[dict[str, Any]], **beside: Any) -> bytes:
        if self._counts == "last":
            beside = {"usage": None} | beside
        elif self._counts == "each":
            spent = self._so_far | {index: end.spent for index, end in self.answers.items()}
            so_far = usage_of([each for _, each in sorted(spent.items())], self._ask)
            beside = {"usage": so_far} | beside
        return sse(self._head.around(choices=choices, **beside))
