"""Computes the smallest amount of memory that a build needs.

The functions of this module use only the description of the network. They load no weights.
"""

from __future__ import annotations

from collections.abc import Mapping

from dlm_calibration.pieces import MOST_CORES, PIECE
from dlm_calibration.precisions import HIGH
from dlm_export import memory
from dlm_export.building.request import Job
from dlm_export.building.writing import table_dtype
from dlm_export.graph import write
from dlm_export.memory import resident_bytes
from dlm_export.network.layered import BATCH_TOKENS, MemoryLimitError
from dlm_export.network.spec import LinearSpec, NetworkSpec
from dlm_export.quantising import calibrate, gptq

_FP32 = 4
_OTHERS = 128 << 20  # bytes reserved for Python objects, for workspaces of engines, and so on
_ROUNDED = 16 << 20  # error messages round amounts up to multiples of this number


def activation_bytes(job: Job) -> int | None:
    """Compute how many bytes of memory the hidden states of canvases may use.

    If ``--memory`` is given, its value is the limit for the whole process. Otherwise, the available
    memory is the limit. From this limit, the function subtracts the memory of the stage that needs
    the most.

    Returns ``None`` if the available memory is unknown. Raises MemoryLimitError if the limit is too
    small for a stage. The error message says how much memory is needed.
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
        # Round up, so that small changes in the memory of this process rarely change the message.
        least = -(-(held + most) // _ROUNDED) * _ROUNDED
        raise MemoryLimitError(
            f"{given}: to {stage} needs {least:,} bytes, one layer at a time. Allow that much{_for_pace(job, least)}."
        )
    return limit - held - most


def _for_pace(job: Job, least: int) -> str:
    """Return the part of an error message that says how much memory makes calibration fast."""
    network, recipe, formats = job.source.network, job.request.recipe, job.formats
    if recipe is None or formats is None or not recipe.needs_states(formats):
        return ""
    token = network.cache_bytes(calibrate.computing_dtype(network, job.request.device).itemsize)
    return f" at least; with {least + 2 * token * BATCH_TOKENS:,} requests run together, which is much faster"


def needed_bytes(job: Job) -> dict[str, int]:
    """Return how many bytes of memory each stage needs at most.

    The hidden states of canvases are not counted. The keys are the names of the stages in error
    messages.
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
    # Quantising a matrix takes three times the fp32 size of the matrix: for the matrix, for its
    # codes, and for a working copy. Unquantised matrices need less memory, because they are
    # processed a few rows at a time.
    matrices = 3 * _FP32 * max((layer.inputs * layer.outputs for layer in held), default=0)
    # If a graph computes all experts, the matrices of all experts of a layer form one matrix. The
    # codes are in memory twice: in one array for the whole matrix, and in a separate array for each
    # expert.
    together = max(
        (2 * layer.count * layer.inputs * layer.outputs for layer in held if layer.is_stacked),
        default=0,
    )
    is_joined = network.joins_experts(job.request.form)
    joined = together if is_joined else 0
    needs = {"write weights": max(matrices, joined) + 3 * _FP32 * PIECE * MOST_CORES}
    largest = max(sum(layer.inputs * layer.outputs for layer in block) for block in blocks)
    if recipe is not None and formats is not None and recipe.needs_states(formats):
        block = calibrate.computing_dtype(network, job.request.device).itemsize * largest
        solving = (
            max(_solving_bytes(each, formats) for each in blocks) if recipe.solver == "gptq" else 0
        )
        needs["calibrate"] = block + max(pass_bytes, matrices) + solving
    if job.request.options.check_parity and job.request.is_quantised:
        # Three copies of a transformer block can be in memory at the same time: one copy in torch,
        # one copy in the graph, and another copy in torch while weights are quantised. A quantised
        # head takes at most one byte per weight. An unquantised head is memory-mapped.
        whole = max(
            sum(layer.count * layer.inputs * layer.outputs for layer in block) for block in blocks
        )
        of_block = 3 * _FP32 * (whole if is_joined else largest)
        needs["check parity"] = max(of_block, network.vocab_size * network.hidden_size + pass_bytes)
    if job.request.is_judged and network.draft_block is not None:
        # ONNX Runtime copies the weights of the graph that computes draft passes. The native
        # runtime opens the graph too, to generate texts and to compute causal passes.
        has_texts = job.request.options.quantise.effort.has_texts(network)
        graphs = 2 if has_texts or network.is_verifying else 1
        graph = write.data_bytes(network, job.base, formats, table_dtype(job).itemsize)
        needs["judge"] = graphs * graph + _FP32 * largest + pass_bytes
    return needs


def _layers_of(network: NetworkSpec, i: int) -> list[LinearSpec]:
    return [layer for layer in network.linear_layers() if layer.path.startswith(f"blocks.{i}.")]


def _solving_bytes(block: list[LinearSpec], formats: Mapping[str, str]) -> int:
    """Return the size of GPTQ's Gram matrices for a block, and of the largest factorisation."""
    sites = {layer.site: layer.inputs for layer in block if formats.get(layer.path, HIGH) != HIGH}
    if not sites:
        return 0
    most = max(sites.values())
    factor = 2 * most**2 * (8 if most <= gptq.EXACT else _FP32)
    return sum(_FP32 * inputs**2 for inputs in sites.values()) + factor
