"""Mixtures of experts in torch: a router, the gated MLPs that it chooses from, and one that every
token sees.

``N`` tokens, ``E`` experts, ``k`` of them for a token. Only the experts that tokens are routed to
are computed, each once for all its tokens: weights may lie in a mapped file, of which the others
are never read.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlm_export.network.linear import MLP, product
from dlm_export.network.spec import ExpertsSpec

torch.library.define(
    "dlm_export::experts", "(Tensor x, Tensor chosen, Tensor weights, Tensor[] stacks) -> Tensor"
)
_NO_SUM = 1e-20
"""What a sum of weights is divided by at least, as released routers have it."""


@torch.library.register_fake("dlm_export::experts")  # type: ignore[untyped-decorator]
def _shape_of_experts(x: Tensor, chosen: Tensor, weights: Tensor, stacks: list[Tensor]) -> Tensor:
    """What a trace knows of ``RoutedMLPs``: it becomes one node for all experts, which the graph
    defines.
    """
    return torch.empty_like(x)


class Router(nn.Module):
    """Chooses experts: see ``RouterSpec``. In fp32 whatever the denoiser computes in: nearly equal
    scores would be swapped.
    """

    def __init__(self, spec: ExpertsSpec, hidden_size: int) -> None:
        super().__init__()
        self.active, self.spec = spec.active, spec.router
        self.weight = nn.Parameter(torch.empty(hidden_size, spec.count))
        self.bias = None if spec.router.bias is None else nn.Parameter(torch.empty(spec.count))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``x`` ``[.., hidden]`` to the chosen experts, int64 ``[.., k]``, and their weights, fp32
        ``[.., k]``.
        """
        scores, judged = self.scores(x)
        chosen = self._of_groups(judged, self._worth(judged)).topk(self.active).indices
        return chosen, self.weights_of(scores, judged, chosen)

    def scores(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Of all experts fp32 ``[.., E]``, and what they are chosen by."""
        products = x.float() @ self.weight.float()
        scores = products.softmax(-1) if self.spec.score == "softmax" else products.sigmoid()
        return scores, scores if self.bias is None else scores + self.bias.float()

    def weights_of(self, scores: Tensor, judged: Tensor, chosen: Tensor) -> Tensor:
        """The weights ``[.., k]`` of the ``chosen`` experts, whichever they are."""
        r = self.spec
        weights = (judged if r.bias == "weights" else scores).gather(-1, chosen)
        if r.renormalise:
            weights = weights / (weights.sum(-1, keepdim=True) + _NO_SUM)
        return weights if r.scale == 1 else weights * r.scale

    def shortfall(self, judged: Tensor, chosen: Tensor) -> Tensor:
        """By how much ``chosen`` ``[.., k]`` are worse than the experts that ``judged`` ``[.., E]``
        says are best, ``[..]``.

        0 where others are as good. Groups with a chosen expert are held against the best groups,
        and experts against the best of the chosen groups. Infinite where an expert is chosen twice,
        or more groups than are allowed.
        """
        r = self.spec
        taken = torch.zeros_like(judged).scatter(-1, chosen, 1.0)
        is_wrong, short = taken.sum(-1) < self.active, torch.zeros_like(judged[..., 0])
        allowed = judged
        if r.active_groups < r.groups:
            worth, has_chosen = self._worth(judged), self._grouped(taken).amax(-1) > 0
            is_wrong |= has_chosen.sum(-1) > r.active_groups
            short = worth.topk(r.active_groups).values[..., -1] - worth.where(
                has_chosen, torch.inf
            ).amin(-1)
            allowed = self._of_groups(judged, worth.where(~has_chosen, torch.inf))
        behind = allowed.topk(self.active).values[..., -1] - judged.gather(-1, chosen).amin(-1)
        return torch.maximum(short, behind).clamp(min=0).where(~is_wrong, torch.inf)

    def _grouped(self, judged: Tensor) -> Tensor:
        return judged.view(
            *judged.shape[:-1], self.spec.groups, judged.shape[-1] // self.spec.groups
        )

    def _worth(self, judged: Tensor) -> Tensor:
        """How good each group is, ``[.., G]``; without groups it does not count."""
        return judged if self.spec.groups == 1 else self._grouped(judged).topk(2).values.sum(-1)

    def _of_groups(self, judged: Tensor, worth: Tensor) -> Tensor:
        """The scores ``[.., E]`` with those outside the best groups at minus infinity."""
        r = self.spec
        if r.active_groups == r.groups:
            return judged
        best = worth.topk(r.active_groups).indices
        is_best = (best.unsqueeze(-1) == torch.arange(r.groups, device=best.device)).any(-2)
        kept: Tensor = self._grouped(judged).where(is_best.unsqueeze(-1), -torch.inf).flatten(-2)
        return kept


class Stacked(nn.Module):
    """A matrix ``[in, out]`` for each of ``E`` experts: held in one parameter, or read where it is
    asked for.
    """

    def __init__(self, count: int, inputs: int, outputs: int, *, is_down: bool = False) -> None:
        """``is_down``: experts' results are added up behind it, so that all of them are one matrix
        of more inputs.
        """
        super().__init__()
        self.count, self.inputs, self.outputs, self.is_down = count, inputs, outputs, is_down
        self.weight = nn.Parameter(torch.empty(count, inputs, outputs))
        self.read: Callable[[int], Tensor] | None = None

    def forward(self, x: Tensor, expert: int | None = None) -> Tensor:
        """``x`` ``[.., in]`` by an expert's matrix; None: by ``wide``."""
        return product(x, self.wide() if expert is None else self.matrix(expert))

    def matrix(self, expert: int) -> Tensor:
        """An expert's, ``[in, out]``."""
        return self.weight[expert] if self.read is None else self.read(expert)

    def wide(self) -> Tensor:
        """All experts' matrices as one: side by side ``[in, E * out]``, those that go down one
        below the other.
        """
        return torch.cat(
            [self.matrix(expert) for expert in range(self.count)], 0 if self.is_down else 1
        )


class RoutedMLPs(nn.Module):
    """``E`` gated MLPs, each for the tokens that are routed to it. With ``is_dense`` all are
    computed for every token, as one MLP of all their features, those of experts that a token is not
    routed to being multiplied by 0.
    """

    def __init__(self, spec: ExpertsSpec, hidden_size: int) -> None:
        super().__init__()
        self.spec, self.count, self.is_dense = spec, spec.count, False
        self.gate = Stacked(spec.count, hidden_size, spec.size)
        self.up = Stacked(spec.count, hidden_size, spec.size)
        self.down = Stacked(spec.count, spec.size, hidden_size, is_down=True)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Weighted sums ``[.., hidden]`` of the results of the ``chosen`` experts ``[.., k]``, for
        ``x`` ``[.., hidden]``.
        """
        if torch.compiler.is_exporting():
            stacks = [self.gate.weight, self.up.weight, self.down.weight]
            y: Tensor = torch.ops.dlm_export.experts(x, chosen, weights, stacks)
            return y
        return self._all(x, chosen, weights) if self.is_dense else self._routed(x, chosen, weights)

    def _routed(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Expert by expert: a token's results are added up in their order."""
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
        """What an expert makes of its tokens ``[n, hidden]`` before they are weighed and go down,
        ``[n, size]``.
        """
        y: Tensor = F.silu(self.gate(x, expert)) * self.up(x, expert)
        return y

    def _all(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        experts = torch.arange(self.count, device=x.device)
        # Shape [.., E].
        shares = ((chosen.unsqueeze(-1) == experts) * weights.unsqueeze(-1)).sum(-2).to(x.dtype)
        hidden = F.silu(self.gate(x)) * self.up(x)
        y: Tensor = self.down(
            (hidden.unflatten(-1, (self.count, -1)) * shares.unsqueeze(-1)).flatten(-2)
        )
        return y


class Experts(nn.Module):
    """A mixture of experts in the place of an MLP."""

    def __init__(self, spec: ExpertsSpec, hidden_size: int) -> None:
        super().__init__()
        self.router = Router(spec, hidden_size)
        self.experts = RoutedMLPs(spec, hidden_size)
        self.shared = MLP(spec.shared_size, hidden_size) if spec.shared_size else None

    def forward(self, x: Tensor) -> Tensor:
        """``[B, T, hidden]``, in and out."""
        y: Tensor = self.experts(x, *self.router(x))
        return y if self.shared is None else y + self.shared(x)
