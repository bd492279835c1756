"""Small random checkpoints for tests and benchmarks.

The checkpoints have the file layouts of released checkpoints, and are made from a seed.
"""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file


def llada_config(**changes: Any) -> dict[str, Any]:
    """The config.json of a tiny LLaDA, with the released keys."""
    return {
        "architectures": ["LLaDAModelLM"],
        "model_type": "llada",
        "d_model": 64,
        "n_layers": 2,
        "n_heads": 4,
        "n_kv_heads": 4,
        "mlp_hidden_size": 96,
        "vocab_size": 160,
        "embedding_size": 160,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
        "max_sequence_length": 256,
        "block_type": "llama",
        "activation_type": "silu",
        "layer_norm_type": "rms",
        "include_bias": False,
        "include_qkv_bias": False,
        "weight_tying": False,
        "rope": True,
        "mask_token_id": 150,
        "eos_token_id": 151,
        "pad_token_id": 151,
    } | changes


def illada_config(**changes: Any) -> dict[str, Any]:
    """The config.json of a tiny iLLaDA: LLaDA with grouped queries, a tied head and a low mask
    token.
    """
    return llada_config(**{"n_kv_heads": 2, "weight_tying": True, "mask_token_id": 5} | changes)


def dream_config(**changes: Any) -> dict[str, Any]:
    """The config.json of a tiny Dream, with the released keys."""
    return {
        "architectures": ["DreamModel"],
        "model_type": "Dream",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "vocab_size": 160,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 256,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "mask_token_id": 150,
        "eos_token_id": 151,
        "pad_token_id": 151,
    } | changes


def a2d_qwen3_config(**changes: Any) -> dict[str, Any]:
    """The config.json of a tiny Qwen3 that was converted to a denoiser (A2D).

    The heads of this network are wider than hidden size / number of heads. Queries and keys have a
    norm per head.
    """
    return {
        "architectures": ["A2DQwen3LMHeadModel"],
        "model_type": "a2d-qwen3",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 96,
        "vocab_size": 160,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 256,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": True,
        "mask_token_id": 150,
        "eos_token_id": 151,
        "pad_token_id": 151,
    } | changes


def coda_config(**changes: Any) -> dict[str, Any]:
    """The config.json of a tiny CoDA, with the released keys.

    The config has the keys of Qwen3, and keys of the training. It does not say whether the head is
    tied.
    """
    other = {
        "architectures": ["CoDALanguageModel"],
        "model_type": "CoDA",
        "attention_kernel": "flash_attention",
        "block_masking_probability": 0.3,
        "mask_block_sizes": [2, 4, 8],
        "prefix_probability": 0.25,
        "truncate_probability": 0.25,
        "sampling_eps": 0.001,
    }
    config = a2d_qwen3_config(**other)
    del config["tie_word_embeddings"]
    return config | changes


def open_dcoder_config(**changes: Any) -> dict[str, Any]:
    """The config.json of a tiny Open-dCoder, with the keys that transformers writes for Qwen2.

    It does not name a mask token.
    """
    other = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "sliding_window": 256,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "mask_token_id": None,
    }
    return dream_config(**other | changes)


def llada_moe_config(**changes: Any) -> dict[str, Any]:
    """The config.json of a tiny LLaDA-MoE, with the released keys."""
    return {
        "architectures": ["LLaDAMoEModelLM"],
        "model_type": "llada",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "expert_intermediate_size": 64,
        "dense_intermediate_size": 96,
        "shared_expert_intermediate_size": None,
        "moe_layer_freq": [1, 1],
        "moe_router_enable_expert_bias": False,
        "moe_router_score_function": "softmax",
        "norm_topk_prob": None,
        "vocab_size": 160,
        "rope_theta": 50000,
        "partial_rotary_factor": 1,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 256,
        "hidden_act": "silu",
        "attention_bias": False,
        "clip_qkv": None,
        "qk_layernorm": True,
        "tie_word_embeddings": False,
        "mask_token_id": 150,
        "eos_token_id": 151,
        "pad_token_id": 151,
    } | changes


def sdar_config(**changes: Any) -> dict[str, Any]:
    """The config.json of a tiny SDAR, with the released keys.

    The config has the keys of Qwen3, and one more key for the block length.
    """
    other = {
        "architectures": ["SDARForCausalLM"],
        "model_type": "sdar",
        "block_size": 4,
        "fuse_cross_entropy": True,
    }
    return a2d_qwen3_config(**other | {"tie_word_embeddings": False} | changes)


def uno_config(architecture: str, **changes: Any) -> dict[str, Any]:
    """The config.json of a tiny autoregressive network, with the keys of the releases.

    Uno bundles have SDAR's class name. Llama and K2-Horizon have the keys of Llama.
    """
    if architecture == "SDARForCausalLM":
        return sdar_config(**changes)
    own = {"architectures": [architecture], "mask_token_id": None, "tie_word_embeddings": False}
    if architecture == "Qwen3ForCausalLM":
        return a2d_qwen3_config(**own | {"model_type": "qwen3"} | changes)
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 151,
        "head_dim": 16,
        "hidden_act": "silu",
        "hidden_size": 64,
        "initializer_range": 0.02,
        "intermediate_size": 96,
        "max_position_embeddings": 256,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 10000.0}
        | (yarn if architecture == "K2HorizonForCausalLM" else {"rope_type": "default"}),
        "use_cache": True,
        "vocab_size": 160,
    } | (own | changes)


def nemotron_config(**changes: Any) -> dict[str, Any]:
    """The config.json of a tiny Nemotron-Labs-Diffusion, with the released keys."""
    return {
        "architectures": ["NemotronLabsDiffusionModel"],
        "model_type": "nemotron_labs_diffusion",
        "ar_loss_weight": 1.0,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_implementation": "sdpa",
        "block_size": 8,
        "dlm_loss_weight": None,
        "dlm_paradigm": "bidirectional",
        "dp_varying_mask_ratio": False,
        "head_dim": 16,
        "hidden_act": "silu",
        "hidden_size": 64,
        "intermediate_size": 96,
        "max_position_embeddings": 256,
        "mlp_bias": False,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 4.0,
            "llama_4_scaling_beta": 0.1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 24,
            "rope_theta": 1000000.0,
            "rope_type": "yarn",
        },
        "sliding_window": None,
        "tie_word_embeddings": False,
        "vocab_size": 160,
        "mask_token_id": 150,
        "eos_token_id": 151,
        "bos_token_id": 1,
    } | changes


ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The modules of a layer that a LoRA adapter can adapt."""


def adapter_config(**changes: Any) -> dict[str, Any]:
    """The adapter_config.json of a LoRA adapter, with the keys that PEFT writes."""
    return {
        "peft_type": "LORA",
        "auto_mapping": None,
        "base_model_name_or_path": "nvidia/Nemotron-Labs-Diffusion-3B",
        "bias": "none",
        "exclude_modules": None,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "layers_to_transform": None,
        "lora_alpha": 16,
        "lora_dropout": 0.05,
        "modules_to_save": None,
        "r": 4,
        "rank_pattern": {},
        "alpha_pattern": {},
        "target_modules": ["o_proj"],
        "task_type": None,
        "use_dora": False,
        "use_rslora": False,
    } | changes


def adapter_tensors(config: dict[str, Any], adapter: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Random tensors of an adapter, with the names that PEFT gives them."""
    generator = torch.Generator().manual_seed(config["hidden_size"])
    rank, found = adapter["r"], {}
    for name, shape in SHAPES[config["architectures"][0]](config).items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] not in adapter["target_modules"]:
            continue
        for kind, size in (("A", (rank, shape[1])), ("B", (shape[0], rank))):
            noise = torch.randn(size, generator=generator)
            found[f"base_model.model.{module}.lora_{kind}.weight"] = noise * size[1] ** -0.5
    return found


def write_adapter(
    checkpoint: Path,
    config: dict[str, Any],
    tensors: dict[str, torch.Tensor] | None = None,
    *,
    name: str = "linear_spec_lora",
    **changes: Any,
) -> Path:
    """Write a LoRA adapter for draft passes into the folder ``name`` of a checkpoint."""
    folder, adapter = checkpoint / name, adapter_config(**changes)
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(adapter))
    tensors = adapter_tensors(config, adapter) if tensors is None else tensors
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def diffusion_gemma_config(**changes: Any) -> dict[str, Any]:
    """The config.json of a tiny DiffusionGemma, with the keys that transformers writes.

    If ``text_config`` contains a key of ``changes``, the value in ``text_config`` is changed.
    """
    text: dict[str, Any] = {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "head_dim": 16,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 64,
        "initializer_range": 0.02,
        "intermediate_size": 64,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "max_position_embeddings": 2048,
        "model_type": "diffusion_gemma_text",
        "moe_intermediate_size": 64,
        "num_attention_heads": 4,
        "num_experts": 8,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "per_layer_config": {"2": {"head_dim": 32, "num_key_value_heads": 1}},
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "full_attention": {
                "partial_rotary_factor": 0.25,
                "rope_theta": 1000000.0,
                "rope_type": "proportional",
            },
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "sliding_window": 8,
        "tie_word_embeddings": True,
        "top_k_experts": 3,
        "use_bidirectional_attention": "vision",
        "vocab_size": 160,
    }
    outer: dict[str, Any] = {
        "architectures": ["DiffusionGemmaForBlockDiffusion"],
        "boi_token_id": 255999,
        "canvas_length": 8,
        "eoi_token_id": 258882,
        "image_token_id": 258880,
        "initializer_range": 0.02,
        "model_type": "diffusion_gemma",
        "tie_word_embeddings": True,
        "vision_config": {"hidden_size": 16, "model_type": "gemma4_vision"},
    }
    inner = {key: value for key, value in changes.items() if key in text}
    return (
        outer
        | {"text_config": text | inner}
        | {key: value for key, value in changes.items() if key not in text}
    )


def fast_dllm_v2_config(**changes: Any) -> dict[str, Any]:
    """The config.json of a tiny Fast-dLLM v2, with the released keys.

    The config has the keys of Qwen2.5, and one more key for the block length. It does not name a
    mask token.
    """
    other = {
        "architectures": ["Fast_dLLM_QwenForCausalLM"],
        "model_type": "Fast_dLLM_Qwen",
        "bd_size": 32,
    }
    return dream_config(**other | {"tie_word_embeddings": True, "mask_token_id": None} | changes)


def a2d_config(trunk: str, **changes: Any) -> dict[str, Any]:
    """The config.json of a tiny Qwen2, Qwen3 or Llama that was converted to a denoiser (A2D)."""
    named = {"architectures": [f"A2D{trunk}LMHeadModel"], "model_type": f"a2d-{trunk.lower()}"}
    return (a2d_qwen3_config if trunk == "Qwen3" else dream_config)(**named | changes)


def stable_diffcoder_config(**changes: Any) -> dict[str, Any]:
    """The config.json of a tiny Stable-DiffCoder, with the released keys of Llama."""
    return {
        "architectures": ["StableDiffcoderForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 1,
        "hidden_act": "silu",
        "hidden_size": 64,
        "intermediate_size": 96,
        "max_position_embeddings": 256,
        "mlp_bias": False,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "vocab_size": 160,
    } | changes


def wedlm_config(*, like: str = "Qwen3", **changes: Any) -> dict[str, Any]:
    """The config.json of a tiny WeDLM with the layers of Qwen2 (7B) or Qwen3 (8B)."""
    config = (a2d_qwen3_config if like == "Qwen3" else dream_config)(
        architectures=["WeDLMForCausalLM"],
        model_type="wedlm",
        attention_bias=like == "Qwen2",
        qk_norm=like == "Qwen3",
        tie_word_embeddings=False,
        max_window_layers=28,
    )
    return config | changes


def sdlm_config(**changes: Any) -> dict[str, Any]:
    """The config.json of a tiny SDLM: the keys of Qwen2.5, and those of the authors' training code."""
    config = open_dcoder_config(
        attn_implementation="sdpa",
        auto_map={
            "AutoConfig": "configuration_qwen2.Qwen2Config",
            "AutoModelForCausalLM": "modeling_qwen2.Qwen2ForCausalLM",
        },
        block_size=4,
        causal_attn=False,
        text_mask_token="<text_mask>",
        text_mask_token_id=150,
        tie_word_embeddings=False,
        use_mrope=False,
    )
    return config | changes


def llada2_config(**changes: Any) -> dict[str, Any]:
    """The config.json of a tiny LLaDA2, with the released keys.

    Each layer has 16 experts in 4 groups, except the first layer, which is dense.
    """
    return {
        "architectures": ["LLaDA2MoeModelLM"],
        "model_type": "llada2_moe",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "moe_intermediate_size": 64,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "num_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1,
        "partial_rotary_factor": 0.5,
        "rope_theta": 600000,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 256,
        "vocab_size": 160,
        "hidden_act": "silu",
        "norm_topk_prob": True,
        "score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "router_dtype": "fp32",
        "use_bias": False,
        "use_qkv_bias": False,
        "tie_word_embeddings": False,
        "mask_token_id": 150,
        "eos_token_id": 151,
        "pad_token_id": 151,
    } | changes


def qwen3_moe_config(architecture: str, **changes: Any) -> dict[str, Any]:
    """The config.json of a tiny RND1 (``RND1LM``) or SDAR-MoE (``SDARMoeForCausalLM``), with the
    released keys, which are the keys of Qwen3-MoE.
    """
    mixture = {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
    }
    further = {
        "architectures": [architecture],
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "tie_word_embeddings": False,
    }
    return a2d_qwen3_config(**mixture | further | changes)


def bert_config(**changes: Any) -> dict[str, Any]:
    """The config.json of a tiny BERT, with the keys that transformers writes."""
    return {
        "architectures": ["BertForMaskedLM"],
        "model_type": "bert",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 96,
        "vocab_size": 160,
        "max_position_embeddings": 66,
        "type_vocab_size": 2,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "pad_token_id": 0,
        "mask_token_id": 150,
    } | changes


def roberta_config(**changes: Any) -> dict[str, Any]:
    """The config.json of a tiny RoBERTa.

    The first position of a text is the padding token's id plus one.
    """
    other = {"architectures": ["RobertaForMaskedLM"], "model_type": "roberta", "type_vocab_size": 1}
    return bert_config(**other | {"pad_token_id": 1, "eos_token_id": 2} | changes)


def torch_encoder_config(**changes: Any) -> dict[str, Any]:
    """The config.json of a tiny model with the layers of ``torch.nn.TransformerEncoder``."""
    return {
        "architectures": ["TransformerEncoderForMaskedLM"],
        "d_model": 64,
        "nhead": 4,
        "num_layers": 2,
        "dim_feedforward": 96,
        "vocab_size": 160,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "mask_token_id": 150,
    } | changes


def modern_bert_config(**changes: Any) -> dict[str, Any]:
    """The config.json of a tiny ModernBERT, with the keys of the release.

    In every third layer, a token sees all tokens. In the other layers, a token sees three tokens on
    each side.
    """
    return {
        "architectures": ["ModernBertForMaskedLM"],
        "model_type": "modernbert",
        "hidden_size": 64,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "intermediate_size": 96,
        "vocab_size": 160,
        "max_position_embeddings": 128,
        "global_attn_every_n_layers": 3,
        "global_rope_theta": 160000.0,
        "local_rope_theta": 10000.0,
        "local_attention": 6,
        "hidden_activation": "gelu",
        "norm_eps": 1e-5,
        "norm_bias": False,
        "attention_bias": False,
        "mlp_bias": False,
        "decoder_bias": True,
        "classifier_bias": False,
        "classifier_activation": "gelu",
        "pad_token_id": 0,
        "eos_token_id": 3,
        "mask_token_id": 150,
    } | changes


def llada_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the tensor names and shapes ``[out, in]`` of a released LLaDA."""
    hidden, mlp, vocab = config["d_model"], config["mlp_hidden_size"], config["embedding_size"]
    kv = hidden // config["n_heads"] * config["n_kv_heads"]
    prefix = "model.transformer."
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}wte.weight": (vocab, hidden)}
    for i in range(config["n_layers"]):
        block = f"{prefix}blocks.{i}."
        rows = {
            "q_proj": hidden,
            "k_proj": kv,
            "v_proj": kv,
            "attn_out": hidden,
            "ff_proj": mlp,
            "up_proj": mlp,
        }
        for name, out in rows.items():
            shapes[f"{block}{name}.weight"] = (out, hidden)
            if config["include_qkv_bias"] and name in ("q_proj", "k_proj", "v_proj"):
                shapes[f"{block}{name}.bias"] = (out,)
        shapes[f"{block}ff_out.weight"] = (hidden, mlp)
        shapes[f"{block}attn_norm.weight"] = shapes[f"{block}ff_norm.weight"] = (hidden,)
    shapes[f"{prefix}ln_f.weight"] = (hidden,)
    if not config["weight_tying"]:
        shapes[f"{prefix}ff_out.weight"] = (vocab, hidden)
    return shapes


def dream_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the tensor names and shapes ``[out, in]`` of a released Dream.

    The names and shapes are the same as in Qwen2.
    """
    return _qwen_shapes(config, bias=True)


def a2d_qwen3_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the tensor names and shapes ``[out, in]`` of a released A2D Qwen3.

    The names and shapes are the same as in Qwen3.
    """
    head_norms = {"q_norm": (config["head_dim"],), "k_norm": (config["head_dim"],)}
    return _qwen_shapes(config, bias=config["attention_bias"], attention=head_norms)


def llada_moe_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the tensor names and shapes ``[out, in]`` of a released LLaDA-MoE."""
    hidden, head_size = (
        config["hidden_size"],
        config["hidden_size"] // config["num_attention_heads"],
    )
    dense = config | {"intermediate_size": config["dense_intermediate_size"]}
    norms = {"q_norm": (head_size,), "k_norm": (head_size,)} if config["qk_layernorm"] else None
    shapes = _qwen_shapes(dense, bias=False, attention=norms)
    for i, has_experts in enumerate(config["moe_layer_freq"]):
        if not has_experts:
            continue
        layer = f"model.layers.{i}."
        shapes = _with_experts(
            shapes, layer, hidden, config["num_experts"], config["expert_intermediate_size"]
        )
        if config["moe_router_enable_expert_bias"]:
            shapes[f"{layer}mlp.expert_bias"] = (config["num_experts"],)
        if config["shared_expert_intermediate_size"]:
            shapes |= _gated_shapes(
                f"{layer}shared_expert.", hidden, config["shared_expert_intermediate_size"]
            )
    return shapes


def llada2_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the tensor names and shapes ``[out, in]`` of a released LLaDA2."""
    hidden, vocab, size = config["hidden_size"], config["vocab_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {"model.word_embeddings.weight": (vocab, hidden)}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        shapes[f"{layer}attention.query_key_value.weight"] = ((heads + 2 * kv_heads) * size, hidden)
        shapes[f"{layer}attention.dense.weight"] = (hidden, heads * size)
        shapes[f"{layer}attention.query_layernorm.weight"] = shapes[
            f"{layer}attention.key_layernorm.weight"
        ] = (size,)
        shapes[f"{layer}input_layernorm.weight"] = shapes[
            f"{layer}post_attention_layernorm.weight"
        ] = (hidden,)
        if i < config["first_k_dense_replace"]:
            shapes |= _gated_shapes(f"{layer}mlp.", hidden, config["intermediate_size"])
            continue
        shapes = _with_experts(
            shapes, layer, hidden, config["num_experts"], config["moe_intermediate_size"]
        )
        shapes[f"{layer}mlp.gate.expert_bias"] = (config["num_experts"],)
        shapes |= _gated_shapes(
            f"{layer}mlp.shared_experts.", hidden, config["moe_intermediate_size"]
        )
    shapes["model.norm.weight"] = (hidden,)
    return shapes if config["tie_word_embeddings"] else shapes | {"lm_head.weight": (vocab, hidden)}


def qwen3_moe_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the tensor names and shapes ``[out, in]`` of a released RND1 or SDAR-MoE.

    The names and shapes are the same as in Qwen3-MoE.
    """
    shapes = a2d_qwen3_shapes(config)
    for i in range(config["num_hidden_layers"]):
        if i not in config["mlp_only_layers"]:
            sizes = config["hidden_size"], config["num_experts"], config["moe_intermediate_size"]
            shapes = _with_experts(shapes, f"model.layers.{i}.", *sizes)
    return shapes


def bert_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the tensor names and shapes of a BERT.

    The tensors include two parts that a denoiser does not use: the pooler and the next-sentence
        head.
    """
    shapes = _encoder_shapes(config, "bert")
    d, head = config["hidden_size"], "cls.predictions"
    shapes |= {"bert.pooler.dense.weight": (d, d), "bert.pooler.dense.bias": (d,)}
    shapes |= {"cls.seq_relationship.weight": (2, d), "cls.seq_relationship.bias": (2,)}
    shapes |= {f"{head}.bias": (config["vocab_size"],)}
    shapes |= {f"{head}.transform.dense.weight": (d, d), f"{head}.transform.dense.bias": (d,)}
    return shapes | {f"{head}.transform.LayerNorm.{name}": (d,) for name in ("weight", "bias")}


def roberta_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    shapes, d = _encoder_shapes(config, "roberta"), config["hidden_size"]
    shapes |= {"lm_head.dense.weight": (d, d), "lm_head.dense.bias": (d,)}
    shapes |= {f"lm_head.layer_norm.{name}": (d,) for name in ("weight", "bias")}
    return shapes | {"lm_head.bias": (config["vocab_size"],)}


def modern_bert_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    d, inner, vocab = (config[name] for name in ("hidden_size", "intermediate_size", "vocab_size"))
    shapes: dict[str, tuple[int, ...]] = {"model.embeddings.tok_embeddings.weight": (vocab, d)}
    matrices, norms = (
        {"head.dense": (d, d)},
        ["model.embeddings.norm", "model.final_norm", "head.norm"],
    )
    biased = ["head.dense"] * config["classifier_bias"]
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        attention = {f"{layer}.attn.Wqkv": (3 * d, d), f"{layer}.attn.Wo": (d, d)}
        mlp = {f"{layer}.mlp.Wi": (2 * inner, d), f"{layer}.mlp.Wo": (d, inner)}
        matrices |= attention | mlp
        biased += [*attention] * config["attention_bias"] + [*mlp] * config["mlp_bias"]
        norms += [f"{layer}.mlp_norm", *([f"{layer}.attn_norm"] if i else [])]
    shapes |= {f"{name}.weight": shape for name, shape in matrices.items()}
    shapes |= {f"{name}.bias": matrices[name][:1] for name in biased}
    shapes |= {f"{norm}.weight": (d,) for norm in norms}
    if config["norm_bias"]:
        shapes |= {f"{norm}.bias": (d,) for norm in norms}
    return shapes | ({"decoder.bias": (vocab,)} if config["decoder_bias"] else {})


def _encoder_shapes(config: dict[str, Any], encoder: str) -> dict[str, tuple[int, ...]]:
    d, inner, embeddings = (
        config["hidden_size"],
        config["intermediate_size"],
        f"{encoder}.embeddings",
    )
    shapes: dict[str, tuple[int, ...]] = {
        f"{embeddings}.word_embeddings.weight": (config["vocab_size"], d),
        f"{embeddings}.position_embeddings.weight": (config["max_position_embeddings"], d),
        f"{embeddings}.token_type_embeddings.weight": (config["type_vocab_size"], d),
    }
    norms = [f"{embeddings}.LayerNorm"]
    for i in range(config["num_hidden_layers"]):
        layer = f"{encoder}.encoder.layer.{i}"
        matrices = {f"attention.self.{name}": (d, d) for name in ("query", "key", "value")}
        matrices |= {"attention.output.dense": (d, d)}
        matrices |= {"intermediate.dense": (inner, d), "output.dense": (d, inner)}
        for name, shape in matrices.items():
            shapes |= {f"{layer}.{name}.weight": shape, f"{layer}.{name}.bias": shape[:1]}
        norms += [f"{layer}.attention.output.LayerNorm", f"{layer}.output.LayerNorm"]
    return shapes | {f"{norm}.{name}": (d,) for norm in norms for name in ("weight", "bias")}


def _with_experts(
    shapes: dict[str, tuple[int, ...]], layer: str, hidden: int, experts: int, size: int
) -> dict[str, tuple[int, ...]]:
    """Replace the tensors of a layer's MLP by the tensors of a router and experts."""
    dense = _gated_shapes(f"{layer}mlp.", hidden, 1)
    kept = {name: shape for name, shape in shapes.items() if name not in dense}
    kept[f"{layer}mlp.gate.weight"] = (experts, hidden)
    for expert in range(experts):
        kept |= _gated_shapes(f"{layer}mlp.experts.{expert}.", hidden, size)
    return kept


def _gated_shapes(prefix: str, hidden: int, size: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}gate_proj.weight": (size, hidden),
        f"{prefix}up_proj.weight": (size, hidden),
        f"{prefix}down_proj.weight": (hidden, size),
    }


def _qwen_shapes(
    config: dict[str, Any], *, bias: bool, attention: dict[str, tuple[int, ...]] | None = None
) -> dict[str, tuple[int, ...]]:
    """Return the tensor names and shapes of a network whose tensors are named as in Qwen.

    ``attention`` contains further tensors of attention, which only some networks have, such as
    biases.
    """
    hidden, mlp, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head_size = config.get("head_dim") or hidden // config["num_attention_heads"]
    q, kv = head_size * config["num_attention_heads"], head_size * config["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        for name, out in {"q_proj": q, "k_proj": kv, "v_proj": kv}.items():
            shapes[f"{layer}self_attn.{name}.weight"] = (out, hidden)
            if bias:
                shapes[f"{layer}self_attn.{name}.bias"] = (out,)
        shapes[f"{layer}self_attn.o_proj.weight"] = (hidden, q)
        for name, shape in (attention or {}).items():
            shapes[f"{layer}self_attn.{name}.weight"] = shape
        shapes[f"{layer}mlp.gate_proj.weight"] = shapes[f"{layer}mlp.up_proj.weight"] = (
            mlp,
            hidden,
        )
        shapes[f"{layer}mlp.down_proj.weight"] = (hidden, mlp)
        shapes[f"{layer}input_layernorm.weight"] = shapes[
            f"{layer}post_attention_layernorm.weight"
        ] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def torch_encoder_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the tensor names and shapes of ``test_masked_models.TorchEncoder``."""
    d, inner, vocab = (config[name] for name in ("d_model", "dim_feedforward", "vocab_size"))
    matrices = {"head": (vocab, d)}
    norms = ["encoder.norm"] * config.get("norm_first", False)
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (vocab, d)}
    shapes["positions.weight"] = (config["max_position_embeddings"], d)
    for i in range(config["num_layers"]):
        layer = f"encoder.layers.{i}."
        attention = f"{layer}self_attn."
        shapes |= {f"{attention}in_proj_weight": (3 * d, d), f"{attention}in_proj_bias": (3 * d,)}
        matrices |= {f"{attention}out_proj": (d, d)}
        matrices |= {f"{layer}linear1": (inner, d), f"{layer}linear2": (d, inner)}
        norms += [f"{layer}norm1", f"{layer}norm2"]
    shapes |= {f"{name}.weight": shape for name, shape in matrices.items()}
    shapes |= {f"{name}.bias": shape[:1] for name, shape in matrices.items()}
    return shapes | {f"{norm}.{kind}": (d,) for norm in norms for kind in ("weight", "bias")}


def nemotron_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the tensors of Nemotron-Labs-Diffusion. They are the tensors of Llama, with other
    names.
    """
    renamed = {"model.": "encoder.", "lm_head.": "diffusion_head."}
    return {
        new + name.removeprefix(old): shape
        for name, shape in _qwen_shapes(config, bias=False).items()
        for old, new in renamed.items()
        if name.startswith(old)
    }


def diffusion_gemma_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of DiffusionGemma that transformers writes, without a vision tower."""
    c = config["text_config"]
    hidden, inner, count = c["hidden_size"], c["intermediate_size"], c["num_experts"]
    size, heads = c["moe_intermediate_size"], c["num_attention_heads"]
    decoder = "model.decoder."
    shapes: dict[str, tuple[int, ...]] = {
        f"{decoder}embed_tokens.weight": (c["vocab_size"], hidden),
        f"{decoder}norm.weight": (hidden,),
        f"{decoder}self_conditioning.pre_norm.weight": (hidden,),
        f"{decoder}self_conditioning.gate_proj.weight": (inner, hidden),
        f"{decoder}self_conditioning.up_proj.weight": (inner, hidden),
        f"{decoder}self_conditioning.down_proj.weight": (hidden, inner),
    }
    norms = (
        *("input_layernorm", "post_attention_layernorm"),
        *(f"pre_feedforward_layernorm{end}" for end in ("", "_2")),
        *(f"post_feedforward_layernorm{end}" for end in ("", "_1", "_2")),
    )
    for i, kind in enumerate(c["layer_types"]):
        own = c["per_layer_config"].get(str(i), {})
        kv_heads = own.get("num_key_value_heads", c["num_key_value_heads"])
        width, layer = own.get("head_dim", c["head_dim"]), f"{decoder}layers.{i}."
        shapes |= {f"{layer}{norm}.weight": (hidden,) for norm in norms}
        shapes |= {
            f"{layer}layer_scalar": (1,),
            f"model.encoder.language_model.layers.{i}.layer_scalar": (1,),
            f"{layer}self_attn.q_proj.weight": (heads * width, hidden),
            f"{layer}self_attn.k_proj.weight": (kv_heads * width, hidden),
            f"{layer}self_attn.o_proj.weight": (hidden, heads * width),
            f"{layer}self_attn.q_norm.weight": (width,),
            f"{layer}self_attn.k_norm.weight": (width,),
            f"{layer}mlp.gate_proj.weight": (inner, hidden),
            f"{layer}mlp.up_proj.weight": (inner, hidden),
            f"{layer}mlp.down_proj.weight": (hidden, inner),
            f"{layer}router.scale": (hidden,),
            f"{layer}router.per_expert_scale": (count,),
            f"{layer}router.proj.weight": (count, hidden),
            f"{layer}experts.gate_up_proj": (count, 2 * size, hidden),
            f"{layer}experts.down_proj": (count, hidden, size),
        }
        if kind == "sliding_attention":
            shapes[f"{layer}self_attn.v_proj.weight"] = (kv_heads * width, hidden)
    return shapes


SHAPES = {
    "DiffusionGemmaForBlockDiffusion": diffusion_gemma_shapes,
    "NemotronLabsDiffusionModel": nemotron_shapes,
    "BertForMaskedLM": bert_shapes,
    "RobertaForMaskedLM": roberta_shapes,
    "ModernBertForMaskedLM": modern_bert_shapes,
    "TransformerEncoderForMaskedLM": torch_encoder_shapes,
    "LLaDAModelLM": llada_shapes,
    "DreamModel": dream_shapes,
    "Fast_dLLM_QwenForCausalLM": dream_shapes,
    "SDARForCausalLM": a2d_qwen3_shapes,
    "Qwen3ForCausalLM": a2d_qwen3_shapes,
    "LlamaForCausalLM": lambda config: _qwen_shapes(config, bias=False),
    "K2HorizonForCausalLM": lambda config: _qwen_shapes(config, bias=False),
    "Qwen2ForCausalLM": dream_shapes,
    "CoDALanguageModel": a2d_qwen3_shapes,
    "A2DQwen2LMHeadModel": dream_shapes,
    "A2DQwen3LMHeadModel": a2d_qwen3_shapes,
    "StableDiffcoderForCausalLM": functools.partial(_qwen_shapes, bias=False),
    "WeDLMForCausalLM": lambda config: (
        a2d_qwen3_shapes(config) if config["qk_norm"] else dream_shapes(config)
    ),
    "A2DLlamaLMHeadModel": functools.partial(_qwen_shapes, bias=False),
    "LLaDAMoEModelLM": llada_moe_shapes,
    "LLaDA2MoeModelLM": llada2_shapes,
    "RND1LM": qwen3_moe_shapes,
    "SDARMoeForCausalLM": qwen3_moe_shapes,
}


def random_tensor(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    """Make a random tensor for a network's weights.

    With these random weights, activations stay near size 1, and logits differ enough that no two
    tokens are equally likely.
    """
    noise = torch.randn(shape, generator=generator)
    if name.endswith("orm.bias"):
        return (0.1 * noise).to(dtype)
    if "norm" in name.lower() or "ln_f" in name or name.endswith(("scalar", "scale")):
        return (1 + 0.1 * noise).to(dtype)
    if name.endswith("bias"):
        return (0.1 * noise).to(dtype)
    is_table = name.endswith(
        ("wte.weight", "embed_tokens.weight", "word_embeddings.weight", "tok_embeddings.weight")
    )
    is_head = name in (
        "model.transformer.ff_out.weight",
        "lm_head.weight",
        "diffusion_head.weight",
    )
    return (noise * (1.0 if is_table else (3.0 if is_head else 1.0) / math.sqrt(shape[-1]))).to(
        dtype
    )


def _scale_for_gemma(tensors: dict[str, torch.Tensor]) -> None:
    """Scale random tensors of DiffusionGemma, which Gemma 4 scales in other places than others.

    - Attention does not divide products of queries and keys by the square root of the head size,
      because the norms of queries and keys learn their scale. With norms of 1 and heads of 512
      features, these products have a deviation of 22. Each token then attends to one other token
      only, and rounding decides which. Here, the deviation is 2.
    - Embeddings are multiplied by the square root of the hidden size, and are also the weights of
      the head. With embeddings of 1, layers would hardly change them, and the logits would all be
      at the ends of their range. Here, they have a deviation of 3.
    """
    for name, tensor in tensors.items():
        if name.endswith("k_norm.weight"):
            tensor *= 2 / math.sqrt(len(tensor))
        elif name.endswith("embed_tokens.weight"):
            tensor *= 3 / math.sqrt(tensor.shape[1])


def write_checkpoint(
    path: Path,
    config: dict[str, Any],
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    shards: int = 1,
) -> Path:
    """Write config.json and safetensors (one file, or shards with an index) into ``path``."""
    shapes = SHAPES[config["architectures"][0]](config)
    generator = torch.Generator().manual_seed(seed)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    names = list(shapes)
    weight_map = {}
    for shard in range(shards):
        file = (
            "model.safetensors"
            if shards == 1
            else f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        )
        mine = names[shard * len(names) // shards : (shard + 1) * len(names) // shards]
        tensors = {name: random_tensor(name, shapes[name], dtype, generator) for name in mine}
        if "DiffusionGemmaForBlockDiffusion" in config["architectures"]:
            _scale_for_gemma(tensors)
        save_file(
            tensors, path / file, metadata={"format": "pt"}
        )  # old versions of transformers require this key
        weight_map |= dict.fromkeys(mine, file)
    if shards > 1:
        (path / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": weight_map})
        )
    return path


# ---- Quantised, in the layout of modelopt's unified export ----

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
# The ends of the names of weight matrices in checkpoints of LLaDA and Dream, including LLaDA's
# head.
LINEARS = (
    "proj.weight",
    "attn_out.weight",
    "ff_out.weight",
)


def quantised_fp8(
    base: str, w: torch.Tensor, *, per_channel: bool = False, input_amax: float | None = 3.5
) -> dict[str, Any]:
    """Quantise a weight ``[out, in]`` to FP8, and return the stored tensors: codes and scales.

    ``base`` is the weight's name without ``.weight``.
    """
    amax = w.float().abs().amax(1) if per_channel else w.float().abs().amax()
    scale = amax / 448
    codes = (w.float() / (scale[:, None] if per_channel else scale)).to(torch.float8_e4m3fn)
    tensors = {f"{base}.weight": codes, f"{base}.weight_scale": scale}
    return tensors | (
        {} if input_amax is None else {f"{base}.input_scale": torch.tensor(input_amax) / 448}
    )


def quantised_nvfp4(
    base: str, w: torch.Tensor, *, input_amax: float | None = 3.5
) -> dict[str, Any]:
    """Quantise a weight ``[out, in]`` to NVFP4, and return the stored tensors: codes and scales.

    Each byte contains two codes. The first code is in the low four bits.
    """
    rows, inputs = w.shape
    scale_2 = w.float().abs().amax() / (6 * 448)
    groups = w.float().view(rows, inputs // 16, 16)
    scale = (groups.abs().amax(-1) / (6 * scale_2)).clamp(2**-9, 448).to(torch.float8_e4m3fn)
    scaled = groups / (scale.float() * scale_2)[..., None]
    # If two codes are equally near to a value, the first code is used. Real exporters may choose
    # the other code, but readers must accept both.
    magnitude = (scaled.abs()[..., None] - E2M1).abs().argmin(-1)
    codes = (magnitude + 8 * (scaled < 0)).view(rows, inputs).to(torch.uint8)
    tensors = {
        f"{base}.weight": codes[:, 0::2] | codes[:, 1::2] << 4,
        f"{base}.weight_scale": scale,
        f"{base}.weight_scale_2": scale_2,
    }
    return tensors | (
        {} if input_amax is None else {f"{base}.input_scale": torch.tensor(input_amax) / (6 * 448)}
    )


def write_quantised(
    path: Path, config: dict[str, Any], algorithm: str, *, seed: int = 0, head: bool = False
) -> Path:
    """Write a checkpoint as modelopt exports it, in ``FP8``, ``FP8_PER_CHANNEL_PER_TOKEN``,
    ``NVFP4``, ``W4A16_NVFP4`` or mixed precision.

    ``MIXED_PRECISION`` means NVFP4 in the MLP and FP8 in attention. The head is only quantised if
    ``head`` is set.
    """
    write_checkpoint(path, config, seed=seed)
    heads = ("model.transformer.ff_out", "lm_head")
    layers: dict[str, dict[str, Any]] = {}
    tensors: dict[str, Any] = {}
    for name, tensor in load_file(path / "model.safetensors").items():
        base = name.removesuffix(".weight")
        is_linear = name.endswith((*LINEARS, "lm_head.weight")) and (head or base not in heads)
        mine = algorithm
        if algorithm == "MIXED_PRECISION":
            mine = "NVFP4" if "mlp." in name or "ff_" in name or "up_proj" in name else "FP8"
        if not is_linear:
            tensors[name] = tensor
        elif mine.startswith("FP8"):
            is_dynamic = mine != "FP8"
            tensors |= quantised_fp8(
                base, tensor, per_channel=is_dynamic, input_amax=None if is_dynamic else 3.5
            )
        else:
            tensors |= quantised_nvfp4(base, tensor, input_amax=3.5 if mine == "NVFP4" else None)
        if is_linear:
            layers[base] = {"quant_algo": mine} | ({"group_size": 16} if "NVFP4" in mine else {})
    save_file(tensors, path / "model.safetensors")
    said: dict[str, Any] = {"quant_algo": algorithm, "kv_cache_quant_algo": None}
    if algorithm == "MIXED_PRECISION":
        said["quantized_layers"] = layers
    else:
        said |= {"exclude_modules": [] if head else list(heads)} | (
            {"group_size": 16} if "NVFP4" in algorithm else {}
        )
    producer = {"name": "modelopt", "version": "0.47.0"}
    (path / "hf_quant_config.json").write_text(
        json.dumps({"producer": producer, "quantization": said})
    )
    return path


def write_headers(path: Path, config: dict[str, Any]) -> None:
    """Write config.json, and a safetensors file of bf16 weights whose data is a hole in the file."""
    header, end = {}, 0
    for name, shape in SHAPES[config["architectures"][0]](config).items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    packed = json.dumps(header).encode()
    with (path / "model.safetensors").open("wb") as file:
        file.write(len(packed).to_bytes(8, "little") + packed)
        file.truncate(8 + len(packed) + end)
    (path / "config.json").write_text(json.dumps(config))
