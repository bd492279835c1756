"""Computes the least memory that a build needs.

It is computed from the network's description, before any weights are read.
"""

from __future__ import annotations

from collections.abc import Mapping

from dlm_calibration.pieces import MOST_CORES, PIECE
from dlm_calibration.recipes import HIGH
from dlm_export import memory
from dlm_export.building.request import Job
from dlm_export.memory import resident_bytes
from dlm_export.network.layered import BATCH_TOKENS, MemoryLimitError
from dlm_export.network.spec import LinearSpec, NetworkSpec
from dlm_export.quantising import calibrate, gptq

_FP32 = 4
_OTHERS = 128 << 20  # memory that the stages do not count: Python objects, workspaces of engines
_ROUNDED = 16 << 20  # reported amounts are rounded up to multiples of this


def activation_bytes(job: Job) -> int | None:
    """Bytes that remain for the hidden states of canvases.

    This is the limit given by ``--memory``, or the available memory, less the memory that the
    largest stage needs for one layer. Returns ``None`` if the available memory is unknown. Raises
    MemoryLimitError if a layer does not fit; the error says how much memory is needed.
    """
    asked = job.request.options.memory_bytes
    limit = memory.available_memory_bytes() if asked is None else asked
    if limit is None:
        return None
    needs = needed_bytes(job)
    stage, most = max(needs.items(), key=lambda item: item[1])
    held = resident_bytes() + _OTHERS
    if held + most > limit:
        given = f"--memory {asked:,}" if asked is not None else f"{limit:,} bytes are free"
        # Rounded up, because the memory in use differs from run to run.
        least = -(-(held + most) // _ROUNDED) * _ROUNDED
        raise MemoryLimitError(
            f"{given}: to {stage} needs {least:,} bytes, one layer at a time. Allow that much{_for_pace(job, least)}."
        )
    return limit - held - most


def _for_pace(job: Job, least: int) -> str:
    """The end of an error message: how much memory lets calibration run fast.

    With this amount, generations run together. With less, each generation reads all layers again.
    """
    network, recipe, formats = job.source.network, job.request.recipe, job.formats
    if recipe is None or formats is None or not recipe.needs_states(formats):
        return ""
    token = network.cache_bytes(calibrate.computing_dtype(network, job.request.device).itemsize)
    return f" at least; with {least + 2 * token * BATCH_TOKENS:,} requests run together, which is much faster"


def needed_bytes(job: Job) -> dict[str, int]:
    """The bytes that each stage needs at once, without the hidden states of canvases.

    The keys describe the stages in words, for error messages.
    """
    network, recipe, formats = job.source.network, job.request.recipe, job.formats
    blocks = [_layers_of(network, i) for i in range(len(network.layers))]
    held = [
        layer
        for block in blocks
        for layer in block
        if (formats or {}).get(layer.path, HIGH) != HIGH
    ]
    widest = max(max(layer.inputs, layer.outputs) for block in blocks for layer in block)
    pass_bytes = 4 * _FP32 * BATCH_TOKENS * widest
    # The largest matrix, its codes, and one more copy, which is corrected or packed. Unquantised
    # weights need less, because they are processed in pieces.
    matrices = 3 * _FP32 * max((layer.inputs * layer.outputs for layer in held), default=0)
    # In a graph for GPUs, a stack of experts is one matrix. Its codes are in memory twice: as a
    # whole, and for each expert.
    together = max(
        (2 * layer.count * layer.inputs * layer.outputs for layer in held if layer.is_stacked),
        default=0,
    )
    joined = together if job.request.on_gpu else 0
    needs = {"write weights": max(matrices, joined) + 3 * _FP32 * PIECE * MOST_CORES}
    largest = max(sum(layer.inputs * layer.outputs for layer in block) for block in blocks)
    if recipe is not None and formats is not None and recipe.needs_states(formats):
        block = calibrate.computing_dtype(network, job.request.device).itemsize * largest
        solving = (
            max(_solving_bytes(each, formats) for each in blocks) if recipe.solver == "gptq" else 0
        )
        needs["calibrate"] = block + max(pass_bytes, matrices) + solving
    if job.request.options.check_parity and job.request.is_quantised:
        # Three blocks are in memory at once: the block in torch, the block of the graph, and while
        # weights are quantised a second block in torch. A quantised head is packed in memory; other
        # heads are memory-mapped.
        whole = max(
            sum(layer.count * layer.inputs * layer.outputs for layer in block) for block in blocks
        )
        of_block = 3 * _FP32 * (whole if job.request.on_gpu else largest)
        needs["check parity"] = max(of_block, network.vocab_size * network.hidden_size + pass_bytes)
    return needs


def _layers_of(network: NetworkSpec, i: int) -> list[LinearSpec]:
    return [layer for layer in network.linear_layers() if layer.path.startswith(f"blocks.{i}.")]


def _solving_bytes(block: list[LinearSpec], formats: Mapping[str, str]) -> int:
    """Bytes of the Gram matrices of a block's inputs, and of the factor of the largest one."""
    sites = {layer.site: layer.inputs for layer in block if formats.get(layer.path, HIGH) != HIGH}
    if not sites:
        return 0
    most = max(sites.values())
    factor = 2 * most**2 * (8 if most <= gptq.EXACT else _FP32)
    return sum(_FP32 * inputs**2 for inputs in sites.values()) + factor
