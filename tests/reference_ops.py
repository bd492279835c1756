"""Operators for ONNX's reference evaluator that its own implementation does not compute."""

from __future__ import annotations

import numpy as np
from onnx.reference.op_run import OpRun


class GatherElements(OpRun):
    """Accepts a negative axis and rows of any length.

    The implementation in onnx 1.23.2 accepts neither a negative axis nor more than 32 elements.
    """

    def _run(self, data: np.ndarray, indices: np.ndarray, axis: int) -> tuple[np.ndarray, ...]:
        return (np.take_along_axis(data, indices, axis),)
