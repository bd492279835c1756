"""Quantises layers in a graph by replacing their MatMul nodes, or the operands of these nodes.

The metadata of a layer's node contains the layer's module path, under ``graph.LAYER_KEY``. While
this module changes a graph, the graph contains only the shapes and types of the weights. Later,
``write_graph`` calls a function that returns the values, one weight at a time.

A graph can be written for three engines (``Form``):

- ``cpu``, for ONNX Runtime on a CPU. Accuracy is measured with these graphs.
- ``tensorrt``, for TensorRT's parser. The graph can share its initialisers with a CPU graph.
- ``cuda``, for ONNX Runtime's CUDA provider. INT8 and INT4 weights use
  ``com.microsoft::MatMulNBits``, which has kernels for CPUs and for CUDA.

A layer that does not use MatMulNBits is written as follows:

==============  ===================================================================================
int8-dynamic    ``dlm_export::Int8Linear``, a product of integers, on a CPU only. The weight has a
                scale per column. Each pass computes a scale for each row of the input
int4-*-dynamic  ``dlm_export::Int4Linear``: like int8-dynamic, with a scale per group of inputs
int8-static     QuantizeLinear and DequantizeLinear on the input, and DequantizeLinear on the
                weight. Zero is code 128 of uint8 on a CPU, and code 0 of int8 for TensorRT
int8-weight     DequantizeLinear on the weight; activations are not quantised
int4            DequantizeLinear on the weight, with a scale per group of inputs; activations are
                not quantised
fp8             like int8-static, in E4M3. A tied head on a CPU is ``dlm_export::Fp8TiedHead``
nvfp4, CPU      an exact simulation. The weight is an E2M1 value times the scale of its group times
                the scale of the tensor: ``dlm_export::NVFP4Linear``, or standard operators if a
                TensorRT graph shares the initialisers. The input goes through
                ``dlm_export::NVFP4QuantizeDequantize``
nvfp4,          two DequantizeLinear on the weight, and TRT_FP4DynamicQuantize on the input
TensorRT
==============  ===================================================================================

ONNX Runtime computes constant expressions when it opens a graph. A pass therefore spends no time on
simulating the format of a weight. Scales have the graph's type. QuantizeLinear and
DequantizeLinear are operators of ONNX opset 23. NVFP4 follows the two-level scheme in TensorRT's
documentation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes
import numpy as np
import onnx_ir as ir

from dlm_calibration.precision_rounding import E2M1_VALUES, activation_scale
from dlm_calibration.precisions import FORMATS, HIGH, LayerFormat
from dlm_calibration.solvers import hadamard
from dlm_export.graph import LAYER_KEY, MICROSOFT_DOMAIN, TRT_DOMAIN, experts, operators
from dlm_export.graph.body import DOMAIN
from dlm_export.graph.edits import constant, initialiser, replace
from dlm_export.graph.operators import FP8_TIED_HEAD
from dlm_export.graph.routed import E4M3_VALUES, MIXTURES
from dlm_export.graph.taps import weight_of
from dlm_export.graph.trace import Graph
from dlm_export.network.spec import HEAD, LinearSpec

F8 = ir.DataType.FLOAT8E4M3FN

Form = Literal["cpu", "tensorrt", "cuda"]
"""The engine for which a graph is written."""


@dataclass(frozen=True)
class Part:
    """Says which part of a layer's weight an initialiser contains.

    ``part`` is one of these:

    - ``panels`` or ``panel_scales``, for the functions of ``graph.operators``;
    - ``blocks`` or ``block_scales``, for MatMulNBits;
    - ``rows`` or ``row_scales``, for an embedding table;
    - ``codes``, ``scales`` or ``global_scale``, for all other weights.
    """

    layer: str
    part: str


def misfit(layer: LinearSpec, name: str, form: Form = "cpu") -> str | None:
    """Return the reason why a layer cannot have the format ``name``, or ``None`` if it can.

    Some formats have one scale per group of inputs. For a GPU, and for NVFP4 on any engine, the
    number of inputs must be a multiple of the group size. ``form`` is the engine.
    """
    chosen, inputs = FORMATS[name], layer.inputs
    # For CUDA, a row of a quantised table consists of whole blocks.
    is_in_blocks = layer.is_tied and form == "cuda" and chosen.weights is not None
    size = chosen.block_size if is_in_blocks else chosen.group_size
    if layer.is_stacked and form == "cpu" and experts.function_of(name) is None:
        return f"a CPU has no function for experts in {name}"
    if size is not None and inputs % size and (form != "cpu" or chosen.weights == "nvfp4"):
        return f"{name} has groups of {size}; {inputs} inputs is not a multiple"
    if layer.is_tied and form == "tensorrt" and chosen.weights is not None:
        # TensorRT accepts codes only as the input of DequantizeLinear. For each lookup, TensorRT
        # would therefore dequantise the whole table.
        return "TensorRT looks up rows of the embedding table, which is also the head's weight, in full precision"
    if layer.is_tied and form == "cpu" and not chosen.suits_table:
        return f"there is no lookup for an embedding table that is also the head's weight in {name}"
    together = operators.PAIRS if chosen.weights == "int4" else operators.DOT
    if chosen.is_dynamic and inputs % together:
        return f"{name} multiplies {together} inputs at once; {inputs} is not a multiple"
    return None


def rewrite(
    traced: Graph,
    formats: Mapping[str, str],
    amax: Mapping[str, float],
    *,
    rotated: Mapping[str, int] | None = None,
    embedding: str | None = None,
    form: Form = "cpu",
    is_shared: bool = False,
) -> dict[str, Part]:
    """Quantise the layers of a traced graph in place.

    Args:
        traced: The graph. The graph must be in fp32 if a format computes input ranges in each pass.
        formats: The format of each layer, a key of ``FORMATS``.
        amax: The largest magnitude of each layer's input, for formats with a static range. Larger
            inputs are clipped.
        rotated: The layers whose input is rotated, each with the size of its Hadamard matrix.
        embedding: Format of the embedding table.
        form: The engine for which the graph is written.
        is_shared: True if a CPU graph and a device graph use the same initialisers.

    Returns:
        A dict that maps the name of each new initialiser to its description.
    """
    writer = _Writer(
        traced, form, has_panels=not is_shared and traced.element_type == ir.DataType.FLOAT
    )
    wanted = {layer for layer, name in formats.items() if name != HIGH}
    # skip the weights of mixtures, because ``experts`` replaces the mixtures
    if any(node.op_type in MIXTURES for node in traced.model.graph):
        wanted -= {layer.path for layer in traced.network.linear_layers() if layer.is_stacked}
    head = traced.network.quantisable().get(HEAD)
    for node in list(traced.model.graph):
        layer = node.metadata_props.get(LAYER_KEY, "")
        weight = weight_of(node)
        if weight is None:
            if node.op_type == "Gather" and layer == "embed":
                if (
                    head is not None
                    and head.is_tied
                    and FORMATS[formats.get(HEAD, HIGH)].weights is not None
                ):
                    writer.look_up(node, FORMATS[formats[HEAD]])
                elif embedding is not None:
                    writer.embedding(node, "embed", embedding)
            continue
        turned = (rotated or {}).get(layer)
        if turned is not None:
            writer.rotate(node, turned)
        chosen = FORMATS[formats.get(layer, HIGH)]
        if chosen.weights is not None:
            tied = head if head is not None and head.is_tied and layer == HEAD else None
            writer.layer(node, layer, chosen, amax.get(layer), tied)
            wanted.remove(layer)
            transpose = weight.producer()
            if transpose is not None and not weight.uses():
                traced.model.graph.remove(transpose, safe=True)
    assert not wanted, f"not in the graph: {wanted}"
    unused = [name for name, value in traced.model.graph.initializers.items() if not value.uses()]
    for name in unused:
        del traced.model.graph.initializers[name]
    return writer.parts


class _Writer:
    def __init__(self, traced: Graph, form: Form, has_panels: bool) -> None:
        self.graph = traced.model.graph
        self.model = traced.model
        self.form, self.has_panels = form, has_panels
        self.for_tensorrt = form == "tensorrt"
        self.dtype = traced.element_type
        self.parts: dict[str, Part] = {}
        self._inputs: dict[tuple[int, str, float], ir.Value] = {}

    def nodes(
        self, before: ir.Node, layer: str, *specs: tuple[str, list[ir.Value | None], dict[str, Any]]
    ) -> ir.Value:
        """Insert a chain of operators before a node.

        If an input is ``None``, the result of the previous operator is used.
        """
        out: ir.Value | None = None
        for op, inputs, attributes in specs:
            out = self.node(
                before, layer, op, [out if value is None else value for value in inputs], attributes
            )[0]
        assert out is not None
        return out

    def node(
        self,
        before: ir.Node,
        layer: str,
        op: str,
        inputs: list[ir.Value | None],
        attributes: dict[str, Any],
        outputs: int = 1,
    ) -> tuple[ir.Value, ...]:
        domain, _, op_type = op.rpartition("::")
        made = ir.node(
            op_type,
            inputs,
            attributes,
            domain=domain,
            num_outputs=outputs,
            metadata_props={LAYER_KEY: layer},
        )
        self.graph.insert_before(before, made)
        if op_type == "Cast":
            made.outputs[0].type = ir.TensorType(attributes["to"])
        elif op_type != "TRT_FP4DynamicQuantize":
            of = inputs[{"QuantizeLinear": 2, "DequantizeLinear": 1}.get(op_type, 0)]
            assert of is not None
            made.outputs[0].type = of.type  # ``widen.compute_in_fp32`` needs the type
        return tuple(made.outputs)

    def weight(self, layer: str, part: str, shape: tuple[int, ...], dtype: ir.DataType) -> ir.Value:
        """Add an initialiser without values, which ``write_graph`` requests later."""
        name = f"{layer}.weight.{part}"
        # The embedding and a tied head use the same initialiser, which may exist already.
        if name in self.graph.initializers:
            return self.graph.initializers[name]
        self.parts[name] = Part(layer, part)
        return initialiser(self.graph, name, shape, dtype)

    def number(self, name: str, array: Any) -> ir.Value:
        """Add a small initialiser in the graph's type."""
        return self.constant(name, np.asarray(array).astype(self.dtype.numpy()))

    def constant(self, name: str, array: Any) -> ir.Value:
        return constant(self.graph, name, array)

    def layer(
        self,
        node: ir.Node,
        layer: str,
        chosen: LayerFormat,
        amax: float | None,
        tied: LinearSpec | None = None,
    ) -> None:
        """Quantise a MatMul.

        If the weight of the MatMul is the transposed embedding table, ``tied`` describes the tied
        head.
        """
        x, w = node.inputs
        assert x is not None
        assert w is not None
        if tied is None:
            assert w.shape is not None
            K, N = (int(size) for size in w.shape)  # type: ignore[arg-type]
        else:
            K, N = tied.inputs, tied.outputs
        if chosen.is_dynamic:
            assert self.dtype == ir.DataType.FLOAT, layer
            if chosen.group_size is None:
                self.linear(node, layer, "Int8Linear", [x, *self.int8_panels(layer, K, N)], N)
            else:
                size = chosen.group_size
                stored = self.int4_panels(layer, K, N, size)
                self.linear(node, layer, "Int4Linear", [x, *stored], N, group_size=size)
            return
        if self.form == "cuda":
            self.blocks(node, layer, x, chosen, K, N)
            return
        if chosen.activations is not None:
            assert amax is not None, layer
            x = self.activation(node, layer, x, chosen.activations, amax)
            node.replace_input_with(0, x)
        if chosen.weights == "nvfp4" and self.has_panels:
            self.nvfp4_panels(node, layer, x, K, N)
            return
        if tied is not None:
            operators.declare(self.model, FP8_TIED_HEAD)
            stored = self.rows(layer, "fp8", N, K)
            self.put(node, layer, f"{DOMAIN}::{FP8_TIED_HEAD}", [x, *stored], {})
            return
        node.replace_input_with(1, self.dequantised(node, layer, chosen, K, N))

    def int8_panels(self, layer: str, K: int, N: int) -> tuple[ir.Value, ir.Value]:
        """Add the codes and scales of an INT8 layer."""
        width = operators.padded(N)
        shape = (width // operators.PANEL, K // operators.DOT, operators.PANEL, operators.DOT)
        panels = self.weight(layer, "panels", shape, ir.DataType.UINT8)
        return panels, self.weight(layer, "panel_scales", (width,), ir.DataType.FLOAT)

    def int4_panels(self, layer: str, K: int, N: int, group_size: int) -> tuple[ir.Value, ir.Value]:
        """Add the codes and scales of an INT4 layer."""
        count = operators.padded(N) // operators.PANEL
        shape = (count, K // operators.PAIRS, operators.PANEL, operators.DOT)
        panels = self.weight(layer, "panels", shape, ir.DataType.UINT8)
        scales = (count, -(-K // group_size), operators.PANEL)
        return panels, self.weight(layer, "panel_scales", scales, ir.DataType.FLOAT16)

    def rows(
        self, layer: str, number_format: str, V: int, hidden: int
    ) -> tuple[ir.Value, ir.Value]:
        """Add the codes and scales of an embedding table, with one scale per row.

        FP8 codes are stored as uint8, because ONNX Runtime's Gather does not support FP8.
        """
        dtype = ir.DataType.INT8 if number_format == "int8" else ir.DataType.UINT8
        codes = self.weight(layer, "rows", (V, hidden), dtype)
        return codes, self.weight(layer, "row_scales", (V, 1), self.dtype)

    def look_up(self, node: ir.Node, chosen: LayerFormat) -> None:
        """Replace the lookup in a quantised embedding table that a tied head also uses."""
        if chosen.weights == "fp8":
            self.embedding(node, HEAD, "fp8")
            return
        table, ids = node.inputs
        assert table is not None
        assert table.shape is not None
        V, hidden = (int(size) for size in table.shape)  # type: ignore[arg-type]
        if self.form == "cuda":
            self.block_rows(node, ids, chosen, hidden, V)
            return
        attributes: dict[str, Any] = {}
        if chosen.group_size is None:
            name, stored = "Int8Embedding", self.int8_panels(HEAD, hidden, V)
        else:
            name, stored = "Int4Embedding", self.int4_panels(HEAD, hidden, V, chosen.group_size)
            attributes = {"group_size": chosen.group_size}
        operators.declare(self.model, name)
        self.put(node, "embed", f"{DOMAIN}::{name}", [ids, *stored], attributes)

    def nvfp4_panels(self, node: ir.Node, layer: str, x: ir.Value, K: int, N: int) -> None:
        count = operators.padded(N) // operators.PANEL
        panels = self.weight(layer, "panels", (count, K, operators.PANEL // 2), ir.DataType.UINT8)
        scales = self.weight(layer, "panel_scales", (count, K // 16, operators.PANEL), F8)
        global_scale = self.weight(layer, "global_scale", (), self.dtype)
        self.linear(node, layer, "NVFP4Linear", [x, panels, scales, global_scale], N)

    def linear(
        self,
        node: ir.Node,
        layer: str,
        name: str,
        inputs: list[ir.Value | None],
        N: int,
        **attributes: int,
    ) -> None:
        """Replace a MatMul with a call of a function."""
        operators.declare(self.model, name)
        self.put(node, layer, f"{DOMAIN}::{name}", inputs, {"columns": [N]} | attributes)

    def blocks(
        self, node: ir.Node, layer: str, x: ir.Value, chosen: LayerFormat, K: int, N: int
    ) -> None:
        """Replace a MatMul with MatMulNBits.

        In INT8, all blocks of a column have the same scale.
        """
        codes, scales = self.block_weights(layer, chosen, K, N)
        self.graph.opset_imports[MICROSOFT_DOMAIN] = 1
        bits = operators.BITS[str(chosen.weights)]
        attributes = {"K": K, "N": N, "bits": bits, "block_size": chosen.block_size}
        self.put(node, layer, f"{MICROSOFT_DOMAIN}::MatMulNBits", [x, codes, scales], attributes)

    def block_weights(
        self, layer: str, chosen: LayerFormat, K: int, N: int
    ) -> tuple[ir.Value, ir.Value]:
        """Add the codes and scales of a layer for MatMulNBits."""
        count = -(-K // chosen.block_size)
        block_bytes = chosen.block_size * operators.BITS[str(chosen.weights)] // 8
        codes = self.weight(layer, "blocks", (N, count, block_bytes), ir.DataType.UINT8)
        return codes, self.weight(layer, "block_scales", (N, count), self.dtype)

    def block_rows(
        self, node: ir.Node, ids: ir.Value | None, chosen: LayerFormat, K: int, V: int
    ) -> None:
        """Replace the lookup in an embedding table that a head multiplies with MatMulNBits.

        The new nodes dequantise only the rows of ``ids``. They are elementary operators, because
        GatherBlockQuantized takes 0 as the zero point in some versions of the CUDA provider
        (ONNX Runtime issue 31692).
        """
        bits = operators.BITS[str(chosen.weights)]

        def add(op: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
            return self.node(node, "embed", op, list(inputs), attributes)[0]

        def whole(*numbers: int, kind: Any = np.int32) -> ir.Value:
            name = f"embed.{np.dtype(kind).name}.{'.'.join(map(str, numbers))}"
            return self.constant(name, np.array(numbers, kind))

        stored, scales = (
            add("Gather", value, ids, axis=0) for value in self.block_weights(HEAD, chosen, K, V)
        )
        codes = add("Cast", stored, to=ir.DataType.INT32)
        last = whole(-1, kind=np.int64)
        if bits == 4:  # the low four bits of each byte are the first code
            high = add("Div", codes, whole(16))
            low = add("Sub", codes, add("Mul", high, whole(16)))
            pairs = add(
                "Concat", add("Unsqueeze", low, last), add("Unsqueeze", high, last), axis=-1
            )
            codes = add("Reshape", pairs, whole(0, 0, -1, chosen.block_size, kind=np.int64))
        signed = add("Cast", add("Sub", codes, whole(1 << bits - 1)), to=self.dtype)
        rows = add("Mul", signed, add("Unsqueeze", scales, last))
        self.put(node, "embed", "Reshape", [rows, whole(0, 0, K, kind=np.int64)], {})

    def put(
        self,
        node: ir.Node,
        layer: str,
        op: str,
        inputs: list[ir.Value | None],
        attributes: dict[str, Any],
    ) -> None:
        """Replace a MatMul or a lookup with an operator."""
        replace(self.graph, node, self.nodes(node, layer, (op, inputs, attributes)))

    def activation(
        self, node: ir.Node, layer: str, x: ir.Value, number_format: str, amax: float
    ) -> ir.Value:
        """Quantise and dequantise the input of a layer, and return the result.

        Layers with the same input and the same range share the nodes that quantise and dequantise.
        """
        key = (id(x), number_format, amax)
        if key not in self._inputs:
            self._inputs[key] = self._activation(node, layer, x, number_format, amax)
        return self._inputs[key]

    def _activation(
        self, node: ir.Node, layer: str, x: ir.Value, number_format: str, amax: float
    ) -> ir.Value:
        scale_value = activation_scale(number_format, amax, self.dtype.numpy())
        if number_format == "nvfp4" and not self.for_tensorrt:
            operators.declare(self.model, "NVFP4QuantizeDequantize")
            scale = self.constant(f"{layer}.input_scale", scale_value)
            wide = self._cast(node, layer, x, ir.DataType.FLOAT)
            rounding = f"{DOMAIN}::NVFP4QuantizeDequantize"
            rounded = self.nodes(node, layer, (rounding, [wide, scale], {}))
            return self._cast(node, layer, rounded, self.dtype)
        scale = self.number(f"{layer}.input_scale", scale_value)
        if number_format == "nvfp4":
            self.graph.opset_imports[TRT_DOMAIN] = 1
            groups = {"axis": -1, "block_size": 16}
            quantise = f"{TRT_DOMAIN}::TRT_FP4DynamicQuantize"
            codes, scales = self.node(
                node, layer, quantise, [x, scale], groups | {"scale_type": F8.value}, outputs=2
            )
            return self.nodes(
                node,
                layer,
                ("DequantizeLinear", [scales, scale], {}),
                ("DequantizeLinear", [codes, None], groups),
            )
        if number_format == "fp8":
            zero = self.constant("zero.fp8", np.zeros((), ml_dtypes.float8_e4m3fn))
        elif self.for_tensorrt:
            zero = self.constant("zero.int8", np.int8(0))
        else:
            # ONNX Runtime multiplies uint8 by int8 in one instruction, but needs several
            # instructions for int8 by int8. Codes of uint8 with zero point 128 represent the same
            # values as codes of int8.
            zero = self.constant("zero.uint8", np.uint8(128))
        return self.nodes(
            node,
            layer,
            ("QuantizeLinear", [x, scale, zero], {}),
            ("DequantizeLinear", [None, scale, zero], {}),
        )

    def dequantised(
        self, node: ir.Node, layer: str, chosen: LayerFormat, K: int, N: int
    ) -> ir.Value:
        if chosen.weights == "int4":
            assert chosen.group_size is not None
            codes = self.weight(layer, "codes", (K, N), ir.DataType.INT4)
            scales = self.weight(layer, "scales", (-(-K // chosen.group_size), N), self.dtype)
            options = {"axis": 0, "block_size": chosen.group_size}
            return self.nodes(node, layer, ("DequantizeLinear", [codes, scales], options))
        if chosen.weights in ("int8", "fp8"):
            kind = ir.DataType.INT8 if chosen.weights == "int8" else F8
            codes = self.weight(layer, "codes", (K, N), kind)
            scales = self.weight(layer, "scales", (N,), self.dtype)
            zeros = []
            if chosen.weights == "int8" and not self.for_tensorrt:
                # Add zero points. Without them, ONNX Runtime would add zero points of a different
                # shape when it converts signed codes to unsigned. Layers cannot share zero points,
                # because ONNX Runtime changes them in place.
                zeros = [self.constant(f"{layer}.zeros", np.zeros(N, np.int8))]
            return self.nodes(
                node, layer, ("DequantizeLinear", [codes, scales, *zeros], {"axis": 1})
            )
        assert chosen.weights == "nvfp4"
        kind = ir.DataType.FLOAT4E2M1 if self.for_tensorrt else ir.DataType.UINT4
        codes = self.weight(layer, "codes", (N, K), kind)
        scales = self.weight(layer, "scales", (N, K // 16), F8)
        global_scale = self.weight(layer, "global_scale", (), self.dtype)
        if self.for_tensorrt:
            group_scales = self.nodes(node, layer, ("DequantizeLinear", [scales, global_scale], {}))
            return self.nodes(
                node,
                layer,
                ("DequantizeLinear", [codes, group_scales], {"axis": -1, "block_size": 16}),
                ("Transpose", [None], {"perm": [1, 0]}),
            )
        group_scales = self.nodes(
            node,
            layer,
            ("Cast", [scales], {"to": ir.DataType.FLOAT}),
            ("Mul", [None, self._cast(node, layer, global_scale, ir.DataType.FLOAT)], {}),
            ("Unsqueeze", [None, self.constant("axis.2", np.array([2], np.int64))], {}),
        )
        matrix = self.nodes(
            node,
            layer,
            ("Cast", [codes], {"to": ir.DataType.INT32}),
            ("Gather", [self.constant("e2m1", E2M1_VALUES), None], {}),
            ("Reshape", [None, self.constant("shape.groups", np.array([0, -1, 16], np.int64))], {}),
            ("Mul", [None, group_scales], {}),
            ("Reshape", [None, self.constant("shape.matrix", np.array([0, -1], np.int64))], {}),
            ("Transpose", [None], {"perm": [1, 0]}),
        )
        return self._cast(node, layer, matrix, self.dtype)

    def _cast(self, node: ir.Node, layer: str, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        if value.dtype == dtype:
            return value
        return self.nodes(node, layer, ("Cast", [value], {"to": dtype}))

    def rotate(self, node: ir.Node, size: int) -> None:
        layer, x = node.metadata_props[LAYER_KEY], node.inputs[0]
        split = self.constant(f"shape.hadamard.{size}", np.array([0, 0, -1, size], np.int64))
        whole = self.constant("shape.features", np.array([0, 0, -1], np.int64))
        rotated = self.nodes(
            node,
            layer,
            ("Reshape", [x, split], {}),
            ("MatMul", [None, self.number(f"hadamard.{size}", hadamard(size))], {}),
            ("Reshape", [None, whole], {"allowzero": 0}),
        )
        # After the reshape, ONNX no longer knows the size of the last axis. MatMul gets this size
        # from the weight.
        node.replace_input_with(0, rotated)

    def embedding(self, node: ir.Node, layer: str, number_format: str) -> None:
        """Store the embedding table as codes with a scale per row.

        Only the looked-up rows are dequantised. ``layer`` is the layer whose codes are used: the
        embedding, or a tied head.
        """
        table, ids = node.inputs
        assert table is not None
        assert table.shape is not None
        V, hidden = (int(size) for size in table.shape)  # type: ignore[arg-type]
        codes, scales = self.rows(layer, number_format, V, hidden)
        (wide,) = self.node(node, "embed", "Gather", [codes, ids], {"axis": 0})
        (steps,) = self.node(node, "embed", "Gather", [scales, ids], {"axis": 0})
        # Look up the row of bytes first, and then the E4M3 value of each byte.
        if number_format == "fp8":
            values = self.constant("e4m3", E4M3_VALUES)
            codes = self._cast(node, "embed", wide, ir.DataType.INT32)
            (wide,) = self.node(node, "embed", "Gather", [values, codes], {"axis": 0})
        wide = self._cast(node, "embed", wide, self.dtype)
        self.put(node, "embed", "Mul", [wide, steps], {})
