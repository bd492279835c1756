"""Tests of SDAR, Fast-dLLM v2, A2D and Stable-DiffCoder.

These denoisers have the layers of Llama, Qwen2 or Qwen3. The tests compare their logits with the
logits of the transformers class with the same layers, which gets a block-causal attention mask. The
expected logits are computed without this project's code. ``test_capture`` makes the same comparison
with the command ``capture``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import (
    a2d_config,
    fast_dllm_v2_config,
    sdar_config,
    stable_diffcoder_config,
    write_checkpoint,
    write_headers,
)
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from slow_cases import slow_except
from trunk_logits import trunk_logits

from dlm_export import families
from dlm_export.build import build
from dlm_export.checkpoints.folder import Checkpoint, CheckpointError
from dlm_export.cli import main
from dlm_export.families.base import Overrides
from dlm_export.sources import open_source

MASK = 150  # the mask token of every denoiser below
# For each denoiser: config.json, the transformers class with the same layers, the user's options,
# and the block length of block-causal attention (None for full attention).
LAYOUTS: dict[str, tuple[dict[str, Any], str, Overrides, int | None]] = {
    "SDAR": (sdar_config(), "Qwen3ForCausalLM", Overrides(), 4),
    "SDAR, tied, blocks of 64": (
        sdar_config(block_size=64, tie_word_embeddings=True),
        "Qwen3ForCausalLM",
        Overrides(),
        64,
    ),
    "SDAR, no block_size": (
        sdar_config(block_size=None),
        "Qwen3ForCausalLM",
        Overrides(attention_block=8),
        8,
    ),
    "Fast-dLLM v2": (fast_dllm_v2_config(), "Qwen2ForCausalLM", Overrides(mask_token_id=MASK), 32),
    "A2D Qwen2": (a2d_config("Qwen2"), "Qwen2ForCausalLM", Overrides(), None),
    "A2D Qwen2, blocks": (
        a2d_config("Qwen2"),
        "Qwen2ForCausalLM",
        Overrides(attention_block=16),
        16,
    ),
    "A2D Qwen3, blocks": (a2d_config("Qwen3"), "Qwen3ForCausalLM", Overrides(attention_block=5), 5),
    "A2D Llama": (a2d_config("Llama"), "LlamaForCausalLM", Overrides(), None),
    "A2D Llama, blocks": (
        a2d_config("Llama", tie_word_embeddings=True),
        "LlamaForCausalLM",
        Overrides(attention_block=7),
        7,
    ),
    "Stable-DiffCoder": (
        stable_diffcoder_config(),
        "LlamaForCausalLM",
        Overrides(mask_token_id=MASK),
        4,
    ),
    "Stable-DiffCoder, blocks of 8": (
        stable_diffcoder_config(),
        "LlamaForCausalLM",
        Overrides(mask_token_id=MASK, attention_block=8),
        8,
    ),
}
LENGTH = 75


@pytest.mark.parametrize("name", LAYOUTS)
def test_logits_equal_the_trunks_under_a_mask(name: str, tmp_path: Path) -> None:
    config, class_name, overrides, block = LAYOUTS[name]
    checkpoint = write_checkpoint(tmp_path, config, seed=5)
    source = open_source(checkpoint, overrides)
    assert {layer.attention.block_length for layer in source.network.layers} == {block}
    ids = torch.randint(0, 140, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    expected = trunk_logits(checkpoint, class_name, block, ids)
    with torch.no_grad():
        found = families.load(source.parameters, source.network)(ids)
    assert float((found - expected).abs().max() / (expected.max() - expected.min())) < 2e-4


@pytest.mark.parametrize(
    "name",
    slow_except(
        ["SDAR", "Fast-dLLM v2"], ["SDAR", "Fast-dLLM v2", "A2D Llama", "Stable-DiffCoder"]
    ),
)
def test_a_bundle_is_built_and_proved_with_native_attention(name: str, tmp_path: Path) -> None:
    config, _, overrides, block = LAYOUTS[name]
    checkpoint = write_checkpoint(tmp_path / "checkpoint", config, seed=5)
    report = build(checkpoint, tmp_path / "bundle", overrides=overrides)
    assert report.parity is not None
    assert report.parity.misses == []
    assert report.kernels is not None
    layers = open_source(checkpoint, overrides).network.layers
    block_name = "" if block is None else "Block"
    attention = f"{block_name}{'Normed' * layers[0].attention.qk_norm}CachedAttention"
    head = {"Fp32TiedHead": 1} if config["tie_word_embeddings"] else {}
    calls = {attention: 2, "AddNorm": 4, **head, "Candidates": 1}
    assert report.kernels == {"calls": calls, "plain": {}}
    verified = CliRunner().invoke(
        main, ["verify", str(tmp_path / "bundle"), "--checkpoint", str(checkpoint)]
    )
    assert verified.exit_code == 0, verified.output


PRESETS = {
    "SDAR": "sdar",
    "Fast-dLLM v2": "fast-dllm-v2",
    "A2D Qwen2": "fast-dllm",
    "A2D Qwen2, blocks": "sdar",
    "Stable-DiffCoder": "stable-diffcoder",
}


@pytest.mark.parametrize("name", PRESETS)
def test_the_default_preset_goes_with_what_is_seen(name: str, tmp_path: Path) -> None:
    config, _, overrides, _ = LAYOUTS[name]
    assert (
        open_source(write_checkpoint(tmp_path, config), overrides).default_preset == PRESETS[name]
    )


# ---- The mask token and the blocks ----


def _tokenizer_config(checkpoint: Path, **values: Any) -> None:
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(values))


def test_the_mask_token_of_fast_dllm_v2_is_found_among_the_added_tokens(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, fast_dllm_v2_config())
    _tokenizer_config(
        path, added_tokens_decoder={"149": {"content": "<|x|>"}, "150": {"content": "|<MASK>|"}}
    )
    assert families.read_network(Checkpoint(path), Overrides()).mask_token_id == 150
    _tokenizer_config(path)
    (path / "added_tokens.json").write_text(json.dumps({"<|x|>": 149, "|<MASK>|": 148}))
    assert families.read_network(Checkpoint(path), Overrides()).mask_token_id == 148


def test_the_mask_token_of_stable_diffcoder_is_found_among_the_added_tokens(
    tmp_path: Path,
) -> None:
    path = write_checkpoint(tmp_path, stable_diffcoder_config())
    _tokenizer_config(path, added_tokens_decoder={"5": {"content": "<[MASK_TOKEN]>"}})
    network = families.read_network(Checkpoint(path), Overrides())
    assert (network.mask_token_id, network.eos_token_ids, network.visible_block) == (5, (2,), 4)


def test_what_inspect_tells_of_a_block_network(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, sdar_config())
    told = CliRunner().invoke(main, ["inspect", str(path)])
    assert told.exit_code == 0, told.output
    assert "block of 4, 4 heads of 32, 2 of keys, q/k norm" in told.output
    assert "ignores these keys" not in told.output
    other = CliRunner().invoke(main, ["inspect", str(path), "--attention-block", "16", "--json"])
    attention = json.loads(other.output)["network"]["layers"][0]["attention"]
    assert (attention["visibility"], attention["block_length"]) == ("block", 16)


def test_stable_diffcoder_8b_is_inspected_and_planned_from_its_headers(tmp_path: Path) -> None:
    """The sizes come from the released config.json. The number of parameters is that of Seed-Coder
    8B.
    """
    config = stable_diffcoder_config(
        hidden_size=4096,
        num_hidden_layers=32,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=155136,
        max_position_embeddings=8192,
    )
    write_headers(tmp_path, config)
    arguments = [str(tmp_path), "--mask-token-id", "5", "--json"]
    told = CliRunner().invoke(main, ["inspect", *arguments])
    assert told.exit_code == 0, told.output
    assert json.loads(told.stdout)["parameters"] == 8_250_462_208
    planned = CliRunner().invoke(main, ["plan", *arguments, "--targets", "h100,rtx5090"])
    assert planned.exit_code == 0, planned.output


def test_inspect_needs_the_headers_alone(tmp_path: Path) -> None:
    """``inspect`` only reads the headers of the weight files.

    The command must not import torch, because the import is slow.
    """
    path = write_checkpoint(tmp_path, sdar_config(), shards=3)
    script = f"import sys; from dlm_export.cli import main; main(['inspect', {str(path)!r}], standalone_mode=False)\n"
    command = [
        sys.executable,
        "-c",
        script + "assert not {'torch', 'onnx', 'onnx_ir', 'transformers'} & sys.modules.keys()",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "block of 4" in done.stdout


def _lacking(checkpoint: Path, tensor: str) -> None:
    weights = load_file(checkpoint / "model.safetensors")
    del weights[tensor]
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})


BAD: dict[str, tuple[dict[str, Any], Overrides, str]] = {
    "no length of a block": (
        sdar_config(block_size=None),
        Overrides(),
        "block_size is missing.*Pass --attention-block",
    ),
    "a block that the loop does not take": (
        fast_dllm_v2_config(bd_size=12),
        Overrides(150),
        "decides 8 positions at a time, which does not divide a block of 12",
    ),
    "no bd_size": (
        fast_dllm_v2_config(bd_size=None),
        Overrides(150),
        "bd_size is missing.*Pass --attention-block",
    ),
    "a block of nothing": (
        sdar_config(block_size=0),
        Overrides(),
        "block_size must be an integer in 1",
    ),
    "a negative block": (
        sdar_config(block_size=-4),
        Overrides(),
        "block_size must be an integer in 1",
    ),
    "a block of a text": (
        sdar_config(block_size="4"),
        Overrides(),
        "block_size must be an integer in 1",
    ),
    "a block of nothing, said": (
        sdar_config(),
        Overrides(attention_block=0),
        "--attention-block is 0; blocks have at least one",
    ),
    "heads that do not divide": (
        sdar_config(num_key_value_heads=3),
        Overrides(),
        "num_key_value_heads 3 do not divide",
    ),
    "a rope that is not known": (
        a2d_config("Llama", rope_scaling={"rope_type": "longrope", "factor": 8.0}),
        Overrides(),
        "rope_type 'longrope' is not supported",
    ),
    "no mask token": (
        sdar_config(mask_token_id=None),
        Overrides(),
        "no mask_token_id.*Pass --mask-token-id",
    ),
    "no mask token among the added": (
        fast_dllm_v2_config(),
        Overrides(),
        r"nor \|<MASK>\| among the added tokens",
    ),
    "biases of Qwen3": (
        sdar_config(attention_bias=True),
        Overrides(),
        "attention_bias = true is not supported",
    ),
    "no mask token of Stable-DiffCoder": (
        stable_diffcoder_config(),
        Overrides(),
        r"nor <\[MASK_TOKEN\]> among the added tokens",
    ),
    "biases of Stable-DiffCoder": (
        stable_diffcoder_config(attention_bias=True),
        Overrides(mask_token_id=MASK),
        "attention_bias = true is not supported",
    ),
    "biases of Llama": (
        a2d_config("Llama", attention_bias=True),
        Overrides(),
        "attention_bias = true is not supported",
    ),
    "a window": (
        a2d_config("Qwen2", use_sliding_window=True),
        Overrides(),
        "use_sliding_window = true is not supported",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_not_to_be_read_is_refused_by_name(name: str, tmp_path: Path) -> None:
    config, overrides, says = BAD[name]
    path = write_checkpoint(tmp_path, config | {"num_key_value_heads": 2})
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=says):
        families.read_network(Checkpoint(path), overrides)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, sdar_config())
    _lacking(path, "model.layers.1.self_attn.q_norm.weight")
    with pytest.raises(
        CheckpointError, match=r"1 tensors missing: model\.layers\.1\.self_attn\.q_norm\.weight"
    ):
        open_source(path)


def test_blocks_are_not_given_to_a_network_that_has_none(dream_checkpoint: Path) -> None:
    with pytest.raises(
        CheckpointError, match="--attention-block: the attention of DreamModel has no blocks"
    ):
        families.read_network(Checkpoint(dream_checkpoint), Overrides(attention_block=4))
