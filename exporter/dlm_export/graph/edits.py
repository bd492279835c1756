"""Graph edits that several rewriters share: add initialisers, replace values."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir


def initialiser(graph: ir.Graph, name: str, shape: tuple[int, ...], dtype: ir.DataType) -> ir.Value:
    """Add an initialiser; ``write_graph`` asks for its values later."""
    value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))
    graph.initializers[name] = value
    return value


def constant(graph: ir.Graph, name: str, array: Any) -> ir.Value:
    """The small initialiser of this name, added if missing; its values are in the graph file."""
    if name not in graph.initializers:
        tensor = ir.tensor(np.asarray(array), name=name)
        shape, dtype = ir.Shape(np.shape(array)), ir.TensorType(tensor.dtype)
        graph.initializers[name] = ir.Value(name=name, shape=shape, type=dtype, const_value=tensor)
    return graph.initializers[name]


def take_place(new: ir.Value, old: ir.Value) -> None:
    """Give ``new`` the name, the type and all uses of ``old``."""
    kept, new.shape, new.type = old.name, old.shape, old.type
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    new.name, old.name = kept, None


def replace(graph: ir.Graph, node: ir.Node, new: ir.Value) -> None:
    """Replace a node's only output with ``new``, and remove the node."""
    take_place(new, node.outputs[0])
    graph.remove(node, safe=True)
