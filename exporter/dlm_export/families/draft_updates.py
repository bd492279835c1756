"""Reads a LoRA adapter as the low-rank updates of a network's matrices for draft passes."""

from __future__ import annotations

import re
import reprlib
from dataclasses import replace

from dlm_export.checkpoints.adapters import CONFIG_FILE, PREFIX, read_adapter
from dlm_export.checkpoints.folder import Checkpoint, CheckpointError
from dlm_export.families.base import Layout, Origin
from dlm_export.network.spec import LowRankSpec, MlpSpec, NetworkSpec

_SUFFIX = re.compile(r"(?:^|[./])(layers\.\d+\.\w+\.\w+\.lora_[AB]\.weight)$")
"""Matches the end of a tensor's name, from ``layers`` on. The start depends on the training code."""


def with_updates(
    network: NetworkSpec, layout: Layout, checkpoint: Checkpoint, folder: str
) -> NetworkSpec:
    """Add the updates of the adapter in ``folder``. All layers get the same updates.

    Without such an adapter, the function returns the network as it is. ``layout`` contains the
    names of the network's tensors. Raises CheckpointError.
    """
    adapter = read_adapter(checkpoint, folder)
    if adapter is None:
        return network
    roles = _roles(network, layout)
    unknown = [module for module in adapter.modules if module not in roles]
    if unknown:
        raise CheckpointError(
            f"{checkpoint.path / folder / CONFIG_FILE}: target_modules contains {', '.join(map(reprlib.repr, unknown))}, but "
            f"only these modules can be adapted: {', '.join(roles)}"
        )
    updates = tuple(
        LowRankSpec(role, adapter.rank, adapter.scale)
        for module, role in roles.items()
        if module in adapter.modules
    )
    layers = tuple(replace(layer, draft_updates=updates) for layer in network.layers)
    return replace(network, layers=layers)


def _roles(network: NetworkSpec, layout: Layout) -> dict[str, str]:
    """Map the names of modules that can be adapted, such as ``o_proj``, to roles of matrices."""
    linear = [layer for layer in network.linear_layers() if layer.path.startswith("blocks.0.")]
    assert all(isinstance(layer.mlp, MlpSpec) for layer in network.layers)
    return {_module(layout, layer.path).rpartition(".")[2]: layer.role for layer in linear}


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
    read_adapter(checkpoint, folder)
    by_suffix: dict[str, str] = {}
    for name in checkpoint.tensors:
        found = _SUFFIX.search(name) if name.startswith(f"{folder}/") else None
        if found is not None and by_suffix.setdefault(found[1], name) != name:
            raise CheckpointError(
                f"{checkpoint.path}: {by_suffix[found[1]]} and {name} belong to the same module. Keep only one of them."
            )
    for path, (layer, _) in network.draft_updates().items():
        for parameter, kind in (("a", "A"), ("b", "B")):
            released = f"{_module(layout, layer.path)}.lora_{kind}.weight"
            suffix = _SUFFIX.search(released)
            assert suffix is not None, released
            tensor = by_suffix.get(suffix[1], f"{folder}/{PREFIX}{released}")
            origins[f"{path}.{parameter}"] = Origin.of(tensor, transpose=True)
    return origins
