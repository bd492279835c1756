"""Defines linear layers, the tied head and MLPs in torch."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlm_export.network.spec import LowRankSpec, MlpSpec

torch.library.define(
    "dlm_export::draft_update",
    "(Tensor x, Tensor y, Tensor is_updated, Tensor a, Tensor b) -> Tensor",
)

WIDENED = 1 << 22
"""Number of weight elements that are converted to fp32 at a time."""


def product(x: Tensor, weight: Tensor) -> Tensor:
    """Return ``x @ weight``, with a method that is fast on every processor.

    Without AVX-512, torch's bf16 kernels on x86 are fifty times slower than torch's fp32 kernels.
    On such processors, this function multiplies in fp32, a few columns at a time, and rounds the
    sums to bf16, as bf16 kernels do.
    """
    if x.dtype != torch.bfloat16 or has_bf16_kernels(x.device):
        return x @ weight
    wide, columns = x.float(), max(1, WIDENED // weight.shape[0])
    starts = range(0, weight.shape[1], columns)
    return torch.cat(
        [(wide @ weight[:, start : start + columns].float()).to(x.dtype) for start in starts], -1
    )


def has_bf16_kernels(device: torch.device) -> bool:
    """Return True if torch multiplies bf16 on a device at least as fast as fp32."""
    return device.type != "cpu" or _processor_has_bf16_kernels()


@functools.cache
def _processor_has_bf16_kernels() -> bool:
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return bool(available and torch.ops.mkldnn._is_mkldnn_bf16_supported())


class Linear(nn.Module):
    """A linear layer: ``x @ weight + bias``, with ``weight`` stored as ``[in, out]``.

    torch usually stores ``[out, in]``, which would add a Transpose node to the graph. With ``[in,
    out]``, the graph's MatMul uses the parameter directly, so the initialiser has the name of the
    parameter.
    """

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        y = product(x, self.weight)
        return y if self.bias is None else y + self.bias


@torch.library.register_fake("dlm_export::draft_update")  # type: ignore[untyped-decorator]
def _shape_of_update(x: Tensor, y: Tensor, is_updated: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return an empty tensor with the shape of the output of ``LowRank``.

    torch.export needs this shape, because ``LowRank`` becomes a single graph node.
    """
    return torch.empty_like(y)


class LowRank(nn.Module):
    """Adds ``x @ a @ b`` to the output of a linear layer, for some tokens only."""

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.empty(inputs, rank))
        self.b = nn.Parameter(torch.empty(rank, outputs))

    def forward(self, x: Tensor, y: Tensor, is_updated: Tensor) -> Tensor:
        """Update ``y`` ``[B, T, outputs]``, the output of the layer for ``x`` ``[B, T, inputs]``.

        ``is_updated`` ``[B, T, 1]`` says which tokens are updated. The rows of all other tokens are
        not changed.
        """
        if torch.compiler.is_exporting():
            node: Tensor = torch.ops.dlm_export.draft_update(x, y, is_updated, self.a, self.b)
            return node
        return torch.where(is_updated, y + product(product(x, self.a), self.b), y)


def updates_of(specs: Sequence[LowRankSpec], layers: Mapping[str, Linear | None]) -> nn.ModuleDict:
    """Make the updates of those of the ``layers`` that ``specs`` name. The keys are roles."""
    made = nn.ModuleDict()
    for spec in specs:
        layer = layers.get(spec.role)
        if layer is not None:
            inputs, outputs = layer.weight.shape
            made[spec.role] = LowRank(inputs, outputs, spec.rank)
    return made


def updated(
    x: Tensor, role: str, layer: Linear, updates: nn.ModuleDict, is_updated: Tensor | None
) -> Tensor:
    """Compute a linear layer with its low-rank update, if ``updates`` contains one for ``role``."""
    y: Tensor = layer(x)
    if role not in updates:
        return y
    assert is_updated is not None
    y = updates[role](x, y, is_updated)
    return y


class TiedHead(nn.Module):
    """Multiplies by the transposed embedding table, which the caller passes in."""

    def __init__(self, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        """Map features ``[..., hidden]`` to raw logits ``[..., V]`` with a table ``[V, hidden]``."""
        y = product(x, table.T)
        return y if self.bias is None else y + self.bias


def activate(x: Tensor, activation: str, is_plain: bool) -> Tensor:
    """Apply an activation function, a name in ``ACTIVATIONS``."""
    if activation == "silu":
        return F.silu(x)
    if activation == "relu":
        # Do not use F.relu. ONNX Runtime 1.31.1 removes a Relu before a QuantizeLinear to FP8, and
        # the results are then wrong.
        return torch.maximum(x, torch.zeros((), dtype=x.dtype, device=x.device))
    if activation == "gelu-tanh":
        if is_plain:  # elementary operators, for engines that have no GELU
            return 0.5 * x * (1 + torch.tanh((2 / math.pi) ** 0.5 * (x + 0.044715 * x * x * x)))
        return F.gelu(x, approximate="tanh")
    if is_plain:  # elementary operators, for engines that have no GELU
        return 0.5 * x * (1 + torch.erf(x * 0.5**0.5))
    return F.gelu(x)


class MLP(nn.Module):
    """Computes ``down(activation(gate x) * up x)``, or ``down(activation(up x))`` without a gate."""

    def __init__(
        self,
        spec: MlpSpec,
        hidden_size: int,
        is_plain: bool = False,
        updates: Sequence[LowRankSpec] = (),
    ) -> None:
        super().__init__()
        self.activation, self.is_plain = spec.activation, is_plain
        self.gate = Linear(hidden_size, spec.size, spec.bias) if spec.is_gated else None
        self.up = Linear(hidden_size, spec.size, spec.bias)
        self.down = Linear(spec.size, hidden_size, spec.bias)
        layers = {"gate": self.gate, "up": self.up, "down": self.down}
        self.draft_updates = updates_of(updates, layers)

    def forward(self, x: Tensor, is_updated: Tensor | None = None) -> Tensor:
        """``updated`` explains ``is_updated``, which only an MLP with low-rank updates needs."""
        updates = self.draft_updates
        if self.gate is None:
            up = updated(x, "up", self.up, updates, is_updated)
            features = activate(up, self.activation, self.is_plain)
        else:
            # The graph's kernels expect the gate first.
            gate = updated(x, "gate", self.gate, updates, is_updated)
            up = updated(x, "up", self.up, updates, is_updated)
            features = activate(gate, self.activation, self.is_plain) * up
        return updated(features, "down", self.down, updates, is_updated)
