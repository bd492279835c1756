"""Defines the family of Dream 7B (arXiv:2508.15487), DiffuCoder (arXiv:2506.20639) and DreamOn.

All of them have full attention. Each row of logits predicts the next token (shift 1). Layers and
tensor names are the same as in Qwen2.5.

DreamOn (arXiv:2602.01326) has the class name and the layers of Dream, and a token for expanding and
one for deleting, with which its decoding loop changes the length of a canvas.
"""

from __future__ import annotations

from dlm_export.checkpoints.folder import Checkpoint
from dlm_export.families.base import Family, Overrides
from dlm_export.families.reading import with_tokens
from dlm_export.families.trunks import TRUNK, trunk_network
from dlm_export.network.spec import NetworkSpec

# Dream and DiffuCoder were trained on canvases of 2048 tokens, but their config.json contains the
# larger max_position_embeddings of Qwen2.5.
TRAINED_LENGTH = 2048


def read_network(checkpoint: Checkpoint, overrides: Overrides) -> NetworkSpec:
    """Read the network from a released Dream config.json. Raises CheckpointError."""
    network = trunk_network(
        checkpoint,
        overrides,
        "dream",
        qkv_bias=True,
        qk_norm=False,
        shift=1,
        longest=TRAINED_LENGTH,
    )
    return _with_resizing(checkpoint, network)


def _with_resizing(checkpoint: Checkpoint, network: NetworkSpec) -> NetworkSpec:
    """Add the tokens of DreamOn, if the checkpoint has them. Raises CheckpointError.

    Releases without ``delete_token_id`` delete with the end token.
    """
    generation = checkpoint.optional_json("generation_config.json")
    expand, delete = (
        generation.get(key) if (value := checkpoint.config.get(key)) is None else value
        for key in ("expand_token_id", "delete_token_id")
    )
    if expand is None and delete is None:
        return network
    if delete is None:
        delete = network.end_token_id
    return with_tokens(checkpoint, network, expand_token_id=expand, delete_token_id=delete)


FAMILY = Family(
    "dream",
    ("DreamModel",),
    "Dream 7B, DiffuCoder, DreamOn 7B",
    "dream-block",
    read_network,
    TRUNK.origins,
    "Qwen2ForCausalLM",
)
