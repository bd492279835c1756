"""Drive the native loop with a denoiser of your own: a Python function that makes the passes.

Made for tests (a torch denoiser under the native loop shows loop parity apart from graph parity)
and for trying a network that is not exported yet. Every pass crosses into Python, so it is not the
fast way.
"""

from __future__ import annotations

import ctypes as C
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from dlm_runtime.abi import native as _native
from dlm_runtime.bundle import Bundle
from dlm_runtime.generation.handle import Handle
from dlm_runtime.policy import Policy


@dataclass(frozen=True)
class DenoiserInfo:
    """What the loop must know of a denoiser."""

    vocab_size: int
    mask_token_id: int
    max_canvas_length: int
    eos_token_ids: tuple[int, ...] = ()
    layers: int = 1
    kv_heads: int = 1
    head_size: int = 1
    shift: int = 0
    has_cache: bool = False
    top_k: int = 2
    visible_block: int | None = None
    """Tokens of a block where attention is block-causal; None: it is full."""


@dataclass(frozen=True)
class CallbackPass:
    """One request's pass as numpy views of the loop's memory; the callback fills every output that
    is not None.

    ``input_ids`` and ``position_ids`` ``[T]``, ``score_rows`` ``[R]``; ``past`` ``[layers, 2, Hkv,
    S, D]`` as nested lists of float32 views (empty when S = 0). Outputs: ``top_tokens`` int32 and
    ``top_probs`` float32 ``[R, K]``, ``entropy`` ``[R]``, ``logits`` ``[R, V]``, ``present`` as
    ``past`` with T rows.
    """

    input_ids: np.ndarray
    position_ids: np.ndarray
    score_rows: np.ndarray
    past: list[tuple[np.ndarray, np.ndarray]]
    top_tokens: np.ndarray
    top_probs: np.ndarray
    entropy: np.ndarray | None
    logits: np.ndarray | None
    present: list[tuple[np.ndarray, np.ndarray]] | None


def _view(pointer: object, shape: tuple[int, ...]) -> np.ndarray:
    return np.ctypeslib.as_array(pointer, shape=shape)  # type: ignore[call-overload, no-any-return]


def _rows(
    info: DenoiserInfo, keys: Any, values: Any, batch: int, rows: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Keys and values of every layer, ``[B, Hkv, rows, D]`` each."""
    shape = (batch, info.kv_heads, rows, info.head_size)
    layers = [
        (C.cast(keys[i], _native.f32p), C.cast(values[i], _native.f32p)) for i in range(info.layers)
    ]
    return [(_view(k, shape), _view(v, shape)) for k, v in layers]


def _passes(info: DenoiserInfo, p: Any) -> Iterator[CallbackPass]:
    """The passes of a batch's requests."""
    B, T, S, R = p.batch, p.tokens, p.cached, p.rows
    ids, positions, rows = (
        _view(p.input_ids, (B, T)),
        _view(p.position_ids, (B, T)),
        _view(p.score_rows, (B, R)),
    )
    tokens, probs = _view(p.top_tokens, (B, R, info.top_k)), _view(p.top_probs, (B, R, info.top_k))
    entropy = _view(p.entropy, (B, R)) if p.entropy else None
    logits = _view(p.logits, (B, R, info.vocab_size)) if p.logits else None
    past = _rows(info, p.past_keys, p.past_values, B, S) if S else []
    present = _rows(info, p.present_keys, p.present_values, B, T) if p.present_keys else None
    for b in range(B):
        yield CallbackPass(
            input_ids=ids[b],
            position_ids=positions[b],
            score_rows=rows[b],
            past=[(keys[b], values[b]) for keys, values in past],
            top_tokens=tokens[b],
            top_probs=probs[b],
            entropy=None if entropy is None else entropy[b],
            logits=None if logits is None else logits[b],
            present=None if present is None else [(keys[b], values[b]) for keys, values in present],
        )


def from_callback(
    info: DenoiserInfo, run: Callable[[CallbackPass], None], policy: Policy | None = None
) -> Bundle:
    """A bundle without files whose passes ``run`` makes; ``policy`` is its default.

    A pass of several requests (``generate_batch``) is a call of ``run`` for each of them. What
    ``run`` raises ends the request and is raised again from ``generate`` as the cause of an
    EngineError; what is no Exception, such as KeyboardInterrupt, as itself.
    """
    raised = (
        threading.local()
    )  # a session's passes are made by the thread that called it, a scheduler's by one of its own

    def call(_: int, pointer: object) -> int:
        try:
            for one in _passes(info, pointer.contents):  # type: ignore[attr-defined]
                run(one)
        except BaseException as err:
            raised.error = err
            return 5  # DLM_ENGINE_FAILED
        return 0

    eos = (C.c_int32 * max(1, len(info.eos_token_ids)))(*info.eos_token_ids)
    native = _native.library()
    denoiser = _native.initialised(_native.Denoiser)
    for name in (
        "vocab_size",
        "mask_token_id",
        "max_canvas_length",
        "layers",
        "kv_heads",
        "head_size",
        "top_k",
        "shift",
    ):
        setattr(denoiser, name, getattr(info, name))
    denoiser.has_cache = int(info.has_cache)
    denoiser.visible_block = info.visible_block or 0
    denoiser.eos_token_ids = C.cast(eos, _native.i32p)
    denoiser.eos_count = len(info.eos_token_ids)
    function = _native.PassFn(call)
    handle = C.c_void_p()
    message = C.create_string_buffer(_native.MESSAGE_BYTES)
    status = native.dlm_bundle_from_callback(
        C.byref(denoiser), function, None, message, len(message), C.byref(handle)
    )
    if status:
        raise _native.error(status, message.value)
    return Bundle(Handle(handle, policy or Policy(), function, raised))
