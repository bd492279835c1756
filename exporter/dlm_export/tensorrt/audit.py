"""What an engine holds a layer in, against what the recipe asked for: nothing falls back unsaid.

Layers are matrix multiplications, found by the module path that the device graph's nodes carry in
their names. Without a GPU the parsed, strongly typed network is read: both operands are followed
back to what dequantises them. On a device the engine inspector's own account comes on top. A table
maps module paths to formats as recipes call them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from dlm_calibration.recipes import FORMATS, HIGH
from dlm_runtime.errors import DlmError, ExitCode
from dlm_runtime.precision import NUMBER_FORMATS

MATMUL = "MatMul"  # nodes of a device graph are called <module path>/<operator>
FULL = {"HALF": "float16", "BF16": "bfloat16", "FLOAT": "float32"}
# By what TensorRT calls them, also in the inspector's "Format/Datatype", such as "Row major linear
# FP8 format".
NUMBERS = {word: name for name, known in NUMBER_FORMATS.items() for word in known.tensorrt}
# An engine holds the weights as the data file does, page padding apart, and besides them kernels
# and constants.
SIZE_LEAST, SIZE_MOST, SIZE_KERNELS_BYTES = 0.9, 1.15, 48 << 20


class AuditError(DlmError):
    """The engine would hold layers in another format than was asked for."""

    exit_code = ExitCode.MISSED


def differs(asked: str, held: str) -> bool:
    """Whether a layer is not held as asked; ``high`` is any full precision."""
    return held not in FULL.values() if asked == HIGH else held != asked


def fallbacks(table: Mapping[str, str], asked: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """What is held otherwise, for the manifest."""
    return {
        layer: {"asked": name, "held": table[layer]}
        for layer, name in asked.items()
        if differs(name, table[layer])
    }


def check(
    table: Mapping[str, str], asked: Mapping[str, str], target: str, *, allow_fallback: bool
) -> None:
    """Raises AuditError that names every layer that is missing or held otherwise, unless fallbacks
    are allowed.
    """
    missing = [layer for layer in asked if layer not in table]
    if missing:
        names = f"{', '.join(missing[:8])}{_more(missing)}"
        raise AuditError(f"the engine for {target} has no layer {names}: build the bundle again")
    found = fallbacks(table, asked).items()
    wrong = [f"{layer} is {each['held']}, {each['asked']} was asked for" for layer, each in found]
    if wrong and not allow_fallback:
        raise AuditError(
            f"the engine for {target} was not written, {len(wrong)} of {len(asked)} layers are not as asked: "
            f"{'; '.join(wrong[:8])}{_more(wrong)}. --allow-fallback takes it as it is."
        )


def _more(names: list[str]) -> str:
    return f" and {len(names) - 8} more" if len(names) > 8 else ""


def check_size(engine_bytes: int, weights_bytes: int, target: str, *, allow_fallback: bool) -> None:
    """Raises AuditError if an engine's size does not go with its weights': widened again, or left
    out.
    """
    low, high = int(SIZE_LEAST * weights_bytes), int(SIZE_MOST * weights_bytes) + SIZE_KERNELS_BYTES
    padding = 4096 * 2048  # of a data file, pages: more than any denoiser's tensors waste
    if not low - padding <= engine_bytes <= high and not allow_fallback:
        raise AuditError(
            f"the engine for {target} was not written: it has {engine_bytes:,} bytes, and the weights that it should hold have "
            f"{weights_bytes:,}. Layers were widened or left out. --allow-fallback takes it as it is."
        )


# ---- Without a GPU: the parsed network ----


class _Network:
    """Layers of an INetworkDefinition, and which of them makes a tensor."""

    def __init__(self, network: Any) -> None:
        self.layers = [network.get_layer(i) for i in range(network.num_layers)]
        self.producers = {
            layer.get_output(j).name: layer
            for layer in self.layers
            for j in range(layer.num_outputs)
            if layer.get_output(j)
        }

    def source(self, tensor: Any) -> Any:
        """The layer that makes a tensor's values, seen through those that only move them; None for
        a network input.
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
    """Module path -> format of every matrix multiplication by a weight in a parsed network."""
    parsed = _Network(network)
    table: dict[str, str] = {}
    for layer in parsed.layers:
        path, _, operator = layer.name.partition("/")
        if _kind(layer) != "MATRIX_MULTIPLY" or operator.partition(".")[0] != MATMUL:
            continue
        made = parsed.source(layer.get_input(1))
        # Leave out products of two activations.
        if made is not None and _kind(made) in ("CONSTANT", "DEQUANTIZE"):
            # The last product of a path counts: a rotation of the input comes before it.
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
        # Ranges of each pass do not exist in TensorRT: static is what its quantised activations
        # are.
        if (
            (known.weights, known.activations) == (weights, activations)
            and is_group
            and not known.is_dynamic
        ):
            return name
    return f"weights {weights or 'in full'} in groups of {group_size}, activations {activations or 'in full'}"


def _quantised(parsed: _Network, tensor: Any, *, is_weight: bool) -> tuple[str | None, int | None]:
    """The number format that an operand is dequantised from, and its group size along the inputs;
    None in full precision.
    """
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
    # int4 [K, N] with scales [K / group, N]; nvfp4 [N, K] with [N, K / group]: one axis is shorter.
    ratios = [
        -(-size // groups)
        for size, groups in zip(tuple(codes.shape), tuple(scales.shape), strict=True)
    ]
    return name, max(ratios)


# ---- On a device: the engine inspector ----


def inspector_table(information: str, expected: Mapping[str, str]) -> dict[str, str]:
    """The table that an engine's layers bear out, from IEngineInspector's JSON (detailed profiling
    verbosity).

    A layer keeps its format of ``expected`` if an engine layer that contains its node reads a
    tensor of its number format; otherwise the widest type that this layer reads is named. Raises
    AuditError where the JSON has no layers.
    """
    try:
        layers = json.loads(information).get("Layers")
    except (ValueError, AttributeError) as err:
        raise AuditError(
            f"the engine inspector's report is not readable ({err}): build with another TensorRT"
        ) from err
    if not isinstance(layers, list) or not all(isinstance(layer, dict) for layer in layers):
        raise AuditError(
            "the engine inspector tells no layers: this TensorRT does not keep them in the engine"
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


def _input_types(layer: Mapping[str, Any]) -> Iterator[str]:
    tensors = [*layer.get("Inputs", []), *layer.get("Constants", [])]
    weights = layer.get("Weights")
    for tensor in [*tensors, *([weights] if isinstance(weights, dict) else [])]:
        if isinstance(tensor, dict):
            yield str(tensor.get("Format/Datatype", tensor.get("Type", "")))
