"""Defines the families Uno and I-DLM: autoregressive networks that draft tokens.

All attention is causal, and each row of logits predicts the token at the next position. A pass
verifies drafted tokens, so the text is that of the autoregressive network. The last rows of a pass
are draft rows.

In Uno (arXiv:2609.04010), draft rows contain random tokens, and use a LoRA adapter that belongs to
the network. The released bundles have the layers and tensor names of Qwen3, and the class name of
SDAR. Networks of Llama and Qwen3, and K2-Horizon, which has the layers of Llama, need an adapter
too. SGLang 0.5.23 (speculative/uno_worker_v2.py) drafts and verifies in two passes. Here, one pass
does both, as in I-DLM.

In I-DLM (arXiv:2604.11035), draft rows contain mask tokens, and there is no adapter. The releases
have the class name of SDAR.
"""

from __future__ import annotations

from dlm_export.checkpoints.adapters import DRAFT_ADAPTERS, names_of
from dlm_export.checkpoints.folder import Checkpoint, CheckpointError
from dlm_export.families.base import Family, Overrides
from dlm_export.families.draft_updates import origins_with_updates, with_updates
from dlm_export.families.reading import block_length
from dlm_export.families.trunks import TRUNK, trunk_network
from dlm_export.network.spec import NetworkSpec

_, ADAPTER = DRAFT_ADAPTERS
SDAR = ("SDARForCausalLM", "SDARMoeForCausalLM")
QWEN = ("Qwen3ForCausalLM", SDAR[0])
"""The architectures with norms of queries and keys."""
DRAFT_BLOCK = 4
"""The default length of a block. The adapters do not record the length in training."""
OF_OTHER_LOOPS = ("block_size", "mask_token_id", "fuse_cross_entropy")
"""Keys of SDAR's config.json that have no effect on causal attention."""


def is_causal(checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint with SDAR's class name has causal attention.

    A Uno bundle's config.json lacks the key, because its class has causal attention by default.
    """
    return checkpoint.config.flag("use_regular_causal", ADAPTER in names_of(checkpoint))


def refuse_causal(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError if a mixture of experts with SDAR's class name has causal attention."""
    if is_causal(checkpoint):
        raise CheckpointError(
            f"{checkpoint.config.path}: use_regular_causal: mixtures of experts with causal attention are not supported."
        )


def _claims(checkpoint: Checkpoint) -> bool:
    names, has_adapter = checkpoint.config.get("architectures"), ADAPTER in names_of(checkpoint)
    return names[0] not in SDAR or (has_adapter and is_causal(checkpoint))


def read_idlm(checkpoint: Checkpoint, overrides: Overrides) -> NetworkSpec:
    """Read the network from a config.json of I-DLM. Raises CheckpointError."""
    checkpoint.config.require("attention_bias", False)
    checkpoint.config.get("fuse_cross_entropy")  # used in training only
    return trunk_network(
        checkpoint,
        overrides,
        "i-dlm",
        qkv_bias=False,
        qk_norm=True,
        block_length=block_length(checkpoint, "block_size", overrides),
        visibility="causal",
        shift=1,
    )


def read_network(checkpoint: Checkpoint, overrides: Overrides) -> NetworkSpec:
    """Read the network from a config.json of Llama or Qwen3. Raises CheckpointError."""
    config = checkpoint.config
    name = config.get("architectures")[0]
    if overrides.no_adapter or ADAPTER not in names_of(checkpoint):
        cause = " (use_regular_causal)" if name in SDAR else ""
        raise CheckpointError(
            f"{checkpoint.path}: this {name} is autoregressive{cause}. It needs a LoRA adapter for draft passes (Uno). Pass "
            f"--adapter FOLDER, or put the adapter into the folder {ADAPTER} beside the weights. Do not pass --no-adapter."
        )
    config.require("attention_bias", False)
    config.get("pretraining_tp")  # splits products without changing them
    for key in OF_OTHER_LOOPS if name in SDAR else ():
        config.get(key)
    network = trunk_network(
        checkpoint,
        overrides,
        "uno",
        qkv_bias=False,
        qk_norm=name in QWEN,
        block_length=overrides.attention_block or DRAFT_BLOCK,
        visibility="causal",
        shift=1,
        noise="uniform",
    )
    return with_updates(network, TRUNK, checkpoint, ADAPTER)


FAMILY = Family(
    "uno",
    ("K2HorizonForCausalLM", "LlamaForCausalLM", *QWEN),
    "Uno: K2-Horizon, Llama, Qwen3 and Uno bundles, with an adapter for draft passes",
    "self-speculation",
    read_network,
    lambda network, checkpoint: origins_with_updates(network, TRUNK, checkpoint, ADAPTER),
    draft_adapter=ADAPTER,
    claims=_claims,
)
IDLM_FAMILY = Family(
    "i-dlm",
    SDAR[:1],
    "I-DLM 8B",
    FAMILY.default_preset,
    read_idlm,
    TRUNK.origins,
    claims=lambda checkpoint: is_causal(checkpoint) and not _claims(checkpoint),
)
