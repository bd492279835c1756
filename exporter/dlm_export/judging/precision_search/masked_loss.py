"""The loss that the search measures: the increase of cross-entropy at masked positions."""

from __future__ import annotations

from collections.abc import Sequence

from dlm_calibration.metrics import summarise
from dlm_calibration.samples import Sample
from dlm_export.judging.accuracy.masked import compare_masked, masked_canvases
from dlm_export.judging.sides.side import Scorer, Seer
from dlm_runtime.policy import Policy


class MaskedLoss:
    """Measures by how much a candidate increases masked cross-entropy, relative to the source."""

    def __init__(
        self, reference: Scorer, samples: Sequence[Sample], policy: Policy, seed: int
    ) -> None:
        """Prepare the canvases. A reference that must know its canvases in advance gets
        them here.
        """
        limit = reference.max_canvas_length
        self._canvases = [
            seen
            for number, sample in enumerate(samples)
            for seen in masked_canvases(
                sample, number, reference, block_length=policy.block_length, limit=limit, seed=seed
            )
        ]
        self._reference, self._samples, self._seed = reference, len(samples), seed
        self._show(reference)

    def _show(self, side: Scorer) -> None:
        if isinstance(side, Seer):
            side.see([seen.view for seen in self._canvases])

    def of(self, candidate: Scorer) -> float:
        """Return the relative increase of a candidate, or infinity if the reference's loss is 0."""
        self._show(candidate)
        (found,) = compare_masked(self._reference, [candidate], self._canvases)
        increase = summarise(found.rows, found.sample, self._samples, self._seed)["ce_increase"]
        return float("inf") if increase is None else float(increase)
