"""Runs LLaDA in llama.cpp through llama-cpp-python. The denoising loop is in Python.

Each pass computes the whole canvas, because llama.cpp has no cache for LLaDA: llama-model.cpp
creates no cache memory, so llama_decode runs llama.cpp's encoder. The encoder also computes the
logits of every token, even if the batch asks for the logits of fewer tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.gguf_files import gguf_of
from benchmarks.llama import Llama, facts
from benchmarks.speed.contestants import Canvas, Contestant, NotOffered
from dlm_runtime.policy import Policy


class LlamaCpp(Contestant):
    """A GGUF file that llama.cpp runs on the CPU."""

    def __init__(self, size: str, file_type: str, threads: int) -> None:
        path = gguf_of(size, file_type)
        self.weights_bytes = path.stat().st_size
        self.llama = Llama(path, threads, is_causal=False)
        self.mask, self.eos = (
            self.llama.number(f"tokenizer.ggml.{name}_token_id") for name in ("mask", "eos")
        )

    def facts(self) -> dict[str, Any]:
        return facts()

    def generate(
        self, prompts: Sequence[Canvas], new: int, policy: dict[str, Any], passes: int | None
    ) -> dict[str, Any]:
        loop = Policy(**policy)
        if (
            loop.commit not in ("static", "threshold")
            or loop.score != "confidence"
            or loop.steps_per_block
        ):
            raise NotOffered(
                "the loop over llama.cpp knows one token a pass, and threshold, by confidence"
            )
        mask, given = self.mask, len(prompts[0])
        canvases = np.array([[*prompt, *[mask] * new] for prompt in prompts])
        self.llama.prepare(*canvases.shape)
        selection, done, is_open = 0.0, 0, np.ones(len(prompts), bool)
        began = time.perf_counter()
        for start in range(given, given + new, loop.block_length):
            blocks = canvases[:, start : start + loop.block_length]
            while done != passes and (is_open & (blocks == mask).any(1)).any():
                logits = self.llama.logits(canvases)
                done += 1
                selecting = time.perf_counter()
                for sequence in np.flatnonzero(is_open & (blocks == mask).any(1)):
                    masked = np.flatnonzero(blocks[sequence] == mask)
                    guess, confidence = _score(logits[sequence, start + masked], mask)
                    chosen = (
                        confidence >= loop.threshold
                        if loop.commit == "threshold"
                        else np.zeros(len(masked), bool)
                    )
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
            self.llama.prepare(B, T)
            began = time.perf_counter()
            self.llama.logits(canvases)
            return time.perf_counter() - began

        return timed

    def best_tokens(self, canvas: Canvas) -> list[int]:
        found: list[int] = self.llama.logits(np.array([canvas]))[0].argmax(1).tolist()
        return found


def _score(logits: np.ndarray, mask: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the most likely tokens and their probabilities ``[M]``, from logits ``[M, V]``.

    Overwrites the logits.
    """
    logits[:, mask] = -np.inf
    best = logits.argmax(1)
    logits -= logits[np.arange(len(best)), best, None]
    return best, 1 / np.exp(logits, out=logits).sum(1)
