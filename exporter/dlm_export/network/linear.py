"""Multiplication by weights in torch: linear layers, the tied head and the gated MLP."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDENED = 1 << 22
"""Number of weight elements that are converted to fp32 at a time."""


def product(x: Tensor, weight: Tensor) -> Tensor:
    """Return ``x @ weight``, computed in a way that is fast on every processor.

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

    torch usually stores ``[out, in]``, which would be exported with a Transpose node. With
    ``[in, out]``, the exported MatMul uses the parameter directly. The graph's initialiser
    therefore has the name of the parameter, and is written once.
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

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        """Map features ``[..., hidden]`` to raw logits ``[..., V]`` with a table ``[V, hidden]``."""
        return product(x, table.T)


class MLP(nn.Module):
    """SwiGLU: ``down(silu(gate x) * up x)``."""

    def __init__(self, size: int, hidden_size: int) -> None:
        super().__init__()
        self.gate = Linear(hidden_size, size)
        self.up = Linear(hidden_size, size)
        self.down = Linear(size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y
