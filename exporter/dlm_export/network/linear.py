"""Defines linear layers, the tied head and MLPs in torch."""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlm_export.network.spec import MlpSpec

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

    def __init__(self, spec: MlpSpec, hidden_size: int, is_plain: bool = False) -> None:
        super().__init__()
        self.activation, self.is_plain = spec.activation, is_plain
        self.gate = Linear(hidden_size, spec.size, spec.bias) if spec.is_gated else None
        self.up = Linear(hidden_size, spec.size, spec.bias)
        self.down = Linear(spec.size, hidden_size, spec.bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            features = activate(self.up(x), self.activation, self.is_plain)
        else:
            features = activate(self.gate(x), self.activation, self.is_plain) * self.up(x)
        y: Tensor = self.down(features)
        return y
