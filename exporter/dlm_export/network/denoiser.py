"""Torch modules for the denoiser that a ``NetworkSpec`` describes.

The code in this module does not depend on a family's name. Layers use RMSNorm, rotate-half RoPE,
grouped-query attention and gated MLPs, as in LLaDA (arXiv:2502.09992) and Dream (arXiv:2508.15487).
Instead of an MLP, a layer may contain a mixture of experts (``experts``).

Shapes: ``B`` canvases, ``T`` tokens of one pass, ``S`` cached tokens, ``H`` heads, ``D`` head size,
``V`` vocabulary size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlm_export.network.experts import Experts
from dlm_export.network.linear import MLP, Linear, TiedHead
from dlm_export.network.scaling import RotaryTable
from dlm_export.network.spec import (
    AttentionSpec,
    LayerSpec,
    MlpSpec,
    NetworkSpec,
    rotary_table,
)
from dlm_runtime.errors import DlmError, ExitCode

Turn = tuple[Tensor, Tensor, Tensor]
"""The rotary embedding of a pass: tables of cosines and sines ``[positions, D / 2]``, and the
position ids ``[B, T]`` that select rows of these tables.
"""
Past = tuple[Tensor, Tensor]
"""One layer's keys and values, ``[B, Hkv, rows, D]``."""


@dataclass(frozen=True, eq=False)
class Packed:
    """Several passes that are computed together, with their tokens concatenated into one sequence.

    Each pass sees its own tokens and its own cache only.

    For each pass, ``passes`` contains the slice of the pass's tokens in the sequence, the pass's
    additive attention mask (see ``hiding``), and the cached keys and values ``[1, Hkv, S, D]`` of
    the pass.
    """

    passes: Sequence[tuple[slice, Tensor | None, Past | None]]


class UnbuiltNetworkError(DlmError):
    """Raised if the network's description needs a feature that this version does not support."""

    exit_code = ExitCode.WRONG_INPUT


def check_built(network: NetworkSpec) -> None:
    """Check that ``Denoiser`` supports all features of the network. Raises UnbuiltNetworkError
    otherwise.

    The error names the layer and the feature.
    """
    for i, layer in enumerate(network.layers):
        a, mlp = layer.attention, layer.mlp
        lacking = {
            f"attention in a window of {a.window}": a.window is not None,
            f"activation {mlp.activation}": mlp.activation != "silu",
        }
        for what, is_lacking in lacking.items():
            if is_lacking:
                raise UnbuiltNetworkError(
                    f"{network.architecture}: layer {i} has {what}, which this version does not support"
                )
    if network.noise != "absorbing":
        raise UnbuiltNetworkError(
            f"{network.architecture}: this version does not support {network.noise} noise"
        )


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in fp32.

    The result is cast back to the input's type, and then multiplied by ``weight`` (not by
    ``1 + weight``).
    """

    def __init__(self, size: int, eps: float, is_plain: bool) -> None:
        super().__init__()
        self.eps, self.is_plain = eps, is_plain
        self.weight = nn.Parameter(torch.empty(size))

    def forward(self, x: Tensor) -> Tensor:
        if self.is_plain:
            wide = x.float()
            return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(
                x.dtype
            ) * self.weight
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def rotate(x: Tensor, turn: Turn, is_plain: bool) -> Tensor:
    """Apply rotate-half RoPE to the first features of ``x`` ``[B, ..., T, D]``.

    The width of the tables in ``turn`` says how many features are rotated.
    """
    cos, sin, position_ids = turn
    size = 2 * cos.shape[-1]
    if torch.compiler.is_exporting() and not is_plain:
        # This operator is exported as one RotaryEmbedding node. The code below would give nine
        # nodes. The operator is used only for export, because it has no gradient.
        partly = 0 if size == x.shape[-1] else size
        rotated: Tensor = torch.onnx.ops.rotary_embedding(
            x, cos, sin, position_ids, rotary_embedding_dim=partly
        )
        return rotated
    c, s = F.embedding(position_ids, cos), F.embedding(position_ids, sin)
    for _ in range(x.dim() - 3):
        c, s = c.unsqueeze(1), s.unsqueeze(1)
    first, second, rest = x[..., : size // 2], x[..., size // 2 : size], x[..., size:]
    return torch.cat((first * c - second * s, second * c + first * s, rest), -1)


def hiding(
    block_length: int | None, position_ids: Tensor, cached: int, dtype: torch.dtype
) -> Tensor | None:
    """Return an additive attention mask that hides the keys of later blocks, or ``None`` if every
    key is visible.

    The mask is ``[B, 1, T, S + T]`` of type ``dtype``. The mask is 0 for visible keys, and the
    lowest finite number for hidden keys. All ``cached`` (S) keys are visible. Minus infinity is not
    used, because some kernels compute the softmax in tiles. If a tile contained only hidden keys,
    minus infinity would make the result of the tile NaN.
    """
    if block_length is None:
        return None
    starts = position_ids - position_ids % block_length  # first position of each position's block
    front = torch.full((starts.shape[0], cached), 0, device=starts.device)
    keys = torch.cat((front, starts), 1)
    is_hidden = keys.unsqueeze(1) > starts.unsqueeze(2)
    return (is_hidden.to(dtype) * torch.finfo(dtype).min).unsqueeze(1)


class Attention(nn.Module):
    """Grouped-query attention over cached and new keys."""

    def __init__(
        self, spec: AttentionSpec, hidden_size: int, norm_eps: float, is_plain: bool
    ) -> None:
        super().__init__()
        a = self.spec = spec
        self.is_plain = is_plain
        self.q = Linear(hidden_size, a.heads * a.head_size, bias=a.qkv_bias)
        self.k = Linear(hidden_size, a.kv_heads * a.head_size, bias=a.qkv_bias)
        self.v = Linear(hidden_size, a.kv_heads * a.head_size, bias=a.qkv_bias)
        self.out = Linear(a.heads * a.head_size, hidden_size, bias=a.out_bias)
        self.q_norm = RMSNorm(a.head_size, norm_eps, is_plain) if a.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(a.head_size, norm_eps, is_plain) if a.qk_norm else nn.Identity()

    def forward(
        self, x: Tensor, turn: Turn | None, hidden: Tensor | None, past: Past | Packed | None
    ) -> tuple[Tensor, Past]:
        B, T, _ = x.shape
        a = self.spec
        if self.is_plain:  # the queries that share a key get a separate axis
            q = self.q_norm(self.q(x).view(B, T, a.kv_heads, a.group, a.head_size)).permute(
                0, 2, 3, 1, 4
            )
        else:
            q = self.q_norm(self.q(x).view(B, T, a.heads, a.head_size)).transpose(1, 2)
        k = self.k_norm(self.k(x).view(B, T, a.kv_heads, a.head_size)).transpose(1, 2)
        v = self.v(x).view(B, T, a.kv_heads, a.head_size).transpose(1, 2)
        if turn is not None:
            q, k = rotate(q, turn, self.is_plain), rotate(k, turn, self.is_plain)
        if isinstance(past, Packed):
            parts = [
                self._attend(q[:, :, at], k[:, :, at], v[:, :, at], hidden, cached)
                for at, hidden, cached in past.passes
            ]
            y = torch.cat(parts, 1)
        else:
            y = self._attend(q, k, v, hidden, past)
        return self.out(y.reshape(B, T, a.heads * a.head_size)), (k, v)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, past: Past | None
    ) -> Tensor:
        """Compute the attention of queries to the cached and the new keys. Returns
        ``[B, T, heads..., D]``.
        """
        keys, values = (
            (k, v) if past is None else (torch.cat((past[0], k), 2), torch.cat((past[1], v), 2))
        )
        if self.is_plain:  # two matrix products, with an fp32 softmax between them
            scores = ((q * self.spec.head_size**-0.5) @ keys.unsqueeze(2).transpose(-1, -2)).float()
            if hidden is not None:
                scores = scores + hidden.unsqueeze(1)
            y: Tensor = scores.softmax(-1).to(q.dtype) @ values.unsqueeze(2)
            return y.permute(0, 3, 1, 2, 4)
        y = F.scaled_dot_product_attention(q, keys, values, hidden, enable_gqa=self.spec.group > 1)
        return y.transpose(1, 2)


class Block(nn.Module):
    """One transformer layer. If the description of the layer lacks a norm, this norm is an
    identity.
    """

    def __init__(self, spec: LayerSpec, hidden_size: int, is_plain: bool) -> None:
        super().__init__()

        def norm(name: str) -> nn.Module:
            return (
                RMSNorm(hidden_size, spec.norm_eps, is_plain)
                if name in spec.norms
                else nn.Identity()
            )

        self.attention_norm = norm("attention_norm")
        self.attention = Attention(spec.attention, hidden_size, spec.norm_eps, is_plain)
        self.attention_out_norm = norm("attention_out_norm")
        self.mlp_norm = norm("mlp_norm")
        self.mlp = (
            MLP(spec.mlp.size, hidden_size)
            if isinstance(spec.mlp, MlpSpec)
            else Experts(spec.mlp, hidden_size)
        )
        self.mlp_out_norm = norm("mlp_out_norm")

    def forward(
        self, x: Tensor, turn: Turn | None, hidden: Tensor | None, past: Past | Packed | None
    ) -> tuple[Tensor, Past]:
        y, present = self.attention(self.attention_norm(x), turn, hidden, past)
        x = x + self.attention_out_norm(y)
        return x + self.mlp_out_norm(self.mlp(self.mlp_norm(x))), present


def cosines_and_sines(table: RotaryTable, positions: int) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines ``[positions, size / 2]`` of a rotary table.

    The tables are computed in float64 and returned in fp32.
    """
    frequencies = torch.tensor(table.frequencies(), dtype=torch.float64)
    angles = torch.outer(torch.arange(positions, dtype=torch.float64), frequencies)
    return (table.magnitude * angles.cos()).float(), (table.magnitude * angles.sin()).float()


class Rotary(nn.Module):
    """A table of cosines and sines that layers share."""

    cos: Tensor
    sin: Tensor

    def __init__(self, table: RotaryTable, positions: int) -> None:
        super().__init__()
        cos, sin = cosines_and_sines(table, positions)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)


class Denoiser(nn.Module):
    """The network. The network takes a canvas and predicts a token for every position.

    Parameters are not initialised: ``families.load`` reads the parameters from a checkpoint. If
    ``is_plain`` is true, the network uses elementary operations only, for engines that have no
    operators for attention, norms and rotary embeddings. Raises UnbuiltNetworkError.
    """

    def __init__(self, network: NetworkSpec, is_plain: bool = False) -> None:
        super().__init__()
        check_built(network)
        c = self.network = network
        self.is_plain = is_plain
        self.embed = nn.Embedding(
            c.vocab_size, c.hidden_size, _weight=torch.empty(c.vocab_size, c.hidden_size)
        )
        self.blocks = nn.ModuleList(Block(layer, c.hidden_size, is_plain) for layer in c.layers)
        self.final_norm = RMSNorm(c.hidden_size, c.norm_eps, is_plain)
        self.head = TiedHead() if c.tied_head else Linear(c.hidden_size, c.vocab_size)
        tables = c.rotary_tables()
        self.rotary = nn.ModuleList(Rotary(table, c.max_canvas_length) for table in tables)
        used = [rotary_table(layer.attention) for layer in c.layers]
        self._turned_by = [None if table is None else tables.index(table) for table in used]

    def hidden(
        self, input_ids: Tensor, position_ids: Tensor, past: Sequence[Past] | None = None
    ) -> tuple[Tensor, list[Past]]:
        """Return the features after the final norm ``[B, T, hidden]``, and the new keys and values
        of each layer ``[B, Hkv, T, D]``.

        ``past`` contains the cached keys and values of each layer, ``[B, Hkv, S, D]``. The keys are
        already rotated by their positions. Cached positions may be in any order, because every
        query sees all cached positions.
        """
        x = self.embed(input_ids)
        turns: list[Turn] = [(table.cos, table.sin, position_ids) for table in self.rotary]  # type: ignore[misc]
        cached = 0 if past is None else past[0][0].shape[2]
        rules = dict.fromkeys(layer.attention.visible_block for layer in self.network.layers)
        dtype = torch.float32 if self.is_plain else x.dtype  # type of the attention scores
        hidden = {rule: hiding(rule, position_ids, cached, dtype) for rule in rules}
        presents = []
        for i, (layer, block) in enumerate(zip(self.network.layers, self.blocks, strict=True)):
            number = self._turned_by[i]
            turn = None if number is None else turns[number]
            x, present = block(
                x, turn, hidden[layer.attention.visible_block], None if past is None else past[i]
            )
            presents.append(present)
        return self.final_norm(x), presents

    def project(self, features: Tensor) -> Tensor:
        """Map features ``[..., hidden]`` to raw logits ``[..., V]``. The logits include the mask
        token's logit.
        """
        logits: Tensor = (
            self.head(features, self.embed.weight)
            if self.network.tied_head
            else self.head(features)
        )
        return logits

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return the raw logits ``[B, L, V]`` of a pass over whole canvases ``[B, L]``, without a
        cache.

        Row i contains the logits that the network computes at position i. If ``shift`` is 1, these
        logits predict the token at position i + 1.
        """
        positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        return self.project(self.hidden(input_ids, positions)[0])
