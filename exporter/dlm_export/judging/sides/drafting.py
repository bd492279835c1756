"""Makes draft passes with a bundle's graph, for denoisers without a mask token.

The passes run in ONNX Runtime on the CPU, with the kernels and settings of the native runtime. The
native runtime has no function that returns the logits of a draft pass.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from dlm_runtime import Bundle
from dlm_runtime.abi import native as _native

if TYPE_CHECKING:
    import onnxruntime

_TYPES = {
    "tensor(float)": (np.float32, 1),
    "tensor(float16)": (np.uint16, 10),
    "tensor(bfloat16)": (np.uint16, 16),
    "tensor(int8)": (np.int8, 3),
}
"""Maps a type of cached rows to a numpy type of the same size, and to the type's number in ONNX."""


class DraftPasses:
    """A bundle's graph, which computes draft passes with self-conditioning."""

    def __init__(self, bundle: Bundle) -> None:
        """``bundle`` must have been opened from a folder."""
        import onnxruntime

        graph = bundle.manifest["loop"]["graph"]
        assert bundle.folder is not None
        options = session_options(is_simulated=graph["simulated"])
        self._session = onnxruntime.InferenceSession(
            os.fspath(bundle.folder / graph["file"]), options, providers=["CPUExecutionProvider"]
        )
        self._longest = bundle.max_canvas_length
        self._width = int(bundle.manifest["loop"]["conditioning_size"])
        self._caches = [each for each in self._session.get_inputs() if each.name.startswith("past")]

    def logits(
        self, canvas: np.ndarray, rows: np.ndarray, start: int, temperature: float
    ) -> np.ndarray:
        """Return the raw logits of ``rows`` in the second of two draft passes, fp32 ``[R, V]``.

        The draft passes compute the positions of a canvas ``[L]`` from ``start`` on, after a causal
        pass over the positions before ``start``. The second pass reads the predictions of the first
        pass, whose logits are divided by ``temperature``.
        """
        past = self._empty()
        if start:
            positions = np.arange(start)
            found = self._run(canvas[:start], positions, positions[-1:], past, temperature)
            past = {each.name: found[each.name.replace("past", "present")] for each in self._caches}
        block, positions = canvas[start:], np.arange(start, len(canvas)) + self._longest
        every = np.arange(len(block))
        first = self._run(block, positions, every, past, temperature)
        read = first["next_conditioning"].numpy()
        second = self._run(block, positions, rows - start, past, temperature, read)
        logits: np.ndarray = second["logits"].numpy()[0]
        return logits

    def _empty(self) -> dict[str, Any]:
        """Return keys and values without rows."""
        from onnxruntime import OrtValue

        found = {}
        for each in self._caches:
            numpy_type, number = _TYPES[each.type]
            nothing = np.zeros((1, each.shape[1], 0, each.shape[3]), numpy_type)
            found[each.name] = OrtValue.ortvalue_from_numpy_with_onnx_type(nothing, number)
        return found

    def _run(
        self,
        ids: np.ndarray,
        positions: np.ndarray,
        rows: np.ndarray,
        past: Mapping[str, Any],
        temperature: float,
        conditioning: np.ndarray | None = None,
    ) -> dict[str, Any]:
        from onnxruntime import OrtValue

        if conditioning is None:
            conditioning = np.zeros((1, len(ids), self._width), np.float32)
        arrays = {
            "input_ids": np.asarray(ids, np.int64)[None],
            "position_ids": np.asarray(positions, np.int64)[None],
            "score_rows": np.asarray(rows, np.int64)[None],
            "conditioning": conditioning,
            "temperature": np.full((1, len(rows)), temperature, np.float32),
        }
        given = {name: OrtValue.ortvalue_from_numpy(array) for name, array in arrays.items()}
        names = [each.name for each in self._session.get_outputs()]
        found = self._session.run_with_ort_values(names, {**given, **past})
        return dict(zip(names, found, strict=True))


def session_options(
    *, is_simulated: bool = False, is_packed: bool = True
) -> onnxruntime.SessionOptions:
    """Return the settings with which the native runtime opens a graph on a CPU.

    ``is_simulated`` is the value of ``simulated`` in the manifest. If ``is_packed`` is true, ONNX
    Runtime copies unquantised matrices to its own layout.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.enable_mem_pattern = 4, False
    for key, value in {
        "session.disable_prepacking": str(int(not is_packed)),
        "session.force_spinning_stop": "1",
        "session.qdq_matmulnbits_accuracy_level": "1",
        "session.x64quantprecision": "1",
        "session.disable_quant_qdq": str(int(is_simulated)),
    }.items():
        options.add_session_config_entry(key, value)
    options.register_custom_ops_library(_native.library()._name)
    return options
