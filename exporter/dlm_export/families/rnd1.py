"""Defines the family RND1, 30B-A3B, with full attention and shift 1.

RND1 was initialised from Qwen3-MoE, so its layers and tensor names are the same as in Qwen3-MoE.
"""

from __future__ import annotations

from dlm_export.checkpoints.folder import Checkpoint
from dlm_export.families.base import Family, Overrides
from dlm_export.families.trunks import MIXTURE, mixture_network
from dlm_export.network.spec import NetworkSpec


def read_network(checkpoint: Checkpoint, overrides: Overrides) -> NetworkSpec:
    """Read the network from a released RND1 config.json. Raises CheckpointError."""
    return mixture_network(checkpoint, overrides, "rnd1", shift=1)


FAMILY = Family("rnd1", ("RND1LM",), "RND1 30B-A3B", "rnd1", read_network, MIXTURE.origins)
