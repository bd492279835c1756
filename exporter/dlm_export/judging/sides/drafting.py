"""Makes draft passes with a bundle's graph.

The passes run in ONNX Runtime on the CPU, with the kernels and settings of the native runtime. The
native runtime has no function that returns the logits of a draft pass.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dlm_export.bundle.manifest import network_of
from dlm_export.judging.sides.side import DraftPass
from dlm_export.network.pass_plan import Span
from dlm_export.network.spec import NetworkSpec
from dlm_runtime import Bundle
from dlm_runtime.abi import native as _native
from dlm_runtime.cache_dtypes import CACHE_ROWS, ONNX_TYPES

if TYPE_CHECKING:
    import onnxruntime


class DraftPasses:
    """A bundle's graph, which computes draft passes."""

    def __init__(self, bundle: Bundle) -> None:
        """``bundle`` must have been opened from a folder."""
        import onnxruntime

        graph = bundle.manifest["loop"]["graph"]
        assert bundle.folder is not None
        options = session_options(is_simulated=graph["simulated"], threads=bundle.threads)
        self._session = onnxruntime.InferenceSession(
            os.fspath(bundle.folder / graph["file"]), options, providers=["CPUExecutionProvider"]
        )
        self._network = network_of(bundle.manifest)
        self._caches = [each for each in self._session.get_inputs() if each.name.startswith("past")]

    def logits(self, canvas: np.ndarray, rows: np.ndarray, draft: DraftPass) -> np.ndarray:
        """Return the raw logits of ``rows`` in the draft pass, fp32 ``[R, V]``.

        The draft pass computes the positions of a canvas ``[L]`` from ``draft.start`` on, after a
        causal pass over the positions before.
        """
        start, temperature = draft.start, draft.temperature
        past = {
            each.name: no_rows(
                each.type.removeprefix("tensor(").removesuffix(")"),
                (1, each.shape[1], 0, each.shape[3]),
            )
            for each in self._caches
        }
        if start:
            positions = np.arange(start)
            names = [each.name.replace("past", "present") for each in self._caches]
            found = self._run(names, canvas[:start], positions, positions[-1:], past, temperature)
            past = dict(zip(past, found, strict=True))
        span = Span.of_draft(self._network, start, len(canvas), draft.is_updated)
        block, positions = canvas[start:], span.ids(self._network)
        read = None
        if self._network.conditioning is not None:
            every = np.arange(len(block))
            (first,) = self._run(["next_conditioning"], block, positions, every, past, temperature)
            read = first.numpy()
        (found,) = self._run(
            ["logits"], block, positions, rows - start, past, temperature, conditioning=read
        )
        logits: np.ndarray = found.numpy()[0]
        return logits

    def _run(
        self,
        names: Sequence[str],
        ids: np.ndarray,
        positions: np.ndarray,
        rows: np.ndarray,
        past: Mapping[str, Any],
        temperature: float,
        conditioning: np.ndarray | None = None,
    ) -> list[Any]:
        """Make a pass, and return the outputs ``names`` as OrtValues."""
        given = inputs_of(
            self._network, ids[None], positions[None], rows[None], conditioning, temperature
        )
        found: list[Any] = self._session.run_with_ort_values(names, {**given, **past})
        return found


def inputs_of(
    network: NetworkSpec,
    ids: np.ndarray,
    positions: np.ndarray,
    rows: np.ndarray,
    conditioning: np.ndarray | None = None,
    temperature: float = 1.0,
) -> dict[str, onnxruntime.OrtValue]:
    """Return the inputs of a graph for a pass over B canvases of L tokens, without the cache.

    ``ids`` and ``positions`` are ``[B, L]``. ``rows`` ``[B, R]`` contains, for each canvas, the
    indices of the R rows whose logits the graph computes. With self-conditioning, ``conditioning``
    ``[B, L, hidden]`` contains the soft embeddings. ``None`` means zeros.
    """
    from onnxruntime import OrtValue

    integers = {"input_ids": ids, "position_ids": positions, "score_rows": rows}
    arrays = {name: np.ascontiguousarray(array, np.int64) for name, array in integers.items()}
    if network.conditioning is not None:
        if conditioning is None:
            conditioning = np.zeros((*ids.shape, network.hidden_size), np.float32)
        arrays["conditioning"] = np.ascontiguousarray(conditioning)
        arrays["temperature"] = np.full(rows.shape, temperature, np.float32)
    return {name: OrtValue.ortvalue_from_numpy(array) for name, array in arrays.items()}


def no_rows(element: str, shape: Sequence[int]) -> onnxruntime.OrtValue:
    """Return a cache without rows, whose elements have the ONNX type ``element``."""
    from onnxruntime import OrtValue

    name = "float32" if element == "float" else element
    nothing = np.zeros(shape, f"u{CACHE_ROWS[name][0]}")  # a numpy type of the same size
    return OrtValue.ortvalue_from_numpy_with_onnx_type(nothing, ONNX_TYPES[name])


def session_options(
    *, is_simulated: bool = False, is_packed: bool = True, threads: int = 0
) -> onnxruntime.SessionOptions:
    """Return the settings with which the native runtime opens a graph on a CPU.

    ``is_simulated`` is the value of ``simulated`` in the manifest. If ``is_packed`` is true, ONNX
    Runtime copies unquantised matrices to its own layout. If ``threads`` is 0, ONNX Runtime uses all
    physical cores.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.enable_mem_pattern = 4, False
    options.intra_op_num_threads = threads
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
