"""Defines mixtures of experts in torch: a router, expert MLPs, and an optional shared MLP.

The router chooses some experts for each token. Each expert is computed once, for all tokens that
are routed to it. Experts without tokens are not computed, so memory-mapped weights of such experts
are never loaded from disk.

Shapes: ``N`` tokens, ``E`` experts, ``k`` active experts per token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlm_export.network.linear import MLP, activate, product
from dlm_export.network.norms import RMSNorm
from dlm_export.network.spec import BRANCH_NORMS, ExpertsSpec, MlpSpec

torch.library.define(
    "dlm_export::experts",
    "(Tensor x, Tensor chosen, Tensor weights, Tensor[] stacks, str activation) -> Tensor",
)
_NO_SUM = 1e-20
"""Routers normalise routing weights by dividing them by their sum.

As in released routers, this number is added to the sum, so that the sum is never 0.
"""


@torch.library.register_fake("dlm_export::experts")  # type: ignore[untyped-decorator]
def _shape_of_experts(
    x: Tensor, chosen: Tensor, weights: Tensor, stacks: list[Tensor], activation: str
) -> Tensor:
    """Return an empty tensor with the shape of the output of ``RoutedMLPs``.

    torch.export needs this shape, because ``RoutedMLPs`` becomes a single graph node.
    """
    return torch.empty_like(x)


class BlockRows(NamedTuple):
    """Tells which rows of a pass belong to the same attention block.

    ``first`` int64 ``[B, T, 1]`` contains the first row of each row's block. ``is_same[k]`` bool ``[B,
    T, 1]`` says whether the row i + 2^k is in the same block as row i.
    """

    first: Tensor
    is_same: tuple[Tensor, ...]


def rows_of_blocks(position_ids: Tensor, block_length: int) -> BlockRows:
    """Find the blocks of a pass with the position ids ``[B, T]``.

    The pass may contain the rows of several requests, one request after the other. The positions of
    a request are consecutive, and only those of the first request may start inside a block.
    """
    rows = torch.arange(position_ids.shape[1], device=position_ids.device)
    first = (rows - position_ids % block_length).clamp(min=0).unsqueeze(-1)
    steps = range((block_length - 1).bit_length())
    return BlockRows(first, tuple(_later(first, 1 << k) == first for k in steps))


def _later(values: Tensor, distance: int) -> Tensor:
    """Return what ``values`` ``[B, T, n]`` contain ``distance`` rows later. The last rows are -1."""
    return F.pad(values, (0, 0, 0, distance), value=-1)[:, distance:]


def block_maxima(values: Tensor, blocks: BlockRows) -> Tensor:
    """Return the largest values ``[B, T, E]`` of the rows of each row's block."""
    for k, is_same in enumerate(blocks.is_same):
        # Before this step, a row has the maximum of itself and the next 2^k - 1 rows of its block.
        values = values.maximum(_later(values, 1 << k)).where(is_same, values)
    return values.gather(1, blocks.first.expand_as(values))


class Router(nn.Module):
    """Chooses the experts of each token, as ``RouterSpec`` describes.

    The router always computes in fp32, because rounding would change the order of nearly equal
    scores.
    """

    def __init__(
        self, spec: ExpertsSpec, hidden_size: int, norm_eps: float, is_plain: bool = False
    ) -> None:
        super().__init__()
        self.active, self.spec = spec.active, spec.router
        # A limit per block works as groups of one expert, which a whole block chooses together.
        of_block, r = spec.router.block_experts, spec.router
        self.groups = r.groups if of_block is None else spec.count
        self.active_groups = r.active_groups if of_block is None else of_block
        self.norm = RMSNorm(hidden_size, norm_eps, is_plain) if spec.router.has_norm else None
        self.weight = nn.Parameter(torch.empty(hidden_size, spec.count))
        self.bias = None if spec.router.bias is None else nn.Parameter(torch.empty(spec.count))
        self.expert_scales = (
            nn.Parameter(torch.empty(spec.count)) if spec.router.has_expert_scales else None
        )

    def forward(self, x: Tensor, blocks: BlockRows | None = None) -> tuple[Tensor, Tensor]:
        """Choose the experts of the tokens ``x`` ``[.., hidden]``.

        Returns the chosen experts, int64 ``[.., k]``, and their routing weights, fp32 ``[.., k]``.
        ``blocks`` are the blocks of the pass, for routers with ``block_experts``.
        """
        scores, judged = self.scores(x)
        worth = self._worth(judged, blocks)
        if blocks is None:
            chosen = self._of_groups(judged, worth).topk(self.active).indices
        else:  # the same choice, without the large intermediate array of _of_groups
            allowed = worth.topk(self.active_groups).indices
            chosen = allowed.gather(-1, judged.gather(-1, allowed).topk(self.active).indices)
        return chosen, self.weights_of(scores, judged, chosen)

    def scores(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the experts' scores without the bias, and with the bias, each fp32 ``[.., E]``.

        The router chooses experts by the scores with the bias.
        """
        return self.scores_of(self.prepared(x))

    def prepared(self, x: Tensor) -> Tensor:
        """Return what the router multiplies by its weight for the tokens ``x``: fp32, normed."""
        x = x.float()
        if self.norm is not None:
            x = self.norm(x) * x.shape[-1] ** -0.5
        return x

    def scores_of(self, prepared: Tensor) -> tuple[Tensor, Tensor]:
        """Return the result of ``scores`` for the result of ``prepared``."""
        products = prepared @ self.weight.float()
        scores = products.softmax(-1) if self.spec.score == "softmax" else products.sigmoid()
        return scores, scores if self.bias is None else scores + self.bias.float()

    def weights_of(self, scores: Tensor, judged: Tensor, chosen: Tensor) -> Tensor:
        """Return the routing weights ``[.., k]`` of the experts ``chosen``.

        ``chosen`` may differ from the experts that the router would choose.
        """
        r = self.spec
        weights = (judged if r.bias == "weights" else scores).gather(-1, chosen)
        if r.renormalise:
            weights = weights / (weights.sum(-1, keepdim=True) + _NO_SUM)
        if self.expert_scales is not None:
            scales = self.expert_scales.float().unsqueeze(-1)
            weights = weights * F.embedding(chosen, scales).squeeze(-1)
        return weights if r.scale == 1 else weights * r.scale

    def shortfall(self, judged: Tensor, chosen: Tensor, blocks: BlockRows | None = None) -> Tensor:
        """Return how much lower the scores of ``chosen`` ``[.., k]`` are than the best scores.

        The result is ``[..]``. ``judged`` ``[.., E]`` contains the scores by which the router
        chooses experts. The function compares the groups of the chosen experts with the best
        groups, and the chosen experts with the best experts of the same groups. The result is the
        larger of these two differences. If the chosen experts have the same scores as the best
        experts, the result is 0. The result is infinity if an expert is chosen twice, or if the
        experts are from too many groups. With ``block_experts``, each expert is a group, and a block
        must not have too many experts.
        """
        taken = torch.zeros_like(judged).scatter(-1, chosen, 1.0)
        is_wrong, short = taken.sum(-1) < self.active, torch.zeros_like(judged[..., 0])
        allowed = judged
        if self.active_groups < self.groups:
            worth, has_chosen = self._worth(judged, blocks), self._grouped(taken).amax(-1)
            has_chosen = (has_chosen if blocks is None else block_maxima(has_chosen, blocks)) > 0
            is_wrong |= has_chosen.sum(-1) > self.active_groups
            short = worth.topk(self.active_groups).values[..., -1] - worth.where(
                has_chosen, torch.inf
            ).amin(-1)
            allowed = self._of_groups(judged, worth.where(~has_chosen, torch.inf))
        behind = allowed.topk(self.active).values[..., -1] - judged.gather(-1, chosen).amin(-1)
        return torch.maximum(short, behind).clamp(min=0).where(~is_wrong, torch.inf)

    def _grouped(self, judged: Tensor) -> Tensor:
        return judged.view(*judged.shape[:-1], self.groups, judged.shape[-1] // self.groups)

    def _worth(self, judged: Tensor, blocks: BlockRows | None) -> Tensor:
        """Return the score of each group of experts, ``[.., G]``: the sum of its two best experts.

        With ``block_experts``, each expert is a group. Its score is the highest one in the block.
        """
        if self.spec.block_experts is not None:
            assert blocks is not None
            return block_maxima(judged, blocks)
        return judged if self.groups == 1 else self._grouped(judged).topk(2).values.sum(-1)

    def _of_groups(self, judged: Tensor, worth: Tensor) -> Tensor:
        """Return the scores ``[.., E]``, with minus infinity for experts outside the best groups."""
        if self.active_groups == self.groups:
            return judged
        best = worth.topk(self.active_groups).indices
        is_best = (best.unsqueeze(-1) == torch.arange(self.groups, device=best.device)).any(-2)
        kept: Tensor = self._grouped(judged).where(is_best.unsqueeze(-1), -torch.inf).flatten(-2)
        return kept


class Stacked(nn.Module):
    """A matrix ``[in, out]`` for each of ``E`` experts.

    Either all matrices are one parameter in memory, or each matrix is loaded when it is needed.
    """

    def __init__(self, count: int, inputs: int, outputs: int, *, is_down: bool = False) -> None:
        """``is_down`` is true for the matrices of the down projection.

        ``wide`` joins the matrices of the down projection along their inputs, because a mixture
        adds up the outputs of the experts. Other matrices are joined along their outputs.
        """
        super().__init__()
        self.count, self.inputs, self.outputs, self.is_down = count, inputs, outputs, is_down
        self.weight = nn.Parameter(torch.empty(count, inputs, outputs))
        self.read: Callable[[int], Tensor] | None = None

    def forward(self, x: Tensor, expert: int | None = None) -> Tensor:
        """Multiply ``x`` ``[.., in]`` by one expert's matrix, or by ``wide()``.

        If ``expert`` is ``None``, the method multiplies by ``wide()``.
        """
        return product(x, self.wide() if expert is None else self.matrix(expert))

    def matrix(self, expert: int) -> Tensor:
        """One expert's matrix ``[in, out]``."""
        return self.weight[expert] if self.read is None else self.read(expert)

    def wide(self) -> Tensor:
        """Return one matrix that joins the matrices of all experts.

        The shape of this matrix is ``[in, E * out]``, or ``[E * in, out]`` if ``is_down`` is true.
        """
        return torch.cat(
            [self.matrix(expert) for expert in range(self.count)], 0 if self.is_down else 1
        )


class RoutedMLPs(nn.Module):
    """Computes ``E`` experts. Each expert is a gated MLP for the tokens that are routed to it.

    If ``is_dense`` is true, one wide MLP computes all experts for every token. The wide MLP
    multiplies the features of an expert by 0 if the token is not routed to this expert.
    """

    def __init__(self, spec: ExpertsSpec, hidden_size: int) -> None:
        super().__init__()
        self.spec, self.count, self.is_dense = spec, spec.count, False
        self.gate = Stacked(spec.count, hidden_size, spec.size)
        self.up = Stacked(spec.count, hidden_size, spec.size)
        self.down = Stacked(spec.count, spec.size, hidden_size, is_down=True)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum ``[.., hidden]`` of the outputs of each token's experts.

        ``x`` is ``[.., hidden]``. ``chosen`` contains the experts of each token, and ``weights``
        contains their routing weights, both ``[.., k]``.
        """
        if torch.compiler.is_exporting():
            stacks = [self.gate.weight, self.up.weight, self.down.weight]
            y: Tensor = torch.ops.dlm_export.experts(
                x, chosen, weights, stacks, self.spec.activation
            )
            return y
        return self._all(x, chosen, weights) if self.is_dense else self._routed(x, chosen, weights)

    def _routed(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Compute one expert after another, and add up the results of each token in this order."""
        active, tokens = chosen.shape[-1], x.flatten(0, -2)
        slots = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=self.count).tolist()
        y = torch.zeros_like(tokens)
        for expert, mine in enumerate(torch.split(slots, counts)):
            if len(mine) == 0:
                continue
            rows = mine // active
            share = weights.flatten()[mine, None].to(x.dtype)
            y = y.index_add(0, rows, self.down(self.hidden(expert, tokens[rows]) * share, expert))
        return y.view(x.shape)

    def hidden(self, expert: int, x: Tensor) -> Tensor:
        """Map ``x`` ``[n, hidden]`` to an expert's features ``[n, size]`` before ``down``."""
        y: Tensor = self._activate(self.gate(x, expert)) * self.up(x, expert)
        return y

    def _activate(self, x: Tensor) -> Tensor:
        return activate(x, self.spec.activation, is_plain=False)

    def _all(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        experts = torch.arange(self.count, device=x.device)
        # routing weight of every token for every expert, [.., E]
        shares = ((chosen.unsqueeze(-1) == experts) * weights.unsqueeze(-1)).sum(-2).to(x.dtype)
        hidden = self._activate(self.gate(x)) * self.up(x)
        y: Tensor = self.down(
            (hidden.unflatten(-1, (self.count, -1)) * shares.unsqueeze(-1)).flatten(-2)
        )
        return y


class Experts(nn.Module):
    """A mixture of experts, which some layers use instead of an MLP."""

    experts_norm: nn.Module
    experts_out_norm: nn.Module
    shared_norm: nn.Module
    shared_out_norm: nn.Module

    def __init__(
        self, spec: ExpertsSpec, hidden_size: int, norm_eps: float, is_plain: bool = False
    ) -> None:
        super().__init__()
        self.router = Router(spec, hidden_size, norm_eps, is_plain)
        self.experts = RoutedMLPs(spec, hidden_size)
        shared = MlpSpec(spec.shared_size, spec.activation)
        self.shared = MLP(shared, hidden_size, is_plain) if spec.shared_size else None
        for name in BRANCH_NORMS:
            norm = RMSNorm(hidden_size, norm_eps, is_plain) if spec.branch_norms else nn.Identity()
            self.add_module(name, norm)

    def forward(self, x: Tensor, blocks: BlockRows | None = None) -> Tensor:
        """``x`` and the result are ``[B, T, hidden]``. ``Router`` explains ``blocks``."""
        y: Tensor = self.experts(self.experts_norm(x), *self.router(x, blocks))
        if self.shared is None:
            return y
        z: Tensor = self.shared_out_norm(self.shared(self.shared_norm(x)))
        whole: Tensor = self.experts_out_norm(y) + z
        return whole
