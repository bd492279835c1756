"""The family RoBERTa (arXiv:1907.11692): the layers of BERT, with positions that start after the
padding token's.
"""

from __future__ import annotations

from dlm_export.checkpoints.folder import Checkpoint
from dlm_export.families.masked import family, layout


def _first_position(checkpoint: Checkpoint) -> int:
    """Return the row of position 0. The rows up to the padding token's id are not used."""
    default = 1  # of transformers' RobertaConfig
    return checkpoint.config.integer("pad_token_id", default=default, low=0) + 1


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
