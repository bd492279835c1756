"""Helpers that edit a graph: they add an initialiser, or replace a value."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir


def initialiser(graph: ir.Graph, name: str, shape: tuple[int, ...], dtype: ir.DataType) -> ir.Value:
    """Add an initialiser without values to a graph.

    The caller of ``write_graph`` later passes a function that returns the values.
    """
    value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))
    graph.initializers[name] = value
    return value


def constant(graph: ir.Graph, name: str, array: Any) -> ir.Value:
    """Return the initialiser ``name``, and add it first if the graph does not contain it.

    The initialiser should be small, because its values are stored in the graph file instead of the
    data file.
    """
    if name not in graph.initializers:
        tensor = ir.tensor(np.asarray(array), name=name)
        shape, dtype = ir.Shape(np.shape(array)), ir.TensorType(tensor.dtype)
        graph.initializers[name] = ir.Value(name=name, shape=shape, type=dtype, const_value=tensor)
    return graph.initializers[name]


def take_place(new: ir.Value, old: ir.Value) -> None:
    """Replace the value ``old`` with ``new`` everywhere in the graph.

    ``new`` gets the name and the type of ``old``. All nodes that used ``old`` use ``new`` instead.
    """
    kept, new.shape, new.type = old.name, old.shape, old.type
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    new.name, old.name = kept, None


def replace(graph: ir.Graph, node: ir.Node, new: ir.Value) -> None:
    """Replace the only output of a node with ``new``, and remove the node."""
    take_place(new, node.outputs[0])
    graph.remove(node, safe=True)
