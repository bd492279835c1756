"""Tests that no key of config.json is ignored in silence.

An unknown key may describe a different network. So each key is either read, listed as harmless, or
accepted by the user.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import (
    a2d_config,
    bert_config,
    coda_config,
    diffusion_gemma_config,
    dream_config,
    fast_dllm_v2_config,
    llada2_config,
    llada_config,
    llada_moe_config,
    modern_bert_config,
    nemotron_config,
    open_dcoder_config,
    qwen3_moe_config,
    roberta_config,
    sdar_config,
    sdlm_config,
    stable_diffcoder_config,
    torch_encoder_config,
    uno_config,
    wedlm_config,
    write_adapter,
    write_checkpoint,
)
from click.testing import CliRunner

from dlm_export.checkpoints.folder import CheckpointError
from dlm_export.cli import main
from dlm_export.families.base import Overrides
from dlm_export.sources import Source, open_source

CONFIGS: dict[str, Callable[..., dict[str, Any]]] = {
    "llada": llada_config,
    "llada-moe": llada_moe_config,
    "llada2": llada2_config,
    "dream": dream_config,
    "a2d-llama": lambda **changes: a2d_config("Llama", **changes),
    "sdar": sdar_config,
    "sdar-moe": lambda **changes: qwen3_moe_config("SDARMoeForCausalLM", block_size=4, **changes),
    "i-dlm": lambda **changes: sdar_config(**{"use_regular_causal": True} | changes),
    "uno": lambda **changes: uno_config("K2HorizonForCausalLM", **changes),
    "rnd1": lambda **changes: qwen3_moe_config("RND1LM", **changes),
    "coda": coda_config,
    "fast-dllm-v2": fast_dllm_v2_config,
    "open-dcoder": open_dcoder_config,
    "stable-diffcoder": stable_diffcoder_config,
    "sdlm": sdlm_config,
    "wedlm": wedlm_config,
    "nemotron": nemotron_config,
    "gemma": diffusion_gemma_config,
    "bert": bert_config,
    "roberta": roberta_config,
    "modern-bert": modern_bert_config,
    "torch-encoder": torch_encoder_config,
}
# One key for each of these cases. The last part of a name is the key.
UNKNOWN: dict[str, tuple[str, dict[str, Any]]] = {
    f"{family}: attn_gate": (family, {"attn_gate": 1}) for family in CONFIGS
} | {
    "sdar-moe: use_regular_causal": ("sdar-moe", {"use_regular_causal": True}),
    "dream: expand_token_id": ("dream", {"expand_token_id": 1 << 20}),
    "dream: attn_logit_softcapping": ("dream", {"attn_logit_softcapping": 50.0}),
    "dream: residual_multiplier": ("dream", {"residual_multiplier": 0.2}),
    "dream: auto_map": ("dream", {"auto_map": {"AutoModel": "modeling_other.OtherModel"}}),
    "llada: auto_map": ("llada", {"auto_map": {"AutoModelForCausalLM": "a.Other"}}),
    "llada: logit_scale": ("llada", {"logit_scale": 2.0}),
    "rnd1: num_shared_experts": ("rnd1", {"num_shared_experts": 1}),
    "wedlm: no_rope_layers": ("wedlm", {"no_rope_layers": [1]}),
    "bert: embedding_size": ("bert", {"embedding_size": 16}),
    # These keys are known, but their values are not supported, or contradict other values.
    "llada: alibi": ("llada", {"alibi": True}),
    "llada: activation_type": ("llada", {"activation_type": "gelu"}),
    "llada: block_type": ("llada", {"block_type": "sequential"}),
    "llada: n_kv_heads": ("llada", {"n_kv_heads": 3}),
    "llada2: score_function": ("llada2", {"score_function": "softmax"}),
    "llada2: use_qkv_bias": ("llada2", {"use_qkv_bias": True}),
    "dream: hidden_act": ("dream", {"hidden_act": "gelu"}),
    "dream: use_sliding_window": ("dream", {"use_sliding_window": True}),
    "sdar: attention_bias": ("sdar", {"attention_bias": True}),
    "nemotron: dlm_paradigm": ("nemotron", {"dlm_paradigm": "autoregressive"}),
    "nemotron: sliding_window": ("nemotron", {"sliding_window": 8}),
    "bert: position_embedding_type": ("bert", {"position_embedding_type": "relative_key"}),
    "modern-bert: hidden_activation": ("modern-bert", {"hidden_activation": "relu"}),
}
MASK = {"mask_token_id": 150}
OPTIONS: dict[str, dict[str, Any]] = {
    "fast-dllm-v2": MASK,
    "stable-diffcoder": MASK,
    "open-dcoder": MASK | {"family": "open-dcoder"},
}
"""The options that families need. Their mask token is only in the tokenizer's files."""


def _write(folder: Path, family: str, changes: dict[str, Any]) -> Path:
    config = CONFIGS[family]()
    path = write_checkpoint(folder, config)
    if family == "uno":
        write_adapter(path, config, name="adapter")
    (path / "config.json").write_text(json.dumps(config | changes))
    return path


def _open(path: Path, family: str, **overrides: Any) -> Source:
    return open_source(path, Overrides(**OPTIONS.get(family, {}), **overrides))


def test_there_are_forty_cases() -> None:
    assert len(UNKNOWN) >= 40


@pytest.mark.parametrize("case", UNKNOWN)
def test_each_key_is_named(tmp_path: Path, case: str) -> None:
    family, changes = UNKNOWN[case]
    with pytest.raises(CheckpointError, match=case.rpartition(" ")[2]):
        _open(_write(tmp_path, family, changes), family)


@pytest.mark.parametrize("family", CONFIGS)
def test_released_keys_are_known_and_a_user_may_accept_others(tmp_path: Path, family: str) -> None:
    path = _write(tmp_path, family, {"attn_gate": 1, "nothing": None, "off": False})
    source = _open(path, family, accept_unknown=("attn_gate",))
    (note,) = [note for note in source.notes if "attn_gate" in note]
    assert note == "not used, although it may describe a different network: attn_gate = 1"


def test_only_unknown_keys_can_be_accepted(tmp_path: Path) -> None:
    path = _write(tmp_path, "dream", {})
    with pytest.raises(CheckpointError, match="--accept-unknown hidden_size: dlm-export knows"):
        _open(path, "dream", accept_unknown=("hidden_size",))


def test_the_command_names_the_option_and_builds_with_it(tmp_path: Path) -> None:
    path, bundle = _write(tmp_path / "a", "sdar", {"attn_gate": 1}), tmp_path / "bundle"
    command = ["build", str(path), "-o", str(bundle), "--no-verify"]
    refused = CliRunner().invoke(main, command)
    assert refused.exit_code == 2
    assert "Then pass --accept-unknown attn_gate" in refused.output
    assert not bundle.exists()
    built = CliRunner().invoke(main, [*command, "--accept-unknown", "attn_gate"])
    assert built.exit_code == 0, built.output
    assert "Warning: not used, although" in built.output
    told = CliRunner().invoke(main, ["inspect", str(path)])
    assert "`build` stops unless you accept them: attn_gate" in told.output
