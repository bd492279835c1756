"""Computes the logits of a checkpoint with the transformers class that has the same layers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file


def trunk_logits(
    checkpoint: Path, class_name: str, block: int | None, ids: torch.Tensor
) -> torch.Tensor:
    """Return the logits of a checkpoint, computed by a transformers class.

    Attention is block-causal with blocks of ``block`` tokens, or full if ``block`` is None. The
    function uses no code of this project.
    """
    transformers = pytest.importorskip("transformers", reason="transformers is not installed here")
    factory = getattr(transformers, class_name)
    said = json.loads((checkpoint / "config.json").read_text())
    config = factory.config_class.from_dict(
        {key: said[key] for key in said if key not in ("architectures", "model_type")}
    )
    config._attn_implementation = "eager"
    model = factory(config).eval()
    weights = load_file(checkpoint / "model.safetensors")
    left = model.load_state_dict(weights, strict=False)
    assert left.unexpected_keys == []
    assert set(left.missing_keys) <= {"lm_head.weight"}
    length = ids.shape[1]
    mask = torch.zeros(1, 1, length, length)
    for query in range(length):
        for key in range(length):
            if block is not None and key // block > query // block:
                mask[0, 0, query, key] = -torch.inf
    with torch.no_grad():
        logits: torch.Tensor = model(ids, attention_mask=mask, use_cache=False).logits
    return logits
