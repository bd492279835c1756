"""Measures how long layers take in each format on this machine, for ``--precision auto --tune``."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from dlm_calibration.precisions import FORMATS, HIGH
from dlm_export.graph import operators
from dlm_export.graph.body import DOMAIN
from dlm_export.graph.operators import TIED_HEADS
from dlm_export.graph.quantise import misfit
from dlm_export.judging.parity.graph_parts import open_graph
from dlm_export.machine import last_level_cache_bytes, this_machine
from dlm_export.network.spec import LinearSpec
from dlm_runtime.errors import RequestError

if TYPE_CHECKING:
    import onnxruntime

ROUNDS = 7
# A measurement multiplies by several different weights in turn, so that the processor reads them
# from memory, as in a real pass. Their total size in bytes is between ``_LEAST_BYTES`` and
# ``_MOST_BYTES``, or smaller if the network contains only a few weights of the same shape.
_LEAST_BYTES = 64 << 20
_MOST_BYTES = 512 << 20
Shape = tuple[int, int]


@dataclass(frozen=True)
class Tuning:
    """The measured times of layers on the processor ``processor``, in a pass of ``rows`` tokens.

    A matrix shape is ``(inputs, outputs)``. ``shapes`` maps each matrix shape to the number of
    matrix products of this shape in a pass. ``seconds`` maps a matrix shape and a number format to
    the time of one matrix product.
    """

    rows: int
    processor: str
    shapes: Mapping[Shape, int]
    seconds: Mapping[Shape, Mapping[str, float]]

    def cost(self, layer: LinearSpec, format: str) -> float:
        """Return the number of seconds that a layer takes in one pass.

        In a layer with experts, only the experts that a pass reaches are counted.
        """
        return _reached(layer, self.rows) * self.seconds[layer.inputs, layer.outputs][format]

    def totals(self) -> dict[str, float]:
        """Map each format to the total time of all layers in one pass, in seconds.

        If a layer's shape does not suit a format, the total contains the layer's time in full
        precision.
        """
        names = dict.fromkeys(name for each in self.seconds.values() for name in each)
        return {
            name: sum(
                count * self.seconds[shape].get(name, self.seconds[shape][HIGH])
                for shape, count in self.shapes.items()
            )
            for name in names
        }

    def as_dict(self) -> dict[str, Any]:
        """Return all times in milliseconds, for the manifest."""
        milliseconds = {
            f"{inputs}x{outputs}": {name: seconds * 1e3 for name, seconds in found.items()}
            for (inputs, outputs), found in self.seconds.items()
        }
        totals = {name: seconds * 1e3 for name, seconds in self.totals().items()}
        return {
            "processor": self.processor,
            "rows": self.rows,
            "ms": totals,
            "ms_by_shape": milliseconds,
        }


def _reached(layer: LinearSpec, rows: int) -> float:
    """Return how many of a layer's matrices ``rows`` tokens use, if experts are equally likely."""
    return layer.count * (1 - (1 - layer.share) ** rows)


def shapes_of(layers: Iterable[LinearSpec], rows: int) -> dict[Shape, int]:
    """Map each matrix shape to its number of matrix products in a pass of ``rows`` tokens."""
    found: Counter[Shape] = Counter()
    for layer in layers:
        found[layer.inputs, layer.outputs] += round(_reached(layer, rows))
    return dict(found)


def measure(
    layers: Iterable[LinearSpec],
    formats: Iterable[str],
    rows: int,
    on_done: Callable[[], None],
    *,
    table: ir.DataType = ir.DataType.FLOAT,
) -> Tuning:
    """Time a matrix product of ``rows`` rows for each matrix shape in ``layers``, in each format.

    Full precision is measured too. Each round measures every format. A measurement uses all cores,
    and the same settings of ONNX Runtime as the native runtime. ``$DLM_KERNELS`` selects the
    kernels.

    If the head shares an unquantised embedding table, ``table`` is the table's type. ``on_done`` is
    called after each shape. Raises RequestError if a format has no kernels.
    """
    formats, layers = list(formats), list(layers)
    for name in formats:
        if not FORMATS[name].is_dynamic:
            raise RequestError(
                f"--tune times formats that have kernels, and {name} has none: choose other formats, or omit --tune"
            )
    found, shapes = {}, shapes_of(layers, rows)
    one_of = {(layer.inputs, layer.outputs): layer for layer in layers}
    for shape, count in shapes.items():
        fitting = [HIGH, *(name for name in formats if misfit(one_of[shape], name) is None)]
        tied = table if one_of[shape].is_tied else None
        found[shape] = _time(shape, fitting, rows, count, tied)
        on_done()
    return Tuning(rows, this_machine()["processor"], shapes, found)


def _time(
    shape: Shape, formats: list[str], rows: int, count: int, table: ir.DataType | None
) -> dict[str, float]:
    """Return the median seconds of a product in each format. ``table`` is a tied table's type."""
    x = np.random.default_rng(0).standard_normal((rows, shape[0]), np.float32)
    runs = {}
    for name in formats:
        size = FORMATS[name].weight_bytes(*shape)
        wanted = max(_LEAST_BYTES, 2 * last_level_cache_bytes())
        copies = max(1, min(count, -(-wanted // size), _MOST_BYTES // size))
        runs[name] = (_session(shape, name, copies, table), copies)
    seconds: dict[str, list[float]] = {name: [] for name in formats}
    for number in range(ROUNDS + 1):
        for name, (session, copies) in runs.items():
            began = time.perf_counter()
            session.run(None, {"x": x})
            if number:
                seconds[name].append((time.perf_counter() - began) / copies)
    return {name: statistics.median(each) for name, each in seconds.items()}


def _session(
    shape: Shape, format: str, copies: int, table: ir.DataType | None = None
) -> onnxruntime.InferenceSession:
    """Create a graph that multiplies one input by ``copies`` distinct weights."""
    chosen, (inputs, outputs) = FORMATS[format], shape
    rng = np.random.default_rng(1)
    x = ir.Value(name="x", shape=ir.Shape(["rows", inputs]), type=ir.TensorType(ir.DataType.FLOAT))
    graph = ir.Graph([x], [], nodes=[], opset_imports={"": 23}, name="products")
    model = ir.Model(graph, ir_version=11)
    for i in range(copies):
        constants = [
            ir.Value(name=f"{name}_{i}", const_value=ir.tensor(array))
            for name, array in _weight(rng, format, shape, table)
        ]
        for value in constants:
            graph.register_initializer(value)
        if format == HIGH and table is None:
            node = ir.node("MatMul", [x, *constants])
        elif format == HIGH:
            assert table is not None
            operators.declare(model, TIED_HEADS[table])
            node = ir.node(TIED_HEADS[table], [x, *constants], domain=DOMAIN)
        else:
            name = operators.LINEAR[chosen.group_size is not None]
            operators.declare(model, name)
            attributes: dict[str, Any] = {"columns": [outputs]}
            if chosen.group_size is not None:
                attributes["group_size"] = chosen.group_size
            node = ir.node(name, [x, *constants], attributes, domain=DOMAIN)
        y = node.outputs[0]
        y.name = f"y_{i}"
        y.shape = ir.Shape(["rows", outputs])
        y.type = ir.TensorType(ir.DataType.FLOAT)
        graph.append(node)
        graph.outputs.append(y)
    return open_graph(model)


def _weight(
    rng: np.random.Generator, format: str, shape: Shape, table: ir.DataType | None
) -> list[tuple[str, np.ndarray]]:
    """Create a random weight in the form that a graph stores for this format."""
    (inputs, outputs), group_size = shape, FORMATS[format].group_size
    if format == HIGH and table is not None:
        rows = rng.standard_normal((outputs, inputs), np.float32)
        return [("table", rows.astype(table.numpy()))]
    if format == HIGH:
        return [("w", rng.standard_normal(shape, np.float32))]
    panels = operators.padded(outputs) // operators.PANEL
    together = operators.DOT if group_size is None else operators.PAIRS
    codes = rng.integers(
        0, 256, (panels, inputs // together, operators.PANEL, operators.DOT), np.uint8
    )
    if group_size is None:
        return [("panels", codes), ("scales", np.ones(panels * operators.PANEL, np.float32))]
    return [
        ("panels", codes),
        ("scales", np.ones((panels, -(-inputs // group_size), operators.PANEL), np.float16)),
    ]
