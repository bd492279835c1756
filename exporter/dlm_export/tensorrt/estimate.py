"""Computes the sizes of an engine's largest passes, and estimates the engine's memory."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from dlm_calibration.precisions import FORMATS
from dlm_export.memory import available_memory_bytes
from dlm_export.network.spec import ExpertsSpec, LayerSpec, NetworkSpec
from dlm_export.targets import Target
from dlm_runtime.errors import DlmError, ExitCode

LEAST_WORKSPACE_BYTES = 1 << 30
# Host memory of a build: a constant, plus a factor times the size of the weights. The factor depends
# on the number format of the weights. Measured in docs/benchmarks/gpus.md.
HOST_OVERHEAD_BYTES = 1 << 30
HOST_FACTORS = {None: 1.75, "int8": 1.75, "fp8": 1.75, "nvfp4": 2.25, "int4": 3.0}
# Device memory for CUDA's context, for kernels, and for the builder's temporary data.
DEVICE_OVERHEAD_BYTES = 768 << 20


class EngineError(DlmError):
    """Raised if an engine cannot be built as requested.

    When this error is raised, no file was written.
    """

    exit_code = ExitCode.WRONG_INPUT


class BuilderError(EngineError):
    """Raised if this machine lacks something that the build needs, or if the build fails."""

    exit_code = ExitCode.COULD_NOT


@dataclass(frozen=True)
class EngineOptions:
    """How an engine is built.

    ``canvas`` is the length of the longest canvas in tokens. ``block`` is the length of the longest
    pass with a cache, in tokens. If a value is ``None``, the bundle's setting is used. If
    ``workspace_bytes`` is ``None``, the workspace has ``Estimate.workspace`` bytes.

    A ``version_compatible`` engine can run in TensorRT's lean runtime, which has no builder. The
    engine file does not contain this runtime, because a program that loads it from the file runs
    code from the bundle. NVIDIA documents that such an engine needs a runtime of exactly the
    builder's version (``IRuntime::loadRuntime`` in NvInferRuntime.h of TensorRT 10 and 11).
    """

    canvas: int | None = None
    block: int | None = None
    workspace_bytes: int | None = None
    timing_cache: Path | None = None
    allow_fallback: bool = False
    builder: str | None = None
    version_compatible: bool = False


@dataclass(frozen=True)
class Limits:
    """The largest passes of an engine.

    A pass without a cache has at most ``canvas`` tokens. A pass with a cache has at most ``block``
    tokens. A pass computes logits for at most ``block`` rows.
    """

    canvas: int
    block: int

    def profiles(self) -> dict[str, dict[str, list[int]]]:
        """Return TensorRT's optimisation profiles. The keys are the kinds of passes.

        Each profile contains ``[min, opt, max]`` for three counts: the tokens, the cached tokens
        and the scored rows of a pass.
        """
        rows = [1, min(32, self.block), self.block]
        return {
            "prefill": {
                "tokens": [1, max(1, self.canvas // 2), self.canvas],
                "cached": [0, 0, 0],
                "rows": rows,
            },
            "block": {
                "tokens": [1, min(32, self.block), self.block],
                "cached": [0, self.canvas // 2, self.canvas],
                "rows": rows,
            },
        }


@dataclass(frozen=True)
class Estimate:
    """Estimated memory of an engine in bytes.

    ``device`` is all memory on the device: weights, cache, passes and CUDA's context. ``host`` is
    the memory that the build needs on the host.
    """

    weights: int
    cache: int
    passes: int
    device: int
    host: int

    @property
    def workspace(self) -> int:
        """The least workspace for building the engine.

        TensorRT compiles a pass as one layer, whose intermediate results are in the workspace. If
        they do not fit, the build fails with "OutOfMemory".
        """
        return max(LEAST_WORKSPACE_BYTES, self.passes)


def limits_of(longest: int, block_length: int, options: EngineOptions) -> Limits:
    """Return an engine's limits for a canvas of ``longest`` and a block of ``block_length`` tokens.

    ``options`` may reduce the limits. Raises EngineError.
    """
    canvas = options.canvas or longest
    if canvas > longest:
        raise EngineError(f"--canvas {canvas} is longer than the denoiser's {longest} tokens")
    block = options.block or max(block_length or canvas, 32)
    if options.block and options.block > canvas:
        raise EngineError(f"--block {options.block} is longer than the canvas of {canvas} tokens")
    return Limits(canvas, min(block, canvas))


def estimate(
    network: NetworkSpec,
    weights_bytes: int,
    limits: Limits,
    formats: Collection[str] = (),
    *,
    all_experts: bool = True,
) -> Estimate:
    """Estimate memory in bytes with these formulas.

    The cache contains the keys and values of the whole canvas, with 2 bytes per element. The cache
    is counted twice, because a pass takes one copy as input and writes a second copy. A pass needs
    the activations of the widest layer: residual, norm, q, k, v, attention, gate and up of the MLP,
    and their product. A layer with experts has the features of all experts, or only those of a
    token's experts if ``all_experts`` is false. If activations are quantised, a pass also needs up to
    one byte for the codes of each feature of the MLP. For each scored row, a pass also needs fp32 logits,
    fp32 probabilities and a sorted copy. With self-conditioning, it needs the fp32 embeddings of all tokens, and for each
    scored row, an fp32 embedding and probabilities in fp32 and in 2 bytes. With visible blocks or
    windows, a pass also needs the attention masks, as booleans and in 2 bytes. ``formats`` contains
    the formats of quantised layers. The one that needs the most host memory counts for all weights.
    """
    canvas, rows = limits.canvas, limits.block
    cache = 2 * canvas * network.cache_bytes(2)
    has_codes = any(FORMATS[name].activations is not None for name in formats)
    inner = [
        _inner_bytes(layer, all_experts=all_experts, has_codes=has_codes)
        for layer in network.layers
    ]
    passes = canvas * (8 * network.hidden_size + max(inner)) + 4 * rows * network.vocab_size * 4
    passes += 3 * mask_bytes(network, canvas)
    if network.conditioning is not None:
        passes += (canvas + rows) * network.hidden_size * 4 + rows * network.vocab_size * 6
    device = weights_bytes + cache + passes + DEVICE_OVERHEAD_BYTES
    numbers = {FORMATS[name].weights for name in formats} - {None} or {None}
    factor = max(HOST_FACTORS[number] for number in numbers)
    host = int(factor * weights_bytes) + HOST_OVERHEAD_BYTES
    return Estimate(weights_bytes, cache, passes, device, host)


def mask_bytes(network: NetworkSpec, canvas: int) -> int:
    """Return the bytes of all attention masks of a pass over ``canvas`` tokens, as booleans."""
    rules = {
        (a.visible_block, a.window, a.draft_block)
        for a in (layer.attention for layer in network.layers)
        if a.visible_block is not None or a.window is not None
    }
    return len(rules) * canvas**2


def _inner_bytes(layer: LayerSpec, *, all_experts: bool, has_codes: bool) -> int:
    """Return the bytes per token inside a layer, without the residual and its norm."""
    a, mlp = layer.attention, layer.mlp
    inside = mlp.size
    if isinstance(mlp, ExpertsSpec):
        inside = (mlp.count if all_experts else mlp.active) * mlp.size + mlp.shared_size
    return 4 * (a.heads + a.kv_heads) * a.head_size + (7 if has_codes else 6) * inside


def check_memory(
    network: NetworkSpec,
    target: Target,
    weights_bytes: int,
    limits: Limits,
    formats: Collection[str] = (),
    *,
    on_host: bool,
    all_experts: bool = True,
) -> Estimate:
    """Estimate the memory, and check that this much memory is available.

    Raises EngineError if the target has too little memory. If ``on_host`` is true, raises
    BuilderError if this machine has too little memory to build the engine. Both error messages
    state the needed bytes and the available bytes.
    """
    found = estimate(network, weights_bytes, limits, formats, all_experts=all_experts)
    if target.memory_bytes is not None and found.device > target.memory_bytes:
        raise EngineError(
            f"{target.name} has {_gb(target.memory_bytes)}, and a canvas of {limits.canvas} tokens in blocks of {limits.block} "
            f"needs {_gb(found.device)} (weights {_gb(found.weights)}, cache {_gb(found.cache)}, passes {_gb(found.passes)}). "
            f"{_what_fits(network, target.memory_bytes, weights_bytes, limits, formats, all_experts)}"
        )
    available = available_memory_bytes()
    if on_host and available is not None and found.host > available:
        raise BuilderError(
            f"building for {target.name} needs about {_gb(found.host)} of host memory, and {_gb(available)} are available. "
            f"Run `dlm-export engine` on a machine with more than that (`dlm-export build --no-engine` skips it here)."
        )
    return found


def _what_fits(
    network: NetworkSpec,
    memory: int,
    weights_bytes: int,
    limits: Limits,
    formats: Collection[str],
    all_experts: bool,
) -> str:
    low, high = 0, limits.canvas  # invariant: the longest canvas that fits is in [low, high)
    while high - low > 1:
        middle = (low + high) // 2
        shorter = Limits(middle, min(limits.block, middle))
        found = estimate(network, weights_bytes, shorter, formats, all_experts=all_experts)
        if found.device <= memory:
            low = middle
        else:
            high = middle
    if low < 1:
        return "No canvas fits: choose a smaller precision, or a larger device."
    return f"--canvas {low} fits."


def _gb(count: int) -> str:
    return f"{count / 1e9:.2f} GB"
