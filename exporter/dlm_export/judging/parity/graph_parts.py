"""Runs a bundle's graph part by part, so that memory holds only the weights of one part.

The parts run in ONNX Runtime, with the kernels of the native runtime. The outputs of each part
become inputs of later parts, so the results are equal to the results of the whole graph.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from dlm_export.graph import cache_dtypes
from dlm_export.graph.parts import Part
from dlm_export.judging.sides.drafting import inputs_of, no_rows, session_options
from dlm_export.memory import give_back
from dlm_export.network.spec import NetworkSpec

if TYPE_CHECKING:
    import onnxruntime

Values = Mapping[str, np.ndarray]
"""Maps the names of values in a graph to arrays."""


def full_pass(
    network: NetworkSpec,
    cache_dtype: str,
    ids: np.ndarray,
    rows: np.ndarray,
    positions: np.ndarray | None = None,
    conditioning: np.ndarray | None = None,
) -> dict[str, onnxruntime.OrtValue]:
    """Return the inputs of a graph for a pass without a cache over a batch of whole canvases.

    ``positions`` ``[B, L]`` contains the position ids, which are 0 to L - 1 by default.
    ``inputs_of`` explains the other arguments.
    """
    if positions is None:
        positions = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
    given = inputs_of(network, ids, positions, rows, conditioning)
    for i, (kv_heads, head_size) in enumerate(network.cache_shapes()):
        element, width = cache_dtypes.row_of(cache_dtype, head_size)
        nothing = no_rows(element.name.lower(), (len(ids), kv_heads, 0, width))
        given |= {f"past_key.{i}": nothing, f"past_value.{i}": nothing}
    return given


def run_parts(
    folder: Path,
    parts: Sequence[Part],
    passes: Sequence[Mapping[str, onnxruntime.OrtValue]],
    wanted: Collection[str],
    *,
    is_simulated: bool,
) -> Iterator[tuple[Part, list[Values]]]:
    """Run the parts of a graph in order. A part computes all ``passes`` before the next part runs.

    For each part, yields the part and a list with one mapping per pass. A mapping contains those
    outputs of the part that ``wanted`` names. ``folder`` contains the graph's weight file.
    ``is_simulated`` is the value of ``is_simulated`` in the manifest. Raises PartError.
    """
    held = [dict(given) for given in passes]
    for number, part in enumerate(parts):
        part.check_given(set.intersection(*(set(values) for values in held)))
        behind = {name for later in parts[number + 1 :] for name in later.inputs}
        names = [name for name in part.outputs if name in behind or name in wanted]
        session = open_graph(part.model, folder, is_simulated=is_simulated, is_packed=False)
        found: list[Values] = []
        for values in held:
            inputs = {name: values[name] for name in part.inputs}
            outputs = dict(zip(names, session.run_with_ort_values(names, inputs), strict=True))
            found.append(
                {name: output.numpy() for name, output in outputs.items() if name in wanted}
            )
            values |= outputs
            for name in values.keys() - behind:
                del values[name]
        del session
        give_back()
        yield part, found


def open_graph(
    model: ir.Model,
    folder: Path | None = None,
    *,
    is_simulated: bool = False,
    is_packed: bool = True,
) -> onnxruntime.InferenceSession:
    """Open a graph, or a part of a graph, with the settings of the native runtime.

    ``folder`` contains the weight file. ``folder`` may be ``None`` if the graph has no weights. If
    ``is_packed`` is true, ONNX Runtime copies unquantised matrices to its own layout. The copy
    takes time and memory once, but makes each pass faster.
    """
    import onnxruntime

    options = session_options(is_simulated=is_simulated, is_packed=is_packed)
    if folder is not None:
        options.add_session_config_entry(
            "session.model_external_initializers_file_folder_path", str(folder)
        )
    return onnxruntime.InferenceSession(
        ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
