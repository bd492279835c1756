"""Mixtures of experts in torch: a router, the gated MLPs that it chooses from, and one that every token sees.

``N`` tokens, ``E`` experts, ``k`` of them for a token. Only the experts that tokens are routed to are computed, each once for
all its tokens: weights may lie in a mapped file, of which the others are never read.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlm_export.network.linear import MLP, product
from dlm_export.network.spec import ExpertsSpec

torch.library.define("dlm_export::experts", "(Tensor x, Tensor chosen, Tensor weights, Tensor[] stacks) -> Tensor")
_NO_SUM = 1e-20
"""What a sum of weights is divided by at least, as released routers have it."""


@torch.library.register_fake("dlm_export::experts")  # type: ignore[untyped-decorator]
def _shape_of_experts(x: Tensor, chosen: Tensor, weights: Tensor, stacks: list[Tensor]) -> Tensor:
    """What a trace knows of ``RoutedMLPs``: it becomes one node for all experts, which the graph defines."""
    return torch.empty_like(x)


class Router(nn.Module):
    """Chooses experts: see ``RouterSpec``. In fp32 whatever the denoiser computes in: nearly equal scores would be swapped."""

    def __init__(self, spec: ExpertsSpec, hidden_size: int) -> None:
        super().__init__()
        self.active, self.spec = spec.active, spec.router
        self.weight = nn.Parameter(torch.empty(hidden_size, spec.count))
        self.bias = None if spec.router.bias is None else nn.Parameter(torch.empty(spec.count))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``x`` ``[.., hidden]`` to the chosen experts, int64 ``[.., k]``, and their weights, fp32 ``[.., k]``."""
        r = self.spec
        products = x.float() @ self.weight.float()
        scores = products.softmax(-1) if r.score == "softmax" else products.sigmoid()
        judged = scores if self.bias is None else scores + self.bias.float()
        chosen = self._of_best_groups(judged).topk(self.active).indices
        weights = (judged if r.bias == "weights" else scores).gather(-1, chosen)
        if r.renormalise:
            weights = weights / (weights.sum(-1, keepdim=True) + _NO_SUM)
        return chosen, weights if r.scale == 1 else weights * r.scale

    def _of_best_groups(self, judged: Tensor) -> Tensor:
        """The scores ``[.., E]`` with those outside the best groups at minus infinity."""
        r = self.spec
        if r.active_groups == r.groups:
            return judged
        grouped = judged.view(*judged.shape[:-1], r.groups, judged.shape[-1] // r.groups)
        best = grouped.topk(2).values.sum(-1).topk(r.active_groups).indices
        is_best = (best.unsqueeze(-1) == torch.arange(r.groups, device=best.device)).any(-2)
        kept: Tensor = grouped.where(is_best.unsqueeze(-1), -torch.inf).flatten(-2)
        return kept


class Stacked(nn.Module):
    """A matrix ``[in, out]`` for each expert: held in one parameter, or read where it is asked for."""

    def __init__(self, count: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, inputs, outputs))
        self.read: Callable[[int], Tensor] | None = None

    def forward(self, x: Tensor, expert: int | None = None) -> Tensor:
        """``x @ weight`` by an expert's matrix; None: ``x`` ``[.., E or 1, n, in]`` by all of them."""
        if expert is None:
            return x @ self.weight
        return product(x, self.weight[expert] if self.read is None else self.read(expert))


class RoutedMLPs(nn.Module):
    """``E`` gated MLPs, each for the tokens that are routed to it. ``is_dense`` computes all of them for every token."""

    def __init__(self, spec: ExpertsSpec, hidden_size: int, is_dense: bool) -> None:
        super().__init__()
        self.count, self.is_dense = spec.count, is_dense
        self.gate = Stacked(spec.count, hidden_size, spec.size)
        self.up = Stacked(spec.count, hidden_size, spec.size)
        self.down = Stacked(spec.count, spec.size, hidden_size)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Weighted sums ``[.., hidden]`` of the results of the ``chosen`` experts ``[.., k]``, for ``x`` ``[.., hidden]``."""
        if self.is_dense:
            return self._all(x, chosen, weights)
        if torch.compiler.is_exporting():
            stacks = [self.gate.weight, self.up.weight, self.down.weight]
            y: Tensor = torch.ops.dlm_export.experts(x, chosen, weights, stacks)
            return y
        return self.routed(x, chosen, weights)

    def routed(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """``forward``, expert by expert: a token's results are added up in their order."""
        active, tokens = chosen.shape[-1], x.flatten(0, -2)
        slots = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=self.count).tolist()
        y = torch.zeros_like(tokens)
        for expert, mine in enumerate(torch.split(slots, counts)):
            if len(mine) == 0:
                continue
            rows = mine // active
            result = self.one(expert, tokens[rows]) * weights.flatten()[mine, None].to(x.dtype)
            y = y.index_add(0, rows, result)
        return y.view(x.shape)

    def one(self, expert: int, x: Tensor) -> Tensor:
        """An expert's result for its tokens ``[n, hidden]``."""
        y: Tensor = self.down(F.silu(self.gate(x, expert)) * self.up(x, expert), expert)
        return y

    def _all(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """``x`` ``[B, T, hidden]``."""
        experts = torch.arange(self.count, device=x.device)
        shares = ((chosen.unsqueeze(-1) == experts) * weights.unsqueeze(-1)).sum(-2).to(x.dtype)  # [B, T, E]
        wide = x.unsqueeze(1)
        results: Tensor = self.down(F.silu(self.gate(wide)) * self.up(wide))  # [B, E, T, hidden]
        return (results * shares.permute(0, 2, 1).unsqueeze(-1)).sum(1)


class Experts(nn.Module):
    """A mixture of experts in the place of an MLP."""

    def __init__(self, spec: ExpertsSpec, hidden_size: int, is_dense: bool) -> None:
        super().__init__()
        self.router = Router(spec, hidden_size)
        self.experts = RoutedMLPs(spec, hidden_size, is_dense)
        self.shared = MLP(spec.shared_size, hidden_size) if spec.shared_size else None

    def forward(self, x: Tensor) -> Tensor:
        """``[B, T, hidden]``, in and out."""
        y: Tensor = self.experts(x, *self.router(x))
        return y if self.shared is None else y + self.shared(x)
