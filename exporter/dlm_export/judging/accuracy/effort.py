"""Defines how thoroughly a candidate is compared with its reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dlm_calibration.samples import Sample
from dlm_export.network.spec import NetworkSpec

JUDGED = 32  # number of samples to judge on, unless the user requests another number
# Masked canvases per sample, and compared states per decoding run, with the default effort. Canvases
# of one sample resemble each other, so the same number of canvases from more samples gives narrower
# intervals. With 2 canvases, 5 neighbouring samples together have every mask ratio.
CANVASES = 2

EffortName = Literal["default", "full", "none"]


@dataclass(frozen=True)
class Effort:
    """Defines how thoroughly a candidate is compared with its reference. ``name`` is one of:

    - ``default``: ``CANVASES`` masked canvases per sample, and as many states per decoding run.
    - ``full``: every mask ratio for each sample, and every state.
    - ``none``: the denoisers are not compared.

    ``judged`` is the number of samples, ``JUDGED`` by default. The number never depends on the speed
    of the machine, so that all bundles are judged on the same samples.
    """

    name: EffortName = "default"
    judged: int | None = None

    @property
    def canvases(self) -> int | None:
        """Maximum number of masked canvases per sample. ``None`` sets no limit."""
        return None if self.name == "full" else CANVASES

    def has_texts(self, network: NetworkSpec) -> bool:
        """Return True if the comparison generates texts.

        The loop of a denoiser whose blocks start from random tokens makes dozens of passes per
        block, and its bundle needs memory for two graphs. It generates texts only with the effort
        ``full``.
        """
        is_slow = not network.has_mask_token and not network.has_causal_drafts
        return not is_slow or self.name == "full"

    def chosen(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return the samples to judge on: the first ones."""
        return list(samples[: self.judged or JUDGED])

    def shortage(self, samples: Sequence[Sample], *, option: str) -> list[str]:
        """Return a warning if the user requested more samples than there are.

        ``option`` is the command-line option with which the user gives the data.
        """
        if self.judged is None or self.judged <= len(samples):
            return []
        return [
            f"--judged {self.judged}: the data has only {len(samples)} samples for judging, and all of them were used. Give a "
            f"larger file as {option}"
        ]
