"""Defines the norms of a denoiser in torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in fp32.

    The normalised values are cast back to the input's type, and then multiplied by ``weight``, not
    by ``1 + weight``.
    """

    def __init__(self, size: int, eps: float, is_plain: bool) -> None:
        super().__init__()
        self.eps, self.is_plain = eps, is_plain
        self.weight = nn.Parameter(torch.empty(size))

    def forward(self, x: Tensor) -> Tensor:
        if self.is_plain:
            return unit_norm(x, self.eps) * self.weight
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def unit_norm(x: Tensor, eps: float) -> Tensor:
    """Apply an RMSNorm without a weight to the last axis, in fp32."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def make_norm(kind: str, size: int, eps: float, is_plain: bool) -> nn.Module:
    """Return a norm of a kind in ``NORM_KINDS``."""
    if kind == "rms":
        return RMSNorm(size, eps, is_plain)
    return nn.LayerNorm(size, eps, bias=kind == "layer-bias")
