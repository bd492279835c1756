"""Generate from an open bundle, over the C ABI. A ``Bundle`` may be shared by threads."""

from __future__ import annotations

import ctypes as C
import functools
import inspect
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dlm_runtime.abi import native as _native
from dlm_runtime.constraints.layout import Layout
from dlm_runtime.errors import RequestError, shown
from dlm_runtime.generation.constraining import Constraints
from dlm_runtime.generation.handle import Handle
from dlm_runtime.generation.infill import Infill, infill
from dlm_runtime.generation.request import (
    OPTION_NAMES,
    InfillOptions,
    Options,
    Request,
    RequestOptions,
    cancel_of,
    count_of,
    token_ids,
)
from dlm_runtime.generation.results import Event, Generation
from dlm_runtime.generation.scheduler import PassCost, Scheduler
from dlm_runtime.manifest import text_files
from dlm_runtime.policy import Policy
from dlm_runtime.text.tokenizer import Tokenizer
from dlm_runtime.tools import CallFormat, Tools

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from dlm_runtime.constraints.compiled import CompileLimits, Constraint


class Bundle:
    """An opened bundle. Made by ``dlm_runtime.open``; usable as a context manager."""

    def __init__(
        self,
        handle: Handle,
        folder: Path | None = None,
        *,
        checks_hashes: bool = True,
        provider: str = "cpu",
    ) -> None:
        """``folder`` has the tokenizer's files; None: there are none. ``checks_hashes`` says whether
        they are compared with the manifest's hashes. ``provider`` runs the graph in ONNX Runtime.
        """
        self._handle = handle
        self._library = _native.library()
        self._tokenizer: Tokenizer | None = None
        self._constraints = Constraints(handle)
        self._folder = folder
        self._checks_hashes = checks_hashes
        self.provider = provider
        self.manifest = handle.manifest
        self.vocab_size = handle.vocab_size
        self.mask_token_id = handle.mask_token_id
        self.max_canvas_length = handle.max_canvas_length
        self.eos_token_ids = handle.eos_token_ids
        self.visible_block = handle.visible_block
        """Tokens of a block where attention is block-causal; None: it is full."""
        self.max_new_tokens = handle.max_new_tokens
        """Mask tokens that a request fills which does not say how many."""
        self.engine = handle.engine

    @property
    def is_on_cpu(self) -> bool:
        """Whether ONNX Runtime runs its graph on the CPU."""
        return self.engine.startswith("onnxruntime") and self.provider == "cpu"

    def close(self) -> None:
        """Take no more requests, and free the engine and its weights once those that run have
        ended.

        A stream ends at its next step, with RequestError. Raises ForkError in a forked process.
        """
        self._handle.close()

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The bundle's tokenizer, None if it takes token ids only. Raises BundleError for a damaged
        one.
        """
        if self._tokenizer is None and self._folder is not None:
            files = text_files(self.manifest, self._folder)
            if files.tokenizer is not None:
                hashes = (
                    {name: entry["sha256"] for name, entry in self.manifest["files"].items()}
                    if self._checks_hashes
                    else None
                )
                self._tokenizer = Tokenizer.from_files(
                    files.tokenizer, files.template, files.special_tokens, hashes
                )
                self._handle.close_with(self._tokenizer)
        return self._tokenizer

    def check_text(self) -> None:
        """Read the compiled text file, which C programs take text with. Raises BundleError where
        there is a damaged one.
        """
        if "file" not in self.manifest.get("text", {}):
            return
        self._handle.check_open()
        message, text = C.create_string_buffer(_native.MESSAGE_BYTES), C.c_void_p()
        status = self._library.dlm_bundle_text(
            self._handle.pointer, message, len(message), C.byref(text)
        )
        if status:
            raise _native.error(status, message.value)

    @property
    def json_layout(self) -> str:
        """Name of the layout of JSON text that the denoiser was trained on, one of ``LAYOUTS``; the
        default is "compact".
        """
        return self._constraints.json_layout

    @property
    def call_format(self) -> str | None:
        """Name of the format of calls that the denoiser was trained on, one of ``tools.FORMATS``;
        None if it does not say.
        """
        return self.manifest.get("call_format")

    def constraint(
        self,
        *,
        schema: Any = None,
        regex: str | None = None,
        grammar: str | None = None,
        enum: Sequence[str] | None = None,
        json_object: bool = False,
        json_lines: Any = None,
        csv: Any = None,
        xml: Any = None,
        tools: Tools | None = None,
        max_depth: int | None = None,
        any_order: bool = False,
        more_properties: bool = False,
        before: str = "",
        behind: str = "",
        json_layout: str | Layout | None = None,
        limits: CompileLimits | None = None,
        cache_dir: str | Path | None = "",
    ) -> Constraint:
        """Compile what a generated text may be, for this bundle's tokenizer. Give one of the first
        nine arguments.

        The bundle keeps the last constraints that it compiled: the same arguments, compared by
        content, are not compiled again.

        Args:
            schema: A JSON Schema, or a class with a method ``model_json_schema`` such as a Pydantic model.
            regex: The whole text matches it, in the syntax of Rust's regex crate.
            grammar: The text is one of this grammar, in GBNF, the notation of llama.cpp.
            enum: The text is one of these.
            json_object: The text is any JSON object.
            json_lines: The text is JSON Lines: a schema of a line, or ``JsonLines``.
            csv: The text is a CSV table: a schema of a row, or ``Csv``.
            xml: The text is an XML element: a schema with the keyword ``xml`` of OpenAPI.
            tools: The text is a call of one of them (``Bundle.tools``).
            max_depth: How often a schema may contain itself, and how many containers may be inside each other where a schema
                allows any value. For a grammar, how many recursive references may be inside each other. 0 to 64. None: 3, or
                less if the result would be too large.
            any_order: If True, the properties of JSON objects with up to 6 of them are in any order. By default, all are in
                the schema's order.
            more_properties: If True, properties that a schema allows but does not name may be written too.
            before, behind: Given texts before and after the generated one. All three together are then valid.
            json_layout: White space of the JSON text: a name of ``LAYOUTS``, or a ``Layout``. None: the bundle's own.
            limits: Bounds on compiling. None: the usual ones.
            cache_dir: Folder where the result is kept. "": the folder in the user's caches. None: nowhere.

        Raises RequestError if something is not supported, matches nothing or exceeds a limit,
        naming it.
        """
        self._handle.origin.check()
        asked = {
            "schema": schema,
            "regex": regex,
            "grammar": grammar,
            "enum": enum,
            "json_object": json_object,
            "json_lines": json_lines,
            "csv": csv,
            "xml": xml,
            "tools": tools,
        }
        return self._constraints.compile(
            self.tokenizer,
            asked,
            max_depth=max_depth,
            any_order=any_order,
            more_properties=more_properties,
            before=before,
            behind=behind,
            json_layout=json_layout,
            limits=limits,
            cache_dir=cache_dir,
        )

    def tools(
        self,
        tools: Sequence[Mapping[str, Any]],
        tool_choice: str = "required",
        parallel_tool_calls: bool | None = None,
        call_format: str | CallFormat | None = None,
    ) -> Tools:
        """Functions that may be called, for ``constraint``, and for many requests:
        ``generate(tools=bundle.tools([...]))``.

        The arguments are those of a request (``Options``). Raises RequestError.
        """
        how = {
            "tool_choice": tool_choice,
            "parallel_tool_calls": parallel_tool_calls,
            "call_format": call_format,
        }
        found = self._tools(Options.of({"tools": tools, **how}))
        assert found is not None
        return found

    def _tools(self, options: Options) -> Tools | None:
        return options.tools_for(self.tokenizer, self.call_format)

    def __enter__(self) -> Bundle:
        return self

    def __exit__(self, *_: object) -> None:
        if self._handle.origin.is_here:
            self.close()

    def policy(
        self, preset: str | None = None, effort: str | None = None, **changes: Any
    ) -> Policy:
        """A preset of this bundle (None: its default), or the loop fitted for an effort, with some
        fields changed.

        Raises BundleError, RequestError.
        """
        return self._handle.policy(preset, effort).with_fields(changes)

    def _policy_for(self, method: str, options: Options) -> Policy:
        """``policy`` for a method whose own arguments may have been meant."""
        beside = (*_arguments(method), *OPTION_NAMES)
        found = self._handle.policy(options.preset, options.effort)
        return found.with_fields(dict(options.policy), beside)

    def generate(
        self,
        *,
        prompt: str | None = None,
        tokens: Sequence[int] | None = None,
        chat: Sequence[Mapping[str, Any]] | None = None,
        cancel: threading.Event | None = None,
        **options: Unpack[RequestOptions],
    ) -> Generation:
        """Fill mask tokens behind a prompt, token ids, or a chat (one of the three); mask tokens
        among ``tokens`` as well.

        ``options`` are those of ``Options`` and any field of ``Policy``, by name:
        ``max_new_tokens=64, preset="fast-dllm", threshold=0.8``. Another thread ends the request
        within one pass by setting ``cancel``.

        ``timings`` are seconds: in the engine ``prefill`` (passes that fill a cache) and ``passes``
        (all others), outside it ``selection`` (scoring, ranking, committing) and ``cache`` (moving
        keys and values), and ``total``, which is more than these by the loop's bookkeeping.

        Raises RequestError for ids, lengths or policies that the bundle does not take, EngineError
        if a pass fails, and, within a pass, what a signal's handler raises on the main thread, such
        as KeyboardInterrupt.
        """
        asked = Options.of(options)
        cancel_of("cancel", cancel)
        request = self._request("generate", (prompt, tokens, chat), asked)
        with self._handle.session([cancel] if cancel else ()) as session:
            result = C.POINTER(_native.Result)()
            status = self._library.dlm_session_generate(
                session, C.byref(request.native), C.byref(result)
            )
            self._check(status, session, [request])
            return request.generation(result.contents)

    def generate_batch(
        self,
        *,
        prompts: Sequence[str] | None = None,
        tokens: Sequence[Sequence[int]] | None = None,
        chats: Sequence[Sequence[Mapping[str, Any]]] | None = None,
        max_batch: int = 8,
        policies: Sequence[Mapping[str, Any]] | None = None,
        cancel: threading.Event | Sequence[threading.Event | None] | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[Generation]:
        """``generate`` for several requests, at most ``max_batch`` of which share their passes;
        results in the given order.

        On a CPU they share passes whatever their lengths, and one begins whenever another is done.
        With other engines those run together whose canvases have one length and, over a cache,
        whose masks lie in the same blocks. Each result is what ``generate`` gives, floating-point
        noise of the engine aside, with its own statistics; the seconds of a shared pass are divided
        among its requests. ``policies`` changes fields for each request, such as its ``seed``.

        Limits and ``stop_strings`` hold for each request. ``cancel`` is an event for all requests,
        or one or None for each.

        Raises what ``generate`` raises, naming the request by its number, counted from 0, and
        RequestError where the engine takes fewer at a time: TensorRT takes one.
        """
        given = {"prompt": prompts, "tokens": tokens, "chat": chats}
        chosen = [(name, values) for name, values in given.items() if values is not None]
        if len(chosen) != 1:
            raise RequestError(
                "give one of prompts, tokens and chats: a list with an entry for each request"
            )
        if isinstance(chosen[0][1], str):
            raise RequestError(
                f"{chosen[0][0]} is one string: give a list with an entry for each request"
            )
        entries = _entries(chosen[0][0], chosen[0][1])
        count = len(entries)
        each = [{}] * count if policies is None else _entries("policies", policies)
        cancels: Sequence[Any] = (
            [cancel] * count
            if cancel is None or hasattr(cancel, "is_set")
            else _entries("cancel", cancel)
        )
        for name, values in (("policies", each), ("cancel", cancels)):
            if len(values) != count:
                raise RequestError(
                    f"{name} has {len(values)} entries for {count} requests: give one for each"
                )
        for event in cancels:
            cancel_of("cancel", event)
        asked, kept = Options.of(options), []
        fields, tools = self._policy_for("generate_batch", asked), self._tools(asked)
        constraint = self._constraints.of_request(self.tokenizer, asked, tools)
        for number, (value, changes) in enumerate(zip(entries, each, strict=True)):
            one = tuple(value if name == chosen[0][0] else None for name in given)
            try:
                if not isinstance(changes, Mapping):
                    raise RequestError(f"policies: {shown(changes)} is no dict of policy fields")
                policy = fields.with_fields(dict(changes))
                kept.append(self._made(one, asked, policy, tools, constraint))
            except RequestError as err:
                raise RequestError(f"request {number}: {err}") from err
        most = count_of("max_batch", max_batch)
        if not kept:
            return []
        natives = (C.POINTER(_native.Request) * len(kept))(
            *(C.pointer(request.native) for request in kept)
        )
        with self._handle.session(cancels if any(cancels) else ()) as session:
            status = self._library.dlm_session_generate_batch(session, natives, len(kept), most)
            self._check(status, session, kept)
            made = []
            for number, request in enumerate(kept):
                result = C.POINTER(_native.Result)()
                self._check(
                    self._library.dlm_session_result(session, number, C.byref(result)), session
                )
                made.append(request.generation(result.contents))
            return made

    def stream(
        self,
        *,
        prompt: str | None = None,
        tokens: Sequence[int] | None = None,
        chat: Sequence[Mapping[str, Any]] | None = None,
        cancel: threading.Event | None = None,
        **options: Unpack[RequestOptions],
    ) -> Iterator[Event]:
        """Like ``generate``, a step at a time: an ``Event`` after each pass. Stop early by leaving
        the loop.
        """
        cancel_of("cancel", cancel)
        return self._steps(
            self._request("stream", (prompt, tokens, chat), Options.of(options)), cancel
        )

    def _request(self, method: str, given: tuple[Any, ...], options: Options) -> Request:
        policy, tools = self._policy_for(method, options), self._tools(options)
        return self._made(
            given,
            options,
            policy,
            tools,
            self._constraints.of_request(self.tokenizer, options, tools),
        )

    def _made(
        self,
        given: tuple[Any, ...],
        options: Options,
        policy: Policy,
        tools: Tools | None,
        constraint: Constraint | None,
    ) -> Request:
        return Request(
            self._handle,
            self.tokenizer,
            given,
            options,
            policy,
            tools,
            constraint,
            self._constraints.count_loss,
        )

    def infill(
        self,
        text: str,
        *,
        lengths: int | Sequence[int | Sequence[int]] = (16,),
        constrain_from: int | None = None,
        **request: Unpack[InfillOptions],
    ) -> Infill:
        """Fill the holes of a text, written ``<mask>`` in it: ``"def f(x): <mask> return y"``.

        ``lengths`` are the tokens of the holes: a number or one entry for all, or one for each. A
        list in place of an entry is of lengths to try, each in a request of its own, and the best
        is taken by the mean ln p of what fills the holes. A hole ends with its first end token, so
        that one with room to spare may take less. What the tokenizer puts in front of a prompt is
        put in front of the text, unless it is there; what it puts behind one is for the text to
        say.

        With ``prompt`` or ``chat``, the text is the answer to it: it follows the prompt's tokens.

        ``request`` is what ``generate_batch`` takes beside what is given: policy fields, limits,
        ``max_batch``. A ``schema`` or the like is then of what fills the holes; with
        ``constrain_from``, of the text from its character of that number on, and that has one hole.

        Raises RequestError where there is no hole, or no tokenizer, and where attention is
        block-causal.
        """
        return infill(self, text, lengths, constrain_from, **request)

    def logits(self, tokens: Sequence[int], rows: Sequence[int] | None = None) -> np.ndarray:
        """Raw logits ``[R, V]`` (float32) of one full pass over a canvas ``[L]``; its mask tokens
        stay masked.

        ``rows`` picks the rows that pass the head, None all of them. Row ``i`` is the
        network's row ``i``: for a family with shift 1 it predicts position ``i + 1``.
        """
        given = token_ids(tokens)
        length = len(given)
        wanted = range(length) if rows is None else token_ids(rows)
        out = np.empty((len(wanted), self.vocab_size), np.float32)
        with self._handle.session() as session:
            status = self._library.dlm_session_logits(
                session,
                (C.c_int32 * max(1, length))(*given),
                length,
                (C.c_int32 * max(1, len(wanted)))(*wanted),
                len(wanted),
                out.ctypes.data_as(_native.f32p),
                out.size,
            )
            self._check(status, session)
        return out

    def time_passes(
        self, tokens: int, cached: int, rows: int, repeats: int, batch: int = 1
    ) -> list[float]:
        """Seconds that the engine takes for a pass of ``tokens`` over ``cached`` ones that scores
        ``rows``, ``repeats`` times.

        ``batch`` requests share the pass, each with as many tokens and rows. On made-up tokens; for
        ``cached`` > 0 a full pass over both fills the cache first, untimed. 0 repeats only check
        the sizes. Raises RequestError for a pass that the denoiser or the engine does not take.
        """
        given = (("batch", batch), ("tokens", tokens), ("cached", cached), ("rows", rows))
        sizes = [count_of(name, value) for name, value in given]
        seconds = (C.c_double * max(1, count_of("repeats", repeats)))()
        with self._handle.session() as session:
            self._check(
                self._library.dlm_session_time_passes(session, *sizes, seconds, repeats), session
            )
        return seconds[:repeats]

    def _steps(self, request: Request, cancel: threading.Event | None) -> Iterator[Event]:
        if request.native.decode:
            request.native.text = _native.TEXT_STEPS
        with self._handle.session([cancel] if cancel else ()) as session:
            status = self._library.dlm_session_start(session, C.byref(request.native))
            self._check(status, session)
            step, result = C.POINTER(_native.Step)(), C.POINTER(_native.Result)()
            event = None
            while event is None or not event.done:
                self._handle.check_open()
                status = self._library.dlm_session_step(session, C.byref(step))
                self._check(status, session, [request])
                event = request.event(step.contents, None if event is None else event.text)
                if event.done:
                    self._check(
                        self._library.dlm_session_result(session, 0, C.byref(result)), session
                    )
                    event = replace(event, result=request.generation(result.contents))
                yield event

    def _check(self, status: int, session: C.c_void_p, requests: Sequence[Request] = ()) -> None:
        """Raise the error of a session's call, or what the tokenizer raised in it."""
        raised = next((one.error for one in requests if one.error is not None), None)
        if status and raised is not None:
            raise raised
        self._handle.check(status, session)

    def scheduler(
        self,
        *,
        max_running: int = 16,
        max_waiting: int = 1024,
        max_tokens: int = 512,
        cache_bytes: int = 0,
        max_pass_ms: float = 0.0,
        cost: PassCost | None = None,
    ) -> Scheduler:
        """What takes requests from any thread and makes their passes on one of its own, together
        where the engine lets them.

        At most ``max_running`` requests have begun, and share passes or take turns; ``max_waiting``
        others wait, in the order of their coming. A pass that several share has at most
        ``max_tokens`` tokens: those for whom there is no room take part in the next.
        ``cache_bytes`` bounds the keys and values of all that run; 0: 1 GiB, or what the longest
        canvas takes if that is more. ``cost`` says what passes cost here, and by that one that
        several share is expected to take ``max_pass_ms`` milliseconds at most (0: any time), and no
        more requests begin than fit into such a pass. Raises RequestError.
        """
        return Scheduler(
            self._handle,
            functools.partial(self._request, "generate"),
            max_running,
            max_waiting,
            max_tokens,
            cache_bytes,
            max_pass_ms,
            cost,
        )


def _entries(name: str, values: Any) -> Sequence[Any]:
    """An argument with an entry for each request. Raises RequestError."""
    if (
        isinstance(values, (str, bytes, Mapping))
        or not hasattr(values, "__len__")
        or not hasattr(values, "__getitem__")
    ):
        raise RequestError(f"{name} = {shown(values)}: give a list with an entry for each request")
    found: Sequence[Any] = values
    return found


@functools.cache
def _arguments(method: str) -> tuple[str, ...]:
    """What a method of ``Bundle`` takes by name, beside a policy's fields."""
    parameters = inspect.signature(getattr(Bundle, method)).parameters.values()
    return tuple(each.name for each in parameters if each.kind is each.KEYWORD_ONLY)
