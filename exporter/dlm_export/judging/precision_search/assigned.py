"""Runs a denoiser layer by layer as if its layers had the formats that the search has chosen."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from dlm_calibration.precisions import HIGH
from dlm_export.families import weights
from dlm_export.families.base import Parameters
from dlm_export.judging.parity.by_layer import read_rounded
from dlm_export.network.denoiser import Block
from dlm_export.network.layered import Head, Layered, named
from dlm_export.network.spec import HEAD, NetworkSpec
from dlm_export.quantising import calibrate
from dlm_export.quantising.quantisation import Quantisation


class _RoundedHead(Head):
    """A quantised head, which first rounds its input to the number format of its layer."""

    def __init__(self, head: Head, done: Quantisation) -> None:
        # A tied head has already read the rounded embedding table.
        weight = (
            head.weight if done.has_tied_table else torch.from_numpy(done.weight(HEAD).dequantise())
        )
        super().__init__(weight, head.device, head.bias, head.softcap)
        self._done = done

    def __call__(self, features: Tensor) -> Tensor:
        seen = calibrate.as_seen(self._done, HEAD, features.float().cpu().numpy())
        return super().__call__(torch.from_numpy(np.ascontiguousarray(seen)))


class Assigned(Layered):
    """A source whose layers compute as if their weights and inputs had the chosen formats."""

    def __init__(
        self,
        parameters: Parameters,
        network: NetworkSpec,
        ready: Mapping[str, Quantisation],
        formats: Mapping[str, str],
        device: torch.device,
    ) -> None:
        """``ready`` maps each format to a quantisation of all layers in this format.

        ``formats`` maps each layer to its chosen format.
        """
        super().__init__(functools.partial(weights.tensor, parameters), network, device=device)
        self._ready, self._formats = ready, formats
        of_head = formats.get(HEAD, HIGH)
        self._of_head = None if of_head == HIGH else ready[of_head]
        if self._of_head is not None and self._of_head.has_tied_table:
            self.read = functools.partial(read_rounded, self._of_head, self.read)

    def head(self) -> Head:
        head = super().head()
        return head if self._of_head is None else _RoundedHead(head, self._of_head)

    def block(self, i: int) -> Block:
        block = super().block(i)
        modules = named(i, block)
        for name, done in self._ready.items():
            calibrate.simulate(
                modules, done, [layer for layer in modules if self._formats.get(layer) == name]
            )
        return block
