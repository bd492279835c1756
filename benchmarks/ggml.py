"""Rounds single matrices to the number formats of llama.cpp.

llama.cpp's own quantiser rounds the matrices. It gets no importance matrix, which would contain
statistics of activations. The ``gguf`` package reads the result. For a whole model, llama.cpp
chooses the format of each matrix. To find these formats, ``types_of`` lets llama.cpp quantise a
small random model with the same number of layers.
"""

from __future__ import annotations

import ctypes
import functools
import tempfile
from pathlib import Path

import gguf
import numpy as np
from gguf_files import LAYER_TENSORS
from llama import FILE_TYPES, quantise, quiet_llama

from dlm_export.network.spec import HEAD, NetworkSpec

WIDTH = 256  # width of the small model; a multiple of the group sizes of all formats


@functools.cache
def _library() -> ctypes.CDLL:
    folder = Path(quiet_llama().__file__).parent / "lib"
    library = ctypes.CDLL(str(folder / "libggml-base.so"))
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    library.ggml_quantize_chunk.argtypes = [
        ctypes.c_int,
        ctypes.POINTER(ctypes.c_float),
        ctypes.c_void_p,
        *[ctypes.c_int64] * 3,
        ctypes.c_void_p,
    ]
    return library


def bits(name: str) -> float:
    """Return the number of bits per weight of a format, including scales."""
    elements, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    return 8 * size / elements


def rounded(w: np.ndarray, name: str) -> np.ndarray:
    """Round an fp32 matrix ``[K, N]`` to a format, with groups along K.

    K-quants and IQ4_XS have groups of 256 weights. If K is not a multiple of 256, the matrix is
    padded with zeros before the rounding, and the zeros are removed afterwards. The padding does
    not change how the other values are rounded.
    """
    kind = gguf.GGMLQuantizationType[name]
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    inputs = len(w)
    rows = np.ascontiguousarray(np.pad(w.T, ((0, 0), (0, -inputs % elements))), np.float32)
    packed = np.empty((len(rows), rows.shape[1] // elements * size), np.uint8)
    _library().ggml_quantize_chunk(
        kind.value,
        rows.ctypes.data_as(ctypes.POINTER(ctypes.c_float)),
        packed.ctypes.data_as(ctypes.c_void_p),
        0,
        len(rows),
        rows.shape[1],
        None,
    )
    found: np.ndarray = gguf.dequantize(packed, kind)[:, :inputs].T
    return found


def types_of(network: NetworkSpec, file_type: str) -> dict[str, str]:
    """Return the format that llama.cpp chooses for each matrix in a GGUF file of type
    ``file_type``.
    """
    attention = network.layers[0].attention
    heads = attention.heads // attention.kv_heads  # llama.cpp's choice depends only on this ratio
    shapes = {
        "attention.q": (heads * WIDTH, WIDTH),
        "attention.k": (WIDTH, WIDTH),
        "attention.v": (WIDTH, WIDTH),
        "attention.out": (WIDTH, heads * WIDTH),
        "mlp.gate": (WIDTH, WIDTH),
        "mlp.up": (WIDTH, WIDTH),
        "mlp.down": (WIDTH, WIDTH),
    }
    names = {
        f"blocks.{i}.{layer}": f"blk.{i}.{LAYER_TENSORS[layer]}.weight"
        for i in range(len(network.layers))
        for layer in shapes
    }
    table = "token_embd.weight"
    names[HEAD] = table if network.tied_head else "output.weight"
    with tempfile.TemporaryDirectory() as folder:
        whole, small = Path(folder) / "F16.gguf", Path(folder) / "small.gguf"
        writer = gguf.GGUFWriter(whole, "qwen3")
        writer.add_tokenizer_model("none")
        writer.add_vocab_size(WIDTH)
        writer.add_context_length(WIDTH)
        writer.add_embedding_length(WIDTH)
        writer.add_block_count(len(network.layers))
        writer.add_feed_forward_length(WIDTH)
        writer.add_head_count(heads)
        writer.add_head_count_kv(1)
        writer.add_key_length(WIDTH)
        writer.add_value_length(WIDTH)
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_file_type(FILE_TYPES["F16"])
        rng = np.random.default_rng(0)
        for tensor in dict.fromkeys([table, *names.values()]):
            layer = next((key for key, ours in LAYER_TENSORS.items() if f".{ours}." in tensor), "")
            shape = shapes.get(layer, (WIDTH, WIDTH))
            writer.add_tensor(tensor, rng.normal(size=shape).astype(np.float16))
        norms = ("attn_norm", "ffn_norm", "attn_q_norm", "attn_k_norm")
        for norm in [f"blk.{i}.{name}" for i in range(len(network.layers)) for name in norms]:
            writer.add_tensor(f"{norm}.weight", np.ones(WIDTH, np.float32))
        writer.add_tensor("output_norm.weight", np.ones(WIDTH, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        quantise(whole, small, file_type)
        found = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(small).tensors}
    return {layer: found[tensor] for layer, tensor in names.items()}
