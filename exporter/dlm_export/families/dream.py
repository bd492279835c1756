"""Defines the family of Dream 7B (arXiv:2508.15487) and DiffuCoder (arXiv:2506.20639).

Dream and DiffuCoder have full attention. Each row of logits predicts the next token (shift 1).

Layers and tensor names are the same as in Qwen2.5.
"""

from __future__ import annotations

from dlm_export.checkpoints.folder import Checkpoint, CheckpointError
from dlm_export.families.base import Family, Overrides
from dlm_export.families.trunks import TRUNK, trunk_network
from dlm_export.network.spec import NetworkSpec

# Dream and DiffuCoder were trained on canvases of 2048 tokens, but their config.json contains the
# larger max_position_embeddings of Qwen2.5.
TRAINED_LENGTH = 2048
OF_DREAMON = ("expand_token_id", "delete_token_id")
"""Keys of DreamOn's tokens. Older releases delete with the end token and lack the second key."""


def read_network(checkpoint: Checkpoint, overrides: Overrides) -> NetworkSpec:
    """Read the network from a released Dream config.json. Raises CheckpointError."""
    _refuse_dreamon(checkpoint)
    return trunk_network(
        checkpoint,
        overrides,
        "dream",
        qkv_bias=True,
        qk_norm=False,
        shift=1,
        longest=TRAINED_LENGTH,
    )


def _refuse_dreamon(checkpoint: Checkpoint) -> None:
    """Reject DreamOn, which has Dream's class name and layers. Raises CheckpointError."""
    generation = checkpoint.optional_json("generation_config.json")
    for key in OF_DREAMON:
        if checkpoint.config.get(key) is not None or generation.get(key) is not None:
            raise CheckpointError(
                f"{checkpoint.path}: {key} belongs to DreamOn, which is not supported: its tokens for expanding and deleting "
                "change the length of the canvas. Use Dream."
            )


FAMILY = Family(
    "dream",
    ("DreamModel",),
    "Dream 7B, DiffuCoder",
    "dream-block",
    read_network,
    TRUNK.origins,
    "Qwen2ForCausalLM",
)
