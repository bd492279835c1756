"""Compares the format of each layer in an engine with the format that the recipe requests.

A layer whose format differs is called a fallback. An engine with fallbacks is rejected, unless the
user allows them. In this module, a layer is a matrix multiplication. The module path of a layer is
part of the names of its nodes in the device graph. The formats come from two sources:

- The network that TensorRT has parsed. Parsing needs no GPU. The network is strongly typed, so each
  operand of a multiplication can be traced back to the operand's dequantisation.
- The report of TensorRT's engine inspector, which is available only on the device.

The result maps the module path of each layer to its format. Formats have the same names as in
recipes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from dlm_calibration.precisions import FORMATS, HIGH
from dlm_export.graph import MOE_LAYER
from dlm_export.network.spec import STACKS
from dlm_runtime.errors import DlmError, ExitCode
from dlm_runtime.precision import NUMBER_FORMATS

MATMUL = "MatMul"  # nodes of a device graph are named <module path>/<operator>
FULL = {"HALF": "float16", "BF16": "bfloat16", "FLOAT": "float32"}
# TensorRT's names of number formats. The inspector uses these names in "Format/Datatype", for
# example in "Row major linear FP8 format".
NUMBERS = {word: name for name, known in NUMBER_FORMATS.items() for word in known.tensorrt}
# An engine contains the weights, kernels and constants. If the weights take W bytes, the engine
# must take at least SIZE_LEAST * W bytes, and at most SIZE_MOST * W + SIZE_KERNELS_BYTES bytes.
SIZE_LEAST, SIZE_MOST, SIZE_KERNELS_BYTES = 0.9, 1.15, 48 << 20


class AuditError(DlmError):
    """Raised if layers of an engine do not have the requested formats."""

    exit_code = ExitCode.MISSED


def differs(asked: str, held: str) -> bool:
    """Return True if a layer's format ``held`` is not the requested format ``asked``.

    The format ``high`` matches any unquantised type.
    """
    return held not in FULL.values() if asked == HIGH else held != asked


def fallbacks(table: Mapping[str, str], asked: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return the layers that do not have the requested format, for the manifest."""
    return {
        layer: {"asked": name, "held": table[layer]}
        for layer, name in asked.items()
        if differs(name, table[layer])
    }


def check(
    table: Mapping[str, str], asked: Mapping[str, str], target: str, *, allow_fallback: bool
) -> None:
    """Check that no layer is missing, and that all layers have the requested formats.

    Raises AuditError. The message names the wrong layers. If ``allow_fallback`` is true, formats
    that differ from the requested formats are accepted.
    """
    missing = [layer for layer in asked if layer not in table]
    if missing:
        names = f"{', '.join(missing[:8])}{_more(missing)}"
        raise AuditError(f"the engine for {target} has no layer {names}: build the bundle again")
    found = fallbacks(table, asked).items()
    wrong = [f"{layer} is {each['held']}, {each['asked']} was asked for" for layer, each in found]
    if wrong and not allow_fallback:
        raise AuditError(
            f"the engine for {target} was not written: {len(wrong)} of {len(asked)} layers do not have the requested format: "
            f"{'; '.join(wrong[:8])}{_more(wrong)}. --allow-fallback accepts it."
        )


def _more(names: list[str]) -> str:
    return f" and {len(names) - 8} more" if len(names) > 8 else ""


def check_size(engine_bytes: int, weights_bytes: int, target: str, *, allow_fallback: bool) -> None:
    """Check that the size of an engine matches the size of its weights.

    Raises AuditError if the engine contains weights in a wider type, or lacks weights.
    """
    low, high = int(SIZE_LEAST * weights_bytes), int(SIZE_MOST * weights_bytes) + SIZE_KERNELS_BYTES
    padding = 4096 * 2048  # an upper bound: the weight file contains padding, engines do not
    if not low - padding <= engine_bytes <= high and not allow_fallback:
        raise AuditError(
            f"the engine for {target} was not written: it has {engine_bytes:,} bytes, but its weights have "
            f"{weights_bytes:,}. Layers were widened or left out. --allow-fallback accepts it."
        )


# ---- Without a GPU: the parsed network ----


class _Network:
    """The layers of an INetworkDefinition, and the layer that produces each tensor."""

    def __init__(self, network: Any) -> None:
        self.layers = [network.get_layer(i) for i in range(network.num_layers)]
        self.producers = {
            layer.get_output(j).name: layer
            for layer in self.layers
            for j in range(layer.num_outputs)
            if layer.get_output(j)
        }

    def source(self, tensor: Any) -> Any:
        """Return the layer that computes a tensor, or ``None`` for an input of the network.

        Layers that copy or reorder values without computing are skipped.
        """
        layer = self.producers.get(tensor.name)
        while layer is not None and _kind(layer) in ("SHUFFLE", "IDENTITY"):
            layer = self.producers.get(layer.get_input(0).name)
        return layer


def _kind(layer: Any) -> str:
    return str(layer.type).rpartition(".")[2]


def _dtype(tensor: Any) -> str:
    return str(tensor.dtype).rpartition(".")[2]


def network_table(network: Any) -> dict[str, str]:
    """Return the format of every multiplication by a weight in a parsed network.

    The keys are module paths.
    """
    parsed = _Network(network)
    table: dict[str, str] = {}
    for layer in parsed.layers:
        path, _, operator = layer.name.partition("/")
        if _kind(layer) == "MOE":
            weights = range(3, 3 + len(STACKS))  # inputs of IMoELayer
            table |= {
                f"{path}.{role}": FULL.get(held := _dtype(layer.get_input(i)), held.lower())
                for role, i in zip(STACKS, weights, strict=True)
            }
        if _kind(layer) != "MATRIX_MULTIPLY" or operator.partition(".")[0] != MATMUL:
            continue
        made = parsed.source(layer.get_input(1))
        # A product of two activations is not a layer. A layer multiplies by a constant.
        if made is not None and _kind(made) in ("CONSTANT", "DEQUANTIZE"):
            # If a layer's input is multiplied by a Hadamard matrix, two products have the layer's
            # path: first the product with this matrix, and then the layer itself. The format of
            # the second product overwrites the format of the first.
            table[path] = _format(parsed, layer)
    return table


def _format(parsed: _Network, matmul: Any) -> str:
    weights, group_size = _quantised(parsed, matmul.get_input(1), is_weight=True)
    activations, _ = _quantised(parsed, matmul.get_input(0), is_weight=False)
    if weights is None and activations is None:
        dtype = _dtype(matmul.get_input(1))
        return FULL.get(dtype, dtype.lower())
    for name, known in FORMATS.items():
        is_group = known.weights != "int4" or known.group_size == group_size
        # Quantised activations in TensorRT have static ranges, because TensorRT cannot compute a
        # range for each row in each pass.
        if (
            (known.weights, known.activations) == (weights, activations)
            and is_group
            and not known.is_dynamic
        ):
            return name
    return f"weights {weights or 'in full'} in groups of {group_size}, activations {activations or 'in full'}"


def _quantised(parsed: _Network, tensor: Any, *, is_weight: bool) -> tuple[str | None, int | None]:
    """Return (format, group size). Only weights quantised in groups have a group size."""
    dequantise = parsed.source(tensor)
    if dequantise is None or _kind(dequantise) != "DEQUANTIZE":
        return None, None
    codes, scales = dequantise.get_input(0), dequantise.get_input(1)
    maker = parsed.source(codes)
    wanted = ("CONSTANT",) if is_weight else ("QUANTIZE", "DYNAMIC_QUANTIZE")
    if maker is None or _kind(maker) not in wanted:
        return None, None
    name = NUMBERS.get(_dtype(codes), _dtype(codes).lower())
    if not is_weight or len(tuple(scales.shape)) < 2:
        return name, None
    # int4 codes are [K, N] with scales [K / group, N]. nvfp4 codes are [N, K] with scales [N, K /
    # group]. In both formats, one axis of the scales is shorter than the same axis of the codes.
    ratios = [
        -(-size // groups)
        for size, groups in zip(tuple(codes.shape), tuple(scales.shape), strict=True)
    ]
    return name, max(ratios)


# ---- On a device: the engine inspector ----


def inspector_table(information: str, expected: Mapping[str, str]) -> dict[str, str]:
    """Return the formats of layers according to the JSON of IEngineInspector.

    The JSON must be created with detailed verbosity. TensorRT may join several nodes of the graph
    into one engine layer. If the inputs of the engine layer have the format that ``expected``
    contains for a layer, the result contains this format. Otherwise, the result contains the types
    of these inputs. Raises AuditError if the JSON contains no layers.
    """
    try:
        layers = json.loads(information).get("Layers")
    except (ValueError, AttributeError) as err:
        raise AuditError(
            f"the engine inspector's report is not readable ({err}): build with another TensorRT"
        ) from err
    if not isinstance(layers, list) or not all(isinstance(layer, dict) for layer in layers):
        raise AuditError(
            "the engine inspector reports no layers: this TensorRT does not keep them in the engine"
        )
    seen: dict[str, set[str]] = {}
    for layer in layers:
        types = set(_input_types(layer))
        for path in _paths(layer):
            seen.setdefault(path, set()).update(types)
    table = {}
    for path, name in expected.items():
        types = seen.get(path, set())
        known = FORMATS.get(name)
        numbers = {known.weights, known.activations} - {None} if known is not None else set()
        held = {
            number
            for text in types
            for spelled, number in NUMBERS.items()
            if spelled in text.upper()
        }
        table[path] = name if numbers <= held else " and ".join(sorted(types)) or "nowhere"
    return table


def _paths(layer: Mapping[str, Any]) -> Iterator[str]:
    text = f"{layer.get('Name', '')} {layer.get('Metadata', '')}"
    yield from dict.fromkeys(re.findall(rf"([A-Za-z][\w.]*)/{MATMUL}\b", text))
    for path in dict.fromkeys(re.findall(rf"([A-Za-z][\w.]*)/{MOE_LAYER}\b", text)):
        yield from (f"{path}.{role}" for role in STACKS)


def _input_types(layer: Mapping[str, Any]) -> Iterator[str]:
    tensors = [*layer.get("Inputs", []), *layer.get("Constants", [])]
    weights = layer.get("Weights")
    for tensor in [*tensors, *([weights] if isinstance(weights, dict) else [])]:
        if isinstance(tensor, dict):
            yield str(tensor.get("Format/Datatype", tensor.get("Type", "")))
