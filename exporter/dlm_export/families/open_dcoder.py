"""Defines the family Open-dCoder, 0.5B (https://github.com/pengzhangzhi/Open-dLLM).

Open-dCoder was initialised from Qwen2.5-Coder, so its layers and tensor names are the same as in
Qwen2. It has full attention and shift 1. Its config.json names transformers' class for Qwen2, as
many autoregressive models do. So the user must pass ``--family``.
"""

from __future__ import annotations

from dlm_export.checkpoints.folder import Checkpoint
from dlm_export.families.base import Family, Overrides
from dlm_export.families.trunks import TRUNK, trunk_network
from dlm_export.network.spec import NetworkSpec

# The longest text in configs/pretrain/qwen2_5_coder_500M.yaml of the authors' code. config.json
# contains the larger max_position_embeddings of Qwen2.5.
TRAINED_LENGTH = 4096


def read_network(checkpoint: Checkpoint, overrides: Overrides) -> NetworkSpec:
    """Read the network from a released Open-dCoder config.json. Raises CheckpointError."""
    return trunk_network(
        checkpoint,
        overrides,
        "open-dcoder",
        qkv_bias=True,
        qk_norm=False,
        shift=1,
        longest=TRAINED_LENGTH,
    )


FAMILY = Family(
    "open-dcoder",
    ("Qwen2ForCausalLM",),
    "Open-dCoder 0.5B",
    "dream",
    read_network,
    TRUNK.origins,
    "Qwen2ForCausalLM",
    is_ambiguous=True,
)
