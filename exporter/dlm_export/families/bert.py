"""Defines the family BERT (arXiv:1810.04805) of masked language models.

BERT has learned positions, token types, and a norm after each residual sum.
"""

from __future__ import annotations

from dlm_export.families.masked import family, layout

LAYOUT = layout(
    "bert",
    transform="cls.predictions.transform.dense",
    transform_norm="cls.predictions.transform.LayerNorm",
    decoder="cls.predictions.decoder",
    bias="cls.predictions.bias",
)
FAMILY = family(
    "bert",
    ("BertForMaskedLM", "BertForPreTraining"),
    "BERT",
    LAYOUT,
    first_position=lambda checkpoint: 0,
    mask_text="[MASK]",
    left_out=("cls.seq_relationship.",),  # the head that BERT uses for next-sentence prediction
)
