"""Measures how much quantisation increases the cross-entropy at masked positions."""

from __future__ import annotations

from collections.abc import Sequence

from dlm_calibration.metrics import summarise
from dlm_calibration.samples import Sample
from dlm_export.judging.accuracy.masked import compare_masked, masked_canvases
from dlm_export.judging.sides.side import Side
from dlm_runtime.policy import Policy


class MaskedLoss:
    """Compares the cross-entropy of candidates and of a reference at masked positions."""

    def __init__(
        self, reference: Side, samples: Sequence[Sample], policy: Policy, seed: int
    ) -> None:
        """Mask the samples, and compute the predictions of the reference."""
        limit = reference.max_canvas_length
        self.canvases = [
            seen
            for number, sample in enumerate(samples)
            for seen in masked_canvases(
                sample, number, reference, policy=policy, limit=limit, seed=seed
            )
        ]
        self._views = [seen.view for seen in self.canvases]
        self._reference, self._samples, self._seed = reference, len(samples), seed
        reference.see(self._views)

    def of(self, candidate: Side) -> float:
        """Return the relative increase of cross-entropy from the reference to ``candidate``.

        If the reference's cross-entropy is 0 and the candidate's cross-entropy is not 0, returns
        infinity.
        """
        candidate.see(self._views)
        (found,) = compare_masked(self._reference, [candidate], self.canvases)
        increase = summarise(found.rows, found.sample, self._samples, self._seed)["ce_increase"]
        return float("inf") if increase is None else float(increase)
