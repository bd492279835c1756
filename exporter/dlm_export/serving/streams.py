"""Streams of server-sent events: text as it becomes certain, or a canvas as it denoises."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

from dlm_export.serving.conversation import Ask
from dlm_export.serving.errors import of_runtime
from dlm_export.serving.hosting import Model
from dlm_export.serving.replies import Answer, Head, answer, tool_calls, usage
from dlm_runtime import DlmError, Event, Job

UNDECIDED = "░"
"""Stands for an undecided position in a snapshot."""
DONE = b"data: [DONE]\n\n"


def sse(content: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(content, ensure_ascii=False).encode() + b"\n\n"


class Writer:
    """Writes the chunks of one request. ``is_chat`` selects deltas of messages, else texts.

    ``passes`` and ``tokens`` count what was written, for the log.
    """

    def __init__(self, head: Head, ask: Ask, model: Model, is_chat: bool, has_usage: bool) -> None:
        self._head, self._ask, self._model = head, ask, model
        self._is_chat, self._has_usage = is_chat, has_usage
        self.answers: dict[int, Answer] = {}

    async def chunks(self, jobs: Sequence[Job], is_diffusing: bool) -> AsyncGenerator[bytes, None]:
        """All events of the stream. Closing the iterator cancels the jobs."""
        found: asyncio.Queue[bytes | None] = asyncio.Queue()
        tasks = [
            asyncio.create_task(self._follow(index, job, is_diffusing, found))
            for index, job in enumerate(jobs)
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
            if self._has_usage:
                ordered = [self.answers[index] for index in range(len(jobs))]
                yield self._chunk([], usage=usage(ordered, self._ask))
            yield DONE
        except DlmError as err:
            yield sse(of_runtime(err).body)
        finally:
            for job, task in zip(jobs, tasks, strict=True):
                job.cancel()
                task.cancel()

    async def _follow(
        self, index: int, job: Job, is_diffusing: bool, found: asyncio.Queue[bytes | None]
    ) -> None:
        """Put the chunks of one answer into the queue, then None."""
        try:
            if self._is_chat:
                found.put_nowait(self._delta(index, {"role": "assistant", "content": ""}))
            follow = self._snapshots if is_diffusing else self._deltas
            async for chunk in follow(index, job):
                found.put_nowait(chunk)
        finally:
            found.put_nowait(None)

    async def _deltas(self, index: int, job: Job) -> AsyncIterator[bytes]:
        """Texts that only grow. Text that may become a call of a function is held back."""
        sent = 0
        async for event in job:
            text = event.text or ""
            if event.result is not None:
                end = await asyncio.to_thread(answer, self._ask, self._model, event.result)
                self.answers[index] = end
                if end.calls:
                    for call in tool_calls(end.calls):
                        yield self._delta(index, {"tool_calls": [call]})
                elif len(end.text) > sent:
                    yield self._text(index, end.text[sent:])
                yield self._end(index, end)
            elif self._ask.hole is None and len(text) > sent and not self._may_call(text):
                yield self._text(index, text[sent:])
                sent = len(text)

    def _may_call(self, text: str) -> bool:
        """True if the text may still turn out to be a call, or to contain one."""
        tools = self._ask.tools
        if tools is None or tools.choice == "none":
            return False
        before = tools.written.before.strip()
        if tools.is_forced or before:
            return True
        start = text.lstrip()
        return not start or start[0] in "{["

    async def _snapshots(self, index: int, job: Job) -> AsyncIterator[bytes]:
        """The whole text after each pass, which replaces the one before."""
        async for event in job:
            if event.result is None:
                content, guess, progress = await asyncio.to_thread(self._snapshot, job, event)
            else:
                end = await asyncio.to_thread(answer, self._ask, self._model, event.result)
                self.answers[index] = end
                content, guess, progress = end.text, end.text, 1.0
                if end.calls:
                    for call in tool_calls(end.calls):
                        yield self._delta(index, {"tool_calls": [call]})
                    yield self._end(index, end)
                    return
            meta = {"diffusion_content": guess, "diffusion_progress": progress}
            yield self._text(index, content, diffusion_meta=meta)
            if event.result is not None:
                yield self._end(index, end)

    def _snapshot(self, job: Job, event: Event) -> tuple[str, str, float]:
        """The canvas as text, with marks for undecided positions, and with the denoiser's guesses;
        and the share of positions that are decided.
        """
        tokenizer, bundle = self._model.bundle.tokenizer, self._model.bundle
        assert tokenizer is not None
        positions = self._positions(job, event)
        ends = set(bundle.eos_token_ids)
        runs: list[list[int]] = []
        marks: list[int] = []  # undecided positions before each run
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
        """The positions of the answer."""
        if self._ask.hole is not None:
            return self._ask.hole[1].holes()[0]
        return range(job.prompt_tokens, len(event.canvas))

    def _text(self, index: int, text: str, **beside: Any) -> bytes:
        if self._is_chat:
            return self._delta(index, {"content": text}, **beside)
        choice = {"index": index, "text": text, "logprobs": None, "finish_reason": None}
        return self._chunk([choice], **beside)

    def _delta(
        self, index: int, delta: dict[str, Any], finish: str | None = None, **beside: Any
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
        return self._chunk([choice], **beside)

    def _end(self, index: int, end: Answer) -> bytes:
        if self._is_chat:
            return self._delta(index, {}, end.finish)
        choice = {"index": index, "text": "", "logprobs": None, "finish_reason": end.finish}
        return self._chunk([choice])

    def _chunk(self, choices: list[dict[str, Any]], **beside: Any) -> bytes:
        if self._has_usage:
            beside = {"usage": None} | beside
        return sse(self._head.around(choices=choices, **beside))
