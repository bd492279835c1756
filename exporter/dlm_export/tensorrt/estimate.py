"""What an engine takes: the passes it is built for, and memory by formula, refused with the figure that would fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlm_export.targets import Target, available_memory_bytes
from dlm_runtime.errors import DlmError

WORKSPACE_BYTES = 1 << 30
HOST_OVERHEAD_BYTES, HOST_FACTOR = 1 << 30, 2.5  # of a build, over the weights: see BENCHMARKS.md
DEVICE_OVERHEAD_BYTES = 768 << 20  # CUDA's context, kernels and the builder's own scratch on a device


class EngineError(DlmError):
    """An engine cannot be built as asked; nothing was written."""

    exit_code = 2


class BuilderError(EngineError):
    """TensorRT refused the graph or failed on it."""

    exit_code = 1


@dataclass(frozen=True)
class EngineOptions:
    """How an engine is built. ``canvas``, ``block``: most tokens of a canvas and of a cached pass; None takes the bundle's."""

    canvas: int | None = None
    block: int | None = None
    workspace_bytes: int = WORKSPACE_BYTES
    timing_cache: Path | None = None
    allow_fallback: bool = False
    builder: str | None = None


@dataclass(frozen=True)
class Limits:
    """The largest passes that an engine takes: canvas without cache; block, also the most scored rows, with one."""

    canvas: int
    block: int

    def profiles(self) -> dict[str, dict[str, list[int]]]:
        """Optimisation profiles: ``[min, opt, max]`` of tokens T, cached S and scored rows R."""
        rows = [1, min(32, self.block), self.block]
        return {
            "prefill": {"tokens": [1, max(1, self.canvas // 2), self.canvas], "cached": [0, 0, 0], "rows": rows},
            "block": {
                "tokens": [1, min(32, self.block), self.block],
                "cached": [0, self.canvas // 2, self.canvas],
                "rows": rows,
            },
        }


@dataclass(frozen=True)
class Estimate:
    """Bytes that an engine takes, by formula. ``device``: weights, cache, passes and the context; ``host``: while building."""

    weights: int
    cache: int
    passes: int
    device: int
    host: int


def limits_of(denoiser: Mapping[str, Any], block_length: int, options: EngineOptions) -> Limits:
    """The passes that a loop of ``block_length`` makes, within what was asked. Raises EngineError."""
    longest = denoiser["max_canvas_length"]
    canvas = options.canvas or longest
    if canvas > longest:
        raise EngineError(f"--canvas {canvas} is longer than the denoiser's {longest} tokens")
    block = options.block or max(block_length or canvas, 32)
    if options.block and options.block > canvas:
        raise EngineError(f"--block {options.block} is longer than the canvas of {canvas} tokens")
    return Limits(canvas, min(block, canvas))


def estimate(denoiser: Mapping[str, Any], weights_bytes: int, limits: Limits) -> Estimate:
    """Memory by formula, in bytes; ``denoiser`` has the sizes that a manifest's does.

    cache = 2 (past, present) * 2 (keys, values) * layers * kv_heads * canvas * head_size * 2 bytes. Passes hold the
    activations of one layer (residual, norm, q, k, v, attention, the two halves of the MLP and their product), and fp32
    logits, probabilities and sorted rows of the scored ones.
    """
    d = denoiser
    canvas, rows = limits.canvas, limits.block
    cache = 2 * 2 * d["layers"] * d["kv_heads"] * canvas * d["head_size"] * 2
    width = 4 * d["hidden_size"] + 2 * (d["heads"] + d["kv_heads"]) * d["head_size"] + 3 * d["mlp_size"]
    passes = canvas * width * 2 + 4 * rows * d["vocab_size"] * 4
    device = weights_bytes + cache + passes + DEVICE_OVERHEAD_BYTES
    return Estimate(weights_bytes, cache, passes, device, int(HOST_FACTOR * weights_bytes) + HOST_OVERHEAD_BYTES)


def check_memory(denoiser: Mapping[str, Any], target: Target, weights_bytes: int, limits: Limits, *, on_host: bool) -> Estimate:
    """The estimate. Raises EngineError, with figures and what would fit, if the target is too small for it; ``on_host``:
    or this machine for building.
    """
    found = estimate(denoiser, weights_bytes, limits)
    if target.memory_bytes is not None and found.device > target.memory_bytes:
        raise EngineError(
            f"{target.name} has {_gb(target.memory_bytes)}, and a canvas of {limits.canvas} tokens in blocks of {limits.block} "
            f"needs {_gb(found.device)} (weights {_gb(found.weights)}, cache {_gb(found.cache)}, passes {_gb(found.passes)}). "
            f"{_what_fits(denoiser, target.memory_bytes, weights_bytes, limits)}"
        )
    available = available_memory_bytes()
    if on_host and available is not None and found.host > available:
        raise EngineError(
            f"building for {target.name} takes about {_gb(found.host)} of host memory, and {_gb(available)} are available. "
            "Run `dlm-export engine` on a larger machine (`dlm-export build --no-engine` leaves it out here)."
        )
    return found


def _what_fits(denoiser: Mapping[str, Any], memory: int, weights_bytes: int, limits: Limits) -> str:
    low, high = 0, limits.canvas  # the longest canvas that fits lies in [low, high)
    while high - low > 1:
        middle = (low + high) // 2
        if estimate(denoiser, weights_bytes, Limits(middle, min(limits.block, middle))).device <= memory:
            low = middle
        else:
            high = middle
    if low < 1:
        return "No canvas fits: choose a smaller precision, or a larger device."
    return f"--canvas {low} fits."


def _gb(count: int) -> str:
    return f"{count / 1e9:.2f} GB"
