"""Traces a denoiser to one ONNX graph without weights. The graph can compute every pass.

The denoiser is traced on torch's meta device, which stores shapes but no values. The docstring of
``graph`` lists the inputs and outputs of the graph, and the opsets.
"""

from __future__ import annotations

import ast
import contextlib
import logging
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxscript
import torch
from onnx_ir.passes import common as passes
from torch import Tensor, nn

from dlm_export.graph import (
    CACHED_REQUESTS,
    CACHED_ROWS,
    DEVICE_FILE,
    GRAPH_FILE,
    LAYER_KEY,
    OPSET,
    PLAIN_OPSET,
    SEGMENTS,
    TOKEN_REQUESTS,
    TOP_K,
    WINDOW_DISTANCES,
    WINDOW_REQUESTS,
    WINDOW_ROWS,
    WINDOW_SEGMENTS,
    faster_tracing,
    operators,
    repeat,
    updates,
)
from dlm_export.graph.body import DOMAIN
from dlm_export.graph.routed import GELU, MIXTURE, MIXTURES
from dlm_export.network.denoiser import Denoiser
from dlm_export.network.experts import Router
from dlm_export.network.spec import STACKS, NetworkSpec

_DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
_ELEMENT_TYPES = {
    torch.float32: ir.DataType.FLOAT,
    torch.float16: ir.DataType.FLOAT16,
    torch.bfloat16: ir.DataType.BFLOAT16,
}


@dataclass(frozen=True)
class Graph:
    """A traced pass without weights.

    Each initialiser has the name of a parameter of ``Denoiser``.
    """

    model: ir.Model
    network: NetworkSpec
    dtype: torch.dtype

    @property
    def element_type(self) -> ir.DataType:
        """The type of parameters, activations and cache."""
        return _ELEMENT_TYPES[self.dtype]

    def clone(self) -> Graph:
        """Return a copy. Changes to the copy do not change this graph."""
        return Graph(self.model.clone(), self.network, self.dtype)


def element_type(precision: str) -> ir.DataType:
    """Return the type in which a graph of this precision computes."""
    return _ELEMENT_TYPES[_DTYPES[precision]]


class Pass(nn.Module):
    """The torch module that is traced: a complete pass from token ids to the most likely tokens."""

    mask_token_bias: Tensor

    def __init__(self, denoiser: Denoiser) -> None:
        super().__init__()
        self.denoiser = denoiser
        # ``write`` sets the values.
        bias = torch.zeros(denoiser.network.vocab_size)
        self.register_buffer("mask_token_bias", bias, persistent=False)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        score_rows: Tensor,
        past: list[tuple[Tensor, Tensor]],
        conditioning: Tensor | None = None,
        temperature: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        features, presents = self.denoiser.hidden(
            input_ids, position_ids, past, conditioning=conditioning
        )
        rows = score_rows.unsqueeze(-1).expand(-1, -1, features.shape[-1])
        logits = self.denoiser.project(features.gather(1, rows)).float()
        # fp32 cannot tell the best token's probability from 1 where its logit leads by more than 15.
        # So the head computes with the sum of the exponentials of all other tokens. The best logit
        # is lowered to the second best one before the softmax, so that the softmax keeps the other
        # tokens' digits. The two logits come from TopK, because the maximum of a row of 126,464
        # logits takes milliseconds in ONNX Runtime's CUDA provider.
        masked = logits + self.mask_token_bias
        top_logit, top_token = masked.topk(TOP_K)
        best, second = top_logit[..., :1], top_logit[..., 1:]
        shares = masked.minimum(second).softmax(-1)
        # the sum of all exponentials but the best token's, relative to the second token's
        rest = shares.gather(-1, top_token[..., :1]).reciprocal() - 1
        apart = second - best
        scale = apart.exp()  # the second token's exponential, relative to that of the best one
        others = scale * rest
        total = others + 1  # the sum of all exponentials, relative to that of the best token
        top_prob = (top_logit - best).exp() / total
        odds = torch.cat(((rest.log() + apart).neg(), apart - (scale * (rest - 1) + 1).log()), -1)
        # The entropy is the sum of p ln p. A logarithm for every token would be slow, so ln p is
        # computed as the token's logit, minus the best logit, minus ln(total). Near 1, the series of
        # the logarithm keeps the digits of total - 1.
        log_total = torch.where(others < 2**-9, others - others * others * 0.5, total.log())
        behind = (shares * (logits - best)).sum(-1, keepdim=True) * (scale * (rest + 1))
        entropy = (behind / total - log_total).squeeze(-1)
        flat = [tensor for present in presents for tensor in present]
        if temperature is not None:
            flat.append(self.denoiser.soft_embedding(logits, temperature).float())
        return (top_token.int(), top_prob, odds, entropy, logits, *flat)


@contextlib.contextmanager
def _quiet_logger(name: str) -> Iterator[None]:
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


# the name that torch.export gives to the scope in which it computes a dynamic size
_NO_MODULE = "_empty_nn_module_stack_from_metadata_hook"
_INPUTS = ("input_ids", "position_ids", "score_rows")
_OUTPUTS = ("top_token", "top_prob", "top_log_odds", "entropy", "logits")
# Graphs of networks with self-conditioning have these inputs and outputs after those of the cache.
_CONDITIONING_INPUTS = ("conditioning", "temperature")
_CONDITIONING_OUTPUTS = ("next_conditioning",)


def _cache_ports(network: NetworkSpec, prefix: str) -> dict[str, tuple[int, int]]:
    """Map the cache inputs or outputs with this prefix to ``(kv_heads, head_size)``."""
    return {
        f"{prefix}_{kind}.{i}": shape
        for i, shape in enumerate(network.cache_shapes())
        for kind in ("key", "value")
    }


def input_names(network: NetworkSpec) -> list[str]:
    """Return the names of the graph's inputs, in order."""
    conditioning = () if network.conditioning is None else _CONDITIONING_INPUTS
    return [*_INPUTS, *_cache_ports(network, "past"), *conditioning]


def output_names(network: NetworkSpec) -> list[str]:
    """Return the names of the graph's outputs, in order."""
    conditioning = () if network.conditioning is None else _CONDITIONING_OUTPUTS
    return [*_OUTPUTS, *_cache_ports(network, "present"), *conditioning]


def describe(
    network: NetworkSpec,
    cache_dtype: str,
    *,
    is_simulated: bool,
    for_device: bool = False,
    has_segments: bool = False,
    chooses_rows: bool = False,
) -> dict[str, Any]:
    """Describe the graph for the native runtime. The manifest stores the result as ``loop.graph``.

    ``for_device`` says whether the bundle also contains a graph for GPUs, and ``chooses_rows``
    whether that graph has the inputs of ``row_choice``. The docstring of ``fuse.Fused`` explains
    ``has_segments``.
    """
    kinds = ("past_key", "past_value", "present_key", "present_value")
    layers = [
        {"kv_heads": kv_heads, "head_size": head_size}
        | ({} if window is None else {"window": window})
        | {kind: f"{kind}.{i}" for kind in kinds}
        for i, ((kv_heads, head_size), window) in enumerate(
            zip(network.cache_shapes(), network.cache_windows(), strict=True)
        )
    ]
    own = [*_INPUTS, *_OUTPUTS, *([SEGMENTS] if has_segments else [])]
    if has_segments and network.cache_window is not None:
        own.append(WINDOW_SEGMENTS)
    if chooses_rows:
        own += [CACHED_ROWS, CACHED_REQUESTS, TOKEN_REQUESTS]
        if network.cache_window is not None:
            own += [WINDOW_ROWS, WINDOW_REQUESTS, WINDOW_DISTANCES]
    if network.conditioning is not None:
        own += [*_CONDITIONING_INPUTS, *_CONDITIONING_OUTPUTS]
    return {
        "file": GRAPH_FILE,
        **({"device_file": DEVICE_FILE} if for_device else {}),
        "simulated": is_simulated,
        "top_k": TOP_K,
        "cache_dtype": cache_dtype,
        "ports": {name: name for name in own} | {"layers": layers},
    }


def trace_pass(network: NetworkSpec, precision: str, *, is_plain: bool = False) -> Graph:
    """Trace the pass of a denoiser.

    Only one layer of each kind is traced, and ``repeat`` makes all other layers. In the result,
    each mixture of experts is a single node, which ``graph.experts`` must replace.

    Args:
        network: The denoiser's description.
        precision: A key of ``graph.PRECISIONS``.
        is_plain: Use elementary operators of opset 21.
    """
    dtype = _DTYPES[precision]
    layers = repeat.kinds(network)
    c = replace(
        network, layers=tuple(network.layers[layers.index(kind)] for kind in range(max(layers) + 1))
    )
    with torch.device("meta"):
        module = Pass(Denoiser(c, is_plain)).eval()
    module.denoiser.to(dtype)
    for part in module.modules():
        if isinstance(part, Router):
            part.float()
    B, T, S, R, W = 2, 7, 5, 3, 4
    with torch.device("meta"):
        ids = torch.zeros(B, T, dtype=torch.int64)
        rows = torch.zeros(B, R, dtype=torch.int64)
        shapes = [
            (B, kv_heads, S if window is None else W, head_size)
            for (kv_heads, head_size), window in zip(
                c.cache_shapes(), c.cache_windows(), strict=True
            )
        ]
        past = [
            (torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)) for shape in shapes
        ]
    auto = torch.export.Dim.AUTO
    rows_and_tokens, cached = {0: auto, 1: auto}, {0: auto, 2: auto}
    more: list[Tensor] = []
    if c.conditioning is not None:
        with torch.device("meta"):
            more = [torch.zeros(B, T, c.hidden_size), torch.zeros(B, R)]
    # Hide torch's warnings and log lines, which do not help users. One example is the warning that
    # torchvision is missing.
    with (
        warnings.catch_warnings(),
        _quiet_logger("torch.onnx"),
        torch.no_grad(),
        faster_tracing.few(),
        # With symbolic shapes, torch's cache of operator results takes more time than it saves.
        torch._dynamo.config.patch(fake_tensor_cache_enabled=False),
    ):
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            module,
            (ids, ids.clone(), rows, past, *more),
            dynamo=True,
            opset_version=OPSET,
            input_names=input_names(c),
            output_names=output_names(c),
            dynamic_shapes=(
                *[rows_and_tokens] * 3,
                [(cached, cached)] * len(past),
                *[rows_and_tokens] * len(more),
            ),
            custom_translation_table={
                torch.ops.dlm_export.experts.default: _experts,
                torch.ops.dlm_export.draft_update.default: _draft_update,
            },
            optimize=False,
            verbose=False,
        )
    assert program is not None
    model = program.model
    model.graph.name = "denoiser"
    model.producer_name, model.producer_version = "dlm-export", metadata.version("dlm-export")
    model.graph.metadata_props.clear()  # torch's metadata takes more space than the graph
    _name_layers(model)
    _simplify_reshapes(model)
    passes.RemoveUnusedNodesPass()(passes.IdentityEliminationPass()(model).model)
    initializers = model.graph.initializers
    held = dict(module.named_parameters()) | dict(module.named_buffers())
    for name in {name.removeprefix("denoiser.") for name in held} & initializers.keys():
        # Remove the parameter's tensor, which has no values. ``write`` supplies the values later.
        initializers[name].const_value = None
    model.graph = repeat.repeat(model.graph, layers)
    if is_plain:
        updates.select_rows(model)
    for name in {node.op_type for node in model.graph if node.domain == DOMAIN}:
        assert name in (*MIXTURES, operators.DRAFT_UPDATE), name
        operators.declare(model, name)
    passes.CommonSubexpressionEliminationPass()(model)
    _name_axes(model, network)
    if is_plain:  # the remaining operators are the same in both opsets
        model.graph.opset_imports[""] = PLAIN_OPSET
    return Graph(model, network, dtype)


def _experts(x: Any, chosen: Any, weights: Any, stacks: Sequence[Any], activation: str) -> Any:
    """Translate the operator of ``network.experts`` to one node of the graph."""
    name = MIXTURE if activation == "silu" else f"{GELU}{MIXTURE}"
    kinds = {"x": "T", "chosen": "tensor(int64)", "weights": "tensor(float)"}
    return _operator(name, kinds | dict.fromkeys(STACKS, "T"))(x, chosen, weights, *stacks)


def _draft_update(x: Any, y: Any, is_updated: Any, a: Any, b: Any) -> Any:
    """Translate the operator of ``network.linear`` to one node of the graph."""
    kinds = {"x": "T", "y": "T", "is_updated": "tensor(bool)", "a": "T", "b": "T"}
    return _operator(operators.DRAFT_UPDATE, kinds)(x, y, is_updated, a, b)


def _operator(name: str, kinds: dict[str, str]) -> onnxscript.values.Op:
    """Return an operator of the domain ``dlm_export``.

    ``kinds`` maps the name of each input to its type. The type ``T`` is that of the activations.
    """
    real = ("T", ["tensor(float)", "tensor(float16)", "tensor(bfloat16)"], "")
    inputs = [onnx.defs.OpSchema.FormalParameter(name, kind) for name, kind in kinds.items()]
    outputs = [onnx.defs.OpSchema.FormalParameter("result", "T")]
    schema = onnx.defs.OpSchema(
        *(name, DOMAIN, 1), inputs=inputs, outputs=outputs, type_constraints=[real]
    )
    return onnxscript.values.Op(onnxscript.values.Opset(DOMAIN, 1), name, schema)


def _name_layers(model: ir.Model) -> None:
    """Store the module path of each node under ``LAYER_KEY``, and delete torch's own metadata."""
    for node in model.graph:
        scopes = node.metadata_props.get("pkg.torch.onnx.name_scopes")
        path = ""
        if scopes is not None:
            modules = [
                scope for scope in ast.literal_eval(scopes)[:-1] if scope and scope != _NO_MODULE
            ]
            path = modules[-1].removeprefix("denoiser.").removeprefix("denoiser") if modules else ""
        node.metadata_props.clear()
        node.metadata_props[LAYER_KEY] = path or "pass"
        for value in node.outputs:
            value.metadata_props.clear()
            if value.type is None:  # torch leaves some types out
                value.type = _type_given_by(node)
    for name, value in list(model.graph.initializers.items()):
        value.metadata_props.clear()
        value.name = name.removeprefix("denoiser.")


def _type_given_by(node: ir.Node) -> ir.TypeProtocol | None:
    """Return the type of a node's output: for most operators, that of the first input."""
    if node.op_type == "Cast":
        return ir.TensorType(ir.DataType(node.attributes["to"].as_int()))
    if node.op_type == "Constant":
        found = ir.convenience.get_const_tensor(node.outputs[0])
        return None if found is None else ir.TensorType(found.dtype)
    if node.op_type in ("Shape", "Size"):
        return ir.TensorType(ir.DataType.INT64)
    if node.op_type == "CastLike" and node.inputs[1] is not None:
        return node.inputs[1].type
    return node.inputs[0].type if node.inputs and node.inputs[0] is not None else None


def _simplify_reshapes(model: ir.Model) -> None:
    """Give each Reshape the constant shape ``[0, 0, ...]`` if only the axes B and T are dynamic.

    A 0 means that the dimension is the same as in the input. Without this change, each layer would
    have 14 more nodes (Shape, Squeeze and Concat), which compute the shapes.
    """

    def constant(before: ir.Node, array: np.ndarray, kind: str) -> ir.Value:
        value = ir.tensor(array, name=f"{before.outputs[0].name}.{kind}")
        metadata = dict(before.metadata_props)
        made = ir.node("Constant", [], {"value": value}, metadata_props=metadata)
        model.graph.insert_before(before, made)
        return made.outputs[0]

    for node in model.graph:
        if node.op_type != "Reshape":
            continue
        number, wanted = (
            ir.convenience.get_const_tensor(value) for value in node.inputs if value is not None
        )
        # torch reshapes constant scalars to lists with one element. Compute the result in advance.
        if number is not None and wanted is not None:
            folded = constant(node, number.numpy().reshape(wanted.numpy()), "value")
            node.outputs[0].replace_all_uses_with(folded)
            continue
        if node.outputs[0].shape is None:
            continue
        dims = list(node.outputs[0].shape)
        if len(dims) < 3 or any(isinstance(dim, int) for dim in dims[:2]):
            continue
        assert all(isinstance(dim, int) for dim in dims[2:]), (node.name, dims)
        shape = constant(node, np.array([0, 0, *dims[2:]], np.int64), "shape")
        node.replace_input_with(1, shape)
        # torch sets allowzero. With allowzero, a 0 in the shape would mean an empty dimension.
        node.attributes.pop("allowzero", None)


def _name_axes(model: ir.Model, c: NetworkSpec) -> None:
    """Name the dynamic axes B, T, S, W and R. In torch, each input has other names."""
    for node in model.graph:
        for value in node.outputs:
            value.shape = None
    shapes: dict[str, list[int | str]] = {
        "input_ids": ["B", "T"],
        "position_ids": ["B", "T"],
        "score_rows": ["B", "R"],
        "top_token": ["B", "R", TOP_K],
        "top_prob": ["B", "R", TOP_K],
        "top_log_odds": ["B", "R", TOP_K],
        "entropy": ["B", "R"],
        "logits": ["B", "R", c.vocab_size],
        "conditioning": ["B", "T", c.hidden_size],
        "temperature": ["B", "R"],
        "next_conditioning": ["B", "R", c.hidden_size],
    }
    for name, (kv_heads, head_size) in _cache_ports(c, "past").items():
        window = c.cache_windows()[int(name.rpartition(".")[2])]
        shapes[name] = ["B", kv_heads, "S" if window is None else "W", head_size]
    for name, (kv_heads, head_size) in _cache_ports(c, "present").items():
        shapes[name] = ["B", kv_heads, "T", head_size]
    for value in (*model.graph.inputs, *model.graph.outputs):
        value.shape = ir.Shape(shapes[str(value.name)])
