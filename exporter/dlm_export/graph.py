"""Torch to ONNX: one graph for every pass of a denoiser, its weights streamed into external data.

The graph is traced once from a denoiser on torch's meta device, so no weight exists while torch works on it; the
weights then go tensor by tensor from the checkpoint to ``denoiser.onnx.data``. Peak memory is the trace plus the largest
tensor, not a multiple of the model.

Inputs and outputs, with ``B`` rows, ``T`` tokens of this pass, ``S`` cached tokens, ``R`` scored rows, ``K`` candidates:

=====================================  ==========================  =================================================
``input_ids``, ``position_ids``        int64 ``[B, T]``            a slice of the canvas, absolute positions
``score_rows``                         int64 ``[B, R]``            rows of T to predict, gathered before the head
``past_key.i``, ``past_value.i``       ``[B, Hkv, S, D]``          cached rows in any order, position-encoded
``top_token``, ``top_prob``            int32, fp32 ``[B, R, K]``   best first, the mask token excluded
``entropy``                            fp32 ``[B, R]``             sum of p ln p, the mask token's p being 0
``logits``                             fp32 ``[B, R, V]``          raw
``present_key.i``, ``present_value.i`` ``[B, Hkv, T, D]``          the T new rows
=====================================  ==========================  =================================================

ONNX operators at opset 23 (Attention, RotaryEmbedding, RMSNormalization are whole nodes there), or in elementary ones at
opset 21 for TensorRT before 10.14, whose parser does not know those three.
"""

from __future__ import annotations

import ast
import contextlib
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir.passes import common as passes
from torch import Tensor, nn

from dlm_calibration.formats import pack_nibbles
from dlm_export.denoiser import Capabilities, Denoiser, rotary_tables
from dlm_export.engines import PLAIN_OPSET

OPSET = 23
TOP_K = 2  # confidence needs the best candidate, margin the best two
LAYER_KEY = "dlm_export.layer"  # node metadata: the module path, e.g. blocks.3.mlp.down
GRAPH_FILE, DATA_FILE = "denoiser.onnx", "denoiser.onnx.data"
DEVICE_FILE = "device.onnx"  # the same graph in the form that TensorRT's parser takes, over the same data
DATA_ALIGNMENT = 4096  # bytes; a page, so that the engine can map every tensor
PRECISIONS: dict[str, torch.dtype] = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_ELEMENT_TYPES = {
    torch.float32: ir.DataType.FLOAT,
    torch.float16: ir.DataType.FLOAT16,
    torch.bfloat16: ir.DataType.BFLOAT16,
}


@dataclass(frozen=True)
class Graph:
    """A traced pass whose weights are still to be written; its initialisers are named like ``Denoiser``'s parameters."""

    model: ir.Model
    capabilities: Capabilities
    dtype: torch.dtype

    @property
    def element_type(self) -> ir.DataType:
        """Of parameters, activations and cache."""
        return _ELEMENT_TYPES[self.dtype]

    def clone(self) -> Graph:
        """Another one like it, to be rewritten by itself."""
        return Graph(self.model.clone(), self.capabilities, self.dtype)


def element_type(precision: str) -> ir.DataType:
    """What a graph of this precision computes in."""
    return _ELEMENT_TYPES[PRECISIONS[precision]]


class Pass(nn.Module):
    """The traced module: body, gather of the scored rows, head, softmax and the K best."""

    mask_token_bias: Tensor

    def __init__(self, denoiser: Denoiser) -> None:
        super().__init__()
        self.denoiser = denoiser
        bias = torch.zeros(denoiser.capabilities.vocab_size)
        bias[denoiser.capabilities.mask_token_id] = -torch.inf
        self.register_buffer("mask_token_bias", bias, persistent=False)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, score_rows: Tensor, past: list[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, ...]:
        features, presents = self.denoiser.hidden(input_ids, position_ids, past)
        rows = score_rows.unsqueeze(-1).expand(-1, -1, features.shape[-1])
        logits = self.denoiser.project(features.gather(1, rows)).float()
        masked = logits + self.mask_token_bias
        probs = masked.softmax(-1)
        top_prob, top_token = probs.topk(TOP_K)
        # sum p ln p without a logarithm a token: ln p is a logit's distance from the best one's, plus the best one's ln p.
        behind = logits - masked.amax(-1, keepdim=True)
        entropy = (probs * behind).sum(-1) + top_prob[..., 0].log()
        flat = [tensor for present in presents for tensor in present]
        return (top_token.int(), top_prob, entropy, logits, *flat)


@contextlib.contextmanager
def _quiet_logger(name: str) -> Iterator[None]:
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _names(layers: int, prefix: str) -> list[str]:
    return [f"{prefix}_{kind}.{i}" for i in range(layers) for kind in ("key", "value")]


def input_names(layers: int) -> list[str]:
    """Names of the graph's inputs, in order."""
    return ["input_ids", "position_ids", "score_rows", *_names(layers, "past")]


def output_names(layers: int) -> list[str]:
    """Names of the graph's outputs, in order."""
    return ["top_token", "top_prob", "entropy", "logits", *_names(layers, "present")]


def describe(capabilities: Capabilities, precision: str, *, for_device: bool = False, is_plain: bool = False) -> dict[str, Any]:
    """What the manifest says of the graph; ``for_device``: that there is a device graph too."""
    layers = capabilities.layers
    return {
        "file": GRAPH_FILE,
        **({"device_file": DEVICE_FILE} if for_device else {}),
        "cache_dtype": {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}[precision],
        "opset": PLAIN_OPSET if is_plain else OPSET,
        "top_k": TOP_K,
        "inputs": input_names(layers),
        "outputs": output_names(layers),
    }


def data_bytes(capabilities: Capabilities, precision: str) -> int:
    """What ``write`` puts into the data file at most: parameters, rotary tables, the mask token's bias, page padding."""
    c = capabilities
    elements = c.parameter_count() + c.max_canvas_length * c.head_size
    padding = (len(c.parameter_shapes()) + 3) * DATA_ALIGNMENT
    return elements * PRECISIONS[precision].itemsize + 4 * c.vocab_size + padding


def trace(capabilities: Capabilities, precision: str, *, is_plain: bool = False) -> Graph:
    """Trace the pass of a denoiser of this shape; ``precision`` is a key of ``PRECISIONS``.

    ``is_plain``: in operators of opset 21.
    """
    dtype = PRECISIONS[precision]
    c = capabilities
    with torch.device("meta"):
        module = Pass(Denoiser(c, is_plain)).eval()
    module.denoiser.to(dtype)
    B, T, S, R = 2, 7, 5, 3
    with torch.device("meta"):
        ids = torch.zeros(B, T, dtype=torch.int64)
        rows = torch.zeros(B, R, dtype=torch.int64)
        past = [
            (torch.zeros(B, c.kv_heads, S, c.head_size, dtype=dtype), torch.zeros(B, c.kv_heads, S, c.head_size, dtype=dtype))
            for _ in range(c.layers)
        ]
    auto = torch.export.Dim.AUTO
    rows_and_tokens, cached = {0: auto, 1: auto}, {0: auto, 2: auto}
    # The exporter reports on itself through warnings and logging (torchvision is absent, and so on): nothing for a user.
    with warnings.catch_warnings(), _quiet_logger("torch.onnx"), torch.no_grad():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            module,
            (ids, ids.clone(), rows, past),
            dynamo=True,
            opset_version=OPSET,
            input_names=input_names(c.layers),
            output_names=output_names(c.layers),
            dynamic_shapes=(rows_and_tokens, rows_and_tokens, rows_and_tokens, [(cached, cached)] * c.layers),
            optimize=False,
            verbose=False,
        )
    assert program is not None
    model = program.model
    model.graph.name = "denoiser"
    model.producer_name, model.producer_version = "dlm-export", metadata.version("dlm-export")
    model.graph.metadata_props.clear()  # torch's own, longer than the graph
    _name_layers(model)
    _simplify_reshapes(model)
    passes.CommonSubexpressionEliminationPass()(passes.IdentityEliminationPass()(model).model)
    passes.RemoveUnusedNodesPass()(model)
    _name_axes(model, c)
    if is_plain:  # all operators that are left have been the same since
        model.graph.opset_imports[""] = PLAIN_OPSET
    held = {name.removeprefix("denoiser.") for name, _ in (*module.named_parameters(), *module.named_buffers())}
    for name in held & model.graph.initializers.keys():
        model.graph.initializers[name].const_value = None  # torch's meta tensor; ``write`` gives the real one
    return Graph(model, c, dtype)


def _name_layers(model: ir.Model) -> None:
    """Give every node its module path (``LAYER_KEY``) and drop torch's own, longer metadata."""
    for node in model.graph:
        scopes = node.metadata_props.get("pkg.torch.onnx.name_scopes")
        path = ""
        if scopes is not None:
            modules = [scope for scope in ast.literal_eval(scopes)[:-1] if scope]
            path = modules[-1].removeprefix("denoiser.").removeprefix("denoiser") if modules else ""
        node.metadata_props.clear()
        node.metadata_props[LAYER_KEY] = path or "pass"
        for value in node.outputs:
            value.metadata_props.clear()
            if value.type is None and node.inputs and node.inputs[0] is not None:
                value.type = node.inputs[0].type  # torch leaves RMSNormalization's out
    for name, value in list(model.graph.initializers.items()):
        value.metadata_props.clear()
        value.name = name.removeprefix("denoiser.")


def _simplify_reshapes(model: ir.Model) -> None:
    """Reshape with a constant ``[0, 0, ...]`` (0 copies a dimension) where only B and T are dynamic.

    The trace computes every shape from Shape, Squeeze and Concat nodes: 14 nodes a layer for nothing.
    """
    for node in model.graph:
        if node.op_type != "Reshape":
            continue
        number, wanted = (ir.convenience.get_const_tensor(value) for value in node.inputs if value is not None)
        if number is not None and wanted is not None:  # which torch makes a list of
            folded = ir.tensor(number.numpy().reshape(wanted.numpy()), name=f"{node.outputs[0].name}.value")
            constant = ir.node("Constant", [], {"value": folded}, metadata_props=dict(node.metadata_props))
            model.graph.insert_before(node, constant)
            node.outputs[0].replace_all_uses_with(constant.outputs[0])
            continue
        if node.outputs[0].shape is None:
            continue
        dims = list(node.outputs[0].shape)
        if len(dims) < 3 or any(isinstance(dim, int) for dim in dims[:2]):
            continue
        assert all(isinstance(dim, int) for dim in dims[2:]), (node.name, dims)
        shape = ir.tensor(np.array([0, 0, *dims[2:]], np.int64), name=f"{node.outputs[0].name}.shape")
        constant = ir.node("Constant", [], {"value": shape}, metadata_props=dict(node.metadata_props))
        model.graph.insert_before(node, constant)
        node.replace_input_with(1, constant.outputs[0])
        node.attributes.pop("allowzero", None)  # torch sets it, and then 0 would mean an empty dimension


def _name_axes(model: ir.Model, c: Capabilities) -> None:
    """Call the dynamic axes B, T, S, R everywhere they are promised; torch gives each input symbols of its own."""
    for node in model.graph:
        for value in node.outputs:
            value.shape = None
    shapes: dict[str, list[int | str]] = {
        "input_ids": ["B", "T"],
        "position_ids": ["B", "T"],
        "score_rows": ["B", "R"],
        "top_token": ["B", "R", TOP_K],
        "top_prob": ["B", "R", TOP_K],
        "entropy": ["B", "R"],
        "logits": ["B", "R", c.vocab_size],
    }
    for value in (*model.graph.inputs, *model.graph.outputs):
        rows = "S" if str(value.name).startswith("past") else "T"
        value.shape = ir.Shape(shapes.get(str(value.name), ["B", c.kv_heads, rows, c.head_size]))


_MOVES = ("Cast", "Concat", "Constant", "Expand", "Gather", "GatherElements", "Reshape", "Shape", "Transpose", "Unsqueeze")


def compute_in_fp32(graph: Graph) -> None:
    """Give a bf16 graph fp32 arithmetic whose every result is rounded to bf16, in place: ONNX Runtime's CPU kernels have none.

    Parameters, inputs and outputs keep their type; operators that only move values do too.
    """
    wide: dict[ir.Value, ir.Value] = {}
    nodes = graph.model.graph

    def cast(value: ir.Value, to: ir.DataType, layer: str) -> ir.Node:
        made = ir.node("Cast", [value], {"to": to}, metadata_props={LAYER_KEY: layer})
        made.outputs[0].type = ir.TensorType(to)
        return made

    for node in list(nodes):
        if node.op_type in _MOVES:
            continue
        layer = node.metadata_props[LAYER_KEY]
        for i, value in enumerate(node.inputs):
            if value is None or value.dtype != ir.DataType.BFLOAT16:
                continue
            if value not in wide:
                widening = cast(value, ir.DataType.FLOAT, layer)
                nodes.insert_before(node, widening)
                wide[value] = widening.outputs[0]
            node.replace_input_with(i, wide[value])
        for value in node.outputs:
            if value.dtype != ir.DataType.BFLOAT16:
                continue
            rounding = cast(value, ir.DataType.BFLOAT16, layer)
            result = rounding.outputs[0]
            name, result.shape = value.name, value.shape
            value.replace_all_uses_with(result, replace_graph_outputs=True)
            rounding.replace_input_with(0, value)
            nodes.insert_after(node, rounding)
            value.type = ir.TensorType(ir.DataType.FLOAT)
            value.name, result.name = f"{name}.fp32", name


def write(
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
    c, dtype = graph.capabilities, graph.element_type.numpy()
    cos, sin = rotary_tables(c)
    mask_token_bias = np.zeros(c.vocab_size, np.float32)
    mask_token_bias[c.mask_token_id] = -np.inf
    buffers = {"cos": cos.numpy().astype(dtype), "sin": sin.numpy().astype(dtype), "mask_token_bias": mask_token_bias}
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
