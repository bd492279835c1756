"""Writes the checkpoints of the benchmarks as GGUF files, which llama.cpp can open.

The files use llama.cpp's architecture LLaDA or Qwen3. Each file is written once, under build/.

The ``gguf`` package defines the file format. Keys and tensor names are the same as in files from
llama.cpp's converter for LLaDA (conversion/llada.py) and Qwen3. The benchmarks use token ids, so
the files contain the size of the vocabulary, but no tokens.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.llama import FILE_TYPES, quantise
from benchmarks.shapes import ROOT, checkpoint

LAYER_TENSORS = {
    "attention.q": "attn_q",
    "attention.k": "attn_k",
    "attention.v": "attn_v",
    "attention.out": "attn_output",
    "mlp.gate": "ffn_gate",
    "mlp.up": "ffn_up",
    "mlp.down": "ffn_down",
}


def gguf_of(name: str, file_type: str, source: Path | None = None) -> Path:
    """Return the GGUF file of a checkpoint.

    ``file_type`` is a type of llama.cpp's ``FILE_TYPES``. For all types except F16, llama.cpp's
    quantiser makes the file. ``source`` is the folder of the checkpoint. If ``source`` is None,
    ``shapes.checkpoint`` finds the checkpoint by ``name``.
    """
    path = ROOT / "build" / "benchmarks" / f"{name}-{file_type}.gguf"
    if not path.is_file():
        partial = path.with_suffix(".partial")
        if file_type == "F16":
            _write(source or checkpoint(name), partial)
        else:
            quantise(gguf_of(name, "F16", source), partial, file_type)
        partial.rename(path)
    return path


def _interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorder the rows of a query or key matrix ``[heads * D, in]`` for llama.cpp.

    llama.cpp's RoPE rotates pairs of neighbouring rows. This project's RoPE rotates pairs of rows
    that are D / 2 apart.
    """
    rows, inputs = weight.shape
    ordered: np.ndarray = (
        weight.reshape(heads, 2, rows // heads // 2, inputs).swapaxes(1, 2).reshape(rows, inputs)
    )
    return ordered


def _write(source: Path, path: Path) -> None:
    import gguf

    from dlm_export import families
    from dlm_export.checkpoints.folder import Checkpoint
    from dlm_export.families.base import Overrides

    opened = Checkpoint(source)
    c = families.read_network(opened, Overrides())
    layer = c.layers[0]  # all layers of llama.cpp's LLaDA have the same shape
    attention = layer.attention
    weights = families.open_weights(opened, c)
    # A checkpoint in the layout of SDAR is written as Qwen3, the autoregressive model with the same
    # shape.
    is_llada = c.family == "llada"
    writer = gguf.GGUFWriter(path, "llada" if is_llada else "qwen3")
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(c.vocab_size)
    writer.add_context_length(c.max_canvas_length)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(len(c.layers))
    writer.add_feed_forward_length(layer.mlp.size)
    writer.add_head_count(attention.heads)
    writer.add_head_count_kv(attention.kv_heads)
    writer.add_rope_dimension_count(attention.head_size)
    writer.add_rope_freq_base(attention.rope.theta)
    writer.add_layer_norm_rms_eps(c.norm_eps)
    if is_llada:
        writer.add_causal_attention(False)
        writer.add_diffusion_shift_logits(False)
        writer.add_mask_token_id(c.mask_token_id)
    else:
        writer.add_key_length(attention.head_size)
        writer.add_value_length(attention.head_size)
    writer.add_eos_token_id(c.eos_token_ids[0])
    writer.add_file_type(FILE_TYPES["F16"])

    def add(name: str, parameter: str, heads: int = 0) -> None:
        """Add a parameter in the form that llama.cpp needs.

        Matrices ``[in, out]`` are stored as ``[out, in]`` in fp16, and norms are stored in fp32.
        """
        value = weights.read(parameter, np.dtype(np.float32))
        if value.ndim == 2:
            value = (value if parameter == "embed.weight" else value.T).astype(np.float16)
        writer.add_tensor(
            f"{name}.weight", np.ascontiguousarray(_interleaved(value, heads) if heads else value)
        )

    add("token_embd", "embed.weight")
    for i in range(len(c.layers)):
        add(f"blk.{i}.attn_norm", f"blocks.{i}.attention_norm.weight")
        add(f"blk.{i}.ffn_norm", f"blocks.{i}.mlp_norm.weight")
        for ours, theirs in LAYER_TENSORS.items():
            heads = (
                {"attention.q": attention.heads, "attention.k": attention.kv_heads}.get(ours, 0)
                if is_llada
                else 0
            )
            add(f"blk.{i}.{theirs}", f"blocks.{i}.{ours}.weight", heads)
        if attention.qk_norm:
            add(f"blk.{i}.attn_q_norm", f"blocks.{i}.attention.q_norm.weight")
            add(f"blk.{i}.attn_k_norm", f"blocks.{i}.attention.k_norm.weight")
    add("output_norm", "final_norm.weight")
    if not c.tied_head:
        add("output", "head.weight")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
