"""Nemotron-Labs-Diffusion: parity with transformers' Ministral 3, draft passes, and self-speculation
in the reference loop and in the native loop.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import nemotron_config, write_checkpoint
from safetensors.torch import load_file

from dlm_export import families
from dlm_export.checkpoints.folder import Checkpoint
from dlm_export.families.base import Overrides
from dlm_export.network import reference
from dlm_export.network.denoiser import Denoiser
from dlm_runtime.presets import PRESETS

transformers = pytest.importorskip("transformers")


def denoiser_of(folder: Path, config: dict[str, Any], seed: int = 0, **overrides: int) -> Denoiser:
    """Write a random checkpoint and read it."""
    checkpoint = Checkpoint(write_checkpoint(folder, config, seed=seed))
    network = families.read_network(checkpoint, Overrides(**overrides))
    return families.load(families.open_weights(checkpoint, network), network)


def ministral(folder: Path, config: dict[str, Any]) -> torch.nn.Module:
    """Transformers' Ministral 3 with the same weights."""
    own = ("architectures", "model_type", "attn_implementation", "block_size", "mask_token_id")
    settings = {name: value for name, value in config.items() if name not in own}
    model = transformers.Ministral3ForCausalLM(
        transformers.Ministral3Config(**settings, attn_implementation="eager")
    )
    model.load_state_dict(
        {
            name.replace("encoder.", "model.").replace("diffusion_head.", "lm_head."): tensor
            for name, tensor in load_file(folder / "model.safetensors").items()
        },
        strict=not config["tie_word_embeddings"],
    )
    return model.eval()


def random_config(seed: int) -> dict[str, Any]:
    """A random config, with an original length that the canvases of the tests exceed."""
    draw = random.Random(seed)
    kv_heads, tied = draw.choice((1, 2)), draw.random() < 0.3
    rope = nemotron_config()["rope_parameters"] | {
        "factor": draw.choice((1.0, 4.0, 16.0)),
        "original_max_position_embeddings": draw.choice((8, 24, 100)),
        "llama_4_scaling_beta": draw.choice((0.1, 0.5)),
        "mscale": draw.choice((1.0, 0.7)),
        "rope_theta": draw.choice((1e4, 1e6)),
    }
    return nemotron_config(
        num_hidden_layers=draw.choice((1, 3)),
        num_key_value_heads=kv_heads,
        num_attention_heads=kv_heads * draw.choice((1, 2, 4)),
        head_dim=draw.choice((8, 16, 32)),
        hidden_size=draw.choice((32, 64)),
        tie_word_embeddings=tied,
        rope_parameters=rope,
    )


@pytest.mark.parametrize("seed", range(12))
def test_causal_and_draft_logits_equal_those_of_ministral_3(tmp_path: Path, seed: int) -> None:
    config = random_config(seed)
    ours, theirs = denoiser_of(tmp_path, config, seed), ministral(tmp_path, config)
    ids = torch.randint(0, 150, (2, 130), generator=torch.Generator().manual_seed(seed))
    longest = ours.network.max_canvas_length
    positions = torch.arange(130).expand_as(ids)
    with torch.no_grad():
        causal, presents = ours.hidden(ids, positions)
        found = [ours.project(causal)]
        wanted = [theirs(ids).logits]
        # A draft pass over the last 30 tokens, after the cached rows of the first 100 tokens.
        past = [(keys[:, :, :100], values[:, :, :100]) for keys, values in presents]
        drafted, _ = ours.hidden(ids[:, 100:], positions[:, 100:] + longest, past)
        found.append(ours.project(drafted))
        mask = torch.ones(130, 130).tril().bool()
        mask[100:, 100:] = True
        additive = torch.where(mask, 0.0, torch.finfo(torch.float32).min)[None, None]
        wanted.append(theirs(ids, attention_mask=additive.expand(2, 1, -1, -1)).logits[:, 100:])
    for own, other in zip(found, wanted, strict=True):
        assert (own - other).abs().max() <= 2e-4 * (other.max() - other.min())


def greedy(denoiser: Denoiser, tokens: list[int], new_tokens: int) -> list[int]:
    """Greedy autoregressive decoding, with a full causal pass for each token."""
    network, canvas = denoiser.network, list(tokens)
    for _ in range(new_tokens):
        with torch.no_grad():
            logits = denoiser(torch.tensor([canvas]))[0, -1]
        logits[network.mask_token_id] = -torch.inf
        canvas.append(int(logits.argmax()))
        if canvas[-1] in network.eos_token_ids:
            break
    return canvas + [network.eos_token_ids[0]] * (len(tokens) + new_tokens - len(canvas))


@pytest.fixture(scope="module")
def denoiser(tmp_path_factory: pytest.TempPathFactory) -> Denoiser:
    return denoiser_of(tmp_path_factory.mktemp("nemotron"), nemotron_config())


def test_the_reference_loop_generates_the_greedy_text(denoiser: Denoiser) -> None:
    policy = PRESETS["self-speculation"]
    for number in range(20):
        draw = random.Random(number)
        tokens = [draw.randrange(150) for _ in range(draw.randint(1, 40))]
        wanted = greedy(denoiser, tokens, 30)
        for block_length in (1, 2, 5, 0):
            changed = policy.with_fields({"block_length": block_length})
            assert reference.generate(denoiser, tokens, changed, 30).tokens == wanted
