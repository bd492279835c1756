"""Runs the native loop with a Python function that makes the passes.

This is for tests (a torch denoiser under the native loop separates loop parity from graph parity)
and for networks that are not exported yet. It is slow, because every pass calls Python.
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
    """The properties of a denoiser that the loop needs.

    Args:
        vocab_size: V, 3..16777216.
        mask_token_id: 0..V-1.
        max_canvas_length: Tokens, 1..16777216.
        eos_token_ids: End tokens, without the mask token.
        layers: 1..1024.
        kv_heads: Key and value heads of every layer, 1..4096.
        head_size: 1..4096.
        shift: 1 if the row of position i predicts position i + 1, else 0.
        has_cache: True if passes read and write keys and values.
        top_k: K, the candidates per row, 2..64 and below V.
        visible_block: Block length of block-causal attention. If None, attention is full.
    """

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
    """Block length of block-causal attention; None if attention is full."""


@dataclass(frozen=True)
class CallbackPass:
    """One request's pass, as numpy views of the loop's memory. The callback fills every output that
    is not None.

    Args:
        input_ids: ``[T]``.
        position_ids: ``[T]``.
        score_rows: ``[R]``.
        past: Keys and values, ``[layers, 2, Hkv, S, D]``: nested lists of float32 views; empty if S is 0.
        top_tokens: Output ``[R, K]``, int32.
        top_probs: Output ``[R, K]``, float32.
        entropy: Output ``[R]``.
        logits: Output ``[R, V]``.
        present: Output with the shape of ``past`` and T rows.
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
    """Create a bundle without files whose passes ``run`` makes.

    Args:
        info: The denoiser's properties.
        run: Makes the pass of one request. A shared pass (``generate_batch``) calls it once per request.
        policy: The bundle's default policy. If None, LLaDA's loop.

    Raises:
        RequestError: A property is out of range.

    An exception of ``run`` ends the request and becomes the cause of an EngineError from
    ``generate``. An exception that is not an Exception, such as KeyboardInterrupt, is raised as it
    is.
    """
    raised = (
        threading.local()
    )  # per thread: sessions make passes on the caller's thread, schedulers on their own

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
