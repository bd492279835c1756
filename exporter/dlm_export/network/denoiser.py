"""The generic denoiser: one bidirectional transformer that every masked family fills.

What differs between families is data: a ``NetworkSpec`` record that an adapter in ``families/``
reads from the checkpoint. Nothing here knows a family by name. Shapes use the glossary's letters:
``B`` rows, ``T`` tokens of one pass, ``S`` cached tokens, ``H`` heads, ``D`` head size, ``V`` vocabulary.

Follows the pre-norm layout that LLaDA (arXiv:2502.09992) and Dream (arXiv:2508.15487) share:
RMSNorm, rotate-half RoPE, grouped queries, SwiGLU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class NetworkSpec:
    """What a denoiser is, as read from its checkpoint; counts are tokens, heads or features."""

    family: str
    architecture: str
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    mlp_size: int
    max_canvas_length: int
    rope_theta: float
    norm_eps: float
    qkv_bias: bool
    tied_head: bool
    shift: int
    mask_token_id: int
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    attention: str = "full"
    noise: str = "absorbing"

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every parameter of ``Denoiser``, in the order of the forward pass."""
        with torch.device("meta"):
            return {name: tuple(p.shape) for name, p in Denoiser(self).named_parameters()}

    def parameter_count(self) -> int:
        """Parameters held by the denoiser; a tied head counts once."""
        total = 0
        for shape in self.parameter_shapes().values():
            count = 1
            for size in shape:
                count *= size
            total += count
        return total

    def as_dict(self) -> dict[str, object]:
        """Plain values, as the manifest and ``inspect --json`` show them."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}


class Linear(nn.Module):
    """``x @ weight + bias`` with ``weight`` stored ``[in, out]``.

    The transposed storage lets the exported MatMul take the parameter as it is: no Transpose node
    to fold, so an initialiser keeps its parameter's name and is written once.
    """

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight
        return y if self.bias is None else y + self.bias


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in fp32 and cast back before the weight (no ``1 + w``)."""

    def __init__(self, size: int, eps: float, is_plain: bool) -> None:
        super().__init__()
        self.eps, self.is_plain = eps, is_plain
        self.weight = nn.Parameter(torch.empty(size))

    def forward(self, x: Tensor) -> Tensor:
        if self.is_plain:
            wide = x.float()
            return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor, is_plain: bool) -> Tensor:
    """Rotate-half RoPE of ``x`` ``[B, ..., T, D]`` by tables ``[positions, D / 2]`` at ``position_ids`` ``[B, T]``."""
    if torch.compiler.is_exporting() and not is_plain:
        # One RotaryEmbedding node; the plain form below would be taken apart into nine. It has no gradient.
        rotated: Tensor = torch.onnx.ops.rotary_embedding(x, cos, sin, position_ids)
        return rotated
    c, s = F.embedding(position_ids, cos), F.embedding(position_ids, sin)
    for _ in range(x.dim() - 3):
        c, s = c.unsqueeze(1), s.unsqueeze(1)
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * c - second * s, second * c + first * s), -1)


class Attention(nn.Module):
    """Full bidirectional attention with grouped queries over cached and new keys."""

    def __init__(self, network: NetworkSpec, is_plain: bool) -> None:
        super().__init__()
        c, self.is_plain = network, is_plain
        self.heads, self.kv_heads, self.head_size = c.heads, c.kv_heads, c.head_size
        self.q = Linear(c.hidden_size, c.heads * c.head_size, bias=c.qkv_bias)
        self.k = Linear(c.hidden_size, c.kv_heads * c.head_size, bias=c.qkv_bias)
        self.v = Linear(c.hidden_size, c.kv_heads * c.head_size, bias=c.qkv_bias)
        self.out = Linear(c.heads * c.head_size, c.hidden_size)

    def forward(
        self, x: Tensor, position_ids: Tensor, cos: Tensor, sin: Tensor, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        B, T, _ = x.shape
        if self.is_plain:
            return self._plain(x, position_ids, cos, sin, past)
        q = self.q(x).view(B, T, self.heads, self.head_size).transpose(1, 2)
        k = self.k(x).view(B, T, self.kv_heads, self.head_size).transpose(1, 2)
        v = self.v(x).view(B, T, self.kv_heads, self.head_size).transpose(1, 2)
        q = rotate(q, cos, sin, position_ids, is_plain=False)
        k = rotate(k, cos, sin, position_ids, is_plain=False)
        keys, values = (k, v) if past is None else (torch.cat((past[0], k), 2), torch.cat((past[1], v), 2))
        y = F.scaled_dot_product_attention(q, keys, values, enable_gqa=self.heads != self.kv_heads)
        y = y.transpose(1, 2).reshape(B, T, self.heads * self.head_size)
        return self.out(y), (k, v)

    def _plain(
        self, x: Tensor, position_ids: Tensor, cos: Tensor, sin: Tensor, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The same by two products and a softmax in fp32; queries that share a key lie on an axis of their own."""
        B, T, _ = x.shape
        group = self.heads // self.kv_heads
        q = self.q(x).view(B, T, self.kv_heads, group, self.head_size).permute(0, 2, 3, 1, 4)
        k = self.k(x).view(B, T, self.kv_heads, self.head_size).transpose(1, 2)
        v = self.v(x).view(B, T, self.kv_heads, self.head_size).transpose(1, 2)
        q = rotate(q, cos, sin, position_ids, is_plain=True)
        k = rotate(k, cos, sin, position_ids, is_plain=True)
        keys, values = (k, v) if past is None else (torch.cat((past[0], k), 2), torch.cat((past[1], v), 2))
        scores = (q * self.head_size**-0.5) @ keys.unsqueeze(2).transpose(-1, -2)
        y = scores.float().softmax(-1).to(x.dtype) @ values.unsqueeze(2)
        y = y.permute(0, 3, 1, 2, 4).reshape(B, T, self.heads * self.head_size)
        return self.out(y), (k, v)


class MLP(nn.Module):
    """SwiGLU: ``down(silu(gate x) * up x)``."""

    def __init__(self, network: NetworkSpec) -> None:
        super().__init__()
        c = network
        self.gate = Linear(c.hidden_size, c.mlp_size)
        self.up = Linear(c.hidden_size, c.mlp_size)
        self.down = Linear(c.mlp_size, c.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


class Block(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, network: NetworkSpec, is_plain: bool) -> None:
        super().__init__()
        c = network
        self.attention_norm = RMSNorm(c.hidden_size, c.norm_eps, is_plain)
        self.attention = Attention(c, is_plain)
        self.mlp_norm = RMSNorm(c.hidden_size, c.norm_eps, is_plain)
        self.mlp = MLP(c)

    def forward(
        self, x: Tensor, position_ids: Tensor, cos: Tensor, sin: Tensor, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        y, present = self.attention(self.attention_norm(x), position_ids, cos, sin, past)
        x = x + y
        return x + self.mlp(self.mlp_norm(x)), present


def rotary_tables(network: NetworkSpec) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[max_canvas_length, D / 2]`` in fp32, computed in float64."""
    c = network
    inverse = c.rope_theta ** (-torch.arange(0, c.head_size, 2, dtype=torch.float64) / c.head_size)
    angles = torch.outer(torch.arange(c.max_canvas_length, dtype=torch.float64), inverse)
    return angles.cos().float(), angles.sin().float()


class Denoiser(nn.Module):
    """The network: a canvas in, a prediction for every position out.

    Parameters are created uninitialised; ``families.load`` fills them from a checkpoint. ``is_plain`` computes the same in
    elementary operations, for engines whose parsers do not know attention, norms and rotations as operators.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, network: NetworkSpec, is_plain: bool = False) -> None:
        super().__init__()
        c = self.network = network
        self.embed = nn.Embedding(c.vocab_size, c.hidden_size, _weight=torch.empty(c.vocab_size, c.hidden_size))
        self.blocks = nn.ModuleList(Block(c, is_plain) for _ in range(c.layers))
        self.final_norm = RMSNorm(c.hidden_size, c.norm_eps, is_plain)
        self.head = None if c.tied_head else Linear(c.hidden_size, c.vocab_size)
        cos, sin = rotary_tables(c)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def hidden(
        self, input_ids: Tensor, position_ids: Tensor, past: Sequence[tuple[Tensor, Tensor]] | None = None
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Final-norm features ``[B, T, hidden]`` and each layer's new keys and values ``[B, Hkv, T, D]``.

        ``past`` holds position-encoded keys and values ``[B, Hkv, S, D]`` a layer, in any order of
        positions: attention is bidirectional and unmasked, so only the set of cached rows matters.
        """
        x = self.embed(input_ids)
        presents = []
        for i, block in enumerate(self.blocks):
            x, present = block(x, position_ids, self.cos, self.sin, None if past is None else past[i])
            presents.append(present)
        return self.final_norm(x), presents

    def project(self, features: Tensor) -> Tensor:
        """Features ``[..., hidden]`` to raw logits ``[..., V]`` (the mask token is not excluded here)."""
        logits: Tensor = features @ self.embed.weight.T if self.head is None else self.head(features)
        return logits

    def forward(self, input_ids: Tensor) -> Tensor:
        """Raw logits ``[B, L, V]`` of one full pass over a canvas ``[B, L]``, rows unshifted."""
        positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        return self.project(self.hidden(input_ids, positions)[0])
