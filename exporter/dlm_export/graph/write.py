"""Writes a graph file, and a separate data file with the graph's weights.

The weights are packed and written a few rows at a time. Writing needs enough memory for the codes
of the largest matrix. A graph for GPUs can use the same data file.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from dlm_calibration.pieces import Lazy, ahead, row_slices
from dlm_calibration.precision_rounding import pack_nibbles
from dlm_calibration.precisions import FORMATS, HIGH
from dlm_export.graph import (
    DATA_FILE,
    DEVICE_FILE,
    GRAPH_FILE,
    LAYER_KEY,
    PRECISIONS,
    cuda,
    operators,
)
from dlm_export.graph.trace import Graph
from dlm_export.network.denoiser import cosines_and_sines
from dlm_export.network.spec import HEAD, NetworkSpec
from dlm_runtime.precision import CUDA_BLOCK

_MOST_PARTS = 3  # A weight has at most three initialisers: codes, scales and a global scale.
# Alignment of each tensor in bytes. The alignment is the size of a memory page, so that the engine
# can map tensors into memory.
DATA_ALIGNMENT = 4096


def data_bytes(
    network: NetworkSpec,
    precision: str,
    formats: Mapping[str, str] | None = None,
    table_bytes: int | None = None,
) -> int:
    """Compute an upper bound of the data file's size in bytes.

    The bound includes parameters, rotary tables, padding, and the bias that excludes the mask
    token and unused ids.

    Args:
        network: The denoiser's description.
        precision: A key of ``PRECISIONS``.
        formats: The formats of all quantised layers. All other layers have the type ``precision``.
        table_bytes: Bytes per element of the embedding table, if its type is not ``precision``.
    """
    c = network
    tables = c.rotary_tables()
    elements = c.parameter_count() + c.max_canvas_length * c.rotary_copies * sum(
        table.size for table in tables
    )
    padding = (_MOST_PARTS * len(c.parameters()) + 2 * len(tables) + 1) * DATA_ALIGNMENT
    # routers are always stored in fp32
    routers = sum(
        layer.inputs * layer.outputs for layer in c.linear_layers() if layer.role == "router"
    )
    saved = -routers * (4 - PRECISIONS[precision])
    head = (formats or {}).get(HEAD, HIGH)
    if table_bytes is not None and (head == HIGH or not c.tied_head):
        saved += (PRECISIONS[precision] - table_bytes) * c.vocab_size * c.hidden_size
    for path, layer in c.quantisable().items():
        chosen = FORMATS[(formats or {}).get(path, HIGH)]
        if chosen.weights is not None or layer.is_stacked:
            columns = operators.padded(layer.outputs)
            plain = layer.inputs * layer.outputs * PRECISIONS[precision]
            saved += layer.count * (plain - chosen.weight_bytes(layer.inputs, columns))
            # MatMulNBits uses whole blocks, and stores a scale for each block.
            if chosen.weights == "int8" and precision != "fp32":
                blocks = -(-layer.inputs // CUDA_BLOCK)
                block_bytes = CUDA_BLOCK + PRECISIONS[precision]
                saved -= layer.count * columns * (blocks * block_bytes - layer.inputs)
    return elements * PRECISIONS[precision] - saved + 4 * c.vocab_size + padding


def write_graph(
    graph: Graph,
    parameter: Callable[[str, np.dtype], np.ndarray | Lazy],
    folder: Path,
    on_bytes: Callable[[int], None],
    device: Graph | None = None,
) -> dict[str, dict[str, Any]]:
    """Write ``denoiser.onnx`` and ``denoiser.onnx.data`` into ``folder``.

    All cores read and pack initialisers, a few rows at a time. At the same time, finished rows are
    hashed and written.

    Args:
        graph: The graph to write.
        parameter: A function that is called with the name and type of an initialiser. The function
            returns the values of the initialiser. Each 4-bit value takes one byte.
        folder: Destination.
        on_bytes: A function that is called with the number of bytes written since the last call.
        device: A second graph, written as ``device.onnx``. The second graph uses the same data
            file.

    Returns:
        A dict that maps the name of the data file to the file's size and SHA-256.

    Raises:
        OSError: The disk is full. If ``parameter`` raises an exception, this exception is raised
            too.
    """
    c, dtype = graph.network, graph.element_type.numpy()
    mask_token_bias = np.zeros(c.vocab_size, np.float32)
    if c.has_mask_token:
        mask_token_bias[c.mask_token_id] = -np.inf
    for first, last in c.unused_tokens:
        mask_token_bias[first:last] = -np.inf
    buffers = {"mask_token_bias": mask_token_bias}
    for i, table in enumerate(c.rotary_tables()):
        for name, values in zip(
            ("cos", "sin"),
            cosines_and_sines(table, c.max_canvas_length, c.rotary_copies),
            strict=True,
        ):
            buffers[f"rotary.{i}.{name}"] = values.numpy().astype(dtype)
    digest = hashlib.sha256()
    with open(folder / DATA_FILE, "wb") as data:

        def write(payload: Any) -> None:
            digest.update(payload)
            data.write(payload)

        for name, value in graph.model.graph.initializers.items():
            if value.const_value is not None:
                continue  # the value is stored in the graph file
            assert value.dtype is not None
            array = buffers[name] if name in buffers else parameter(name, value.dtype.numpy())
            expected = tuple(value.shape or ())
            assert array.shape == expected, (name, array.shape, expected)
            write(bytes(-data.tell() % DATA_ALIGNMENT))
            offset = data.tell()
            for payload in _payloads(array, value.dtype):
                write(payload)
                on_bytes(payload.nbytes)
            value.const_value = ir.ExternalTensor(
                DATA_FILE,
                offset,
                data.tell() - offset,
                value.dtype,
                shape=ir.Shape(expected),
                name=name,
                base_dir=folder,
            )
        written = {DATA_FILE: {"bytes": data.tell(), "sha256": digest.hexdigest()}}
    ir.save(graph.model, folder / GRAPH_FILE)
    if device is not None:
        _share_data(graph, device, folder)
        _name_nodes(device)
        ir.save(device.model, folder / DEVICE_FILE)
    return written


def _payloads(array: np.ndarray | Lazy, dtype: ir.DataType) -> Iterator[memoryview]:
    """Yield the bytes of an initialiser, a few rows at a time."""
    if not array.shape:
        yield memoryview(np.asarray(array[()]).tobytes())
        return

    def payload(rows: slice) -> memoryview:
        piece = np.ascontiguousarray(array[(rows,)])
        assert 8 * piece.itemsize == max(8, dtype.bitwidth), (piece.dtype, dtype)
        elements = piece.reshape(-1).view(np.uint8)
        return (_packed(elements) if dtype.bitwidth == 4 else elements).data

    yield from ahead(payload, row_slices(array.shape))


def _name_nodes(graph: Graph) -> None:
    """Name each node by its module path and operator, for audits and for the runtime."""
    used: Counter[str] = Counter()
    on_sizes = cuda.size_nodes(graph.model)
    for node in graph.model.graph:
        path = cuda.SIZES if node in on_sizes else node.metadata_props[LAYER_KEY]
        name = f"{path}/{node.op_type}"
        used[name] += 1
        node.name = name if used[name] == 1 else f"{name}.{used[name]}"


def _share_data(graph: Graph, device: Graph, folder: Path) -> None:
    """Let the device graph use the bytes of the initialisers with the same names in ``graph``."""
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
            DATA_FILE,
            tensor.offset,
            tensor.length,
            value.dtype,
            shape=shape,
            name=name,
            base_dir=folder,
        )


def _packed(codes: np.ndarray) -> np.ndarray:
    """Pack 4-bit codes into half as many bytes. As in ONNX, the first code is in the low bits."""
    nibbles = codes & np.uint8(15)
    return pack_nibbles(np.pad(nibbles, (0, nibbles.size % 2)) if nibbles.size % 2 else nibbles)
