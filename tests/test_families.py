"""Tests of families whose layers are those of Llama, Qwen2, Qwen3 or a mixture of transformers.

Logits are compared with the class of transformers that has the same layers and the same weights, and
gets a block-causal attention mask. The expected logits are computed without this project's code. The
tables also contain, for all families, settings that must be refused and sizes of releases.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch
from checkpoints import (
    a2d_config,
    adapter_config,
    bert_config,
    coda_config,
    diffusion_gemma_config,
    fast_dllm_v2_config,
    illada_config,
    llada2_config,
    llada_moe_config,
    modern_bert_config,
    nemotron_config,
    open_dcoder_config,
    qwen3_moe_config,
    sdar_config,
    sdlm_config,
    stable_diffcoder_config,
    wedlm_config,
    write_checkpoint,
    write_headers,
)
from click.testing import CliRunner
from denoisers import load
from mixtures import (
    as_glm4_moe,
    glm4_moe,
    logits_of,
    merged,
    qwen3_moe,
    read_tensors,
    rewritten,
)
from safetensors.torch import load_file, save_file
from slow_cases import slow_except
from torch.nn import functional as F
from transformers import Glm4MoeForCausalLM, Qwen3MoeForCausalLM
from trunk_logits import trunk_logits

from dlm_export import families
from dlm_export.build import BuildOptions, build
from dlm_export.checkpoints.folder import Checkpoint, CheckpointError
from dlm_export.cli import main
from dlm_export.families.base import Overrides
from dlm_export.network.spec import ExpertsSpec, MlpSpec, NetworkSpec
from dlm_export.sources import open_source, open_source_of

MASK = 150  # the mask token of every denoiser below
NAMED, BLOCKS = Overrides(mask_token_id=MASK), {4: Overrides(attention_block=4)}
OPEN_DCODER = Overrides(mask_token_id=MASK, family="open-dcoder")
LENGTH = 75
IDS = torch.randint(0, 140, (2, LENGTH), generator=torch.Generator().manual_seed(0))


def network_of(path: Path, overrides: Overrides | None = None) -> NetworkSpec:
    return families.read_network(Checkpoint(path), overrides or Overrides())


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / (expected.max() - expected.min()))


def invoke(*arguments: object) -> str:
    done = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output
    return done.stdout


# ---- Logits ----

# For each denoiser: config.json, the transformers class with the same layers, the user's options,
# and the block length of block-causal attention (None for full attention).
LAYOUTS: dict[str, tuple[dict[str, Any], str, Overrides, int | None]] = {
    "SDAR": (sdar_config(), "Qwen3ForCausalLM", Overrides(), 4),
    "SDAR, no block_size": (
        sdar_config(block_size=None),
        "Qwen3ForCausalLM",
        Overrides(attention_block=8),
        8,
    ),
    "Fast-dLLM v2": (fast_dllm_v2_config(), "Qwen2ForCausalLM", NAMED, 32),
    "A2D Qwen2, blocks": (
        a2d_config("Qwen2"),
        "Qwen2ForCausalLM",
        Overrides(attention_block=16),
        16,
    ),
    "A2D Qwen3": (a2d_config("Qwen3"), "Qwen3ForCausalLM", Overrides(), None),
    "A2D Qwen3, narrow heads, blocks": (
        a2d_config("Qwen3", head_dim=8, num_key_value_heads=4),
        "Qwen3ForCausalLM",
        Overrides(attention_block=5),
        5,
    ),
    "A2D Llama, blocks": (
        a2d_config("Llama", tie_word_embeddings=True),
        "LlamaForCausalLM",
        Overrides(attention_block=7),
        7,
    ),
    "Stable-DiffCoder": (stable_diffcoder_config(), "LlamaForCausalLM", NAMED, 4),
    "Open-dCoder": (open_dcoder_config(), "Qwen2ForCausalLM", OPEN_DCODER, None),
    "CoDA": (coda_config(), "Qwen3ForCausalLM", Overrides(), None),
    "CoDA, tied": (coda_config(tie_word_embeddings=True), "Qwen3ForCausalLM", Overrides(), None),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_logits_equal_the_trunks_under_a_mask(name: str, tmp_path: Path) -> None:
    config, class_name, overrides, block = LAYOUTS[name]
    checkpoint = write_checkpoint(tmp_path, config, seed=5)
    source = open_source(checkpoint, overrides)
    assert {layer.attention.block_length for layer in source.network.layers} == {block}
    expected = trunk_logits(checkpoint, class_name, block, IDS)
    with torch.no_grad():
        found = families.load(source.parameters, source.network)(IDS)
    assert difference(found, expected) < 2e-4


# The fields that transformers' configuration of Qwen3-MoE does not have under the same name.
QWEN3_MOE = (
    "head_dim",
    "intermediate_size",
    "moe_intermediate_size",
    "norm_topk_prob",
    "mlp_only_layers",
)


def of_llada_moe(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "head_dim": 16,
        "moe_intermediate_size": config["expert_intermediate_size"],
        "intermediate_size": config["dense_intermediate_size"],
        "norm_topk_prob": False,
        "mlp_only_layers": [i for i, has in enumerate(config["moe_layer_freq"]) if not has],
    }


# For each mixture: config.json, and the block length of block-causal attention.
MIXTURES: dict[str, tuple[dict[str, Any], int]] = {
    "LLaDA-MoE": (llada_moe_config(moe_layer_freq=[0, 1], num_key_value_heads=2), LENGTH),
    "RND1": (
        qwen3_moe_config("RND1LM", norm_topk_prob=False, mlp_only_layers=[1]),
        LENGTH,
    ),
    "SDAR-MoE": (qwen3_moe_config("SDARMoeForCausalLM", block_size=4), 4),
    "LLaDA2": (llada2_config(), 32),
}


@torch.no_grad()
@pytest.mark.parametrize("name", MIXTURES)
def test_logits_of_mixtures_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    config, block_length = MIXTURES[name]
    path = write_checkpoint(tmp_path / "checkpoint", config, seed=3)
    kind, tensors = Qwen3MoeForCausalLM, read_tensors(path)
    if name == "LLaDA2":
        # This project never chooses experts outside the chosen groups. Glm4Moe sets their scores to
        # 0 instead, and could still choose them if other scores were negative. Positive biases
        # prevent this.
        biases = {key: each.abs() for key, each in tensors.items() if key.endswith("expert_bias")}
        rewritten(path, dict(biases))
        kind, tensors, theirs = Glm4MoeForCausalLM, as_glm4_moe(tensors | biases), glm4_moe(config)
    elif name == "LLaDA-MoE":
        theirs = qwen3_moe(config, **of_llada_moe(config))
    else:
        theirs = qwen3_moe(config, **{key: config[key] for key in QWEN3_MOE})
    block = torch.arange(LENGTH) // block_length
    is_visible = block[None, :] <= block[:, None]
    expected = logits_of(kind, theirs, tensors, tmp_path / "theirs", IDS, is_visible)
    assert difference(load(path)(IDS), expected) < 1e-5


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


def _rotate_half(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, kv_heads: int, theta: float
) -> torch.Tensor:
    """Compute full attention with rotary embeddings that pair element i of a head with element i +
    D / 2. q is ``[B, L, H * D]``, k and v are ``[B, L, Hkv * D]``.
    """
    B, L, width = q.shape
    D = width // heads
    q, k, v = (t.view(B, L, -1, D).transpose(1, 2) for t in (q, k, v))
    inverse = 1.0 / (theta ** (torch.arange(0, D, 2).float() / D))
    angles = torch.cat([torch.outer(torch.arange(L).float(), inverse)] * 2, -1)
    q = q * angles.cos() + _rotate_half(q) * angles.sin()
    k = k * angles.cos() + _rotate_half(k) * angles.sin()
    k, v = k.repeat_interleave(heads // kv_heads, 1), v.repeat_interleave(heads // kv_heads, 1)
    weights = torch.softmax(q @ k.transpose(-1, -2) / D**0.5, -1)
    return (weights @ v).transpose(1, 2).reshape(B, L, width)


def forward(config: dict[str, Any], w: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    """Compute logits ``[B, L, V]`` like the published code of LLaDA-MoE.

    For simplicity, every expert is computed for every token.
    """
    eps, heads, kv_heads = (
        config["rms_norm_eps"],
        config["num_attention_heads"],
        config["num_key_value_heads"],
    )
    size = config["hidden_size"] // heads

    def gated(x: torch.Tensor, prefix: str) -> torch.Tensor:
        gate, up = (x @ w[f"{prefix}.{name}_proj.weight"].T for name in ("gate", "up"))
        return (F.silu(gate) * up) @ w[f"{prefix}.down_proj.weight"].T

    x = w["model.embed_tokens.weight"][ids]
    for i in range(config["num_hidden_layers"]):
        b = f"model.layers.{i}."
        h = _rms_norm(x, w[f"{b}input_layernorm.weight"], eps)
        q, k, v = (h @ w[f"{b}self_attn.{name}_proj.weight"].T for name in "qkv")
        q, k = (
            _rms_norm(
                each.unflatten(-1, (count, size)), w[f"{b}self_attn.{name}_norm.weight"], eps
            ).flatten(-2)
            for each, count, name in ((q, heads, "q"), (k, kv_heads, "k"))
        )
        attended = _attention(q, k, v, heads, kv_heads, config["rope_theta"])
        x = x + attended @ w[f"{b}self_attn.o_proj.weight"].T
        h = _rms_norm(x, w[f"{b}post_attention_layernorm.weight"], eps)
        scores = (h @ w[f"{b}mlp.gate.weight"].T).softmax(-1) + w[f"{b}mlp.expert_bias"]
        ranked = scores.sort(descending=True).values
        kept = scores >= ranked[..., config["num_experts_per_tok"] - 1, None]
        for expert in range(config["num_experts"]):
            weight = (scores * kept)[..., expert, None]
            x = x + weight * gated(h, f"{b}mlp.experts.{expert}")
        x = x + gated(h, f"{b}shared_expert")
    return _rms_norm(x, w["model.norm.weight"], eps) @ w["lm_head.weight"].T


@torch.no_grad()
def test_a_bias_enters_the_weights_and_a_shared_expert_sees_all_tokens(tmp_path: Path) -> None:
    config = llada_moe_config(
        moe_router_enable_expert_bias=True, shared_expert_intermediate_size=24
    )
    path = write_checkpoint(tmp_path, config, seed=5)
    assert difference(load(path)(IDS), forward(config, read_tensors(path), IDS)) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize(
    ("config", "layers"),
    [(llada_moe_config(), [0, 1]), (llada2_config(num_experts=8), [1])],
    ids=["llada-moe", "llada2"],
)
def test_merged_experts_are_the_split_ones(
    tmp_path: Path, config: dict[str, Any], layers: list[int]
) -> None:
    path = write_checkpoint(tmp_path, config)
    split = load(path)(IDS)
    assert torch.equal(load(merged(path, layers))(IDS), split)


# ---- Bundles ----

# For each bundle: config.json, the user's options, and the kernels for attention and experts.
BUNDLES: dict[str, tuple[dict[str, Any], Overrides, dict[str, int]]] = {
    "SDAR": (sdar_config(), Overrides(), {"BlockNormedCachedAttention": 2}),
    "Fast-dLLM v2": (
        fast_dllm_v2_config(),
        NAMED,
        {"BlockCachedAttention": 2, "Fp32TiedHead": 1},
    ),
    "LLaDA-MoE": (
        llada_moe_config(
            moe_layer_freq=[0, 1],
            moe_router_enable_expert_bias=True,
            shared_expert_intermediate_size=24,
        ),
        Overrides(),
        {"NormedCachedAttention": 2, "Fp32Experts": 1},
    ),
    "LLaDA2": (
        llada2_config(),
        Overrides(),
        {"BlockNormedCachedAttention": 2, "Fp32Experts": 1},
    ),
    "A2D Llama": (a2d_config("Llama"), Overrides(), {"CachedAttention": 2}),
    "Open-dCoder": (open_dcoder_config(), OPEN_DCODER, {"CachedAttention": 2, "Fp32TiedHead": 1}),
    "CoDA": (coda_config(), Overrides(), {"NormedCachedAttention": 2}),
    "Stable-DiffCoder": (stable_diffcoder_config(), NAMED, {"BlockCachedAttention": 2}),
}


@pytest.mark.parametrize("name", slow_except(["SDAR", "LLaDA-MoE"], BUNDLES))
def test_a_bundle_is_built_with_parity_and_kernels(name: str, tmp_path: Path) -> None:
    """The build compares logits and whole canvases with torch, with and without caches."""
    config, overrides, own = BUNDLES[name]
    checkpoint = write_checkpoint(tmp_path / "checkpoint", config, seed=5)
    report = build(checkpoint, tmp_path / "bundle", overrides=overrides)
    assert report.parity is not None
    assert report.parity.misses == []
    assert report.kernels == {"calls": own | {"AddNorm": 4, "Candidates": 1}, "plain": {}}


# ---- What a checkpoint says ----

PRESETS: dict[str, tuple[dict[str, Any], Overrides]] = {
    "sdar": (sdar_config(), Overrides()),
    "fast-dllm-v2": (fast_dllm_v2_config(), NAMED),
    "fast-dllm": (a2d_config("Qwen2"), Overrides()),
    "stable-diffcoder": (stable_diffcoder_config(), NAMED),
    "wedlm": (wedlm_config(), Overrides()),
    "sdlm": (sdlm_config(), Overrides()),
    "rnd1": (qwen3_moe_config("RND1LM"), Overrides()),
    "dream": (coda_config(), Overrides()),
}


SHIFTED: dict[str, tuple[dict[str, Any], Overrides]] = {
    "RND1": (qwen3_moe_config("RND1LM"), Overrides()),
    "CoDA": (coda_config(), Overrides()),
    "Open-dCoder": (open_dcoder_config(), OPEN_DCODER),
}


@pytest.mark.parametrize("preset", PRESETS)
def test_the_default_preset_goes_with_what_is_seen(preset: str, tmp_path: Path) -> None:
    config, overrides = PRESETS[preset]
    assert open_source(write_checkpoint(tmp_path, config), overrides).default_preset == preset


@pytest.mark.parametrize(
    ("config", "files", "mask"),
    [
        (
            fast_dllm_v2_config(),
            {"tokenizer_config": {"added_tokens_decoder": {"150": {"content": "|<MASK>|"}}}},
            150,
        ),
        (
            fast_dllm_v2_config(),
            {"tokenizer_config": {}, "added_tokens": {"<|x|>": 149, "|<MASK>|": 148}},
            148,
        ),
        (
            stable_diffcoder_config(),
            {"tokenizer_config": {"added_tokens_decoder": {"5": {"content": "<[MASK_TOKEN]>"}}}},
            5,
        ),
    ],
    ids=["decoder", "added tokens", "Stable-DiffCoder"],
)
def test_the_mask_token_is_found_among_the_added_tokens(
    tmp_path: Path, config: dict[str, Any], files: dict[str, Any], mask: int
) -> None:
    path = write_checkpoint(tmp_path, config)
    for name, value in files.items():
        (path / f"{name}.json").write_text(json.dumps(value))
    assert network_of(path).mask_token_id == mask


def test_mixtures_are_described(tmp_path: Path) -> None:
    llada_moe = network_of(
        write_checkpoint(tmp_path / "llada-moe", llada_moe_config(moe_layer_freq=[0, 1]))
    )
    dense, experts = (layer.mlp for layer in llada_moe.layers)
    assert dense == MlpSpec(96)
    assert isinstance(experts, ExpertsSpec)
    assert (experts.count, experts.active, experts.size) == (8, 3, 64)
    assert not experts.router.renormalise
    idle = 5 * 3 * 64 * 64
    assert llada_moe.parameter_count() - llada_moe.active_parameter_count() == idle
    path = write_checkpoint(tmp_path / "llada2", llada2_config())
    llada2 = network_of(path)
    attention, experts = llada2.layers[0].attention, llada2.layers[1].mlp
    assert (attention.qk_norm, attention.visible_block, llada2.shift) == (True, 32, 0)
    assert isinstance(experts, ExpertsSpec)
    assert (experts.shared_size, experts.router.bias, experts.router.scale) == (64, "choice", 2.5)
    told = invoke("inspect", path)
    assert f"{llada2.active_parameter_count():,} of them per token" in told
    assert "4 of 16 experts of 64, silu" in told
    assert "by sigmoid in 2 of 4 groups and" in told
    assert "(ceil(T / 32) - 1) * 32 of T tokens on the canvas, at most 224" in told


@pytest.mark.parametrize("name", SHIFTED)
def test_rows_of_some_families_predict_the_next_token(name: str, tmp_path: Path) -> None:
    config, overrides = SHIFTED[name]
    network = network_of(write_checkpoint(tmp_path, config), overrides)
    assert (network.shift, network.visible_block) == (1, None)


def test_what_inspect_tells_of_a_block_network(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, sdar_config())
    told = invoke("inspect", path)
    assert "block of 4, 4 heads of 32, 2 of keys, q/k norm" in told
    other = invoke("inspect", path, "--attention-block", "16", "--json")
    attention = json.loads(other)["network"]["layers"][0]["attention"]
    assert (attention["visibility"], attention["block_length"]) == ("block", 16)


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


def trunk(
    layers: int, hidden: int, mlp: int, vocab: int, kv_heads: int = 8, **more: Any
) -> dict[str, Any]:
    """Return the fields of config.json for the sizes of a release with heads of 128 features."""
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": mlp,
        "num_attention_heads": 32,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "vocab_size": vocab,
    } | more


YARN = nemotron_config()["rope_parameters"] | {
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
}
# For each release: config.json, its number of parameters, its attention, and a preset. The sizes
# of Stable-DiffCoder are those of Seed-Coder 8B, and those of WeDLM are those of Qwen2.5 and Qwen3.
# The hidden size and the number of layers of iLLaDA are those of LLaDA 8B.
RELEASES: dict[str, tuple[dict[str, Any], int, str, str]] = {
    "iLLaDA 8B": (
        illada_config(
            d_model=4096,
            n_layers=32,
            n_heads=32,
            n_kv_heads=8,
            mlp_hidden_size=14336,
            vocab_size=155136,
            embedding_size=155136,
            max_sequence_length=8192,
        ),
        7_615_025_152,
        "full",
        "fast-dllm",
    ),
    "Stable-DiffCoder 8B": (
        stable_diffcoder_config(**trunk(32, 4096, 14336, 155136)),
        8_250_462_208,
        "block",
        "stable-diffcoder",
    ),
    "WeDLM 7B": (
        wedlm_config(like="Qwen2", **trunk(28, 3584, 18944, 152064, 4, num_attention_heads=28)),
        7_615_616_512,
        "masks-last",
        "wedlm",
    ),
    "WeDLM 8B": (wedlm_config(**trunk(36, 4096, 12288, 151936)), 8_190_735_360, "masks-last", "wedlm"),
    "CoDA 1.7B": (
        coda_config(**trunk(28, 2048, 6144, 151936, num_attention_heads=16)),
        2_031_739_904,
        "full",
        "dream",
    ),
    "Nemotron 8B": (
        nemotron_config(
            **trunk(34, 4096, 14336, 131072), block_size=32, rope_parameters=YARN,
            max_position_embeddings=262144,
        ),
        8_489_553_920,
        "draft",
        "self-speculation",
    ),
    "SDLM 3B": (
        sdlm_config(
            **trunk(36, 2048, 11008, 151666, 2, num_attention_heads=16),
            text_mask_token_id=151665,
            tie_word_embeddings=True,
        ),
        3_085_385_728,
        "draft",
        "sdlm",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RELEASES)
def test_releases_are_inspected_and_planned_from_their_headers(name: str, tmp_path: Path) -> None:
    """The weight file contains a header, but no weights. The commands must only read the header."""
    config, parameters, visibility, preset = RELEASES[name]
    write_headers(tmp_path, config)
    options = (tmp_path, "--mask-token-id", "5", "--json")
    told = json.loads(invoke("inspect", *options))
    assert told["parameters"] == parameters
    assert told["network"]["layers"][0]["attention"]["visibility"] == visibility
    invoke("plan", *options, "--targets", "h100", "--preset", preset)


def test_the_family_of_an_ambiguous_architecture_is_an_option(tmp_path: Path) -> None:
    sizes = {"hidden_size": 896, "num_hidden_layers": 24, "intermediate_size": 4864}
    heads = {"num_attention_heads": 14, "max_position_embeddings": 32768, "vocab_size": 151936}
    write_headers(tmp_path, open_dcoder_config(**sizes, **heads))
    options = (tmp_path, "--family", "open-dcoder", "--mask-token-id", "5", "--json")
    told = json.loads(invoke("inspect", *options))
    assert told["parameters"] == 494_032_768
    assert told["network"]["max_canvas_length"] == 4096
    invoke("plan", *options, "--targets", "h100", "--preset", "dream")


def test_a_bundle_remembers_the_family_that_the_user_named(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "source", open_dcoder_config())
    bundle = tmp_path / "bundle"
    options = BuildOptions(check_parity=False)
    build(checkpoint, bundle, options, overrides=OPEN_DCODER)
    manifest = json.loads((bundle / "manifest.json").read_text())
    assert open_source(bundle).default_preset == "dream"
    assert open_source_of(bundle, manifest, checkpoint).network.family == "open-dcoder"
    with pytest.raises(CheckpointError, match=r"a bundle's family, .* cannot be changed"):
        open_source(bundle, OPEN_DCODER)


# ---- What is refused ----

GEMMA, NEMOTRON, WEDLM = diffusion_gemma_config, nemotron_config, wedlm_config
LLADA, DREAM = checkpoints.llada_config, checkpoints.dream_config
REFUSED: list[tuple[Callable[..., dict[str, Any]], dict[str, Any], Overrides, str]] = [
    (LLADA, {"architectures": ["MysteryLM"]}, Overrides(), "unknown architecture 'MysteryLM'"),
    (LLADA, {"mask_token_id": None}, Overrides(), "no mask_token_id.*Pass --mask-token-id"),
    (LLADA, {"mask_token_id": 160}, Overrides(), r"160 is outside the vocabulary \(0\.\.159\)"),
    (LLADA, {"eos_token_id": [151, 2**40]}, Overrides(), "eos_token_id 1099511627776 is outside"),
    (LLADA, {"eos_token_id": 150}, Overrides(), "mask_token_id 150 is also an eos_token_id"),
    (LLADA, {"d_model": "x" * 10**6}, Overrides(), r"d_model must be an integer in 1\.\."),
    (LLADA, {"rope_theta": float("inf")}, Overrides(), "must be a positive number, found inf"),
    (LLADA, {"block_type": {"a": "b" * 10**6}}, Overrides(), 'block_type.*only "llama"'),
    (LLADA, {"block_type": "sequential"}, Overrides(), "block_type"),
    (LLADA, {"layer_norm_type": "default"}, Overrides(), "layer_norm_type"),
    (LLADA, {"scale_logits": True}, Overrides(), "scale_logits"),
    (LLADA, {"n_heads": 3}, Overrides(), "n_heads 3"),
    (LLADA, {"n_layers": "2"}, Overrides(), "n_layers"),
    (LLADA, {"rope_theta": -1}, Overrides(), "rope_theta"),
    (LLADA, {"n_heads": 64, "n_kv_heads": 64}, Overrides(), "but 1 of the 1 in a head are rotated"),
    # Without these keys, LLaDA's configuration class describes another network.
    (LLADA, {"block_type": None}, Overrides(), "block_type is missing"),
    (LLADA, {"rope": None}, Overrides(), "rope is missing"),
    (LLADA, {"weight_tying": None}, Overrides(), "weight_tying is missing"),
    (open_dcoder_config, {}, NAMED, "autoregressive models.*If .*, pass --family open-dcoder"),
    (open_dcoder_config, {}, Overrides(family="open-dcoder"), "no mask_token_id"),
    (open_dcoder_config, {"use_sliding_window": True}, OPEN_DCODER, "use_sliding_window = true"),
    (DREAM, {}, OPEN_DCODER, "'DreamModel' does not belong to --family open-dcoder"),
    (DREAM, {}, Overrides(family="mystery"), "--family 'mystery' is unknown. Known: llada, "),
    (DREAM, {"hidden_act": "gelu"}, Overrides(), "hidden_act"),
    (DREAM, {"rms_norm_eps": "1e-6"}, Overrides(), "rms_norm_eps must be a positive number"),
    (DREAM, {"partial_rotary_factor": 2}, Overrides(), "factor 2.0 is greater than 1"),
    (DREAM, {"rope_theta": None}, Overrides(), "rope_theta is missing, and a guess would change"),
    (DREAM, {"rope_scaling": {"type": "longrope"}}, Overrides(), "'longrope' is not supported"),
    (DREAM, {"rope_scaling": {"type": "linear"}}, Overrides(), "factor in rope_scaling is missing"),
    (DREAM, {"rope_parameters": {"rope_theta": 5.0}}, Overrides(), "and, in rope_parameters, 5.0"),
    (
        DREAM,
        {"rope_parameters": {"rope_theta": 1e6, "mrope_section": [1]}},
        Overrides(),
        "'mrope_section' in rope_scaling or rope_par",
    ),
    (
        DREAM,
        {"rope_parameters": {"sliding_attention": {"rope_theta": 1.0}}},
        Overrides(),
        "by layer type, 'sliding_attention'",
    ),
    (DREAM, {"layer_types": ["sliding_attention"] * 2}, Overrides(), "other than full_attention"),
    (sdar_config, {"block_size": None}, Overrides(), "block_size is missing.*--attention-block"),
    (sdar_config, {"block_size": -4}, Overrides(), "block_size must be an integer in 1"),
    (sdar_config, {"block_size": "4"}, Overrides(), "block_size must be an integer in 1"),
    (sdar_config, {}, Overrides(attention_block=0), "--attention-block is 0; blocks have at least"),
    (
        sdar_config,
        {},
        Overrides(attention_block=1 << 20),
        "--attention-block is 1048576, but a canvas",
    ),
    (
        sdar_config,
        {"num_key_value_heads": 3},
        Overrides(),
        "is not a multiple of num_key_value_heads 3",
    ),
    (sdar_config, {"mask_token_id": None}, Overrides(), "no mask_token_id.*Pass --mask-token-id"),
    (sdar_config, {"attention_bias": True}, Overrides(), "attention_bias = true is not supported"),
    (coda_config, {"attention_bias": True}, Overrides(), "attention_bias = true is not supported"),
    (fast_dllm_v2_config, {"bd_size": 12}, NAMED, "8 positions at a time, which does not divide"),
    (fast_dllm_v2_config, {"bd_size": None}, NAMED, "bd_size is missing.*Pass --attention-block"),
    (fast_dllm_v2_config, {}, Overrides(), r"nor \|<MASK>\| among the added tokens"),
    (stable_diffcoder_config, {}, Overrides(), r"nor <\[MASK_TOKEN\]> among the added tokens"),
    (stable_diffcoder_config, {"attention_bias": True}, NAMED, "attention_bias = true is not"),
    (DREAM, {}, BLOCKS[4], "the attention of DreamModel has no blocks"),
    (llada_moe_config, {"num_experts_per_tok": 9}, Overrides(), r"an integer in 1\.\.8, found 9"),
    (llada_moe_config, {"moe_layer_freq": [1]}, Overrides(), "must be a list of 2 numbers"),
    (llada_moe_config, {"norm_topk_prob": True}, Overrides(), "norm_topk_prob = true is not"),
    (llada_moe_config, {"clip_qkv": 8.0}, Overrides(), r"clip_qkv = 8\.0 is not supported"),
    (llada2_config, {"num_key_value_heads": 3}, Overrides(), "4 is not a multiple of num_key"),
    (llada2_config, {"n_group": 3}, Overrides(), "num_experts 16 in n_group 3"),
    (llada2_config, {"num_experts_per_tok": 9}, Overrides(), "cannot give each token"),
    (llada2_config, {"score_function": "softmax"}, Overrides(), "score_function"),
    (llada2_config, {"expert_capacity": 8, "block_size": 32}, Overrides(), "belong to LLaDA2.2"),
    (llada2_config, {"rope_scaling": {"type": "longrope"}}, Overrides(), "'longrope' is not"),
    (WEDLM, {"use_sliding_window": True}, Overrides(), "use_sliding_window = true is not"),
    (WEDLM, {"attention_bias": "yes"}, Overrides(), "must be true or false, found 'yes'"),
    (WEDLM, {}, BLOCKS[4], "the attention of WeDLMForCausalLM has no blocks"),
    (NEMOTRON, {"sliding_window": 64}, Overrides(), "sliding_window = 64 is not supported"),
    (NEMOTRON, {"dlm_paradigm": "autoregressive"}, Overrides(), "dlm_paradigm = .* is not"),
    (NEMOTRON, {"block_size": None}, Overrides(), "block_size is missing"),
    (NEMOTRON, {"rope_parameters": {"rope_theta": 1e4}}, Overrides(), "llama_4_scaling_beta is"),
    (
        GEMMA,
        {"layer_types": ["sliding_attention", "chunked", "full_attention"]},
        Overrides(),
        "layer 1 has the type 'chunked' in layer_types, which is not supported",
    ),
    (GEMMA, {"layer_types": ["sliding_attention"] * 3}, Overrides(), "last entry of layer_types"),
    (GEMMA, {"use_bidirectional_attention": "all"}, Overrides(), 'only "vision"'),
    (GEMMA, {"tie_word_embeddings": False}, Overrides(), "only true"),
    (GEMMA, {"rope_parameters": {"full_attention": {}}}, Overrides(), "must have an object"),
    (GEMMA, {"num_key_value_heads": 3}, Overrides(), "3 key and value heads of layer 0"),
    (GEMMA, {"per_layer_config": {"9": {}}}, Overrides(), "per_layer_config names layer '9'"),
    (GEMMA, {}, Overrides(mask_token_id=4), "has no mask token"),
    (bert_config, {"hidden_act": "relu"}, Overrides(), 'hidden_act = "relu" is not supported'),
    (bert_config, {"is_decoder": True}, Overrides(), "is_decoder = true is not supported"),
    (bert_config, {"num_attention_heads": 5}, Overrides(), "64 is not a multiple of num_attention"),
    (bert_config, {"mask_token_id": None}, Overrides(), r"nor \[MASK\] among the added tokens"),
    (modern_bert_config, {"rope_scaling": {"rope_type": "yarn"}}, Overrides(), "rope_scaling = "),
    (
        modern_bert_config,
        {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}},
        Overrides(),
        "rope_parameters of full_attention must have the rope_type default",
    ),
    (modern_bert_config, {"local_attention": 1}, Overrides(), "must be an integer in 2"),
]


@pytest.mark.parametrize(("config", "changes", "overrides", "says"), REFUSED)
def test_a_config_that_we_do_not_compute_is_refused_by_its_key(
    config: Callable[..., dict[str, Any]],
    changes: dict[str, Any],
    overrides: Overrides,
    says: str,
    tmp_path: Path,
) -> None:
    path = write_checkpoint(tmp_path, config())
    (path / "config.json").write_text(json.dumps(config(**changes)))
    with pytest.raises(CheckpointError, match=says) as caught:
        network_of(path, overrides)
    assert len(str(caught.value)) < 1500, "a sentence, not the input"


def test_a_uno_bundle_is_known_by_its_adapter(tmp_path: Path) -> None:
    """The released config.json of Uno bundles does not say that attention is causal."""
    write_checkpoint(tmp_path, sdar_config())
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(adapter_config()))
    with pytest.raises(CheckpointError, match=r"autoregressive .* Do not pass --no-adapter"):
        network_of(tmp_path, Overrides(no_adapter=True))
    config = sdar_config(use_regular_causal=False)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert network_of(tmp_path, Overrides(no_adapter=True)).visible_block == 4


LAYER = "model.layers.0.mlp"
# For each damage: config.json, the changed tensors (None removes one), and the error.
WRONG: dict[str, tuple[dict[str, Any], dict[str, torch.Tensor | None], str]] = {
    "missing norm": (
        sdar_config(),
        {"model.layers.1.self_attn.q_norm.weight": None},
        r"1 tensors missing: model\.layers\.1\.self_attn\.q_norm\.weight",
    ),
    "missing expert": (
        llada_moe_config(),
        {f"{LAYER}.experts.5.up_proj.weight": None},
        r"1 tensors missing: model\.layers\.0\.mlp\.experts\.5\.up_proj",
    ),
    "router": (
        llada_moe_config(),
        {f"{LAYER}.gate.weight": torch.zeros(7, 64)},
        r"mlp\.gate\.weight is \[7, 64\], expected \[8, 64\]",
    ),
    "extra expert": (
        llada_moe_config(),
        {f"{LAYER}.experts.8.up_proj.weight": torch.zeros(64, 64)},
        r"1 tensors not known: model\.layers\.0\.mlp\.experts\.8",
    ),
    "fused matrix of other heads": (
        llada2_config(),
        {"model.layers.0.attention.query_key_value.weight": torch.zeros(127, 64)},
        r"query_key_value\.weight is \[127, 64\], expected \[128, 64\]",
    ),
    "missing self-conditioning": (
        diffusion_gemma_config(),
        {"model.decoder.self_conditioning.up_proj.weight": None},
        r"1 tensors missing: model\.decoder\.self_conditioning\.up_proj",
    ),
    "missing token types": (
        bert_config(),
        {"bert.embeddings.token_type_embeddings.weight": None},
        "1 tensors missing: bert.embeddings.token_type_embeddings.weight",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_tensors_are_named(tmp_path: Path, name: str) -> None:
    config, change, told = WRONG[name]
    path = rewritten(write_checkpoint(tmp_path, config), change)
    with pytest.raises(CheckpointError, match=told):
        families.open_weights(Checkpoint(path), network_of(path))


def test_experts_in_both_forms_are_refused(tmp_path: Path) -> None:
    path = merged(write_checkpoint(tmp_path, llada_moe_config()), [1])
    told = r"model\.layers\.0\.mlp\.experts\.0\.gate_proj\.weight has one expert and model\.layers\.1\.mlp\.experts\.gate_proj"
    with pytest.raises(CheckpointError, match=told):
        families.open_weights(Checkpoint(path), network_of(path))


def test_a_vision_tower_is_left_out_by_name(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, diffusion_gemma_config())
    tensors = load_file(tmp_path / "model.safetensors")
    tower = "model.encoder.vision_tower.patch_embedder.input_proj.weight"
    save_file(tensors | {tower: torch.zeros(4, 4)}, tmp_path / "model.safetensors")
    (note,) = families.check_tensors(Checkpoint(tmp_path), network_of(tmp_path)).checkpoint.notes
    assert note.startswith("1 tensors are left out")
    assert tower in note
