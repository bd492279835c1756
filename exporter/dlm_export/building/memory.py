"""How much memory a build needs at least, known from the network before anything is read."""

from __future__ import annotations

from dlm_export import targets
from dlm_export.building.request import Job
from dlm_export.memory import resident_bytes
from dlm_export.network.layered import BATCH_TOKENS, MemoryLimitError
from dlm_export.network.spec import LinearSpec
from dlm_export.quantising import calibrate, gptq

_FP32 = 4
_OTHERS = 128 << 20  # what no stage's count has: Python's objects, engines' workspaces


def activation_bytes(job: Job) -> int | None:
    """Of ``--memory``, or of what the machine has free: what canvases' states may take beside what a layer needs.

    None: nobody knows how much there is. Raises MemoryLimitError if a layer does not fit, with what would.
    """
    asked = job.request.options.memory_bytes
    limit = targets.available_memory_bytes() if asked is None else asked
    if limit is None:
        return None
    needs = needed_bytes(job)
    stage, most = max(needs.items(), key=lambda item: item[1])
    held = resident_bytes() + _OTHERS
    if held + most > limit:
        given = f"--memory {asked:,}" if asked is not None else f"{limit:,} bytes are free"
        raise MemoryLimitError(f"{given}: to {stage} takes {held + most:,} bytes, one layer at a time. Allow that much.")
    return limit - held - most


def needed_bytes(job: Job) -> dict[str, int]:
    """Stage, in words -> bytes that it holds at once beside the canvases' states."""
    network, recipe, formats = job.source.network, job.request.recipe, job.formats
    layers = network.linear_layers()
    largest = max(layer.inputs * layer.outputs for layer in layers)
    needs = {"write weights": 2 * _FP32 * max(largest, network.vocab_size * network.hidden_size)}
    if recipe is None or formats is None or not recipe.needs_states(formats):
        return needs
    blocks: dict[str, list[LinearSpec]] = {}
    for layer in layers:
        blocks.setdefault(layer.path.rpartition(".")[0].split(".mlp")[0].split(".attention")[0], []).append(layer)
    element = calibrate.holding_dtype(network).itemsize
    block = max(element * sum(each.inputs * each.outputs for each in members) for members in blocks.values())
    widest = max(max(layer.inputs, layer.outputs) for layer in layers if layer.path != "head")
    pass_bytes = 4 * _FP32 * BATCH_TOKENS * widest
    solving = 0
    if recipe.solver == "gptq":
        for members in blocks.values():
            sites = {layer.site: layer.inputs for layer in members if formats.get(layer.path, "high") != "high"}
            if not sites:
                continue
            grams = sum(_FP32 * inputs**2 for inputs in sites.values())
            most = max(sites.values())
            factor = 2 * most**2 * (8 if most <= gptq.EXACT else _FP32)
            solving = max(solving, grams + factor)
    matrices = 3 * _FP32 * max(layer.inputs * layer.outputs for layer in layers if formats.get(layer.path, "high") != "high")
    return needs | {"calibrate": block + max(pass_bytes, matrices) + solving}
