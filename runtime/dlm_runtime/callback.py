"""Runs the native loop without an engine. A Python function computes each pass.

Tests use this module to run a torch denoiser with the native loop. If such a test passes and the
exported bundle gives wrong results, the error is in the exported graph and not in the loop. The
module can also run networks that cannot be exported. The module is slow, because every pass calls
Python.
"""

from __future__ import annotations

import ctypes as C
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
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
        vocab_size: V, the size of the vocabulary, 3..16777216.
        mask_token_id: The id of the mask token, 0..V-1. V means that the denoiser has no mask token
            and starts from random tokens. It then has draft passes.
        max_canvas_length: The longest canvas in tokens, 1..16777216.
        eos_token_ids: The ids of the end tokens. The mask token must not be an end token.
        layers: Number of layers, 1..1024.
        kv_heads: Number of key and value heads in every layer, 1..4096.
        head_size: Size of a head, 1..4096.
        shift: 1 if row i of the output predicts position i + 1. 0 if row i predicts position i.
        has_cache: True if passes read and write keys and values.
        top_k: K, the number of most likely tokens that a pass returns for each row, 2..64 and below
            V.
        visible_block: The block length of block-causal attention. If None, attention is full.
        draft_block: The number of tokens of a draft pass. If None, there are no draft passes. A
            denoiser with draft passes has visible_block 1 and a cache. With shift 1, a pass may end
            with draft rows instead.
        conditioning_size: C, the number of values of self-conditioning per row, 0..65536. 0 means
            that the denoiser has no self-conditioning. Otherwise, the denoiser has no mask token.
        max_new_tokens: The length of the answers that the denoiser was trained on, in tokens.
        expand_token_id, delete_token_id: The ids of the tokens that change the length of a canvas.
            Two mask tokens replace a committed expand token, and a committed delete token is
            removed. If both are None, there are no such tokens.
        split_token_id: If not None, passes rewrite their block: a predicted split token inserts a
            mask token, and a predicted delete token removes its position (LLaDA2.2). The denoiser
            then has a visible_block, a delete_token_id, and no expand_token_id.
        shifted_drafts: True if the rows of a draft pass see each other and predict the next
            positions (SDLM). The denoiser then has draft passes, shift 1 and a mask token.
        blocks_after_prompt: True if the prompt is one attention block, and the first block of
            visible_block tokens starts at its end (D2F).
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
    draft_block: int | None = None
    conditioning_size: int = 0
    max_new_tokens: int = 128
    expand_token_id: int | None = None
    delete_token_id: int | None = None
    shifted_drafts: bool = False
    blocks_after_prompt: bool = False
    split_token_id: int | None = None


@dataclass(frozen=True)
class CallbackPass:
    """The inputs and outputs of one request in a pass.

    The arrays are numpy views of the loop's memory. The callback must fill every output that is not
    None.

    T is the number of tokens in the pass, R is the number of rows to score, and S is the number of
    cached tokens. Hkv and D are ``kv_heads`` and ``head_size`` of ``DenoiserInfo``.

    Args:
        input_ids: Token ids ``[T]``.
        position_ids: The positions of these tokens in the canvas, ``[T]``. In a draft pass,
            or in a draft row, max_canvas_length is added to the position. With
            blocks_after_prompt, it is added n times in block n after the prompt.
        score_rows: The rows (0..T-1) for which the callback must fill the outputs of R rows,
            ``[R]``.
        past: The cached keys and values, ``[layers, 2, Hkv, S, D]``, as nested lists of float32
            views. The lists are empty if S is 0.
        top_tokens: Output ``[R, K]``, int32: the most likely tokens of each row.
        top_probs: Output ``[R, K]``, float32: the probabilities of ``top_tokens``.
        top_log_odds: Optional output ``[R, K]``, float32: ln(p / (1 - p)) for these probabilities p,
            computed from the logits: ``l - logsumexp(the other logits)``. Where the best logit leads
            by more than 15, ``top_probs`` is exactly 1, and only these numbers rank positions. They
            are NaN when the function is called. For numbers that stay NaN, ``top_probs`` is used.
        entropy: Output ``[R]``: the entropy of each row's distribution.
        logits: Output ``[R, V]``.
        present: Output: the keys and values of the T tokens, as nested lists like ``past``.
        conditioning: ``next_conditioning`` of the last pass over the same block, ``[T, C]``. The
            values are 0 in the first pass over a block, and in causal passes. If the denoiser has
            no self-conditioning, this field and the next two fields are None.
        temperature: The temperature of each scored row, ``[R]``, for ``next_conditioning``.
        next_conditioning: Output ``[R, C]``, computed from the softmax of the logits divided by
            ``temperature``. None if it is not needed.
    """

    input_ids: np.ndarray
    position_ids: np.ndarray
    score_rows: np.ndarray
    past: list[tuple[np.ndarray, np.ndarray]]
    top_tokens: np.ndarray
    top_probs: np.ndarray
    top_log_odds: np.ndarray
    entropy: np.ndarray | None
    logits: np.ndarray | None
    present: list[tuple[np.ndarray, np.ndarray]] | None
    conditioning: np.ndarray | None = None
    temperature: np.ndarray | None = None
    next_conditioning: np.ndarray | None = None


def _view(pointer: object, shape: tuple[int, ...]) -> np.ndarray:
    return np.ctypeslib.as_array(pointer, shape=shape)  # type: ignore[call-overload, no-any-return]


def _rows(
    info: DenoiserInfo, keys: Any, values: Any, batch: int, rows: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return every layer's array of keys and of values, each ``[B, Hkv, rows, D]``."""
    shape = (batch, info.kv_heads, rows, info.head_size)
    layers = [
        (C.cast(keys[i], _native.f32p), C.cast(values[i], _native.f32p)) for i in range(info.layers)
    ]
    return [(_view(k, shape), _view(v, shape)) for k, v in layers]


def _passes(info: DenoiserInfo, p: Any) -> Iterator[CallbackPass]:
    """Yield the inputs and outputs of each request that shares the pass."""
    B, T, S, R = p.batch, p.tokens, p.cached, p.rows
    ids, positions, rows = (
        _view(p.input_ids, (B, T)),
        _view(p.position_ids, (B, T)),
        _view(p.score_rows, (B, R)),
    )
    tokens, probs, log_odds = (
        _view(array, (B, R, info.top_k)) for array in (p.top_tokens, p.top_probs, p.top_log_odds)
    )
    entropy = _view(p.entropy, (B, R)) if p.entropy else None
    logits = _view(p.logits, (B, R, info.vocab_size)) if p.logits else None
    c = info.conditioning_size
    conditioning = _view(p.conditioning, (B, T, c)) if p.conditioning else None
    temperature = _view(p.temperature, (B, R)) if p.temperature else None
    following = _view(p.next_conditioning, (B, R, c)) if p.next_conditioning else None
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
            top_log_odds=log_odds[b],
            entropy=None if entropy is None else entropy[b],
            logits=None if logits is None else logits[b],
            present=None if present is None else [(keys[b], values[b]) for keys, values in present],
            conditioning=None if conditioning is None else conditioning[b],
            temperature=None if temperature is None else temperature[b],
            next_conditioning=None if following is None else following[b],
        )


def from_callback(
    info: DenoiserInfo, run: Callable[[CallbackPass], None], policy: Policy | None = None
) -> Bundle:
    """Create a bundle without files. The function ``run`` computes the bundle's passes.

    Args:
        info: The properties of the denoiser.
        run: Computes the pass of one request. If several requests share a pass
            (``generate_batch``), the function is called once for each of these requests.
        policy: The default policy of the bundle. None means the preset "llada".

    Raises:
        RequestError: A property is out of range.

    If ``run`` raises an Exception, the request ends, and ``generate`` raises an EngineError with
    this exception as its cause. Other exceptions, such as KeyboardInterrupt, are raised unchanged.
    """
    # The callback stores an exception of ``run`` in this object, separately for each thread.
    # Outside a scheduler, passes run on the caller's thread. A scheduler runs passes on its own
    # thread.
    raised = threading.local()

    def call(_: int, pointer: object) -> int:
        try:
            for one in _passes(info, pointer.contents):  # type: ignore[attr-defined]
                run(one)
        except BaseException as err:
            raised.error = err
            return 5  # DLM_ENGINE_FAILED
        return 0

    eos = (C.c_int32 * len(info.eos_token_ids))(*info.eos_token_ids)
    denoiser = _native.initialised(_native.Denoiser)
    for each in fields(DenoiserInfo):
        if each.name != "eos_token_ids" and (value := getattr(info, each.name)) is not None:
            setattr(denoiser, each.name, value)
    if info.eos_token_ids:
        denoiser.eos_token_ids = C.cast(eos, _native.i32p)
    denoiser.eos_count = len(info.eos_token_ids)
    function = _native.PassFn(call)
    handle = C.c_void_p()
    make = _native.library().dlm_bundle_from_callback
    _native.check(make, (C.byref(denoiser), function, None), C.byref(handle))
    return Bundle(Handle(handle, policy or Policy(), function, raised))
