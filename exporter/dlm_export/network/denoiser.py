"""Torch modules for the denoiser that a ``NetworkSpec`` describes.

The code in this module does not depend on a family's name. Most layers use RMSNorm, rotate-half
RoPE, grouped-query attention and gated MLPs, as in LLaDA (arXiv:2502.09992) and Dream
(arXiv:2508.15487). Masked language models use LayerNorm, learned positions and MLPs without a gate,
as in BERT (arXiv:1810.04805). Instead of an MLP, a layer may contain a mixture of experts
(``experts``).

Shapes: ``B`` canvases, ``T`` tokens of one pass, ``S`` cached tokens, ``H`` heads, ``D`` head size,
``V`` vocabulary size.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlm_export.network.cache_dtypes import read_back
from dlm_export.network.experts import BlockRows, Experts, rows_of_blocks
from dlm_export.network.linear import (
    MLP,
    Linear,
    TiedHead,
    activate,
    product,
    updated,
    updates_of,
)
from dlm_export.network.norms import RMSNorm, make_norm, unit_norm
from dlm_export.network.pass_plan import Span
from dlm_export.network.rope_scaling import QueryScale, RotaryTable
from dlm_export.network.spec import (
    ACTIVATIONS,
    AttentionSpec,
    LayerSpec,
    LowRankSpec,
    MlpSpec,
    NetworkSpec,
    rotary_table,
)
from dlm_runtime.errors import DlmError, ExitCode


class Turn(NamedTuple):
    """The rotary embedding of a pass: a table of cosines, a table of sines, and position ids.

    The tables are ``[positions, D / 2]``. The position ids ``[B, T]`` select rows of the tables. If
    ``query_scale`` ``[B, T, 1]`` is not ``None``, queries are multiplied by ``query_scale``. If the
    network has draft passes, ``is_draft`` ``[B, T, 1]`` says which tokens belong to a draft pass.
    If the network has low-rank updates, ``is_updated`` ``[B, T, 1]`` says which tokens use them.
    ``blocks`` are the blocks of the pass, if the layer's router needs them.
    """

    cos: Tensor
    sin: Tensor
    position_ids: Tensor
    query_scale: Tensor | None = None
    is_draft: Tensor | None = None
    is_updated: Tensor | None = None
    blocks: BlockRows | None = None


Past = tuple[Tensor, Tensor]
"""One layer's keys and values, ``[B, Hkv, rows, D]``."""


@dataclass(frozen=True, eq=False)
class Packed:
    """Several passes whose tokens are concatenated into one sequence.

    A token attends only to the tokens and the cache of its own pass. For each pass, ``passes``
    contains three values: the slice of its tokens in the sequence, its additive attention mask (see
    ``hiding``), and its cached keys and values ``[1, Hkv, S, D]``.
    """

    passes: Sequence[tuple[slice, Tensor | None, Past | None]]


class UnbuiltNetworkError(DlmError):
    """Raised if the network's description needs a feature that this version does not support."""

    exit_code = ExitCode.WRONG_INPUT


def check_built(network: NetworkSpec) -> None:
    """Check that ``Denoiser`` supports all features of the network.

    Raises UnbuiltNetworkError if a feature is not supported. The error names the layer and the
    feature.
    """
    for i, layer in enumerate(network.layers):
        known = ACTIVATIONS if isinstance(layer.mlp, MlpSpec) else ("silu", "gelu-tanh")
        if layer.mlp.activation not in known:
            raise UnbuiltNetworkError(
                f"{network.architecture}: layer {i} has activation {layer.mlp.activation}, which this version does not support"
            )
        if (layer.has_scalar or layer.draft_updates) and layer.attention.rope is None:
            part = "a scalar" if layer.has_scalar else "low-rank updates"
            raise UnbuiltNetworkError(
                f"{network.architecture}: layer {i} has {part} and no rotary positions, which this version does not support"
            )
    if network.noise not in ("absorbing", "uniform"):
        raise UnbuiltNetworkError(
            f"{network.architecture}: this version does not support {network.noise} noise"
        )
    if network.conditioning is not None and (network.draft_block is None or not network.tied_head):
        raise UnbuiltNetworkError(
            f"{network.architecture}: this version supports self-conditioning only with draft passes and a tied head"
        )


def rotate(x: Tensor, turn: Turn, is_plain: bool) -> Tensor:
    """Apply rotate-half RoPE to the first features of ``x`` ``[B, ..., T, D]``.

    The width of the tables in ``turn`` says how many features are rotated.
    """
    cos, sin, position_ids = turn[:3]
    size = 2 * cos.shape[-1]
    if torch.compiler.is_exporting() and not is_plain:
        # torch.onnx's operator has no gradient, so it is used only for export. The operator becomes
        # a single RotaryEmbedding node in the graph. The code below would become nine nodes.
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


def places_of(network: NetworkSpec, input_ids: Tensor, position_ids: Tensor) -> Tensor:
    """Return the position ids that attention masks depend on, ``[B, T]``.

    With visibility ``masks-last``, the length of the longest canvas is added to the position ids of
    mask tokens, so that decided tokens do not attend to mask tokens. With causal drafts, attention
    does not depend on whether a token belongs to a draft pass.
    """
    if network.has_causal_drafts:
        return position_ids % network.max_canvas_length
    if not network.has_masks_last:
        return position_ids
    is_mask = (input_ids == network.mask_token_id).to(position_ids.dtype)
    return position_ids + is_mask * network.max_canvas_length


def hiding(
    attention: AttentionSpec, position_ids: Tensor, cached: int, dtype: torch.dtype, longest: int
) -> Tensor | None:
    """Return an additive attention mask, or ``None`` if every query attends to every key.

    The mask is ``[B, 1, T, S + T]`` of type ``dtype``. Its value is 0 for visible keys, and the
    lowest finite number for hidden keys. Without a window, all ``cached`` (S) keys are visible. A
    network with full attention in a window has no cached keys. If a network has draft passes and a
    window, the cached keys must belong to the last S positions before the pass, in order. Positions
    outside the window may be missing. The mask does not contain minus infinity, because the softmax
    of a tile with only minus infinity would be NaN in some kernels.

    ``position_ids`` are the result of ``places_of``. ``longest`` is the length of the longest canvas.
    With visibility ``draft``, the tokens of a draft pass attend to each other. ``longest`` or ``2 *
    longest`` is added to their position ids (see ``Span.ids``). With visibility ``after-prompt``, a
    position id contains the number of its block, multiplied by ``longest``.
    """
    block_length, window = attention.visible_block, attention.window
    if attention.visibility == "after-prompt":
        block_length = longest
    has_drafts = attention.visibility == "draft"
    if window is not None and has_drafts:
        is_draft, places = position_ids >= longest, position_ids % longest
        # In a draft pass, measure the distances of all queries from the first position of the pass.
        begin = places.amin(1, keepdim=True)
        first = torch.where(is_draft, begin, places)
        last = torch.where(is_draft, longest, places)
        rows = begin - cached + torch.arange(cached, device=places.device)
        keys = torch.cat((rows, places), 1).unsqueeze(1)
        is_far = first.unsqueeze(2) - keys > window
        is_hidden = torch.logical_or(is_far, keys > last.unsqueeze(2))
    elif window is not None:
        distances = position_ids.unsqueeze(1) - position_ids.unsqueeze(2)
        front = torch.full((*position_ids.shape, cached), 0, device=position_ids.device)
        is_hidden = torch.cat((front, distances.abs()), 2) > window
    elif block_length is not None:
        # first position of each position's block
        starts = (
            position_ids - position_ids % block_length
            if not has_drafts
            # all tokens of a draft pass form one block
            else torch.where(position_ids < longest, position_ids, longest)
        )
        front = torch.full((starts.shape[0], cached), 0, device=starts.device)
        keys = torch.cat((front, starts), 1)
        is_hidden = keys.unsqueeze(1) > starts.unsqueeze(2)
    else:
        return None
    return (is_hidden.to(dtype) * torch.finfo(dtype).min).unsqueeze(1)


def rule_of(attention: AttentionSpec) -> tuple[int | None, int | None, int | None]:
    """Return a dict key. Two layers with the same attention mask have equal keys."""
    return attention.visible_block, attention.window, attention.draft_block


def turns_of(
    network: NetworkSpec,
    layers: Sequence[LayerSpec],
    tables: Sequence[Rotary],
    position_ids: Tensor,
    places: Tensor,
) -> list[Turn | None]:
    """Return the rotary embedding of each layer for a pass.

    The pass has the position ids ``position_ids`` ``[B, T]``, and ``places`` is the result of
    ``places_of``. ``tables`` are the modules of ``network.rotary_tables()``. An entry of the result
    is ``None`` if the attention of the layer does not depend on positions.
    """
    longest, known = network.max_canvas_length, network.rotary_tables()
    is_draft, is_updated, ids = None, None, places
    if network.blocks_after_prompt:
        ids = position_ids % longest
    if network.draft_block is not None:
        is_causal = network.has_causal_drafts
        if network.has_draft_updates:
            is_updated = (position_ids >= (1 if is_causal else 2) * longest).unsqueeze(-1)
        if any(layer.has_scalar for layer in network.layers):
            is_draft = (position_ids >= longest).unsqueeze(-1)
        if not is_causal:
            ids = position_ids % longest
    scales: dict[QueryScale, Tensor] = {}
    blocks: dict[int, BlockRows] = {}
    found: list[Turn | None] = []
    for layer in layers:
        rope, table = layer.attention.rope, rotary_table(layer.attention)
        if rope is None or table is None:
            found.append(None)
            continue
        scale = rope.query_scale
        if scale is not None and scale.original_length < longest and scale not in scales:
            times = torch.floor(ids.float() / scale.original_length)
            scales[scale] = (1 + scale.beta * torch.log(1 + times)).unsqueeze(-1)
        length = layer.attention.visible_block if layer.block_experts is not None else None
        if length is not None and length not in blocks:
            blocks[length] = rows_of_blocks(position_ids, length)
        module = tables[known.index(table)]
        found.append(
            Turn(
                module.cos,
                module.sin,
                ids,
                None if scale is None else scales.get(scale),
                is_draft,
                is_updated,
                None if length is None else blocks[length],
            )
        )
    return found


class Attention(nn.Module):
    """Grouped-query attention to cached and new keys."""

    def __init__(
        self,
        spec: AttentionSpec,
        hidden_size: int,
        norm_eps: float,
        is_plain: bool,
        updates: Sequence[LowRankSpec] = (),
    ) -> None:
        super().__init__()
        a = self.spec = spec
        self.is_plain, self.norm_eps = is_plain, norm_eps
        self.q = Linear(hidden_size, a.heads * a.head_size, bias=a.qkv_bias)
        self.k = Linear(hidden_size, a.kv_heads * a.head_size, bias=a.qkv_bias)
        self.v = (
            Linear(hidden_size, a.kv_heads * a.head_size, bias=a.qkv_bias) if a.has_values else None
        )
        self.out = Linear(a.heads * a.head_size, hidden_size, bias=a.out_bias)
        self.q_norm = RMSNorm(a.head_size, norm_eps, is_plain) if a.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(a.head_size, norm_eps, is_plain) if a.qk_norm else nn.Identity()
        layers = {"q": self.q, "k": self.k, "v": self.v, "out": self.out}
        self.draft_updates = updates_of(updates, layers)

    def forward(
        self,
        x: Tensor,
        turn: Turn | None,
        hidden: Tensor | None,
        past: Past | Packed | None,
        cache_dtype: str | None = None,
    ) -> tuple[Tensor, Past]:
        """Return the output, and the new keys and values. The keys and values are not rounded.

        With block-causal or causal attention, queries attend to rounded copies of the new keys and
        values: the numbers that a cache of type ``cache_dtype`` would contain. If ``cache_dtype``
        is ``None``, queries attend to the keys and values without rounding.
        """
        B, T, _ = x.shape
        a = self.spec
        updates, is_updated = self.draft_updates, None if turn is None else turn.is_updated
        q = updated(x, "q", self.q, updates, is_updated)
        if turn is not None and turn.query_scale is not None:
            q = q * turn.query_scale.to(q.dtype)  # scaling and rotation commute
        if self.is_plain:  # add an axis for the queries that share a key
            q = self.q_norm(q.view(B, T, a.kv_heads, a.group, a.head_size)).permute(0, 2, 3, 1, 4)
        else:
            q = self.q_norm(q.view(B, T, a.heads, a.head_size)).transpose(1, 2)
        k = updated(x, "k", self.k, updates, is_updated)
        v = k if self.v is None else updated(x, "v", self.v, updates, is_updated)
        if a.value_norm:
            by_head = v.view(B, T, a.kv_heads, a.head_size)
            v = unit_norm(by_head, self.norm_eps).reshape(B, T, a.kv_heads * a.head_size)
        k = self.k_norm(k.view(B, T, a.kv_heads, a.head_size)).transpose(1, 2)
        v = v.view(B, T, a.kv_heads, a.head_size).transpose(1, 2)
        if turn is not None:
            q, k = rotate(q, turn, self.is_plain), rotate(k, turn, self.is_plain)
        new = k, v
        if cache_dtype is not None and a.visible_block is not None:
            k, v = read_back(k, cache_dtype), read_back(v, cache_dtype)
        if isinstance(past, Packed):
            parts = [
                self._attend(q[:, :, at], k[:, :, at], v[:, :, at], hidden, cached)
                for at, hidden, cached in past.passes
            ]
            y = torch.cat(parts, 1)
        else:
            y = self._attend(q, k, v, hidden, past)
        y = y.reshape(B, T, a.heads * a.head_size)
        return updated(y, "out", self.out, updates, is_updated), new

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, past: Past | None
    ) -> Tensor:
        """Compute the attention of queries to cached and new keys. Returns ``[B, T, heads..., D]``."""
        keys, values = (
            (k, v) if past is None else (torch.cat((past[0], k), 2), torch.cat((past[1], v), 2))
        )
        if self.is_plain:  # two matrix products, with an fp32 softmax between them
            scale = self.spec.head_size**-0.5 if self.spec.scale is None else self.spec.scale
            scores = ((q * scale) @ keys.unsqueeze(2).transpose(-1, -2)).float()
            if hidden is not None:
                scores = scores + hidden.unsqueeze(1)
            y: Tensor = scores.softmax(-1).to(q.dtype) @ values.unsqueeze(2)
            return y.permute(0, 3, 1, 2, 4)
        y = F.scaled_dot_product_attention(
            q, keys, values, hidden, scale=self.spec.scale, enable_gqa=self.spec.group > 1
        )
        return y.transpose(1, 2)


class Block(nn.Module):
    """One transformer layer. Norms that the layer's description does not contain do nothing."""

    def __init__(self, spec: LayerSpec, hidden_size: int, is_plain: bool) -> None:
        super().__init__()

        def norm(name: str) -> nn.Module:
            if name not in spec.norms:
                return nn.Identity()
            return make_norm(spec.norm_kind, hidden_size, spec.norm_eps, is_plain)

        self.attention_norm = norm("attention_norm")
        updates = spec.draft_updates
        self.attention = Attention(spec.attention, hidden_size, spec.norm_eps, is_plain, updates)
        self.attention_out_norm = norm("attention_out_norm")
        self.attention_sum_norm = norm("attention_sum_norm")
        self.mlp_norm = norm("mlp_norm")
        self.mlp = (
            MLP(spec.mlp, hidden_size, is_plain, updates)
            if isinstance(spec.mlp, MlpSpec)
            else Experts(spec.mlp, hidden_size, spec.norm_eps, is_plain)
        )
        self.mlp_out_norm = norm("mlp_out_norm")
        self.mlp_sum_norm = norm("mlp_sum_norm")
        self.scalars = spec.scalars
        for scalar in spec.scalars:
            self.register_parameter(scalar, nn.Parameter(torch.empty(1)))

    def forward(
        self,
        x: Tensor,
        turn: Turn | None,
        hidden: Tensor | None,
        past: Past | Packed | None,
        cache_dtype: str | None = None,
    ) -> tuple[Tensor, Past]:
        y, present = self.attention(self.attention_norm(x), turn, hidden, past, cache_dtype)
        x = self.attention_sum_norm(x + self.attention_out_norm(y))
        y = self.mlp_norm(x)
        is_updated, blocks = (None, None) if turn is None else (turn.is_updated, turn.blocks)
        y = self.mlp(y, is_updated) if isinstance(self.mlp, MLP) else self.mlp(y, blocks)
        y = self.mlp_sum_norm(x + self.mlp_out_norm(y))
        if not self.scalars:
            return y, present
        scalar: Tensor = self.get_parameter("scalar")
        if len(self.scalars) > 1:
            assert turn is not None
            assert turn.is_draft is not None
            scalar = torch.where(turn.is_draft, self.get_parameter("draft_scalar"), scalar)
        return y * scalar, present


def cosines_and_sines(table: RotaryTable, positions: int, copies: int = 1) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines ``[copies * positions, size / 2]`` of a rotary table.

    The tables are computed in float64 and returned in fp32.
    """
    frequencies = torch.tensor(table.frequencies(), dtype=torch.float64)
    angles = torch.outer(torch.arange(positions, dtype=torch.float64), frequencies)
    angles = angles.repeat(copies, 1)
    return (table.magnitude * angles.cos()).float(), (table.magnitude * angles.sin()).float()


class Rotary(nn.Module):
    """A table of cosines and sines that layers share."""

    cos: Tensor
    sin: Tensor

    def __init__(self, table: RotaryTable, positions: int, copies: int) -> None:
        super().__init__()
        if torch.get_default_device().type == "meta":
            # Computing the tables on this device would import torch._dynamo, which takes a second.
            cos, sin = (torch.empty(copies * positions, table.size // 2) for _ in range(2))
        else:
            cos, sin = cosines_and_sines(table, positions, copies)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)


class Positions(nn.Embedding):
    """A table of learned positions. The row ``first`` belongs to position 0 of a canvas."""

    def __init__(self, rows: int, hidden_size: int, first: int) -> None:
        super().__init__(rows, hidden_size, _weight=torch.empty(rows, hidden_size))
        self.first = first

    def forward(self, position_ids: Tensor) -> Tensor:
        return super().forward(position_ids + self.first if self.first else position_ids)


def counted(input_ids: Tensor, position_ids: Tensor, padding: int | None) -> Tensor:
    """Return the learned position of each token, ``[B, T]``.

    If ``padding`` is a token, only other tokens are counted, and the padding token has the position
    -1, as in RoBERTa. The pass must then contain whole canvases, because its first tokens decide the
    positions of the others. A shared pass contains several of them one after the other.
    """
    if padding is None:
        return position_ids
    is_padding = (input_ids == padding).to(position_ids.dtype)
    before = is_padding.cumsum(1) - is_padding
    index = torch.arange(input_ids.shape[1], device=input_ids.device)
    own = before - before.gather(1, index - position_ids)
    return torch.where(input_ids == padding, -1, position_ids - own)


class TokenTypes(nn.Module):
    """A table with one row per token type. All tokens of a canvas have type 0."""

    def __init__(self, rows: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight[0]


class Embedding(nn.Module):
    """Looks up the embeddings of tokens, and adds learned positions and token types, if any."""

    def __init__(self, network: NetworkSpec, is_plain: bool) -> None:
        super().__init__()
        c, e = network, network.embedding
        self.weight = nn.Parameter(torch.empty(c.vocab_size, c.hidden_size))
        self.positions = (
            Positions(e.positions, c.hidden_size, e.first_position) if e.positions else None
        )
        self.types = TokenTypes(e.token_types, c.hidden_size) if e.token_types else nn.Identity()
        self.norm = (
            make_norm(c.norm_kind, c.hidden_size, c.norm_eps, is_plain) if e.norm else nn.Identity()
        )
        self.scale, self.longest, self.padding = e.scale, c.max_canvas_length, e.padding
        self.conditioning = None if c.conditioning is None else Conditioning(c, is_plain)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, conditioning: Tensor | None = None
    ) -> Tensor:
        positions = counted(input_ids, position_ids, self.padding)
        return self.complete(F.embedding(input_ids, self.weight), positions, conditioning)

    def complete(
        self, x: Tensor, position_ids: Tensor, conditioning: Tensor | None = None
    ) -> Tensor:
        """Compute the embeddings from looked-up table rows ``x`` ``[B, T, hidden]``.

        With self-conditioning, ``conditioning`` ``[B, T, hidden]`` contains the soft embeddings of
        the previous draft pass. ``None`` means zeros. Only tokens of draft passes use
        ``conditioning``.
        """
        if self.scale != 1:
            x = x * self.scale
        if self.positions is not None:
            x = x + self.positions(position_ids)
        y: Tensor = self.norm(self.types(x))
        if self.conditioning is None:
            return y
        drafted = self.conditioning(
            y, torch.zeros_like(y) if conditioning is None else conditioning
        )
        return torch.where((position_ids >= self.longest).unsqueeze(-1), drafted, y)


class Conditioning(MLP):
    """Runs an MLP on soft embeddings, and adds the result to the embeddings of tokens."""

    def __init__(self, network: NetworkSpec, is_plain: bool) -> None:
        c = network
        assert c.conditioning is not None
        mlp = MlpSpec(c.conditioning.size, c.conditioning.activation)
        super().__init__(mlp, c.hidden_size, is_plain)
        self.norm, self.norm_eps = RMSNorm(c.hidden_size, c.norm_eps, is_plain), c.norm_eps

    def forward(self, x: Tensor, soft: Tensor | None = None) -> Tensor:
        """``x``, ``soft`` and the result are ``[B, T, hidden]``."""
        assert soft is not None
        return unit_norm(x + super().forward(self.norm(soft.to(x.dtype))), self.norm_eps)


class Transform(Linear):
    """The computation before the head in some networks: a matrix, an activation and a norm."""

    def __init__(self, network: NetworkSpec, is_plain: bool) -> None:
        c = network
        super().__init__(c.hidden_size, c.hidden_size, c.head.transform_bias)
        assert c.head.transform is not None
        self.activation, self.is_plain = c.head.transform, is_plain
        self.norm = make_norm(c.norm_kind, c.hidden_size, c.norm_eps, is_plain)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(activate(super().forward(x), self.activation, self.is_plain))
        return y


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """Limit logits to the range ``[-softcap, softcap]``, in fp32. ``None`` means no limit."""
    return logits if softcap is None else softcap * torch.tanh(logits.float() / softcap)


class Denoiser(nn.Module):
    """The network, which takes a canvas and predicts a token for every position.

    The constructor does not initialise the parameters. ``families.load`` loads them from a
    checkpoint. If ``is_plain`` is true, the network uses elementary operations only, for engines
    that have no operators for attention, norms and rotary embeddings. Raises UnbuiltNetworkError.
    """

    def __init__(self, network: NetworkSpec, is_plain: bool = False) -> None:
        super().__init__()
        check_built(network)
        c = self.network = network
        self.is_plain = is_plain
        self.embed = Embedding(c, is_plain)
        self.blocks = nn.ModuleList(Block(layer, c.hidden_size, is_plain) for layer in c.layers)
        self.final_norm = (
            make_norm(c.norm_kind, c.hidden_size, c.norm_eps, is_plain)
            if c.head.final_norm
            else nn.Identity()
        )
        self.transform = nn.Identity() if c.head.transform is None else Transform(c, is_plain)
        self.head = (
            TiedHead(c.vocab_size, c.head.bias)
            if c.tied_head
            else Linear(c.hidden_size, c.vocab_size, c.head.bias)
        )
        tables = c.rotary_tables()
        self.rotary = nn.ModuleList(
            Rotary(table, c.max_canvas_length, c.rotary_copies) for table in tables
        )

    def hidden(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        past: Sequence[Past] | None = None,
        cache_dtype: str | None = None,
        conditioning: Tensor | None = None,
    ) -> tuple[Tensor, list[Past]]:
        """Return the features after the final norm, and the new keys and values of each layer.

        Features are ``[B, T, hidden]``, and keys and values are ``[B, Hkv, T, D]``. ``past``
        contains the cached keys and values of each layer, ``[B, Hkv, S, D]``. S may be smaller in
        layers with a window. The keys are already rotated by their positions. Cached positions may
        be in any order if every query attends to all cached positions (see ``hiding``).
        ``Attention.forward`` explains ``cache_dtype``, and ``Embedding.complete`` explains
        ``conditioning``.
        """
        x = self.embed(input_ids, position_ids, conditioning)
        places = places_of(self.network, input_ids, position_ids)
        tables: list[Rotary] = list(self.rotary)  # type: ignore[arg-type]
        turns = turns_of(self.network, self.network.layers, tables, position_ids, places)
        dtype = torch.float32 if self.is_plain else x.dtype  # type of the attention scores
        hidden: dict[Hashable, Tensor | None] = {}
        for i, layer in enumerate(self.network.layers):
            rule, longest = rule_of(layer.attention), self.network.max_canvas_length
            if rule not in hidden:
                cached = 0 if past is None else past[i][0].shape[2]
                hidden[rule] = hiding(layer.attention, places, cached, dtype, longest)
        presents = []
        for i, (layer, block) in enumerate(zip(self.network.layers, self.blocks, strict=True)):
            x, present = block(
                x,
                turns[i],
                hidden[rule_of(layer.attention)],
                None if past is None else past[i],
                cache_dtype,
            )
            presents.append(present)
        return self.final_norm(x), presents

    def project(self, features: Tensor) -> Tensor:
        """Map features ``[..., hidden]`` to raw logits ``[..., V]``, including the mask token."""
        ready = self.transform(features)
        logits: Tensor = (
            self.head(ready, self.embed.weight) if self.network.tied_head else self.head(ready)
        )
        return capped(logits, self.network.head.softcap)

    def soft_embedding(self, logits: Tensor, temperature: Tensor) -> Tensor:
        """Return the conditioning of the next draft pass, ``[..., hidden]``, for self-conditioning.

        ``logits`` ``[..., V]`` are the logits of a draft pass. The function divides ``logits`` by
        ``temperature`` ``[...]``.
        """
        probs = (logits.float() / temperature.unsqueeze(-1)).softmax(-1)
        table = self.embed.weight
        return product(probs.to(table.dtype), table) * self.embed.scale

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return the raw logits ``[B, L, V]`` of whole canvases ``[B, L]``, without using a cache.

        Row i contains the logits that the network computes at position i. If ``shift`` is 1, these
        logits predict the token at position i + 1.
        """
        spans = [Span.of_canvas(self.network, canvas) for canvas in input_ids.cpu().numpy()]
        ids = np.stack([span.ids(self.network) for span in spans])
        positions = torch.from_numpy(ids).to(input_ids.device)
        return self.project(self.hidden(input_ids, positions)[0])
