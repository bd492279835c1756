"""Defines the server's routes, and checks the API key and the limits of each request.

The module also updates the metrics and the log.
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import json
import secrets
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dlm_runtime import DlmError, Generation, Job
from dlm_runtime.generation.deciding import Deciding
from dlm_serve import decisions, field_arguments, fields, openai_decisions, page_routes
from dlm_serve.cancelling import results_of, unless_disconnected
from dlm_serve.edits import EditBody, edit
from dlm_serve.errors import ApiError, of_runtime
from dlm_serve.field_arguments import Ask, chat_tokens, check_ids, prompt_tokens, tokenizer_of
from dlm_serve.hosting import Model, Models, describe
from dlm_serve.metrics import Metrics
from dlm_serve.openai_decisions import AnyDecisionBody
from dlm_serve.openapi import DOCS_PAGE, document
from dlm_serve.replies import Answer, Choices, Head, answer, usage
from dlm_serve.response_fields import ResponsesBody, response
from dlm_serve.responses import ResponseForm, ResponseWriter
from dlm_serve.streams import ChoicesWriter, EventStream, Writer
from dlm_serve.web import Web
from dlm_serve.workers import Workers

OPEN_PATHS = ("/health", "/ready", *page_routes.PATHS)
"""Requests to these paths need no API key."""
MOST_ID = 128
QUICK_BYTES = 1 << 14
"""A limit in bytes for short bodies, which are checked on the thread of the event loop.

Longer bodies are checked on a separate thread, and their texts are tokenised one body at a time.
"""
SHORT_THREADS = 4


@dataclass(frozen=True)
class Limits:
    """The limits of one request.

    Args:
        body_bytes: The maximum size of the body in bytes.
        body_s: The number of seconds in which the whole body must arrive.
        bodies_bytes: The maximum total size in bytes of all bodies that are arriving at the same
            time.
        compile_threads: The maximum number of requests whose schemas are compiled at the same time.
            Other requests with new schemas wait.
        waiting: The maximum number of requests that wait for one of these threads, and that wait
            until their short bodies are tokenised.
        waiting_long: The maximum number of long bodies that wait until they are checked, or until
            they are tokenised.
    """

    body_bytes: int = 1 << 20
    body_s: float = 30.0
    bodies_bytes: int = 256 << 20
    compile_threads: int = 2
    waiting: int = 256
    waiting_long: int = 16


@dataclass(frozen=True)
class Form:
    """Creates responses in the format of one path.

    Args:
        whole: Creates the body of a response that is not a stream.
        writer: Creates the writer of a stream. If None, responses on the path are never streams.
    """

    whole: Callable[[Ask, Model, Sequence[Answer]], dict[str, Any]]
    writer: Callable[[Ask, Model], Writer] | None = None


class Server:
    """The server application for several models. ``app`` is the ASGI application.

    Args:
        models: The models that answer requests. When the application ends, the application closes
            all models.
        keys: The valid API keys. Each request must contain a valid key, unless ``keys`` is empty.
        limits: The limits that apply to each request.
        has_log: If True, the application writes a line of JSON to stderr for each request. The line
            does not contain the request's texts.
        web: The host names and web pages that may be used with the server.
        shares_prompts: If False, a request reuses only keys and values of requests with the same
            API key.
    """

    def __init__(
        self,
        models: Models,
        keys: Sequence[str] = (),
        limits: Limits | None = None,
        has_log: bool = False,
        web: Web | None = None,
        shares_prompts: bool = False,
    ) -> None:
        self._models, self._keys = models, [key.encode() for key in keys]
        self._limits, self._has_log = limits or Limits(), has_log
        self._shares_prompts = shares_prompts
        few, many = self._limits.waiting_long, self._limits.waiting
        self._compiling = Workers("a compiler", self._limits.compile_threads, many)
        self._checking = Workers("the check of their bodies", 1, few)
        self._short = Workers("the tokenizer", SHORT_THREADS, many)
        self._long = Workers("the tokenizer", 1, few)
        self._arriving = 0  # total size of all arriving bodies in bytes
        self.is_ready = True
        posts: dict[str, Callable[[Request], Awaitable[Response]]] = {
            "/v1/chat/completions": self._chat,
            "/v1/completions": self._completion,
            "/v1/responses": self._respond,
            "/v1/fim/completions": self._fim,
            "/v1/edit/completions": self._edit,
            "/v1/decisions": functools.partial(self._decide, AnyDecisionBody),
            "/v1/systemone": functools.partial(self._decide, decisions.SystemOneBody),
            "/tokenize": self._tokenize,
            "/detokenize": self._detokenize,
        }
        # A response can be a route's ASGI application, and the same one is sent for every request.
        gets: dict[str, Any] = {
            "/v1/models": functools.partial(self._list, None),
            "/v1/models/{name:path}": self._model,
            "/v1/chat/completions/models": functools.partial(self._list, "chat.completions"),
            "/v1/fim/completions/models": functools.partial(self._list, "fim.completions"),
            "/v1/edit/completions/models": functools.partial(self._list, "edit.completions"),
            "/health": JSONResponse({"status": "ok"}),
            "/ready": self._ready,
            "/metrics": self._show_metrics,
            "/openapi.json": JSONResponse(document()),
            "/docs": Response(DOCS_PAGE, media_type="text/html"),
        }
        self._metrics = Metrics(models, posts)
        routes = [Route(path, call, methods=["POST"]) for path, call in posts.items()]
        routes += [Route(path, call, methods=["GET"]) for path, call in gets.items()]
        routes += page_routes.routes()
        starlette = Starlette(
            routes=routes,
            lifespan=self._lifespan,
            exception_handlers={
                ApiError: _api_error,
                DlmError: lambda _, err: _api_error(None, of_runtime(err)),
                HTTPException: _http_error,
                ClientDisconnect: lambda *_: Response(status_code=499),
                Exception: _defect,
            },
        )
        web = web or Web()
        self.app: ASGIApp = _Around(starlette, web, self._group_of, self._note)
        if web.origins:
            self.app = CORSMiddleware(
                self.app,
                allow_origins=web.origins,
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=["x-request-id"],
            )

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        yield
        self.is_ready = False
        for workers in (self._compiling, self._checking, self._short, self._long):
            workers.close()
        await asyncio.to_thread(self._models.close)

    # ---- Around every request ----

    def _group_of(self, path: str, authorization: bytes) -> int | None:
        """Return the number of the group of requests that may reuse each other's prompts.

        Each key has its own group. Returns None if the request must contain a key and does not.
        """
        if not self._keys or path in OPEN_PATHS:
            return 0
        scheme, _, key = authorization.partition(b" ")
        # Compare all keys, even after a key has matched. Otherwise, the response time would reveal
        # which key matches.
        matches = [hmac.compare_digest(key.strip(), each) for each in self._keys]
        if scheme.lower() != b"bearer" or not any(matches):
            return None
        return 0 if self._shares_prompts else 1 + matches.index(True)

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        state = scope["state"]
        model = state["about"].get("model", "")
        self._metrics.request(scope["path"], model, status, seconds)
        if self._has_log:
            line = {
                "time": round(time.time(), 3),
                "id": state["id"],
                "method": scope["method"],
                "path": scope["path"],
                "status": status,
                "ms": round(1e3 * seconds, 1),
            }
            line |= state["about"]
            print(json.dumps(line), file=sys.stderr, flush=True)

    async def _read(self, kind: type[BaseModel], request: Request) -> Any:
        """Read and check the body of a request. Raises ApiError.

        Long bodies are checked one at a time, in a separate thread. Several such threads would
        compete with the event loop for Python's global interpreter lock.
        """
        content = await self._body(request)
        most_commas = fields.commas_for(self._models.longest_context)
        request.state.is_long = len(content) >= QUICK_BYTES
        if not request.state.is_long:
            return fields.read(kind, content, most_commas)
        return await self._checking.run(fields.read, kind, content, most_commas)

    def _tokenising(self, request: Request) -> Workers:
        """Return the threads that tokenise the texts of a request."""
        return self._long if request.state.is_long else self._short

    async def _body(self, request: Request) -> bytes:
        """Return the body of a request.

        Raises ApiError if the body is too large or arrives too slowly.
        """
        found = bytearray()
        size = request.headers.get("content-length", "")
        self._check_size(int(size) if size.isdecimal() else 0)  # check before reading the body
        try:
            with anyio.fail_after(self._limits.body_s):
                async for piece in request.stream():
                    found += piece
                    self._arriving += len(piece)
                    self._check_size(len(found))
        except TimeoutError as err:
            said = f"the body did not arrive within {self._limits.body_s:g} s"
            raise ApiError(408, said, code="body_too_slow") from err
        finally:
            self._arriving -= len(found)
        return bytes(found)

    def _check_size(self, size: int) -> None:
        """Check the size of a body, and of all arriving bodies together. Raises ApiError."""
        if size > self._limits.body_bytes:
            said = f"the body has more than {self._limits.body_bytes} bytes"
            raise ApiError(413, said, code="body_too_large")
        if self._arriving > self._limits.bodies_bytes:
            raise ApiError(503, "too many bodies are arriving at once: try again", code="too_busy")

    # ---- Completions ----

    async def _chat(self, request: Request) -> Response:
        body: fields.ChatBody = await self._read(fields.ChatBody, request)
        head = Head("chatcmpl", "chat.completion", body.model)
        form = Choices(head, is_chat=True, has_logprobs=bool(body.logprobs))
        return await self._complete(request, body, field_arguments.chat, _choices(body, form))

    async def _completion(self, request: Request) -> Response:
        body: fields.CompletionBody = await self._read(fields.CompletionBody, request)
        head = Head("cmpl", "text_completion", body.model)
        form = Choices(head, is_chat=False, has_logprobs=body.logprobs is not None)
        return await self._complete(request, body, field_arguments.completion, _choices(body, form))

    async def _respond(self, request: Request) -> Response:
        body: ResponsesBody = await self._read(ResponsesBody, request)
        made = ResponseForm(body)
        form = Form(made.whole, functools.partial(ResponseWriter, made))
        return await self._complete(request, body, response, form)

    async def _fim(self, request: Request) -> Response:
        body: fields.FimBody = await self._read(fields.FimBody, request)
        head = Head("fim", "text_completion", body.model)
        form = Choices(head, is_chat=False, has_both=True)
        return await self._complete(request, body, field_arguments.fim, _choices(body, form))

    async def _edit(self, request: Request) -> Response:
        body: EditBody = await self._read(EditBody, request)
        form = Choices(Head("editcmpl", "edit.completion", body.model), is_chat=True)
        return await self._complete(request, body, edit, _choices(body, form))

    async def _complete(
        self, request: Request, body: Any, read: Callable[[Any, Model], Ask], form: Form
    ) -> Response:
        """Generate text for a request, and return either a whole response or a stream."""
        model = self._models.named(body.model)
        request.state.about |= {"model": model.name}
        model.acquire()
        is_streaming = False
        try:
            starting = self._start(request, read, body, model)
            ask, jobs = await unless_disconnected(request, starting)
            if body.stream:
                assert form.writer is not None
                writer = form.writer(ask, model)
                is_streaming = True
                return EventStream(self._streamed(request, writer, jobs, ask), model.release)
            made = await unless_disconnected(request, results_of(jobs))
            answers, whole = await asyncio.to_thread(_answered, form, ask, model, made)
            self._count(request, usage(answers, ask))
            return JSONResponse(whole)
        finally:
            if not is_streaming:
                model.release()

    async def _start(
        self, request: Request, read: Callable[[Any, Model], Ask], body: Any, model: Model
    ) -> tuple[Ask, list[Job]]:
        """Read and submit a request on threads. Raises ApiError.

        Only a few requests may compile new constraints at the same time, because compiling a
        constraint may take seconds.
        """

        def begin() -> tuple[Ask, list[Job] | None]:
            ask = read(body, model)
            ask.options["prefix_group"] = request.state.group
            return ask, submit(ask) if ask.find_constraint(model) else None

        def submit(ask: Ask) -> list[Job]:
            try:
                return ask.submit(model, bool(body.stream))
            except DlmError as err:
                raise of_runtime(err, length_field=body.length_field) from err

        ask, jobs = await self._tokenising(request).run(begin)
        if jobs is None:
            await self._compiling.run(ask.compile_constraint, model)
            jobs = await self._short.run(submit, ask)
        return ask, jobs

    async def _streamed(
        self, request: Request, writer: Writer, jobs: Sequence[Job], ask: Ask
    ) -> AsyncIterator[bytes]:
        is_noted = False
        async with aclosing(writer.chunks(jobs)) as chunks:
            async for chunk in chunks:
                if writer.has_text and not is_noted:
                    is_noted, state = True, request.state
                    seconds = time.perf_counter() - state.began
                    self._metrics.first_text(request.url.path, state.about["model"], seconds)
                yield chunk
        if len(writer.answers) == len(jobs):
            self._count(request, usage(writer.in_order(), ask))

    def _count(self, request: Request, counts: dict[str, Any]) -> None:
        names = ("prompt_tokens", "completion_tokens", "denoising_passes")
        values = (counts[name] for name in names)
        self._metrics.tokens(request.url.path, request.state.about["model"], *values)
        request.state.about |= {name: counts[name] for name in names}

    # ---- Decisions ----

    async def _decide(self, kind: type[BaseModel], request: Request) -> Response:
        body = await self._read(kind, request)
        body = body.root if kind is AnyDecisionBody else body
        is_openai = isinstance(body, openai_decisions.DecisionsBody)
        form: Any = openai_decisions if is_openai else decisions
        with self._models.using(body.model) as model:
            request.state.about |= {"model": model.name}
            reading = self._tokenising(request).run(form.read, body, model)
            deciding: Deciding = await unless_disconnected(request, reading)
            while deciding.is_open:
                # This compiles the constraint on the answer.
                given = (deciding, model, request.state.group, "input" if is_openai else "state")
                submitting = self._compiling.run(_submitted, *given)
                job = await unless_disconnected(request, submitting)
                (made,) = await unless_disconnected(request, results_of([job]))
                try:
                    deciding.take(made)
                except DlmError as err:
                    raise of_runtime(err) from err
            found = deciding.decision()
            counts = decisions.counted(found)
            self._count(request, counts)
            return JSONResponse(form.reply(body, model, found, counts))

    # ---- Tokens ----

    async def _tokenize(self, request: Request) -> Response:
        body: fields.TokenizeBody = await self._read(fields.TokenizeBody, request)
        with self._models.using(body.model) as model:
            working = self._tokenising(request).run(_tokens, body, model)
            tokens = await unless_disconnected(request, working)
            return JSONResponse({"tokens": tokens, "count": len(tokens)})

    async def _detokenize(self, request: Request) -> Response:
        body: fields.DetokenizeBody = await self._read(fields.DetokenizeBody, request)
        with self._models.using(body.model) as model:
            decode = tokenizer_of(model).decode
            check_ids(body.tokens, model, "tokens")
            try:
                working = self._tokenising(request).run(decode, body.tokens)
                text = await unless_disconnected(request, working)
            except DlmError as err:
                raise of_runtime(err, "tokens") from err
            return JSONResponse({"prompt": text})

    # ---- About the server ----

    async def _list(self, endpoint: str | None, _: Request) -> Response:
        found = [describe(model) for model in self._models]
        data = [
            each for each in found if endpoint is None or endpoint in each["supported_endpoints"]
        ]
        return JSONResponse({"object": "list", "data": data})

    async def _model(self, request: Request) -> Response:
        return JSONResponse(describe(self._models.named(request.path_params["name"])))

    async def _ready(self, _: Request) -> Response:
        is_open = self.is_ready and not any(model.scheduler.has_ended for model in self._models)
        return JSONResponse({"status": "ready" if is_open else "closing"}, 200 if is_open else 503)

    async def _show_metrics(self, _: Request) -> Response:
        return Response(self._metrics.text(), media_type=self._metrics.media_type)


class _Around:
    """Checks each request's headers and key, assigns an ID, and records the status and duration."""

    def __init__(
        self,
        app: ASGIApp,
        web: Web,
        group_of: Callable[[str, bytes], int | None],
        note: Callable[[Scope, int, float], None],
    ) -> None:
        self._app, self._web, self._group_of, self._note = app, web, group_of, note

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")[:MOST_ID].decode("latin-1")
        made = given if given and given.isascii() and given.isprintable() else ""
        request_id = made or f"req_{secrets.token_hex(12)}"
        # If the client disconnects before the response, log the status 499, as nginx does.
        status, began = 499, time.perf_counter()
        group = self._group_of(scope["path"], headers.get(b"authorization", b""))
        # Replace the dict ``state``, because all requests share the original dict.
        about: dict[str, Any] = {}
        state = {"id": request_id, "about": about, "began": began, "group": group}
        scope["state"] = {**scope.get("state", {}), **state}

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [
                    *message["headers"],
                    (b"x-request-id", request_id.encode()),
                ]
            await send(message)

        try:
            error = self._web.refusal(scope, headers)
            if error is None and group is None:
                said = "the key is missing or wrong: send `Authorization: Bearer KEY`"
                error = ApiError(401, said, code="invalid_api_key")
            app = self._app if error is None else _api_error(None, error)
            await app(scope, receive, noted)
        finally:
            self._note(scope, status, time.perf_counter() - began)


def _api_error(_: Any, err: Any) -> JSONResponse:
    return JSONResponse(err.body, err.status, err.headers)


def _http_error(request: Request, err: Any) -> JSONResponse:
    said = {
        404: f"there is no {request.url.path}",
        405: f"{request.url.path} does not take {request.method}",
    }
    error = ApiError(err.status_code, said.get(err.status_code, str(err.detail)))
    return JSONResponse(error.body, error.status, err.headers)


def _defect(_: Request, err: Exception) -> JSONResponse:
    return _api_error(None, ApiError(500, f"a defect of the server: {type(err).__name__}"))


def _submitted(deciding: Deciding, model: Model, group: int, field: str) -> Job:
    """Submit a decision's next request. ``field`` contains its prompt. Raises ApiError."""
    try:
        return model.scheduler.submit(**deciding.arguments(), prefix_group=group)
    except DlmError as err:
        raise of_runtime(err, decisions.prompt_or_questions(err, field)) from err


def _answered(
    form: Form, ask: Ask, model: Model, made: Sequence[Generation]
) -> tuple[list[Answer], dict[str, Any]]:
    """Convert the results in ``made`` to answers. Also returns the body of the response."""
    answers = [answer(ask, model, each) for each in made]
    return answers, form.whole(ask, model, answers)


def _choices(body: fields.Sampling, choices: Choices) -> Form:
    """Return the form that creates responses with a field ``choices``."""
    options = body.stream_options or fields.StreamOptions()

    def writer(ask: Ask, model: Model) -> Writer:
        return ChoicesWriter(choices, options.counts, ask, model, bool(body.diffusing))

    return Form(choices.whole, writer)


def _tokens(body: fields.TokenizeBody, model: Model) -> list[int]:
    """Return the token IDs of a text or of a chat. Raises ApiError."""
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give one of prompt and messages", "prompt")
    if body.prompt is not None:
        return prompt_tokens(body.prompt, model, body.special_tokens)
    messages = [
        field_arguments.message(each, f"messages[{at}]")
        for at, each in enumerate(body.messages or [])
    ]
    return chat_tokens(messages, model, body.special_tokens)
