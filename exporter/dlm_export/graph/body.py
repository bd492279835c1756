"""Builds the body of an ONNX function, operator by operator. The body may contain loops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

DOMAIN = "dlm_export"
_OPSET = 23


class Body:
    """The inputs and the nodes of an ONNX function that is being built."""

    def __init__(self, name: str, inputs: str) -> None:
        self.name = name
        self.inputs = [ir.Value(name=given) for given in inputs.split()]
        self.nodes: list[ir.Node] = []

    def op(self, op_type: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        """Add an operator and return its result."""
        return self.several(1, op_type, *inputs, **attributes)[0]

    def several(
        self, count: int, op_type: str, *inputs: ir.Value | None, **attributes: Any
    ) -> Sequence[ir.Value]:
        """Add an operator that has ``count`` outputs, and return these outputs."""
        node = ir.node(op_type, list(inputs), attributes, num_outputs=count)
        self.nodes.append(node)
        return node.outputs

    def constant(self, value: Any) -> ir.Value:
        return self.op("Constant", value=ir.tensor(np.asarray(value)))

    def ints(self, *values: int) -> ir.Value:
        return self.constant(np.array(values, np.int64))

    def number(self, value: float) -> ir.Value:
        """Add an fp32 constant, and return its value in the graph."""
        return self.constant(np.float32(value))

    def cast(self, value: ir.Value, to: ir.DataType) -> ir.Value:
        return self.op("Cast", value, to=to)

    def size(self, value: ir.Value, axis: int) -> ir.Value:
        """Add nodes that compute the size of one axis, as int64 ``[1]``."""
        return self.op("Shape", value, start=axis, end=axis + 1)

    def nibbles(self, stored: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Add nodes that split each byte into its low four bits and its high four bits."""
        low = self.op("BitwiseAnd", stored, self.constant(np.uint8(15)))
        return low, self.op("BitShift", stored, self.constant(np.uint8(4)), direction="RIGHT")

    def attribute(self, name: str, kind: ir.AttributeType) -> ir.Value:
        """Add a node that returns an attribute of the function as a tensor."""
        key = {ir.AttributeType.INT: "value_int", ir.AttributeType.INTS: "value_ints"}[kind]
        node = ir.Node("", "Constant", [], [ir.Attr(key, kind, None, ref_attr_name=name)])
        self.nodes.append(node)
        return node.outputs[0]

    def call(self, function: str, *inputs: ir.Value, **attributes: str) -> ir.Value:
        """Add a call of a function in the domain ``dlm_export``.

        Each key of ``attributes`` is the name of an attribute of the called function. The value in
        ``attributes`` names the attribute of this function that supplies the value. If the name is
        empty, the attribute is not set.
        """
        types = {"columns": ir.AttributeType.INTS, "group_size": ir.AttributeType.INT}
        named = {name: own for name, own in attributes.items() if own}
        given = [ir.Attr(name, types[name], None, ref_attr_name=own) for name, own in named.items()]
        node = ir.Node(DOMAIN, function, inputs, given)
        self.nodes.append(node)
        return node.outputs[0]

    def function(
        self, outputs: dict[str, ir.Value], attributes: dict[str, ir.AttributeType] | None = None
    ) -> ir.Function:
        for name, value in outputs.items():
            value.name = name
        graph = ir.Graph(
            self.inputs,
            list(outputs.values()),
            nodes=self.nodes,
            opset_imports={"": _OPSET, DOMAIN: 1},
        )
        declared = [ir.Attr(name, kind, None) for name, kind in (attributes or {}).items()]
        return ir.Function(DOMAIN, self.name, graph=graph, attributes=declared)


class LoopBody(Body):
    """The body of a loop.

    The body has three inputs: the index of the iteration, a condition that is always true, and the
    value that the previous iteration returned. The body may also use values from outside the loop.
    """

    def __init__(self) -> None:
        super().__init__("loop", "turn goes_on carried")
        self.turn, self._goes_on, self.carried = self.inputs
        self.turn.type, self.turn.shape = ir.TensorType(ir.DataType.INT64), ir.Shape([])
        self._goes_on.type, self._goes_on.shape = ir.TensorType(ir.DataType.BOOL), ir.Shape([])

    def run(self, outside: Body, turns: ir.Value, first: ir.Value, last: ir.Value) -> ir.Value:
        """Add this loop to the function ``outside``, and return the last iteration's result.

        ``first`` is the input value of the first iteration. ``last`` is the value that each
        iteration returns.
        """
        goes_on = self.op("Identity", self._goes_on)
        for number, value in enumerate(value for node in self.nodes for value in node.outputs):
            value.name = f"loop.{number}"  # names inside a loop must differ from names outside
        graph = ir.Graph(self.inputs, [goes_on, last], nodes=self.nodes, name=self.name)
        return outside.op("Loop", turns, None, first, body=graph)
