"""Contestants: the engines whose speed generation.py compares.

The contestants are this project's runtime, the reference loop in torch, and llama.cpp. They have
the names ``native-PRECISION``, ``torch-fp32``, ``torch-bf16``, ``torch-bf16-compile`` and
``llama.cpp-TYPE`` (F16, Q8_0, Q4_0). Each contestant runs in a separate process, because the
benchmark measures the memory of the process. For the same reason, each process imports only the
engine of its contestant.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.shapes import bundle_of, checkpoint
from benchmarks.timing import clocked

if TYPE_CHECKING:
    from dlm_export.network.denoiser import Denoiser

Canvas = list[int]
NATIVE = "native"
TORCH_NAMES = ("torch-fp32", "torch-bf16", "torch-bf16-compile")
LLAMA_NAMES = ("llama.cpp-F16", "llama.cpp-Q8_0", "llama.cpp-Q4_0")


class NotOffered(Exception):
    """Raised if a contestant does not support a request. The message gives the reason."""


class Contestant(ABC):
    """An engine that has loaded a denoiser.

    Times are in seconds. The ``B`` sequences of a batch have the same length.
    """

    weights_bytes: int

    def facts(self) -> dict[str, Any]:
        """Return versions, build flags and other facts that the benchmark prints with results."""
        return {}

    @abstractmethod
    def generate(
        self, prompts: Sequence[Canvas], new: int, policy: dict[str, Any], passes: int | None
    ) -> dict[str, Any]:
        """Fill ``new`` tokens after each prompt.

        ``passes`` is the approximate number of passes to run. If it is None, or if the passes of
        the loop take different times, the whole loop runs. Returns ``canvases``, the ``nfe`` of the
        whole loop, the number of ``timed_passes``, and the ``seconds`` of the timed passes. Some
        engines and loops also report ``selection_s``, the seconds to select tokens in the timed
        passes, and ``cache_bytes``.
        """

    @abstractmethod
    def pass_of(self, B: int, T: int, S: int, R: int) -> Callable[[], float]:
        """Prepare a pass of ``T`` tokens and ``S`` cached tokens, in which ``R`` rows are scored.

        Returns a function that runs the pass and returns its seconds.
        """

    @abstractmethod
    def best_tokens(self, canvas: Canvas) -> list[int]:
        """Return the most likely token of each row in a full pass.

        This token may be the mask token.
        """


class Native(Contestant):
    """This project's runtime with a bundle."""

    def __init__(self, size: str, precision: str, threads: int) -> None:
        import dlm_runtime

        self.bundle = dlm_runtime.open(
            bundle_of(size, precision), threads=threads, check_hashes=False
        )
        graph = self.bundle.manifest["loop"]["graph"]["file"]
        entries = self.bundle.manifest["files"]
        self.weights_bytes = sum(
            entry["bytes"] for name, entry in entries.items() if name in (graph, f"{graph}.data")
        )

    def generate(
        self, prompts: Sequence[Canvas], new: int, policy: dict[str, Any], passes: int | None
    ) -> dict[str, Any]:
        began = time.perf_counter()
        done = self.bundle.generate_batch(
            tokens=prompts, new_tokens=new, max_batch=len(prompts), **policy
        )
        nfe = max(one.nfe for one in done)
        return {
            "seconds": time.perf_counter() - began,
            "selection_s": sum(one.timings["selection"] for one in done),
            "canvases": [one.tokens for one in done],
            "nfe": nfe,
            "timed_passes": nfe,
            "cache_bytes": sum(one.cache_bytes for one in done),
        }

    def pass_of(self, B: int, T: int, S: int, R: int) -> Callable[[], float]:
        return lambda: self.bundle.time_passes(T, S, R, 1, B)[0]

    def best_tokens(self, canvas: Canvas) -> list[int]:
        found: list[int] = self.bundle.logits(canvas).argmax(1).tolist()
        return found


def torch_pass(denoiser: Denoiser, B: int, T: int, S: int, R: int) -> Callable[[], Any]:
    """Return a function that runs one pass in torch, as the reference loop does.

    The pass computes the layers, the head for the scored rows, softmax, and the two most likely
    tokens.
    """
    import torch

    c, dtype = denoiser.network, denoiser.final_norm.weight.dtype
    ids, rows = torch.randint(0, 1000, (B, T)), torch.arange(R)
    positions = torch.arange(S, S + T).expand(B, T)
    shapes = [(B, kv_heads, S, head_size) for kv_heads, head_size in c.cache_shapes()]
    past = (
        [(torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)) for shape in shapes]
        if S
        else None
    )

    @torch.no_grad()
    def run() -> Any:
        features, _ = denoiser.hidden(ids, positions, past)
        logits = denoiser.project(features[:, rows]).float()
        logits[..., c.mask_token_id] = -torch.inf
        return logits.softmax(-1).topk(2)

    return run


class _Enough(Exception):
    """Raised to end the reference loop early."""


class Torch(Contestant):
    """The exporter's reference loop in torch.

    The layers of the denoiser run in eager mode, or compiled by torch.compile.
    """

    def __init__(self, size: str, kind: str, threads: int) -> None:
        import torch

        from dlm_export import families
        from dlm_export.checkpoints.folder import Checkpoint
        from dlm_export.families.base import Overrides

        torch.set_num_threads(threads)
        opened = Checkpoint(checkpoint(size))
        network = families.read_network(opened, Overrides())
        dtype = torch.bfloat16 if kind.startswith("bf16") else torch.float32
        self.denoiser = families.load(families.open_weights(opened, network), network, dtype)
        self.weights_bytes = sum(p.numel() * p.element_size() for p in self.denoiser.parameters())
        if kind.endswith("-compile"):
            # The layers (body) are compiled for two shapes of their input: the canvas and a block.
            # The head stays in eager mode, because it would have to be compiled for every number of
            # scored rows.
            torch._dynamo.config.recompile_limit = 256
            self.denoiser.hidden = torch.compile(self.denoiser.hidden, dynamic=False)  # type: ignore[method-assign]

    def generate(
        self, prompts: Sequence[Canvas], new: int, policy: dict[str, Any], passes: int | None
    ) -> dict[str, Any]:
        from dlm_export.network import reference
        from dlm_runtime.policy import Policy

        if len(prompts) > 1:
            raise NotOffered("the reference loop has one sequence")
        loop, steps = Policy(**policy), 0
        # All blocks take the same time, but the first pass of a block takes longer than the others,
        # because it fills the cache. Therefore end the loop after whole blocks.
        limit = None if passes is None else -(-passes // loop.block_length) * loop.block_length

        def count(_: object) -> None:
            nonlocal steps
            steps += 1
            if steps == limit:
                raise _Enough

        canvas, nfe = [], new
        began = time.perf_counter()
        try:
            done = reference.generate(self.denoiser, prompts[0], loop, new, on_step=count)
            canvas, nfe = done.tokens, done.nfe
        except _Enough:
            pass
        return {
            "seconds": time.perf_counter() - began,
            "canvases": [canvas],
            "nfe": nfe,
            "timed_passes": steps,
        }

    def pass_of(self, B: int, T: int, S: int, R: int) -> Callable[[], float]:
        return clocked(torch_pass(self.denoiser, B, T, S, R))

    def best_tokens(self, canvas: Canvas) -> list[int]:
        import torch

        with torch.no_grad():
            found: list[int] = self.denoiser(torch.tensor([canvas]))[0].argmax(-1).tolist()
        return found
