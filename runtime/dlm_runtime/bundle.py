"""Defines the ``Bundle`` class, which generates text. Several threads may share a ``Bundle``."""

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
from dlm_runtime.generation.deciding import Decides
from dlm_runtime.generation.handle import Handle
from dlm_runtime.generation.infill import Infill, infill
from dlm_runtime.generation.pass_cost import PassCost
from dlm_runtime.generation.prompt_caches import UsesPromptCaches
from dlm_runtime.generation.request import (
    KINDS,
    OPTION_NAMES,
    InfillOptions,
    Options,
    Request,
    RequestOptions,
    check_cancel,
    count_of,
    entries_of,
    token_ids,
)
from dlm_runtime.generation.results import Event, Generation
from dlm_runtime.generation.scheduler import Scheduler
from dlm_runtime.manifest import text_files
from dlm_runtime.policy import Policy
from dlm_runtime.text.tokenizer import Tokenizer
from dlm_runtime.tools import CallFormat, Tools

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from dlm_runtime.constraints.compiled import CompileLimits, Constraint


class Bundle(Decides, UsesPromptCaches):
    """An open bundle, which ``dlm_runtime.open`` returns.

    Threads may share a bundle. At the end of a ``with`` block, the bundle is closed.
    """

    def __init__(
        self,
        handle: Handle,
        folder: Path | None = None,
        *,
        checks_hashes: bool = True,
        provider: str = "cpu",
        threads: int = 0,
    ) -> None:
        """Create a bundle.

        ``folder`` contains the tokenizer, if the bundle has one. If ``checks_hashes`` is True, the
        hashes of the tokenizer's files are checked. ``dlm_runtime.open`` explains ``provider`` and
        ``threads``.
        """
        self._handle = handle
        self._library = _native.library()
        self._tokenizer: Tokenizer | None = None
        self._constraints = Constraints(handle)
        self.folder = folder
        """The bundle's folder. None if the bundle was not opened from a folder."""
        self._checks_hashes = checks_hashes
        self.provider, self.threads = provider, threads
        self.manifest = handle.manifest
        self.vocab_size = handle.vocab_size
        self.mask_token_id = handle.mask_token_id
        self.max_canvas_length = handle.max_canvas_length
        self.eos_token_ids = handle.eos_token_ids
        self.shift = handle.shift
        """1 if the row of position i predicts position i + 1, and 0 if it predicts position i."""
        self.visible_block = handle.visible_block
        self.blocks_after_prompt = handle.blocks_after_prompt
        """True if the prompt is one attention block, and the other blocks start at its end (D2F)."""
        self.draft_block = handle.draft_block
        """The number of tokens of a draft pass. None if the denoiser has no draft passes."""
        self.max_new_tokens = handle.max_new_tokens
        """The length of the answers that the denoiser was trained on, in tokens.

        This is also the default of a request's option ``max_new_tokens``.
        """
        self.resizes = handle.resizes
        """True if the denoiser changes the length of canvases, with expand and delete tokens."""
        self.engine = handle.engine

    @property
    def is_on_cpu(self) -> bool:
        """True if the engine is ONNX Runtime and runs the graph on the CPU."""
        return self.engine.startswith("onnxruntime") and self.provider == "cpu"

    def close(self) -> None:
        """Reject new requests, and free the engine when the running requests have ended.

        A running ``stream`` raises RequestError at its next step. In a forked process, ``close`` raises ForkError.
        """
        self._handle.close()

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer, or None if the bundle only accepts token ids. Raises BundleError if a file is damaged."""
        if self._tokenizer is None and self.folder is not None:
            files = text_files(self.manifest, self.folder)
            if files.tokenizer is not None:
                hashes = (
                    {name: entry["sha256"] for name, entry in self.manifest["files"].items()}
                    if self._checks_hashes
                    else None
                )
                self._tokenizer = Tokenizer.from_files(
                    files.tokenizer, files.template, files.special_tokens, hashes
                )
                self._tokenizer.most_tokens = self.max_canvas_length
                self._handle.close_with(self._tokenizer.close)
        return self._tokenizer

    def check_text(self) -> None:
        """Read the file that contains the tokenizer and the chat template in compiled form.

        Only C programs use the compiled form. Raises BundleError if the file is damaged.
        """
        if "file" not in self.manifest.get("text", {}):
            return
        self._handle.check_open()
        text, given = C.c_void_p(), (self._handle.pointer,)
        _native.check(self._library.dlm_bundle_text, given, C.byref(text))

    @property
    def json_layout(self) -> str:
        """The layout of the JSON texts that the denoiser was trained on: a name of ``LAYOUTS``."""
        return self._constraints.json_layout

    @property
    def call_format(self) -> str | None:
        """The format of the tool calls that the denoiser was trained on: a name of ``tools.FORMATS``."""
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
        """Compile a constraint on generated texts, for this bundle's tokenizer.

        Pass exactly one of the first nine arguments. The bundle stores the 64 constraints that were used last. A
        stored constraint is not compiled again. If a constraint cannot be compiled, the bundle remembers the error
        for 60 seconds.

        Args:
            schema: A JSON Schema as a value or as JSON text, or a class with a method
                ``model_json_schema``, such as a Pydantic model.
            regex: A regular expression that matches the whole text, in the syntax of Rust's regex crate.
            grammar: A grammar of the text in GBNF, the notation of llama.cpp.
            enum: The allowed texts.
            json_object: If True, the text is any JSON object.
            json_lines: A constraint for JSON Lines: the schema of each line, or a ``JsonLines`` object.
            csv: A constraint for a CSV table: the schema of each row, or a ``Csv`` object.
            xml: A constraint for an XML element: a schema that uses the keyword ``xml`` of OpenAPI.
            tools: The result of ``Bundle.tools``. The text must call these functions.
            max_depth: Limit on recursion, 0 to 64. For a schema: how often the schema may contain itself, and how
                deeply arrays and objects may be nested where the schema allows any value. For a grammar: how deeply
                recursive references may be nested. If None, the limit is 3, or less if the result would be too large.
            any_order: If True, the properties of a JSON object with at most 6 properties may be in any order. By
                default, properties are in the order of the schema.
            more_properties: If True, JSON objects may contain properties that the schema allows but does not name.
            before: A fixed text before the generated text. The constraint also covers ``before`` and ``behind``.
            behind: A fixed text after the generated text.
            json_layout: White space of the JSON text: a name of ``LAYOUTS``, or a ``Layout``. If None, the bundle's
                layout is used.
            limits: Limits on the resources that compiling may use. If None, the defaults of ``CompileLimits`` are used.
            cache_dir: Folder for compiled constraints. "" means the user's cache folder. If None, nothing is stored.

        Returns:
            The compiled constraint, to pass to requests.

        Raises:
            RequestError: The constraint is invalid, unsupported or matches no text, or compilation exceeds a limit.
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

    def stored_constraint(self, **arguments: Any) -> Constraint | None:
        """Return a stored constraint without compiling, or None if it is not stored.

        ``arguments`` are the arguments of ``constraint``. Raises the errors of ``constraint``.
        """
        self._handle.origin.check()
        asked = {name: arguments.pop(name, None) for name in (*KINDS, "tools")}
        asked["json_object"] = asked["json_object"] or False
        return self._constraints.find(self.tokenizer, asked, **arguments)

    def tools(
        self,
        tools: Sequence[Mapping[str, Any]],
        tool_choice: str = "required",
        parallel_tool_calls: bool | None = None,
        call_format: str | CallFormat | None = None,
    ) -> Tools:
        """Check descriptions of tools, and return the checked tools for use by many requests.

        The arguments mean the same as the fields of ``Options``. Raises RequestError if a
        description is invalid.
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
        """Return a policy of this bundle, with some fields changed.

        Args:
            preset: Name of a preset. If None, the bundle's default preset is used.
            effort: "instant", "low", "medium" or "high". If set, the result is the policy that was
                fitted for this effort level. If None, the result is the policy of the preset.
            changes: Fields of ``Policy``, by name.

        Raises:
            BundleError: The bundle does not contain this preset or effort level.
            RequestError: A field is unknown or has an invalid value.
        """
        return self._handle.policy(preset, effort).with_fields(changes)

    def _policy_for(self, method: str, options: Options) -> Policy:
        """Like ``policy``. An error may suggest an argument of ``method``, the called method."""
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
        """Fill the mask tokens that follow a prompt, a list of token ids, or a chat.

        Pass exactly one of ``prompt``, ``tokens`` and ``chat``. Mask tokens within ``tokens`` are filled as well.

        Args:
            prompt: The prompt as text.
            tokens: Token ids, 0..vocab_size-1.
            chat: Messages for the chat template, each with ``role`` and ``content``.
            cancel: An event that another thread may set. When the event is set, the request ends within one pass.
            options: The fields of ``Options`` and ``Policy``, such as ``max_new_tokens=64, preset="fast-dllm",
                threshold=0.8``.

        Returns:
            The result. The values of ``timings`` are in seconds. ``prefill`` is the engine's time for passes that fill
            a cache, and ``passes`` is the engine's time for all other passes. ``selection`` is the time to score, rank
            and commit tokens. ``cache`` is the time to move keys and values. ``total`` is the sum of these four times
            and of the loop's bookkeeping.

        Raises:
            RequestError: A token id, a length or the policy is invalid for this bundle.
            EngineError: A pass failed.
            BaseException: On the main thread, the exception of a signal handler, such as KeyboardInterrupt.
        """
        asked = Options.of(options)
        check_cancel(cancel)
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
        """Run several requests. At most ``max_batch`` requests share a pass.

        On a CPU, all requests can share passes, and a new request starts when another request ends. On other engines,
        requests share passes if their canvases have the same length. If the requests use a cache, their mask tokens
        must also be in the same blocks. Each result equals the result of ``generate`` for this
        request, except for rounding differences in the engine. The time of a shared pass is divided
        among the requests in the pass.

        Args:
            prompts: Texts, one per request. Pass one of ``prompts``, ``tokens`` and ``chats``.
            tokens: Lists of token ids, one per request.
            chats: Lists of messages, one per request.
            max_batch: The largest number of requests in a pass, 1..4096.
            policies: Changes to policy fields: one dict per request, for example to give each request its own ``seed``.
            cancel: One event for all requests, or a list with an event or None for each request.
            options: The options of ``generate``, the same for all requests. Limits and
                ``stop_strings`` apply to each request separately.

        Returns:
            The results, in the order of the requests.

        Raises:
            RequestError: As for ``generate``. The message contains the index of the request. Also raised if
                ``max_batch`` exceeds the engine's limit (TensorRT: 1).
            EngineError: A pass failed.
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
        entries = entries_of(chosen[0][0], chosen[0][1])
        count = len(entries)
        each = [{}] * count if policies is None else entries_of("policies", policies)
        cancels: Sequence[Any] = (
            [cancel] * count
            if cancel is None or hasattr(cancel, "is_set")
            else entries_of("cancel", cancel)
        )
        for name, values in (("policies", each), ("cancel", cancels)):
            if len(values) != count:
                raise RequestError(
                    f"{name} has {len(values)} entries for {count} requests: give one for each"
                )
        for event in cancels:
            check_cancel(event)
        asked, kept = Options.of(options), []
        fields, tools = self._policy_for("generate_batch", asked), self._tools(asked)
        constraint = self._constraints.of_request(self.tokenizer, asked, tools)
        note = self._constraints.count_loss
        for number, (value, changes) in enumerate(zip(entries, each, strict=True)):
            one = tuple(value if name == chosen[0][0] else None for name in given)
            try:
                if not isinstance(changes, Mapping):
                    raise RequestError(f"policies: {shown(changes)} is not a dict of policy fields")
                policy = fields.with_fields(dict(changes))
                request = Request(self.tokenizer, one, asked, policy, tools, constraint, note)
                kept.append(request)
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
        """Like ``generate``, but yields an ``Event`` after each pass. To stop early, leave the loop."""
        check_cancel(cancel)
        return self._steps(
            self._request("stream", (prompt, tokens, chat), Options.of(options)), cancel
        )

    def _request(self, method: str, given: tuple[Any, ...], options: Options) -> Request:
        policy, tools = self._policy_for(method, options), self._tools(options)
        constraint = self._constraints.of_request(self.tokenizer, options, tools)
        note = self._constraints.count_loss
        return Request(self.tokenizer, given, options, policy, tools, constraint, note)

    def infill(
        self,
        text: str,
        *,
        lengths: int | Sequence[int | Sequence[int]] | None = None,
        constrain_from: int | None = None,
        **request: Unpack[InfillOptions],
    ) -> Infill:
        """Fill the holes of a text. A hole is written as ``<mask>``: ``"def f(x): <mask> return y"``.

        The name of the denoiser's mask token marks a hole too: ``"the capital of [MASK] is [MASK]"``.

        The text of a hole ends before the first end token in the hole, so the text may be shorter than the hole. For a
        prompt, the tokenizer may add tokens at the start and at the end. Without ``prompt`` and
        ``chat``, ``text`` is the whole canvas. ``infill`` then also adds the start tokens, unless
        ``text`` already starts with them. If the denoiser has no end token, ``infill`` adds the
        tokenizer's tokens at the end too.

        A denoiser with ``resizes`` changes the length of the hole. It fills one hole, and accepts
        ``max_new_tokens``, the number of tokens by which the hole may become longer.

        Args:
            text: Text with at least one hole. If ``prompt`` or ``chat`` is passed, the text is the answer.
            lengths: Tokens per hole, 1 or more. An integer applies to all holes. A list contains one entry for each
                hole, or a single entry for all holes. An entry is an integer, or a list of lengths to try. Each
                combination of lengths is a separate request. At most 64 combinations are allowed. Each result has a
                mean ln p of the tokens in its holes, and ``infill`` returns the result with the highest mean. If
                ``lengths`` is None, each hole has 16 tokens if the denoiser has an end token, and 1 token otherwise.
            constrain_from: An index into the characters of ``text``. If set, the constraint covers the text from this
                character to the end, and the text must have only one hole. If None, the constraint covers the text of
                each hole.
            request: Options of ``generate_batch``, such as policy fields, limits or a constraint.

        Returns:
            The filled text and its holes.

        Raises:
            RequestError: The text has no hole, the bundle has no tokenizer, attention is block-causal, or the
                denoiser changes the length of holes and the text has several.
        """
        return infill(self, text, lengths, constrain_from, **request)

    def logits(self, tokens: Sequence[int], rows: Sequence[int] | None = None) -> np.ndarray:
        """Run one full pass over a canvas and return the raw logits. Mask tokens are not filled.

        With ``blocks_after_prompt``, the prompt ends before the first mask token.

        Args:
            tokens: Token ids ``[L]``.
            rows: The rows to return, 0..L-1. If None, all rows. If the denoiser's shift is 1, row ``i`` predicts
                position ``i + 1``.

        Returns:
            Raw logits ``[R, V]``, float32.

        Raises:
            RequestError: An id or row is out of range, or the canvas is too long.
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
        """Measure the engine's time for passes of a given size, with arbitrary tokens.

        Args:
            tokens: Number of tokens of each request in the pass, 1 or more.
            cached: Number of cached tokens that the pass reads. If ``cached`` is above 0, a full pass fills the cache
                first. The full pass is not timed.
            rows: Number of rows of each request for which the pass computes scores, 1..tokens.
            repeats: Number of passes. If 0, only the sizes are checked.
            batch: Number of requests that share the pass, 1..4096.

        Returns:
            The seconds of each pass.

        Raises:
            RequestError: The denoiser or the engine does not support passes of this size.
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
        """Raise the error of a failed native call, or the exception of the tokenizer if the tokenizer failed."""
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
        prefix_cache_bytes: int | None = None,
    ) -> Scheduler:
        """Create a scheduler. The scheduler accepts requests from any thread, and runs all passes on a separate thread.

        Requests share passes if the engine supports shared passes. Otherwise, each pass computes one request, and
        requests take turns. Requests start in the order of submission.

        Args:
            max_running: The largest number of requests that run at the same time, 1..4096.
            max_waiting: Largest size of the queue, 1..1048576 requests. If the queue is full, BusyError is raised.
            max_tokens: The largest number of tokens in a shared pass. A request that does not fit
                into a pass takes part in the next pass.
            cache_bytes: Limit on the bytes of keys and values of all running requests together. If 0, the limit is 1
                GiB, or more if the longest canvas needs more.
            max_pass_ms: Limit on the expected milliseconds of a shared pass. A waiting request starts only if the
                expected time of the pass stays within this limit. If 0, there is no limit.
            cost: The measured time of passes on this machine, as a ``PassCost``. ``max_pass_ms``
                requires this argument.
            prefix_cache_bytes: Limit on the bytes of keys and values that the scheduler stores after a request has
                ended. These bytes count towards ``cache_bytes`` too. A later request reuses the keys and values if its
                prompt starts with the same tokens. If None, the scheduler may use all of ``cache_bytes`` that no
                running request needs. If 0, nothing is reused.

        Raises:
            RequestError: An argument is out of range, or ``max_pass_ms`` is set although requests cannot share passes.
        """
        make = functools.partial(self._request, "generate")
        sizes = (max_running, max_waiting, max_tokens, cache_bytes)
        return Scheduler(self._handle, make, *sizes, max_pass_ms, cost, prefix_cache_bytes)


@functools.cache
def _arguments(method: str) -> tuple[str, ...]:
    """Return the names of a method's keyword arguments. The names of ``**options`` are not included."""
    parameters = inspect.signature(getattr(Bundle, method)).parameters.values()
    return tuple(each.name for each in parameters if each.kind is each.KEYWORD_ONLY)
