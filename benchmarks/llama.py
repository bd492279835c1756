"""Uses llama.cpp through llama-cpp-python: quantises GGUF files, and runs passes over token ids."""

from __future__ import annotations

import ctypes
import functools
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

# llama.h, enum llama_ftype
FILE_TYPES = {
    "F32": 0,
    "F16": 1,
    "Q4_0": 2,
    "Q4_1": 3,
    "Q8_0": 7,
    "Q4_K_S": 14,
    "Q4_K_M": 15,
    "Q5_K_M": 17,
    "IQ4_NL": 25,
    "IQ4_XS": 30,
}
_callback: Any = None  # llama.cpp stores a pointer to the callback, so the callback must stay alive


@functools.cache
def quiet_llama() -> Any:
    """Import llama-cpp-python and make it print only errors, to stderr."""
    import llama_cpp

    def tell(level: int, text: bytes, _: object) -> None:
        if level == 4:  # ggml.h, GGML_LOG_LEVEL_ERROR
            sys.stderr.write(text.decode(errors="replace"))

    global _callback
    _callback = llama_cpp.llama_log_callback(tell)
    llama_cpp.llama_log_set(_callback, None)
    return llama_cpp


def quantise(source: Path, path: Path, file_type: str) -> None:
    """Convert a GGUF file to one of ``FILE_TYPES``. The source file may already be quantised."""
    llama = quiet_llama()
    options = llama.llama_model_quantize_default_params()
    options.ftype, options.allow_requantize = FILE_TYPES[file_type], True
    if llama.llama_model_quantize(str(source).encode(), str(path).encode(), options):
        raise SystemExit(f"{source}: llama.cpp could not quantise it to {path}")


def facts() -> dict[str, str]:
    """Return the versions of llama-cpp-python and llama.cpp, and llama.cpp's system information.

    The system information lists the instruction sets for which llama.cpp was compiled.
    """
    llama = quiet_llama()
    return {
        "llama-cpp-python": llama.__version__,
        "llama.cpp": llama.llama_version().decode(),
        "system_info": llama.llama_print_system_info().decode().strip(),
    }


class Llama:
    """A GGUF file opened on the CPU.

    Keys and values are fp32. A new context is created whenever the number of
    tokens changes.
    """

    def __init__(self, path: Path, threads: int, *, is_causal: bool) -> None:
        self.llama, self.threads, self.is_causal = quiet_llama(), threads, is_causal
        self.llama.llama_backend_init()
        options = self.llama.llama_model_default_params()
        options.n_gpu_layers = 0
        self.model = self.llama.llama_model_load_from_file(str(path).encode(), options)
        if not self.model:
            raise SystemExit(f"{path}: llama.cpp could not load it")
        self.vocabulary = self.llama.llama_model_get_vocab(self.model)
        self.vocab_size = self.llama.llama_vocab_n_tokens(self.vocabulary)
        self.context: Any = None
        self.batch: Any = None
        self.shape = (0, 0)

    def close(self) -> None:
        """Free the model."""
        self._free_context()
        self.llama.llama_model_free(self.model)

    def _free_context(self) -> None:
        if self.context:
            self.llama.llama_batch_free(self.batch)
            self.llama.llama_free(self.context)
            self.context = None

    def number(self, key: str) -> int:
        """Return an integer from the metadata of the GGUF file."""
        text = ctypes.create_string_buffer(32)
        if self.llama.llama_model_meta_val_str(self.model, key.encode(), text, len(text)) < 0:
            raise SystemExit(f"the GGUF has no {key}; delete build/benchmarks/*.gguf")
        return int(text.value)

    def tokenise(self, text: str) -> list[int]:
        """Return the token ids of plain text."""
        data = text.encode()
        tokens = (self.llama.llama_token * len(data))()
        count = self.llama.llama_tokenize(
            self.vocabulary, data, len(data), tokens, len(data), False, False
        )
        return list(tokens[:count])

    def prepare(self, B: int, L: int) -> None:
        """Create a context and a batch for ``B`` sequences of ``L`` tokens."""
        if self.shape == (B, L):
            return
        llama, tokens = self.llama, B * L
        self._free_context()
        options = llama.llama_context_default_params()
        options.n_ctx = options.n_batch = options.n_ubatch = tokens
        options.n_seq_max = B
        options.n_threads = options.n_threads_batch = self.threads
        options.type_k = options.type_v = 0  # ggml.h, GGML_TYPE_F32
        self.context = llama.llama_init_from_model(self.model, options)
        if not self.context:
            raise SystemExit(f"llama.cpp made no context of {tokens} tokens")
        llama.llama_set_causal_attn(self.context, self.is_causal)
        self.batch, self.shape = llama.llama_batch_init(tokens, 0, 1), (B, L)
        self.batch.n_tokens = tokens
        for i in range(tokens):
            self.batch.pos[i], self.batch.n_seq_id[i], self.batch.logits[i] = i % L, 1, 1
            self.batch.seq_id[i][0] = i // L

    def time_prompt(self, tokens: Sequence[int]) -> float:
        """Return the seconds to compute a prompt.

        llama.cpp uses its default batches, flash attention, and keys and values in fp16. Only the
        last token of a batch has logits.
        """
        llama = self.llama
        self._free_context()
        options = llama.llama_context_default_params()
        options.n_ctx, options.n_threads_batch = len(tokens), self.threads
        options.flash_attn_type = llama.LLAMA_FLASH_ATTN_TYPE_ENABLED
        context = llama.llama_init_from_model(self.model, options)
        if not context:
            raise SystemExit(f"llama.cpp made no context of {len(tokens)} tokens")
        ids = (llama.llama_token * len(tokens))(*tokens)
        began = time.perf_counter()
        for first in range(0, len(ids), options.n_batch):
            count = min(options.n_batch, len(ids) - first)
            part = ctypes.cast(
                ctypes.byref(ids, first * ctypes.sizeof(llama.llama_token)),
                ctypes.POINTER(llama.llama_token),
            )
            if llama.llama_decode(context, llama.llama_batch_get_one(part, count)):
                raise SystemExit(f"llama.cpp failed in a pass of {count} tokens")
        llama.llama_get_logits_ith(context, -1)  # this call waits until the pass has ended
        seconds = time.perf_counter() - began
        llama.llama_free(context)
        return seconds

    def logits(self, canvases: np.ndarray) -> np.ndarray:
        """Return the logits ``[B, L, V]`` of a pass over canvases ``[B, L]``.

        The array is in the engine's memory and only valid until the next pass.
        """
        B, L = canvases.shape
        self.prepare(B, L)
        # Remove earlier sequences. Only causal models store sequences.
        if self.is_causal:
            self.llama.llama_memory_clear(self.llama.llama_get_memory(self.context), True)
        np.ctypeslib.as_array(self.batch.token, shape=(B * L,))[:] = canvases.ravel()
        if self.llama.llama_decode(self.context, self.batch):
            raise SystemExit(f"llama.cpp failed in a pass of {B} x {L} tokens")
        return np.ctypeslib.as_array(
            self.llama.llama_get_logits(self.context), shape=(B, L, self.vocab_size)
        )
