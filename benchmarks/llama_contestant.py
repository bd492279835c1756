"""llama.cpp's LLaDA through llama-cpp-python, and the denoising loop over its logits.

llama.cpp keeps no keys and values for LLaDA (llama-model.cpp creates no memory for it, so that llama_decode runs its encoder),
and its encoder scores every row, whatever the batch asks for: each pass is one over the whole canvas, head included.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from contestants import Canvas, Contestant, NotOffered
from gguf_files import gguf_of, quiet_llama

from dlm_runtime.policy import Policy


class LlamaCpp(Contestant):
    """A GGUF on the CPU; the context is made anew, untimed, when the number of tokens changes."""

    def __init__(self, size: str, file_type: str, threads: int) -> None:
        self.llama, self.threads = quiet_llama(), threads
        path = gguf_of(size, file_type)
        self.weights_bytes = path.stat().st_size
        self.llama.llama_backend_init()
        options = self.llama.llama_model_default_params()
        options.n_gpu_layers = 0
        self.model = self.llama.llama_model_load_from_file(str(path).encode(), options)
        if not self.model:
            raise SystemExit(f"{path}: llama.cpp could not load it")
        self.vocab_size = self.llama.llama_vocab_n_tokens(self.llama.llama_model_get_vocab(self.model))
        self.mask, self.eos = (self._number(f"tokenizer.ggml.{name}_token_id") for name in ("mask", "eos"))
        self.context: Any = None
        self.batch: Any = None
        self.shape = (0, 0)

    def _number(self, key: str) -> int:
        text = ctypes.create_string_buffer(32)
        if self.llama.llama_model_meta_val_str(self.model, key.encode(), text, len(text)) < 0:
            raise SystemExit(f"the GGUF has no {key}; delete build/benchmarks/*.gguf")
        return int(text.value)

    def facts(self) -> dict[str, Any]:
        return {
            "llama-cpp-python": self.llama.__version__,
            "llama.cpp": self.llama.llama_version().decode(),
            "system_info": self.llama.llama_print_system_info().decode().strip(),
        }

    def _prepare(self, B: int, L: int) -> None:
        """A context and a batch of ``B`` sequences of ``L`` tokens."""
        if self.shape == (B, L):
            return
        llama, tokens = self.llama, B * L
        if self.context:
            llama.llama_batch_free(self.batch)
            llama.llama_free(self.context)
        options = llama.llama_context_default_params()
        options.n_ctx = options.n_batch = options.n_ubatch = tokens
        options.n_seq_max = B
        options.n_threads = options.n_threads_batch = self.threads
        self.context = llama.llama_init_from_model(self.model, options)
        if not self.context:
            raise SystemExit(f"llama.cpp made no context of {tokens} tokens")
        llama.llama_set_causal_attn(self.context, False)
        self.batch, self.shape = llama.llama_batch_init(tokens, 0, 1), (B, L)
        self.batch.n_tokens = tokens
        for i in range(tokens):
            self.batch.pos[i], self.batch.n_seq_id[i], self.batch.logits[i] = i % L, 1, 1
            self.batch.seq_id[i][0] = i // L

    def logits(self, canvases: np.ndarray) -> np.ndarray:
        """Logits ``[B, L, V]`` of a pass over canvases ``[B, L]``, in the engine's own memory until the next pass."""
        B, L = canvases.shape
        np.ctypeslib.as_array(self.batch.token, shape=(B * L,))[:] = canvases.ravel()
        if self.llama.llama_decode(self.context, self.batch):
            raise SystemExit(f"llama.cpp failed in a pass of {B} x {L} tokens")
        return np.ctypeslib.as_array(self.llama.llama_get_logits(self.context), shape=(B, L, self.vocab_size))

    def generate(self, prompts: Sequence[Canvas], new: int, policy: dict[str, Any], passes: int | None) -> dict[str, Any]:
        loop = Policy(**policy)
        if loop.commit not in ("static", "threshold") or loop.score != "confidence" or loop.steps_per_block:
            raise NotOffered("the loop over llama.cpp knows one token a pass, and threshold, by confidence")
        mask, given = self.mask, len(prompts[0])
        canvases = np.array([[*prompt, *[mask] * new] for prompt in prompts])
        self._prepare(*canvases.shape)
        selection, done, is_open = 0.0, 0, np.ones(len(prompts), bool)
        began = time.perf_counter()
        for start in range(given, given + new, loop.block_length):
            blocks = canvases[:, start : start + loop.block_length]
            while done != passes and (is_open & (blocks == mask).any(1)).any():
                logits = self.logits(canvases)
                done += 1
                selecting = time.perf_counter()
                for sequence in np.flatnonzero(is_open & (blocks == mask).any(1)):
                    masked = np.flatnonzero(blocks[sequence] == mask)
                    guess, confidence = _score(logits[sequence, start + masked], mask)
                    chosen = confidence >= loop.threshold if loop.commit == "threshold" else np.zeros(len(masked), bool)
                    chosen[confidence.argmax()] = True
                    blocks[sequence, masked[chosen]] = guess[chosen]
                selection += time.perf_counter() - selecting
            if loop.stop == "eos":
                is_open &= ~(blocks == self.eos).any(1)
        seconds = time.perf_counter() - began
        canvases[canvases == mask] = self.eos
        return {
            "seconds": seconds,
            "selection_s": selection,
            "canvases": canvases.tolist(),
            "nfe": new if done == passes else done,
            "timed_passes": done,
        }

    def pass_of(self, B: int, T: int, S: int, R: int) -> Callable[[], float]:
        if S:
            raise NotOffered("no cache for LLaDA")
        canvases = np.random.default_rng(0).integers(0, 1000, (B, T))

        def timed() -> float:
            self._prepare(B, T)
            began = time.perf_counter()
            self.logits(canvases)
            return time.perf_counter() - began

        return timed

    def best_tokens(self, canvas: Canvas) -> list[int]:
        self._prepare(1, len(canvas))
        found: list[int] = self.logits(np.array([canvas]))[0].argmax(1).tolist()
        return found


def _score(logits: np.ndarray, mask: int) -> tuple[np.ndarray, np.ndarray]:
    """Best tokens and their probabilities ``[M]`` from logits ``[M, V]``, which it overwrites."""
    logits[:, mask] = -np.inf
    best = logits.argmax(1)
    logits -= logits[np.arange(len(best)), best, None]
    return best, 1 / np.exp(logits, out=logits).sum(1)
