"""Defines the family D2F (Discrete Diffusion Forcing, arXiv:2508.09192).

D2F is published as LoRA adapters for LLaDA and Dream. The layers and tensor names are those of the
base model, but attention is block-causal: the prompt is one block, and blocks of 32 tokens follow
it. No file says so, because the adapters are plain PEFT folders, so the user must pass ``--family``.
"""

from __future__ import annotations

from dataclasses import replace

from dlm_export.checkpoints.folder import Checkpoint, CheckpointError
from dlm_export.families import dream, llada
from dlm_export.families.base import Family, Origin, Overrides
from dlm_export.network.spec import NetworkSpec

BASES = {name: base for base in (llada.FAMILY, dream.FAMILY) for name in base.architectures}
"""The family of the base model, by architecture."""
BLOCK_LENGTH = 32
"""The block length in most of the authors' commands. They also evaluate with 48 and 64."""


def read_network(checkpoint: Checkpoint, overrides: Overrides) -> NetworkSpec:
    """Read the network of the base model, and set its attention. Raises CheckpointError."""
    base = BASES[checkpoint.config.get("architectures")[0]].read(checkpoint, overrides)
    if base.resizes:
        raise CheckpointError(
            f"{checkpoint.config.path}: the checkpoint has expand and delete tokens (DreamOn), which --family d2f does not "
            "support"
        )
    block, longest = overrides.attention_block or BLOCK_LENGTH, base.max_canvas_length
    if longest * (1 + longest // block) >= 1 << 31:  # a kernel computes with such position ids
        raise CheckpointError(
            f"{checkpoint.path}: canvases of {longest} tokens are too long for --family d2f with blocks of {block}. Pass a "
            "smaller --max-canvas-length."
        )
    layers = [
        replace(
            layer,
            attention=replace(layer.attention, visibility="after-prompt", block_length=block),
        )
        for layer in base.layers
    ]
    return replace(base, family="d2f", layers=tuple(layers))


def origins(network: NetworkSpec, checkpoint: Checkpoint) -> dict[str, Origin]:
    """Map the parameters of the denoiser to the tensors of the base model."""
    return BASES[network.architecture].origins(network, checkpoint)


FAMILY = Family(
    "d2f",
    tuple(BASES),
    "D2F LLaDA 8B and Dream 7B",
    "d2f",
    read_network,
    origins,
    is_ambiguous=True,
)
