"""Tests of WeDLM.

WeDLM moves all mask tokens to the end of the sequence and then uses causal attention. The tests
compare logits with the transformers class with the same layers, for which the tests move the mask
tokens. ``test_published_loops`` compares the decoding loop with the authors' code.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import wedlm_config, write_checkpoint
from denoisers import under_native_loop
from published import MASK, prompt_of, random_network
from safetensors.torch import load_file
from slow_cases import slow_except

import dlm_runtime
from dlm_export import families
from dlm_export.build import build
from dlm_export.families.base import Overrides
from dlm_export.network import reference
from dlm_export.sources import open_source
from dlm_runtime.presets import PRESETS


def moved_logits(checkpoint: Path, like: str, ids: torch.Tensor, mask: int) -> torch.Tensor:
    """Return the logits ``[L, V]`` of a canvas ``[L]``, computed by transformers.

    The function moves mask tokens to the end of the sequence. All tokens keep their position ids.
    """
    transformers = pytest.importorskip("transformers", reason="transformers is not installed here")
    factory = getattr(transformers, f"{like}ForCausalLM")
    said = json.loads((checkpoint / "config.json").read_text())
    config = factory.config_class.from_dict(
        {key: said[key] for key in said if key not in ("architectures", "model_type")}
    )
    config._attn_implementation = "eager"
    model = factory(config).eval()
    model.load_state_dict(load_file(checkpoint / "model.safetensors"))
    order = torch.cat([torch.where(ids != mask)[0], torch.where(ids == mask)[0]])
    with torch.no_grad():
        found = model(
            ids[order][None],
            position_ids=order[None],
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            use_cache=False,
        ).logits[0]
    logits = torch.empty_like(found)
    logits[order] = found
    return logits


@pytest.mark.parametrize("like", ["Qwen2", "Qwen3"])
@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
def test_logits_equal_the_trunks_with_moved_masks(like: str, ratio: float, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, wedlm_config(like=like), seed=5)
    source = open_source(checkpoint, Overrides())
    mask = source.network.mask_token_id
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 140, (75,), generator=generator)
    ids[torch.rand(75, generator=generator) < ratio] = mask
    expected = moved_logits(checkpoint, like, ids, mask)
    with torch.no_grad():
        found = families.load(source.parameters, source.network)(ids[None])[0]
    assert float((found - expected).abs().max() / (expected.max() - expected.min())) < 2e-4


@pytest.mark.parametrize("like", slow_except(["Qwen3"], ["Qwen2", "Qwen3"]))
def test_a_bundle_is_built_with_native_attention(like: str, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", wedlm_config(like=like), seed=5)
    report = build(checkpoint, tmp_path / "bundle")
    assert report.parity is not None
    assert report.parity.misses == []
    assert report.kernels is not None
    attention = f"Block{'Normed' * (like == 'Qwen3')}CachedAttention"
    assert report.kernels["calls"][attention] == 2
    with dlm_runtime.open(tmp_path / "bundle", threads=1) as bundle:
        ids = torch.tensor([5, 150, 17, 150, 150, 9, 150])
        expected = moved_logits(checkpoint, like, ids, 150)
        found = torch.from_numpy(np.array(bundle.logits(ids.tolist())))
        assert float((found - expected).abs().max() / (expected.max() - expected.min())) < 2e-4
        one = bundle.generate(tokens=[5, 17, 9], max_new_tokens=40, stop="none")
        other = bundle.generate(tokens=[5, 17, 9], max_new_tokens=40, stop="none", cache="none")
    assert one.tokens == other.tokens


@pytest.mark.parametrize("seed", range(6))
def test_the_cache_is_exact_and_the_native_loop_equals_the_reference(seed: int) -> None:
    """Decided tokens never attend to mask tokens, so cached rows of decided tokens are exact."""
    denoiser = random_network(0, 0, seed, has_masks_last=True)
    tokens, new = prompt_of(5, seed), 21
    policy = PRESETS["wedlm"].with_fields({"block_length": 6, "threshold": 0.4, "stop": "none"})
    outputs = []
    for changes in ({}, {"cache": "none"}, {"store": "open"}):
        changed = policy.with_fields(changes)
        with under_native_loop(denoiser) as bundle:
            out = bundle.generate(tokens=tokens, max_new_tokens=new, **changed.as_dict())
        wanted = reference.generate(denoiser, tokens, changed, new)
        assert (out.tokens, out.nfe) == (wanted.tokens, wanted.nfe)
        outputs.append(out.tokens)
    assert outputs[0] == outputs[1] == outputs[2]
    assert MASK not in outputs[0]
