"""Reads a LoRA adapter as the low-rank updates of a network's matrices for draft passes."""

from __future__ import annotations

import re
import reprlib
from dataclasses import replace
from pathlib import Path

from dlm_export.checkpoints.adapters import PREFIX, Adapter, config_file, read_adapter
from dlm_export.checkpoints.folder import Checkpoint, CheckpointError
from dlm_export.families.base import Layout, Origin
from dlm_export.network.spec import LowRankSpec, MlpSpec, NetworkSpec

_SUFFIX = re.compile(r"(?:^|[./])(layers\.\d+\.\w+\.\w+\.lora_[AB]\.weight)$")
"""Matches the end of a tensor's name, from ``layers`` on. The start depends on the training code."""


def with_updates(
    network: NetworkSpec, layout: Layout, checkpoint: Checkpoint, folder: str
) -> NetworkSpec:
    """Add the updates of the adapter ``folder``. All layers get the same updates.

    Without such an adapter, the function returns the network as it is. ``layout`` contains the
    names of the network's tensors. Raises CheckpointError.
    """
    adapter = read_adapter(checkpoint, folder)
    if adapter is None:
        return network
    updates = _updates(network, layout, adapter, config_file(checkpoint, folder))
    layers = tuple(replace(layer, draft_updates=updates) for layer in network.layers)
    return replace(network, layers=layers)


def _updates(
    network: NetworkSpec, layout: Layout, adapter: Adapter, config: Path
) -> tuple[LowRankSpec, ...]:
    """Return the updates of each layer. Raises CheckpointError."""
    assert all(isinstance(layer.mlp, MlpSpec) for layer in network.layers)
    adaptable = {
        _module(layout, layer.path).rpartition(".")[2]: layer
        for layer in network.linear_layers()
        if layer.path.startswith("blocks.0.")
    }
    unknown = [module for module in adapter.modules if module not in adaptable]
    if unknown:
        raise CheckpointError(
            f"{config}: target_modules contains {', '.join(map(reprlib.repr, unknown))}, but only these modules can be "
            f"adapted: {', '.join(adaptable)}"
        )
    chosen = {module: layer for module, layer in adaptable.items() if module in adapter.modules}
    for module, layer in chosen.items():
        if adapter.rank > min(layer.inputs, layer.outputs):
            raise CheckpointError(
                f"{config}: r is {adapter.rank}, but {module} has {layer.inputs} inputs and {layer.outputs} outputs; r must "
                "not be above either number"
            )
    return tuple(LowRankSpec(layer.role, adapter.rank) for layer in chosen.values())


def _module(layout: Layout, path: str) -> str:
    return layout.released(f"{path}.weight").removesuffix(".weight")


def origins_with_updates(
    network: NetworkSpec, layout: Layout, checkpoint: Checkpoint, folder: str
) -> dict[str, Origin]:
    """Return the tensors of every parameter of a network that ``with_updates`` returned.

    Raises CheckpointError.
    """
    plain = replace(
        network, layers=tuple(replace(layer, draft_updates=()) for layer in network.layers)
    )
    origins = layout.origins(plain, checkpoint)
    if not network.has_draft_updates:
        return origins
    adapter = read_adapter(checkpoint, folder)
    assert adapter is not None
    by_suffix: dict[str, str] = {}
    for name in checkpoint.tensors:
        found = _SUFFIX.search(name) if name.startswith(f"{folder}/") else None
        if found is not None and by_suffix.setdefault(found[1], name) != name:
            raise CheckpointError(
                f"{checkpoint.path}: {by_suffix[found[1]]} and {name} belong to the same module. Keep only one of them."
            )
    for path, (layer, _) in network.draft_updates().items():
        for parameter, kind, scale in (("a", "A", 1.0), ("b", "B", adapter.scale)):
            released = f"{_module(layout, layer.path)}.lora_{kind}.weight"
            suffix = _SUFFIX.search(released)
            assert suffix is not None, released
            tensor = by_suffix.get(suffix[1], f"{folder}/{PREFIX}{released}")
            shape = checkpoint.tensors[tensor].shape if tensor in checkpoint.tensors else ()
            if kind == "A" and shape and shape[0] != adapter.rank:
                raise CheckpointError(
                    f"{config_file(checkpoint, folder)}: r is {adapter.rank}, but the rank of {tensor} is {shape[0]}"
                )
            origins[f"{path}.{parameter}"] = Origin.of(tensor, transpose=True, scale=scale)
    return origins
