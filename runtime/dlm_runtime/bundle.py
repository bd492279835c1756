"""Open a bundle and generate from it, over the C ABI.

A ``Bundle`` may be shared by threads: each running request takes a native session from a pool.
"""

from __future__ import annotations

import ctypes as C
import functools
import inspect
import json
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dlm_runtime import _native, providers
from dlm_runtime.constraints.layout import LAYOUTS, Layout
from dlm_runtime.errors import ClosedError, ConstraintWarning, DlmWarning, RequestError, shown
from dlm_runtime.forks import Origin
from dlm_runtime.infill import Infill, infill
from dlm_runtime.manifest import check_text_options, text_files
from dlm_runtime.policy import Policy
from dlm_runtime.request import (
    OPTION_NAMES,
    TEXT_FIELDS,
    InfillOptions,
    Options,
    Request,
    RequestOptions,
    cancel_of,
    count_of,
    layout_of,
    text_of,
    texts_of,
    token_ids,
)
from dlm_runtime.results import Event, Generation
from dlm_runtime.signals import Cancels, seen_between_passes
from dlm_runtime.text_stream import TextStream
from dlm_runtime.tokenizer import Tokenizer
from dlm_runtime.tools import CallFormat, Tools

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from dlm_runtime.constraints.byte_automaton import CompileLimits
    from dlm_runtime.constraints.compiled import Constraint
    from dlm_runtime.scheduler import PassCost, Scheduler

KEPT_CONSTRAINTS = 64  # compiled ones that a bundle holds
UNLIKELY_NATS = 1.0
"""Nats per token that a bundle's constraints may lose on average without a warning. Over 100
commands the second demo loses 0.013 with its own layout (1.35 in the worst command), 2.5 with
"compact" and 3.6 with "spaced".
"""


class Bundle:
    """An opened bundle. Made by ``dlm_runtime.open``; usable as a context manager."""

    def __init__(
        self,
        handle: C.c_void_p,
        tokenizer: Tokenizer | None,
        default_policy: Policy | None,
        owned: object = None,
    ):
        self._library = _native.library()
        self._handle = handle
        self._origin = Origin("bundle")
        self._owned = owned  # what must live as long as the handle, such as a callback
        self._lock = threading.Lock()
        self._idle: list[C.c_void_p] = []
        self._busy = 0  # sessions of running requests; the last one to end frees a closed bundle
        self._is_closed = False
        self._default_policy = default_policy
        self._tokenizer = tokenizer
        self._constraints: dict[tuple[Any, ...], Constraint] = {}
        self._constrained = [0.0, 0.0]  # nats that constraints lost, and tokens of their texts
        self._has_warned = False  # of that loss
        self._checks_hashes = True
        self._folder: Path | None = None  # where files that the manifest names lie
        text = self._library.dlm_bundle_manifest(handle).decode()
        self.manifest: dict[str, Any] = json.loads(text) if text else {}
        info = _native.Denoiser()
        self._library.dlm_bundle_denoiser_sized(handle, C.byref(info), C.sizeof(info))
        self.vocab_size: int = info.vocab_size
        self.mask_token_id: int = info.mask_token_id
        self.max_canvas_length: int = info.max_canvas_length
        self.eos_token_ids: tuple[int, ...] = tuple(
            info.eos_token_ids[i] for i in range(info.eos_count)
        )
        self.visible_block: int | None = info.visible_block or None
        """Tokens of a block where attention is block-causal; None: it is full."""
        self.max_new_tokens: int = self._library.dlm_bundle_max_new_tokens(handle)
        """Mask tokens that a request fills which does not say how many."""
        self.provider = "cpu"  # that runs the graph in ONNX Runtime
        self.engine: str = self._library.dlm_bundle_engine(handle).decode()

    @property
    def is_on_cpu(self) -> bool:
        """Whether ONNX Runtime runs its graph on the CPU."""
        return self.engine.startswith("onnxruntime") and self.provider == "cpu"

    def close(self) -> None:
        """Take no more requests, and free the engine and its weights once those that run have
        ended.

        A stream ends at its next step, with RequestError. Raises ForkError in a forked process.
        """
        self._origin.check()
        with self._lock:
            self._is_closed = True
            self._free()

    def _free(self) -> None:
        """Free what a closed bundle holds if nothing runs; the lock is held."""
        if not self._is_closed or self._busy:
            return
        while self._idle:
            self._library.dlm_session_destroy(self._idle.pop())
        if self._handle:
            self._library.dlm_bundle_destroy(self._handle)
            self._handle = C.c_void_p()
        if self._tokenizer is not None:
            self._tokenizer.close()

    def _check_open(self) -> None:
        self._origin.check()
        if self._is_closed:
            raise ClosedError("the bundle is closed")

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
        return self._tokenizer

    def check_text(self) -> None:
        """Read the compiled text file, which C programs take text with. Raises BundleError where
        there is a damaged one.
        """
        if "file" not in self.manifest.get("text", {}):
            return
        self._check_open()
        message, text = C.create_string_buffer(_native.MESSAGE_BYTES), C.c_void_p()
        status = self._library.dlm_bundle_text(self._handle, message, len(message), C.byref(text))
        if status:
            raise _native.error(status, message.value)

    @property
    def json_layout(self) -> str:
        """Name of the layout of JSON text that the denoiser was trained on, one of ``LAYOUTS``; the
        default is "compact".
        """
        return str(self.manifest.get("json_layout", "compact"))

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
        enum: Sequence[str] | None = None,
        json_object: bool = False,
        tools: Tools | None = None,
        max_depth: int | None = None,
        before: str = "",
        behind: str = "",
        json_layout: str | Layout | None = None,
        limits: CompileLimits | None = None,
        cache_dir: str | Path | None = "",
    ) -> Constraint:
        """Compile what a generated text may be, for this bundle's tokenizer. Give one of the first
        five arguments.

        The bundle keeps the last constraints that it compiled: the same arguments, compared by
        content, are not compiled again.

        Args:
            schema: A JSON Schema, or a class with a method ``model_json_schema`` such as a Pydantic model.
            regex: The whole text matches it, in the syntax of Rust's regex crate.
            enum: The text is one of these.
            json_object: The text is any JSON object.
            tools: The text is a call of one of them (``Bundle.tools``).
            max_depth: How often a schema may contain itself, and how many containers may be inside each other where a schema
                allows any value. None rejects recursive schemas.
            before, behind: Given texts before and after the generated one. All three together are then valid.
            json_layout: White space of the JSON text: a name of ``LAYOUTS``, or a ``Layout``. None: the bundle's own.
            limits: Bounds on compiling. None: the usual ones.
            cache_dir: Folder where the result is kept. "": the folder in the user's caches. None: nowhere.

        Raises RequestError if something is not supported, matches nothing or exceeds a limit,
        naming it; DlmError without outlines-core.
        """
        from dlm_runtime.constraints import compiled
        from dlm_runtime.constraints.byte_automaton import CompileLimits
        from dlm_runtime.constraints.vocabulary import read_vocabulary

        self._origin.check()
        if not isinstance(json_object, bool):
            raise RequestError(f"json_object = {shown(json_object)}: give True or False")
        options = {
            "schema": schema,
            "regex": regex,
            "enum": enum,
            "json_object": json_object or None,
            "tools": tools,
        }
        given = [kind for kind, value in options.items() if value is not None]
        if len(given) != 1:
            raise RequestError("give one of schema, regex, enum, json_object and tools")
        if self.tokenizer is None:
            raise RequestError("constraints are of text, and this bundle has no tokenizer")
        kind, tokenizer = given[0], self.tokenizer
        is_json = kind in ("schema", "json_object", "tools")
        if json_layout is not None and not is_json:
            raise RequestError(
                f"json_layout is of schema, json_object and tools, not of {kind}: leave it out"
            )
        content = _content(kind, options[kind])
        depth = None if max_depth is None else count_of("max_depth", max_depth)
        layout = layout_of(self.json_layout if json_layout is None else json_layout)
        around = (text_of("before", before), text_of("behind", behind))
        if limits is not None and not isinstance(limits, CompileLimits):
            raise RequestError(f"limits = {shown(limits)}: give CompileLimits, or None")
        chosen = limits or CompileLimits()
        folder = compiled.default_folder() if cache_dir == "" else _folder(cache_dir)
        key = (kind, content, depth, layout if is_json else None, around, chosen)
        with self._lock:
            made = self._constraints.get(key)
        if made is None:
            made = compiled.compile_constraint(
                _expression(kind, content, depth, layout, chosen, tools),
                kind != "regex",
                lambda: read_vocabulary(tokenizer),
                tokenizer.sha256,
                self.vocab_size,
                self.eos_token_ids,
                chosen,
                folder,
                around,
                _layout_hint(layout) if is_json else "",
            )
            with self._lock:
                if len(self._constraints) >= KEPT_CONSTRAINTS:
                    self._constraints.pop(next(iter(self._constraints)))
                self._constraints[key] = made
        return made

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
        found = Options.of({"tools": tools, **how}).tools_for(self)
        assert found is not None
        return found

    def _constraint(self, options: Options, tools: Tools | None) -> Constraint | None:
        """The compiled constraint of a request; None if its text is free."""
        asked = options.constrained_by
        if options.constraint is not None and asked:
            raise RequestError(f"give constraint or {next(iter(asked))}, not both")
        if options.constraint is None and tools is not None and tools.is_forced:
            asked["tools"] = tools
        if asked:
            layout = options.json_layout
            return self.constraint(before=options.prefix, json_layout=layout, **asked)
        if options.constraint is not None:
            from dlm_runtime.constraints.compiled import Constraint

            if not isinstance(options.constraint, Constraint):
                raise RequestError(
                    f"constraint = {shown(options.constraint)} is none: Bundle.constraint makes one"
                )
        return options.constraint

    def warn_if_unlikely(self, made: Generation) -> None:
        """Warn, once per bundle, if constraints make texts far less likely than the denoiser's own
        choices.

        The mean over all constrained requests of the bundle counts, as a single hard request may
        lose much.
        """
        with self._lock:
            self._constrained[0] += made.constraint_log_prob_loss
            self._constrained[1] += max(1, made.completion_tokens)
            loss, tokens = self._constrained
            is_news = not self._has_warned and loss / tokens > UNLIKELY_NATS
            self._has_warned |= is_news
        if is_news:
            warnings.warn(
                f"the constraint lost {loss:.1f} nats of log probability over {tokens:.0f} tokens: the denoiser would have "
                f"written something else. For JSON, check the layout that it was trained on: the bundle says "
                f"{self.json_layout!r}. Give another json_layout, or build the bundle with --json-layout and --call-format",
                ConstraintWarning,
                stacklevel=2,
            )

    def __enter__(self) -> Bundle:
        return self

    def __exit__(self, *_: object) -> None:
        if self._origin.is_here:
            self.close()

    def __del__(self) -> None:
        if getattr(self, "_handle", None) and self._origin.is_here:
            self.close()

    def policy(
        self, preset: str | None = None, effort: str | None = None, **changes: Any
    ) -> Policy:
        """A preset of this bundle (None: its default), or the loop fitted for an effort, with some
        fields changed.

        Raises BundleError, RequestError.
        """
        return self._loop(preset, effort).with_fields(changes)

    def _policy_for(self, method: str, options: Options) -> Policy:
        """``policy`` for a method whose own arguments may have been meant."""
        beside = (*_arguments(method), *OPTION_NAMES)
        return self._loop(options.preset, options.effort).with_fields(dict(options.policy), beside)

    def _loop(self, preset: str | None, effort: str | None) -> Policy:
        return self._preset(preset) if effort is None else self._effort(effort, preset)

    def _effort(self, level: str, preset: str | None) -> Policy:
        fitted = self.manifest.get("loop", {}).get("effort", {}).get("preset")
        if preset is not None and fitted is not None and preset != fitted:
            raise RequestError(
                f"effort {level} was fitted for preset {fitted}, not for {preset}: give one of the two"
            )
        return self._native_policy(self._library.dlm_bundle_effort, level, "effort")

    def _preset(self, preset: str | None) -> Policy:
        if self._default_policy is not None and preset is None:
            self._check_open()
            return self._default_policy
        return self._native_policy(self._library.dlm_bundle_preset, preset, "preset")

    def _native_policy(self, find: Callable[..., int], name: str | None, kind: str) -> Policy:
        """The policy of that name, as a function of the library finds it."""
        self._check_open()
        native = _native.initialised(_native.Policy)
        message = C.create_string_buffer(_native.MESSAGE_BYTES)
        if name is not None and not isinstance(name, str):
            raise RequestError(f"{kind} = {shown(name)} is not a name")
        # A NUL would end the name in C.
        encoded = None if name is None else name.replace("\0", "?").encode("utf-8", "replace")
        if find(self._handle, encoded, message, len(message), C.byref(native)):
            raise RequestError(message.value.decode("utf-8", "replace"))
        values = {field.name: getattr(native, field.name) for field in fields(Policy)}
        values |= {name: values[name].decode() for name in TEXT_FIELDS}
        return Policy(**values)

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
        request, wanted = self._request("generate", (prompt, tokens, chat), asked)
        if asked.stop_strings:
            *_, last = self._steps(request, cancel, wanted)
            assert last.result is not None
            return last.result
        with self._session([cancel] if cancel else (), wanted) as session:
            stats, length = _native.Stats(), C.c_size_t()
            buffer = (C.c_int32 * max(1, request.capacity))(*request.given)
            status = self._library.dlm_session_generate(
                session,
                C.byref(request.options),
                buffer,
                len(request.given),
                request.capacity,
                C.byref(stats),
                C.byref(length),
            )
            self._check(status, session)
            return self._result(session, 0, request, list(buffer[: length.value]), stats)

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
        noise of the engine aside, with its own ``nfe``; ``timings``, ``passes`` and ``cache_bytes``
        are those of the whole call. ``policies`` changes fields for each request, such as its
        ``seed``.

        ``max_steps`` is each request's own, ``deadline_ms`` that of the call. ``cancel`` is an
        event for all requests, or one or None for each. ``stop_strings`` end texts, and no passes.

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
        fields, tools = self._policy_for("generate_batch", asked), asked.tools_for(self)
        for number, (value, changes) in enumerate(zip(entries, each, strict=True)):
            one = tuple(value if name == chosen[0][0] else None for name in given)
            try:
                if not isinstance(changes, Mapping):
                    raise RequestError(f"policies: {shown(changes)} is no dict of policy fields")
                kept.append(Request(self, one, asked, fields.with_fields(dict(changes)), tools))
            except RequestError as err:
                raise RequestError(f"request {number}: {err}") from err
        most, wanted = count_of("max_batch", max_batch), self._constraint(asked, tools)
        if not kept:
            return []
        native_options = kept[0].options
        native_options.policies = (C.POINTER(_native.Policy) * len(kept))(
            *(C.pointer(request.policy) for request in kept)
        )
        buffers = [(C.c_int32 * max(1, request.capacity))(*request.given) for request in kept]
        natives = (_native.Request * len(kept))(
            *(
                _native.Request(C.cast(buffer, _native.i32p), len(request.given), request.capacity)
                for request, buffer in zip(kept, buffers, strict=True)
            )
        )
        stats = _native.Stats()
        with self._session(cancels if any(cancels) else (), wanted) as session:
            status = self._library.dlm_session_generate_batch(
                session, C.byref(native_options), natives, len(kept), most, C.byref(stats)
            )
            self._check(status, session)
            return [
                self._result(session, number, request, list(buffer[: native.length]), stats)
                for number, (request, buffer, native) in enumerate(
                    zip(kept, buffers, natives, strict=True)
                )
            ]

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
        request, wanted = self._request("stream", (prompt, tokens, chat), Options.of(options))
        return self._steps(request, cancel, wanted)

    def _request(
        self, method: str, given: tuple[Any, ...], options: Options
    ) -> tuple[Request, Constraint | None]:
        """A single request, and what its text has to be."""
        policy, tools = self._policy_for(method, options), options.tools_for(self)
        return Request(self, given, options, policy, tools), self._constraint(options, tools)

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
        with self._session() as session:
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
        with self._session() as session:
            self._check(
                self._library.dlm_session_time_passes(session, *sizes, seconds, repeats), session
            )
        return seconds[:repeats]

    def _steps(
        self, request: Request, cancel: threading.Event | None, constraint: Constraint | None
    ) -> Iterator[Event]:
        stream = request.text_stream()
        with self._session([cancel] if cancel else (), constraint) as session:
            given = (C.c_int32 * max(1, len(request.given)))(*request.given)
            self._check(
                self._library.dlm_session_start(
                    session, C.byref(request.options), given, len(request.given)
                ),
                session,
            )
            view, stats = _native.Step(), _native.Stats()
            while not view.done:
                self._check_open()
                self._check(self._library.dlm_session_step(session, C.byref(view)), session)
                delta = (
                    None
                    if stream is None
                    else request.push(stream, view, self._undecided(session, view))
                )
                if stream is not None and stream.is_stopped and not view.done:
                    self._library.dlm_session_cancel(session, 0)
                    self._check(
                        self._library.dlm_session_step(session, C.byref(view)), session
                    )  # makes no pass
                canvas, result = view.canvas[: view.length], None
                if view.done:
                    self._library.dlm_session_stats(session, C.byref(stats))
                    result = self._result(session, 0, request, canvas, stats, stream)
                yield Event(
                    canvas=canvas,
                    undecided=self._undecided(session, view),
                    guess=view.guess[: view.length],
                    score=view.score[: view.length],
                    block=(view.block_start, view.block_end),
                    nfe=view.nfe,
                    committed=view.committed,
                    text=None if stream is None else stream.text,
                    delta=delta,
                    done=bool(view.done),
                    result=result,
                )

    def _undecided(self, session: C.c_void_p, view: _native.Step) -> list[bool]:
        return [
            bool(flag) for flag in self._library.dlm_session_undecided(session, None)[: view.length]
        ]

    def _result(
        self,
        session: C.c_void_p,
        number: int,
        request: Request,
        canvas: list[int],
        stats: _native.Stats,
        stream: TextStream | None = None,
    ) -> Generation:
        """What the session's request of that number came to."""
        found = _native.Result()
        self._check(
            self._library.dlm_session_result_sized(
                session, number, C.byref(found), C.sizeof(found)
            ),
            session,
        )
        return request.generation(
            canvas, _native.outcome(found), stream, stats, self._passes(session)
        )

    def _passes(self, session: C.c_void_p) -> dict[str, int]:
        counts = _native.PassCounts()
        self._library.dlm_session_pass_counts_sized(session, C.byref(counts), C.sizeof(counts))
        return {name: getattr(counts, name) for name in ("prefill", "denoise", "store")}

    def _check(self, status: int, session: C.c_void_p) -> None:
        if status:
            raise _native.error(status, self._library.dlm_session_last_error(session))

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
        from dlm_runtime.scheduler import Scheduler

        return Scheduler(self, max_running, max_waiting, max_tokens, cache_bytes, max_pass_ms, cost)

    def _begin(self) -> None:
        """Keep the engine until the matching ``_end``."""
        self._origin.check()
        with self._lock:
            self._check_open()
            self._busy += 1

    def _end(self) -> None:
        if not self._origin.is_here:
            return
        with self._lock:
            self._busy -= 1
            self._free()

    @contextmanager
    def _session(
        self, cancels: Cancels = (), constraint: Constraint | None = None
    ) -> Iterator[C.c_void_p]:
        self._origin.check()  # before the lock, which another thread may have held at the fork
        with self._lock:
            self._check_open()
            session = self._idle.pop() if self._idle else C.c_void_p()
            if not session:
                message = C.create_string_buffer(_native.MESSAGE_BYTES)
                status = self._library.dlm_session_create(
                    self._handle, message, len(message), C.byref(session)
                )
                if status:
                    raise _native.error(status, message.value)
            self._busy += 1
        try:
            handle = None if constraint is None else constraint.handle
            self._check(self._library.dlm_session_constrain(session, handle), session)
            with seen_between_passes(session, cancels):
                yield session
        finally:
            if self._origin.is_here:
                with self._lock:
                    self._idle.append(session)
                    self._busy -= 1
                    self._free()


def _content(kind: str, value: Any) -> str:
    """A constraint's argument as text that is equal for equal content. The order of properties
    counts. Raises RequestError.
    """
    if kind == "regex":
        return text_of("regex", value)
    if kind == "enum":
        value = texts_of("enum", value)
    elif kind == "tools":
        if not isinstance(value, Tools):
            raise RequestError(
                f"tools = {shown(value)}: Bundle.tools makes them of a list of functions"
            )
        value = [value.listed, value.choice, asdict(value.written), value.is_parallel]
    elif kind == "schema" and callable(make := getattr(value, "model_json_schema", None)):
        try:
            value = make()
        except Exception as err:  # whatever the class raises
            raise RequestError(
                f"schema: {shown(value)}.model_json_schema() failed ({err})"[:300]
            ) from err
    try:
        return json.dumps(value, allow_nan=False, default=_plain)
    except (TypeError, ValueError, RecursionError) as err:
        raise RequestError(f"{kind}: not JSON ({err})"[:300]) from err


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is no JSON")


def _expression(
    kind: str,
    content: str,
    max_depth: int | None,
    layout: Layout,
    limits: CompileLimits,
    tools: Tools | None,
) -> str:
    """The expression of a constraint's texts, from what ``_content`` made of its argument. Raises
    RequestError.
    """
    from dlm_runtime.constraints import schema as schemas

    if kind == "regex":
        return content
    if kind == "tools":
        assert tools is not None
        return tools.expression(max_depth, layout, limits)
    if kind == "json_object":
        return schemas.any_object(max_depth, layout)
    value = json.loads(content)
    return (
        schemas.choices(value)
        if kind == "enum"
        else schemas.expression(value, max_depth, layout, limits=limits)
    )


def _layout_hint(layout: Layout) -> str:
    """The end of the message about a given text that no constrained text starts with: the layout in
    force.
    """
    name = next((name for name, known in LAYOUTS.items() if known == layout), None)
    shape = layout.dumps([{"a": 1, "b": 2}, {}])
    said = "one of your own" if name is None else repr(name)
    return f": the JSON layout is {said}, which writes {shape!r}, and properties are in the schema's order"


def _folder(cache_dir: str | Path | None) -> Path | None:
    """The folder where the caller wants compiled constraints. Raises RequestError."""
    if cache_dir is None:
        return None
    try:
        if b"\0" not in os.fsencode(cache_dir):
            return Path(os.fsdecode(cache_dir))
    except (TypeError, ValueError):
        pass
    raise RequestError(f"cache_dir = {shown(cache_dir)} is not the path of a folder")


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


def open(
    path: str | Path,
    *,
    engine: str = "auto",
    provider: str = "cpu",
    allow_fallback: bool = False,
    threads: int = 0,
    library: str | Path | None = None,
    check_hashes: bool = True,
) -> Bundle:
    """Open the bundle in the folder ``path``.

    ``engine`` is "auto" ("tensorrt" if the bundle was built for GPUs, else "onnxruntime"),
    "onnxruntime", "tensorrt", or "none" (the bundle is checked and makes no passes). ``library`` is
    the path of the engine's library; None looks at $DLM_ONNXRUNTIME or $DLM_TENSORRT, the installed
    packages and the system, in that order. ``threads`` are those of ONNX Runtime: 0 takes all
    cores, and more than the cores of this process gives as many as these and a DlmWarning. ONNX
    Runtime gets this package's kernels for the processor, or those that $DLM_KERNELS names ("none":
    its own).

    All files are compared with the manifest's hashes. A file of more than 16 MiB is not hashed again
    if its hash was right before and it has not changed since, unless ``engine`` is "none" or
    $DLM_HASH_FILES is "always". ``check_hashes=False`` compares files by size only.

    ``provider`` of ONNX Runtime: "cpu", or on a GPU "cuda", "tensorrt" or "nv_tensorrt_rtx", with
    the GPU's number behind it where that is not 0 ("cuda:1"); engine "auto" is then "onnxruntime".
    What such a provider does not run is refused by name, or with ``allow_fallback`` left to the
    CPU, and named in ``Bundle.engine``.

    Raises BundleError for a missing or damaged bundle, EngineError for a missing or failing engine,
    RequestError for an engine or provider that is not known, or that this bundle or device does not
    have.
    """
    name, device = providers.parse(provider)
    if name != "cpu":
        engine = "onnxruntime" if engine == "auto" else engine
        if library is None and not os.environ.get("DLM_ONNXRUNTIME"):
            providers.check_wheels()
            providers.load_libraries()
    if engine == "auto":
        # The library has to be found before the engine is opened, so which one it will be is asked
        # first.
        with _open(path, "none", library=None, check_hashes=False) as looked_at:
            engine = (
                "tensorrt"
                if "device_file" in looked_at.manifest["loop"]["graph"]
                else "onnxruntime"
            )
    if library is None and engine == "onnxruntime" and not os.environ.get("DLM_ONNXRUNTIME"):
        library = _native.onnxruntime_library()
    if library is None and engine == "tensorrt" and not os.environ.get("DLM_TENSORRT"):
        library = _native.tensorrt_library()
    bundle = _open(
        path,
        engine,
        library=library,
        check_hashes=check_hashes,
        provider=name.encode(),
        device=device,
        allow_fallback=int(allow_fallback),
        threads=threads,
    )
    cores = len(os.sched_getaffinity(0))  # as the native library counts them
    if threads > cores:
        said = f"threads = {threads} is more than the {cores} cores that this process may use: {cores} threads run"
        warnings.warn(said, DlmWarning, stacklevel=2)
    bundle.provider = name
    bundle._folder, bundle._checks_hashes = Path(path), check_hashes
    check_text_options(bundle.manifest, bundle._folder)
    if engine != "none":
        _ = bundle.tokenizer  # a damaged one is noticed here
    return bundle


def _open(
    path: str | Path,
    engine: str,
    *,
    library: str | Path | None,
    check_hashes: bool,
    **others: bytes | int,
) -> Bundle:
    """``others``: fields of the C struct as they are."""
    native = _native.library()
    options = _native.initialised(_native.OpenOptions)
    options.engine = engine.encode() if isinstance(engine, str) else None
    options.engine_library = None if library is None else os.fsencode(library)
    options.check_hashes = int(check_hashes)
    for field, value in others.items():
        setattr(options, field, value)
    handle = C.c_void_p()
    message = C.create_string_buffer(_native.MESSAGE_BYTES)
    status = native.dlm_bundle_open(
        os.fsencode(path), C.byref(options), message, len(message), C.byref(handle)
    )
    if status:
        raise _native.error(status, message.value)
    return Bundle(handle, None, None)
