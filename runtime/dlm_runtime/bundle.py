"""Open a bundle and generate from it, over the C ABI.

A ``Bundle`` may be shared by threads: each running request takes a native session from a pool.
"""

from __future__ import annotations

import ctypes as C
import functools
import inspect
import json
import math
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dlm_runtime import _native, providers
from dlm_runtime.errors import RequestError
from dlm_runtime.infill import Infill, infill
from dlm_runtime.manifest import text_files
from dlm_runtime.policy import Policy
from dlm_runtime.request import TEXT_FIELDS, Limits, Request, count_of, token_ids
from dlm_runtime.results import Event, Generation
from dlm_runtime.signals import Cancels, seen_between_passes
from dlm_runtime.tokenizer import Tokenizer

if TYPE_CHECKING:
    from dlm_runtime.constraints.byte_automaton import CompileLimits
    from dlm_runtime.constraints.compiled import Constraint

KEPT_CONSTRAINTS = 64  # compiled ones that a bundle holds


class Bundle:
    """An opened bundle. Made by ``dlm_runtime.open``; usable as a context manager."""

    def __init__(self, handle: C.c_void_p, tokenizer: Tokenizer | None, default_policy: Policy | None, owned: object = None):
        self._library = _native.library()
        self._handle = handle
        self._owned = owned  # what must live as long as the handle, such as a callback
        self._lock = threading.Lock()
        self._idle: list[C.c_void_p] = []
        self._busy = 0  # sessions of running requests; the last one to end frees a closed bundle
        self._is_closed = False
        self._default_policy = default_policy
        self._tokenizer = tokenizer
        self._constraints: dict[tuple[Any, ...], Constraint] = {}
        self._folder: Path | None = None  # where files that the manifest names lie
        text = self._library.dlm_bundle_manifest(handle).decode()
        self.manifest: dict[str, Any] = json.loads(text) if text else {}
        info = _native.Denoiser()
        self._library.dlm_bundle_denoiser_sized(handle, C.byref(info), C.sizeof(info))
        self.vocab_size: int = info.vocab_size
        self.mask_token_id: int = info.mask_token_id
        self.max_canvas_length: int = info.max_canvas_length
        self.eos_token_ids: tuple[int, ...] = tuple(info.eos_token_ids[i] for i in range(info.eos_count))
        self.visible_block: int | None = info.visible_block or None
        """Tokens of a block where attention is block-causal; None: it is full."""
        self.provider = "cpu"  # that runs the graph in ONNX Runtime
        self.engine: str = self._library.dlm_bundle_engine(handle).decode()

    @property
    def is_on_cpu(self) -> bool:
        """Whether ONNX Runtime runs its graph on the CPU."""
        return self.engine.startswith("onnxruntime") and self.provider == "cpu"

    def close(self) -> None:
        """Take no more requests, and free the engine and its weights once those that run have ended.

        A stream ends at its next step, with RequestError.
        """
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
        if self._is_closed:
            raise RequestError("the bundle is closed")

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The bundle's tokenizer, None if it takes token ids only. Raises BundleError for a damaged one."""
        if self._tokenizer is None and self._folder is not None:
            files = text_files(self.manifest, self._folder)
            if files.tokenizer is not None:
                self._tokenizer = Tokenizer.from_files(files.tokenizer, files.template, files.special_tokens)
        return self._tokenizer

    def constraint(
        self,
        *,
        schema: Any = None,
        regex: str | None = None,
        enum: Sequence[str] | None = None,
        json_object: bool = False,
        max_depth: int | None = None,
        limits: CompileLimits | None = None,
        cache_dir: str | Path | None = "",
    ) -> Constraint:
        """What a generated text may be, compiled for this bundle's tokenizer: one of the first four.

        ``schema``: a JSON Schema, whose texts are compact JSON; ``regex``: the text matches it as a whole, in the syntax of
        Rust's regex crate; ``enum``: it is one of these; ``json_object``: it is any JSON object. ``max_depth``: how often a
        schema may lie within itself, and how many containers may be within each other where it leaves them open. ``limits``:
        what compiling may take, None for the usual. It is kept in the folder ``cache_dir`` ("": that of the user's caches,
        None: nowhere).

        Raises RequestError that says what is not supported, matches nothing, or meets which limit; DlmError without
        outlines-core.
        """
        from dlm_runtime.constraints import compiled
        from dlm_runtime.constraints import schema as schemas
        from dlm_runtime.constraints.byte_automaton import CompileLimits
        from dlm_runtime.constraints.vocabulary import read_vocabulary

        given = [schema is not None, regex is not None, enum is not None, json_object]
        if sum(given) != 1:
            raise RequestError("give one of schema, regex, enum and json_object")
        if self.tokenizer is None:
            raise RequestError("constraints are of text, and this bundle has no tokenizer")
        if schema is not None:
            expression = schemas.expression(schema, max_depth)
        elif json_object:
            expression = schemas.any_object(max_depth)
        else:
            expression = regex if regex is not None else schemas.choices(enum or ())
        if not isinstance(expression, str):
            raise RequestError(f"regex = {expression!r} is not a text")
        chosen, tokenizer = limits or CompileLimits(), self.tokenizer
        key = (expression, regex is None, chosen)
        with self._lock:
            made = self._constraints.get(key)
        if made is None:
            folder = None if cache_dir is None else Path(cache_dir) if cache_dir else compiled.default_folder()
            made = compiled.compile_constraint(
                expression,
                regex is None,
                lambda: read_vocabulary(tokenizer),
                tokenizer.sha256,
                self.vocab_size,
                self.eos_token_ids,
                chosen,
                folder,
            )
            with self._lock:
                if len(self._constraints) >= KEPT_CONSTRAINTS:
                    self._constraints.pop(next(iter(self._constraints)))
                self._constraints[key] = made
        return made

    def _constraint(self, constraint: Constraint | None, **given: Any) -> Constraint | None:
        """What a request was given, in one of two ways."""
        asked = {name: value for name, value in given.items() if value is not None and value is not False}
        if constraint is None:
            return self.constraint(**asked) if asked else None
        if asked:
            raise RequestError(f"give constraint or {next(iter(asked))}, not both")
        return constraint

    def __enter__(self) -> Bundle:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self.close()

    def policy(self, preset: str | None = None, **changes: Any) -> Policy:
        """A preset of this bundle (None: its default) with some fields changed. Raises BundleError, RequestError."""
        return self._preset(preset).with_fields(changes)

    def _policy_for(self, method: str, preset: str | None, changes: dict[str, Any]) -> Policy:
        """``policy`` for a method whose own arguments may have been meant."""
        return self._preset(preset).with_fields(changes, _arguments(method))

    def _preset(self, preset: str | None) -> Policy:
        self._check_open()
        if self._default_policy is not None and preset is None:
            return self._default_policy
        native = _native.initialised(_native.Policy)
        message = C.create_string_buffer(_native.MESSAGE_BYTES)
        if preset is not None and not isinstance(preset, str):
            raise RequestError(f"preset = {preset!r} is not a name")
        name = None if preset is None else preset.encode("utf-8", "replace")
        status = self._library.dlm_bundle_preset(self._handle, name, message, len(message), C.byref(native))
        if status:
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
        max_new_tokens: int = 128,
        preset: str | None = None,
        steps: int = 0,
        max_steps: int = 0,
        deadline_ms: float = 0.0,
        stop_strings: Sequence[str] = (),
        cancel: threading.Event | None = None,
        constraint: Constraint | None = None,
        schema: Any = None,
        regex: str | None = None,
        enum: Sequence[str] | None = None,
        json_object: bool = False,
        **policy: Any,
    ) -> Generation:
        """Fill ``max_new_tokens`` mask tokens behind a prompt, token ids, or a chat (one of the three).

        Mask tokens among ``tokens`` are filled as well. ``preset`` names one of the bundle's loops; any field of
        ``Policy`` may be changed by name; ``steps`` plans that many passes for the whole generation, split evenly over the
        blocks. ``timings`` are seconds: in the engine ``prefill`` (passes that fill a cache) and ``passes`` (all
        others), outside it ``selection`` (scoring, ranking, committing) and ``cache`` (moving keys and values), and
        ``total``, which is more than these by the loop's bookkeeping.

        The request ends before all is decided, within one pass, after ``max_steps`` passes, ``deadline_ms`` milliseconds after
        its start, or once another thread sets ``cancel``; ``finish`` then says so, and the result has what it came to.
        ``stop_strings`` end the text, and the passes behind the block that holds one.

        ``constraint`` (of ``Bundle.constraint``), or in its place ``schema``, ``regex``, ``enum`` or ``json_object``, which are
        its arguments: a text that nothing ends before all is decided is then valid by it, whatever the policy and the room.

        Raises RequestError for ids, lengths or policies that the bundle does not take, EngineError if a pass fails, and, within
        a pass, what a signal's handler raises on the main thread, such as KeyboardInterrupt.
        """
        request = Request(
            self,
            (prompt, tokens, chat),
            max_new_tokens,
            steps,
            self._policy_for("generate", preset, policy),
            Limits(max_steps, deadline_ms, stop_strings),
        )
        wanted = self._constraint(constraint, schema=schema, regex=regex, enum=enum, json_object=json_object)
        if stop_strings:
            *_, last = self._steps(request, cancel, wanted)
            assert last.result is not None
            return last.result
        with self._session([cancel] if cancel else (), wanted) as session:
            stats, length = _native.Stats(), C.c_size_t()
            buffer = (C.c_int32 * max(1, request.capacity))(*request.given)
            status = self._library.dlm_session_generate(
                session, C.byref(request.options), buffer, len(request.given), request.capacity, C.byref(stats), C.byref(length)
            )
            self._check(status, session)
            return request.result(session, 0, list(buffer[: length.value]), stats)

    def generate_batch(
        self,
        *,
        prompts: Sequence[str] | None = None,
        tokens: Sequence[Sequence[int]] | None = None,
        chats: Sequence[Sequence[Mapping[str, Any]]] | None = None,
        max_new_tokens: int = 128,
        preset: str | None = None,
        steps: int = 0,
        max_batch: int = 8,
        policies: Sequence[Mapping[str, Any]] | None = None,
        max_steps: int = 0,
        deadline_ms: float = 0.0,
        stop_strings: Sequence[str] = (),
        cancel: threading.Event | Sequence[threading.Event | None] | None = None,
        constraint: Constraint | None = None,
        schema: Any = None,
        regex: str | None = None,
        enum: Sequence[str] | None = None,
        json_object: bool = False,
        **policy: Any,
    ) -> list[Generation]:
        """``generate`` for several requests, at most ``max_batch`` of which share their passes; results in the given order.

        Those run together whose canvases have one length and, over a cache, whose masks lie in the same blocks; the others
        run in further batches, one after the other. To be together, prompts must have as many tokens. Each result is what
        ``generate`` gives, floating-point noise of the engine aside, with its own ``nfe``; ``timings``, ``passes`` and
        ``cache_bytes`` are those of the whole call. ``policies`` changes fields for each request, such as its ``seed``.

        ``max_steps`` is each request's own, ``deadline_ms`` that of the call. ``cancel`` is an event for all requests, or one
        or None for each. ``stop_strings`` end texts, and no passes.

        Raises what ``generate`` raises, naming the request by its number, counted from 0, and RequestError where the engine
        takes fewer at a time: TensorRT takes one.
        """
        given = {"prompt": prompts, "tokens": tokens, "chat": chats}
        chosen = [(name, values) for name, values in given.items() if values is not None]
        if len(chosen) != 1:
            raise RequestError("give one of prompts, tokens and chats: a list with an entry for each request")
        if isinstance(chosen[0][1], str):
            raise RequestError(f"{chosen[0][0]} is one string: give a list with an entry for each request")
        count = len(chosen[0][1])
        each = [{}] * count if policies is None else policies
        cancels = [cancel] * count if cancel is None or isinstance(cancel, threading.Event) else cancel
        for name, values in (("policies", each), ("cancel", cancels)):
            if len(values) != count:
                raise RequestError(f"{name} has {len(values)} entries for {count} requests: give one for each")
        fields, kept = self._policy_for("generate_batch", preset, policy), []
        limits = Limits(max_steps, deadline_ms, stop_strings)
        for number, (value, changes) in enumerate(zip(chosen[0][1], each, strict=True)):
            one = tuple(value if name == chosen[0][0] else None for name in given)
            try:
                kept.append(Request(self, one, max_new_tokens, steps, fields.with_fields(dict(changes)), limits))
            except RequestError as err:
                raise RequestError(f"request {number}: {err}") from err
        most = count_of("max_batch", max_batch)
        wanted = self._constraint(constraint, schema=schema, regex=regex, enum=enum, json_object=json_object)
        if not kept:
            return []
        options = kept[0].options
        options.policies = (C.POINTER(_native.Policy) * len(kept))(*(C.pointer(request.policy) for request in kept))
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
                session, C.byref(options), natives, len(kept), most, C.byref(stats)
            )
            self._check(status, session)
            return [
                request.result(session, number, list(buffer[: native.length]), stats)
                for number, (request, buffer, native) in enumerate(zip(kept, buffers, natives, strict=True))
            ]

    def stream(
        self,
        *,
        prompt: str | None = None,
        tokens: Sequence[int] | None = None,
        chat: Sequence[Mapping[str, Any]] | None = None,
        max_new_tokens: int = 128,
        preset: str | None = None,
        steps: int = 0,
        max_steps: int = 0,
        deadline_ms: float = 0.0,
        stop_strings: Sequence[str] = (),
        cancel: threading.Event | None = None,
        constraint: Constraint | None = None,
        schema: Any = None,
        regex: str | None = None,
        enum: Sequence[str] | None = None,
        json_object: bool = False,
        **policy: Any,
    ) -> Iterator[Event]:
        """Like ``generate``, a step at a time: an ``Event`` after each pass. Stop early by leaving the loop."""
        fields = self._policy_for("stream", preset, policy)
        limits = Limits(max_steps, deadline_ms, stop_strings)
        wanted = self._constraint(constraint, schema=schema, regex=regex, enum=enum, json_object=json_object)
        return self._steps(Request(self, (prompt, tokens, chat), max_new_tokens, steps, fields, limits), cancel, wanted)

    def infill(self, text: str, *, lengths: Sequence[int | Sequence[int]] = (16,), **request: Any) -> Infill:
        """Fill the holes of a text, written ``<mask>`` in it: ``"def f(x): <mask> return y"``.

        ``lengths`` are the tokens of the holes: one entry for all, or one for each. A list in place of a number is of lengths
        to try, each in a request of its own, and the best is taken by the mean ln p of what fills the holes. A hole ends with
        its first end token, so that one with room to spare may take less. ``request`` is what ``generate_batch`` takes beside
        what is given: policy fields, limits, ``max_batch``.

        Raises RequestError where there is no hole, or no tokenizer, and where attention is block-causal.
        """
        return infill(self, text, lengths, **request)

    def logits(self, tokens: Sequence[int], rows: Sequence[int] | None = None) -> np.ndarray:
        """Raw logits ``[R, V]`` (float32) of one full pass over a canvas ``[L]``; its mask tokens stay masked.

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

    def time_passes(self, tokens: int, cached: int, rows: int, repeats: int, batch: int = 1) -> list[float]:
        """Seconds that the engine takes for a pass of ``tokens`` over ``cached`` ones that scores ``rows``, ``repeats`` times.

        ``batch`` requests share the pass, each with as many tokens and rows.
        On made-up tokens; for ``cached`` > 0 a full pass over both fills the cache first, untimed. 0 repeats only check the
        sizes. Raises RequestError for a pass that the denoiser or the engine does not take.
        """
        given = (("batch", batch), ("tokens", tokens), ("cached", cached), ("rows", rows))
        sizes = [count_of(name, value) for name, value in given]
        seconds = (C.c_double * max(1, count_of("repeats", repeats)))()
        with self._session() as session:
            self._check(self._library.dlm_session_time_passes(session, *sizes, seconds, repeats), session)
        return seconds[:repeats]

    def _steps(self, request: Request, cancel: threading.Event | None, constraint: Constraint | None) -> Iterator[Event]:
        stream = request.text_stream()
        with self._session([cancel] if cancel else (), constraint) as session:
            given = (C.c_int32 * max(1, len(request.given)))(*request.given)
            self._check(self._library.dlm_session_start(session, C.byref(request.options), given, len(request.given)), session)
            view, stats = _native.Step(), _native.Stats()
            while not view.done:
                self._check_open()
                self._check(self._library.dlm_session_step(session, C.byref(view)), session)
                delta = None if stream is None else request.push(stream, view, self._undecided(session, view))
                if stream is not None and stream.is_stopped and not view.done:
                    self._library.dlm_session_cancel(session, 0)
                    self._check(self._library.dlm_session_step(session, C.byref(view)), session)  # makes no pass
                canvas, result = view.canvas[: view.length], None
                if view.done:
                    self._library.dlm_session_stats(session, C.byref(stats))
                    result = request.result(session, 0, canvas, stats, stream)
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
        return [bool(flag) for flag in self._library.dlm_session_undecided(session, None)[: view.length]]

    def _outcome(self, session: C.c_void_p, number: int) -> dict[str, Any]:
        """What ``Generation`` says of a request that the native loop tells."""
        found = _native.Result()
        self._check(self._library.dlm_session_result_sized(session, number, C.byref(found), C.sizeof(found)), session)
        return {
            "nfe": found.nfe,
            "finish": _native.FINISHES[found.finish],
            "prompt_tokens": found.prompt_tokens,
            "completion_tokens": found.completion_tokens,
            "log_probs": [None if math.isnan(value) else value for value in found.log_probs[: found.length]],
            "undecided": [bool(flag) for flag in found.undecided[: found.length]],
            "passes": self._passes(session),
        }

    def _passes(self, session: C.c_void_p) -> dict[str, int]:
        counts = _native.PassCounts()
        self._library.dlm_session_pass_counts_sized(session, C.byref(counts), C.sizeof(counts))
        return {name: getattr(counts, name) for name in ("prefill", "denoise", "store")}

    def _check(self, status: int, session: C.c_void_p) -> None:
        if status:
            raise _native.error(status, self._library.dlm_session_last_error(session))

    @contextmanager
    def _session(self, cancels: Cancels = (), constraint: Constraint | None = None) -> Iterator[C.c_void_p]:
        with self._lock:
            self._check_open()
            session = self._idle.pop() if self._idle else C.c_void_p()
            if not session:
                message = C.create_string_buffer(_native.MESSAGE_BYTES)
                status = self._library.dlm_session_create(self._handle, message, len(message), C.byref(session))
                if status:
                    raise _native.error(status, message.value)
            self._busy += 1
        try:
            handle = None if constraint is None else constraint.handle
            self._check(self._library.dlm_session_constrain(session, handle), session)
            with seen_between_passes(session, cancels):
                yield session
        finally:
            with self._lock:
                self._idle.append(session)
                self._busy -= 1
                self._free()


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

    ``engine`` is "auto" ("tensorrt" if the bundle was built for GPUs, else "onnxruntime"), "onnxruntime", "tensorrt", or
    "none" (the bundle is checked and makes no passes). ``library`` is the path of the engine's library; None looks at
    $DLM_ONNXRUNTIME or $DLM_TENSORRT, the installed packages and the system, in that order. ``threads`` of ONNX Runtime,
    0 takes all cores; it gets this package's kernels for the processor, or those that $DLM_KERNELS names ("none": its own).
    ``check_hashes=False`` compares files by size only.

    ``provider`` of ONNX Runtime: "cpu", or on a GPU "cuda", "tensorrt" or "nv_tensorrt_rtx", with the GPU's number behind it
    where that is not 0 ("cuda:1"); engine "auto" is then "onnxruntime". What such a provider does not run is refused by name,
    or with ``allow_fallback`` left to the CPU, and named in ``Bundle.engine``.

    Raises BundleError for a missing or damaged bundle, EngineError for a missing or failing engine, RequestError for an
    engine or provider that is not known, or that this bundle or device does not have.
    """
    name, device = providers.parse(provider)
    if name != "cpu":
        engine = "onnxruntime" if engine == "auto" else engine
        if library is None and not os.environ.get("DLM_ONNXRUNTIME"):
            providers.check_wheels()
            providers.load_libraries()
    if engine == "auto":
        # The library has to be found before the engine is opened, so which one it will be is asked first.
        with _open(path, "none", library=None, check_hashes=False) as looked_at:
            engine = "tensorrt" if "device_file" in looked_at.manifest["loop"]["graph"] else "onnxruntime"
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
    bundle.provider = name
    bundle._folder = Path(path)
    if engine != "none":
        _ = bundle.tokenizer  # a damaged one is noticed here
    return bundle


def _open(path: str | Path, engine: str, *, library: str | Path | None, check_hashes: bool, **others: bytes | int) -> Bundle:
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
    status = native.dlm_bundle_open(os.fsencode(path), C.byref(options), message, len(message), C.byref(handle))
    if status:
        raise _native.error(status, message.value)
    return Bundle(handle, None, None)
