"""Weights into a traced graph's external data, tensor by tensor from wherever they lie.

Peak memory is the largest tensor, not a multiple of the model. A second form of the graph points into the same data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir

from dlm_calibration.formats import pack_nibbles
from dlm_export.graph import DATA_FILE, DEVICE_FILE, GRAPH_FILE, LAYER_KEY, PRECISIONS
from dlm_export.graph.trace import Graph
from dlm_export.network.denoiser import cosines_and_sines
from dlm_export.network.spec import NetworkSpec

DATA_ALIGNMENT = 4096  # bytes; a page, so that the engine can map every tensor


def data_bytes(network: NetworkSpec, precision: str) -> int:
    """What ``write_graph`` puts into the data file at most: parameters, rotary tables, the mask token's bias, page padding."""
    c = network
    tables = c.rotary_tables()
    elements = c.parameter_count() + c.max_canvas_length * sum(table.size for table in tables)
    padding = (len(c.parameters()) + 2 * len(tables) + 1) * DATA_ALIGNMENT
    return elements * PRECISIONS[precision] + 4 * c.vocab_size + padding


def write_graph(
    graph: Graph,
    parameter: Callable[[str, np.dtype], np.ndarray],
    folder: Path,
    on_tensor: Callable[[int], None],
    device: Graph | None = None,
) -> None:
    """Write ``denoiser.onnx`` and ``denoiser.onnx.data`` into ``folder``, one tensor in memory at a time.

    ``parameter(name, dtype)`` gives an initialiser as a C-contiguous array, 4-bit ones an element a byte;
    ``on_tensor(bytes)`` is called after each one. ``device`` is written as ``device.onnx`` over the same data. Raises what
    ``parameter`` raises, and OSError when the disk is full.
    """
    c, dtype = graph.network, graph.element_type.numpy()
    mask_token_bias = np.zeros(c.vocab_size, np.float32)
    mask_token_bias[c.mask_token_id] = -np.inf
    buffers = {"mask_token_bias": mask_token_bias}
    for i, table in enumerate(c.rotary_tables()):
        for name, values in zip(("cos", "sin"), cosines_and_sines(table, c.max_canvas_length), strict=True):
            buffers[f"rotary.{i}.{name}"] = values.numpy().astype(dtype)
    with open(folder / DATA_FILE, "wb") as data:
        for name, value in graph.model.graph.initializers.items():
            if value.const_value is not None:
                continue  # a constant that the graph's file holds itself
            assert value.dtype is not None
            array = buffers[name] if name in buffers else parameter(name, value.dtype.numpy())
            expected = tuple(value.shape or ())
            assert array.shape == expected, (name, array.shape, expected)
            payload = _packed(array) if value.dtype.bitwidth == 4 else array
            data.write(bytes(-data.tell() % DATA_ALIGNMENT))
            offset = data.tell()
            data.write(payload.view(np.uint8).data if payload.ndim else payload.tobytes())
            value.const_value = ir.ExternalTensor(
                DATA_FILE, offset, payload.nbytes, value.dtype, shape=ir.Shape(array.shape), name=name, base_dir=folder
            )
            on_tensor(payload.nbytes)
    ir.save(graph.model, folder / GRAPH_FILE)
    if device is not None:
        _share_data(graph, device, folder)
        _name_nodes(device)
        ir.save(device.model, folder / DEVICE_FILE)


def _name_nodes(graph: Graph) -> None:
    """Call every node by its module path and operator: TensorRT's layers, and so the audit, go by nodes' names."""
    used: Counter[str] = Counter()
    for node in graph.model.graph:
        name = f"{node.metadata_props[LAYER_KEY]}/{node.op_type}"
        used[name] += 1
        node.name = name if used[name] == 1 else f"{name}.{used[name]}"


def _share_data(graph: Graph, device: Graph, folder: Path) -> None:
    """Point the device graph's initialisers at the bytes that ``graph`` has under the same names."""
    written = {name: value.const_value for name, value in graph.model.graph.initializers.items()}
    for name, value in device.model.graph.initializers.items():
        if value.const_value is not None:
            continue
        tensor = written[name]
        assert isinstance(tensor, ir.ExternalTensor)
        assert value.dtype is not None
        assert value.dtype.bitwidth == tensor.dtype.bitwidth, name
        shape = ir.Shape(tuple(tensor.shape))
        value.const_value = ir.ExternalTensor(
            DATA_FILE, tensor.offset, tensor.length, value.dtype, shape=shape, name=name, base_dir=folder
        )


def _packed(codes: np.ndarray) -> np.ndarray:
    """4-bit codes, an element a byte, as ONNX stores them: two a byte in order of memory, the earlier in the low nibble."""
    nibbles = codes.astype(np.int8).view(np.uint8).reshape(-1) & np.uint8(15)
    return pack_nibbles(np.pad(nibbles, (0, nibbles.size % 2)))
