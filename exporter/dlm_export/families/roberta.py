"""Defines the family RoBERTa (arXiv:1907.11692), which has the layers of BERT.

Position 0 uses the row of the table of learned positions whose index is the padding token's id plus
1. Positions count only tokens that are not padding. Padding uses the row before.
"""

from __future__ import annotations

from dlm_export.checkpoints.folder import Checkpoint
from dlm_export.families.masked import family, layout
from dlm_export.families.reading import padding_token


def _first_position(checkpoint: Checkpoint) -> int:
    """Return the index of the table row for position 0: the padding token's id plus 1."""
    config = checkpoint.config
    if config.get("pad_token_id") is None:
        return 2  # the default of transformers' RobertaConfig is 1
    pad = padding_token(checkpoint, config, config.integer("vocab_size"))
    return 0 if pad is None else pad + 1


LAYOUT = layout(
    "roberta",
    transform="lm_head.dense",
    transform_norm="lm_head.layer_norm",
    decoder="lm_head.decoder",
    bias="lm_head.bias",
)
FAMILY = family(
    "roberta",
    ("RobertaForMaskedLM",),
    "RoBERTa",
    LAYOUT,
    first_position=_first_position,
    mask_text="<mask>",
    left_out=(),
)
