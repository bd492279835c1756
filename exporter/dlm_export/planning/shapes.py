"""Describes a denoiser's size, and finds the precisions in which a target can run the denoiser."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dlm_calibration.precisions import FORMATS, HIGH
from dlm_export.bundle.manifest import network_of, read_manifest, table_bytes_of
from dlm_export.graph import PRECISIONS
from dlm_export.network.spec import (
    HEAD,
    AttentionSpec,
    ExpertsSpec,
    LayerSpec,
    MlpSpec,
    NetworkSpec,
    Rope,
)
from dlm_export.targets import AUTO, STORED, Target, TargetError, recipe_for
from dlm_runtime.errors import DlmError, ExitCode

# LLaDA-8B (arXiv:2502.09992) has 32 layers, 32 heads of 128 features, hidden size 4096, an MLP of
# 12288 features, a vocabulary of 126464 tokens, and an untied head.
LLADA_VOCABULARY, LLADA_HEAD_SIZE, LLADA_MLP_RATIO = 126464, 128, 3


def computes_all_experts(
    network: NetworkSpec,
    targets: Sequence[Target],
    formats: Mapping[str, str],
    *,
    is_plain: bool = False,
) -> bool:
    """Return whether a bundle's graph computes all experts of a layer for every token.

    All other graphs compute only the chosen experts: graphs for CPUs, graphs with ONNX Runtime's
    operators for experts, and graphs with TensorRT's MoE layer. The layer supports silu only, and
    NVIDIA does not document how to quantise its weights. ``formats`` contains the formats of
    quantised layers. ``is_plain`` is true for graphs of elementary operators.
    """
    if targets[0].sm is None:
        return network.joins_experts(targets[0].provider)
    if is_plain or not all(target.has_moe_layer for target in targets):
        return True
    stacks = [stack.path for mixture in network.mixtures() for stack in mixture]
    mixtures = [layer.mlp for layer in network.layers if isinstance(layer.mlp, ExpertsSpec)]
    return any(formats.get(path, HIGH) != HIGH for path in stacks) or any(
        mixture.activation != "silu" for mixture in mixtures
    )


class ShapeError(DlmError):
    """Raised if no plan can be made for a denoiser of the requested size."""

    exit_code = ExitCode.WRONG_INPUT


@dataclass(frozen=True, eq=False)
class Shape:
    """A denoiser whose speed and memory are planned.

    - ``max_canvas_length``: the longest allowed canvas in tokens. ``None`` allows any length.
    - ``presets``: maps each preset to the fields of its ``Policy``.
    - ``precision``: the precision of a bundle. ``None`` for a checkpoint.
    - ``layers``: maps each layer of a quantised bundle to its format. ``None`` for checkpoints and
      for unquantised bundles.
    - ``table_bytes``: number of bytes of each element of the checkpoint's embedding table. fp32
      graphs store the table in the checkpoint's type.
    """

    name: str
    network: NetworkSpec
    max_canvas_length: int | None
    presets: Mapping[str, Mapping[str, Any]]
    precision: str | None = None
    layers: Mapping[str, str] | None = None
    table_bytes: int = 4


@functools.lru_cache(maxsize=1 << 6)
def shape_on_gpus(shape: Shape) -> Shape:
    """Return the shape that a denoiser with draft passes and windows has on GPUs.

    On GPUs, a layer with a window stores the keys and values of all tokens, and attends to all of
    them with a mask. It takes as much time and memory as a layer without a window.
    """
    network = shape.network
    if network.cache_window is None:
        return shape
    layers = tuple(
        replace(layer, attention=replace(layer.attention, window=None)) for layer in network.layers
    )
    return replace(shape, network=replace(network, layers=layers))


def scaled_shape(size: str) -> Shape:
    """Scale LLaDA-8B to a given number of parameters, such as 8B, 0.5B or 134M.

    The scaled network has n layers, and n heads of 128 features in each layer. For LLaDA-8B, n is
    32. The hidden size is d = 128 n. The MLP has 3 d features. The vocabulary size stays 126464.
    All layers together therefore have 13 n d**2 parameters. The embedding and the head together
    have 2 * 126464 d parameters. The function chooses the n that brings the total number of
    parameters nearest to ``size``. Raises ShapeError.
    """
    unit = {"M": 1e6, "B": 1e9}.get(size[-1:].upper())
    try:
        wanted = float(size[:-1]) * (unit or math.nan)
    except ValueError:
        wanted = math.nan
    if not 1e8 <= wanted <= 1e13:
        raise ShapeError(
            f"size {size!r}: write parameters as 134M, 8B or 0.5B, from 100M to 10000B"
        )

    def shaped(n: int) -> NetworkSpec:
        d = LLADA_HEAD_SIZE * n
        layer = LayerSpec(
            AttentionSpec(n, n, LLADA_HEAD_SIZE, Rope(5e5)), MlpSpec(LLADA_MLP_RATIO * d), 1e-5
        )
        return NetworkSpec(
            family="llada",
            architecture="LLaDAModelLM",
            vocab_size=LLADA_VOCABULARY,
            hidden_size=d,
            layers=(layer,) * n,
            norm_eps=1e-5,
            tied_head=False,
            max_canvas_length=4096,
            shift=0,
            mask_token_id=126336,
            eos_token_ids=(126081,),
            pad_token_id=126081,
        )

    def parameters(n: int) -> int:
        d = LLADA_HEAD_SIZE * n
        return n * (4 + 3 * LLADA_MLP_RATIO) * d * d + 2 * LLADA_VOCABULARY * d + (2 * n + 1) * d

    n = min(range(1, 512), key=lambda n: abs(parameters(n) - wanted))
    network = shaped(n)
    return Shape(size, network, None, _published(network))


def _published(network: NetworkSpec) -> dict[str, dict[str, Any]]:
    return {name: policy.as_dict() for name, policy in network.presets().items()}


def read_shape(path: Path, read_checkpoint: Callable[[Path], tuple[NetworkSpec, int]]) -> Shape:
    """Read the size of a bundle's or a checkpoint's denoiser. Raises DlmError.

    For a checkpoint, the function calls ``read_checkpoint``, which must return the network and the
    value of ``Shape.table_bytes``. Only checkpoints need torch.
    """
    if not (path / "manifest.json").is_file():
        network, table_bytes = read_checkpoint(path)
        return Shape(
            path.name,
            network,
            network.max_canvas_length,
            _published(network),
            table_bytes=table_bytes,
        )
    manifest = read_manifest(path)
    network, precision = network_of(manifest), manifest["precision"]
    presets, layers = manifest["loop"]["presets"], precision.get("layers")
    return Shape(
        path.name,
        network,
        network.max_canvas_length,
        presets,
        precision["name"],
        layers,
        table_bytes_of(manifest) or 4,
    )


@dataclass(frozen=True)
class Precision:
    """A precision in which a target can run a denoiser.

    ``layers`` contains a pair for each quantised layer: the layer's path and format.
    ``element_bytes`` is the number of bytes per element of all unquantised data, including the
    cache. ``same_as`` lists the names of other precisions that choose the same formats for this
    denoiser.
    """

    name: str
    layers: tuple[tuple[str, str], ...]
    element_bytes: int
    same_as: tuple[str, ...] = ()


def _held_table(name: str, target: Target) -> str:
    """Return the format of a tied table for layers in ``name``. GPUs never quantise it."""
    if target.sm is not None:
        return HIGH
    return next((each for each in (name, *FORMATS[name].next) if FORMATS[each].suits_table), HIGH)


def precisions_of(
    shape: Shape, target: Target, names: Sequence[str] | None = None
) -> tuple[list[Precision], dict[str, str]]:
    """Find the precisions in which a target can run a denoiser.

    ``names`` lists the precisions to consider. If ``names`` is ``None``, all precisions are
    considered, including the precision of a quantised bundle. Returns the precisions that the
    target supports, and a mapping from the name of each unsupported precision to the reason.
    """
    found: dict[tuple[Any, ...], Precision] = {}
    left_out: dict[str, str] = {}
    every_name = [name for name in target.precisions if name not in (AUTO, STORED)]
    asked = every_name if names is None else names
    every = list(shape.network.quantisable())
    element_bytes = PRECISIONS["fp32" if target.sm is None else "fp16"]

    def add(name: str, formats: Mapping[str, str], element_bytes: int) -> None:
        held = {layer: formats.get(layer, HIGH) for layer in every}
        # With self-conditioning, the table is never quantised.
        if shape.network.tied_head and HEAD in held:
            held[HEAD] = _held_table(held[HEAD], target)
        layers = tuple((layer, name) for layer, name in held.items() if name != HIGH)
        if target.sm is None and any(FORMATS[held].is_simulated_on_cpu for _, held in layers):
            left_out[name] = "a CPU simulates it, at the speed of fp32"
            return
        first = found.get((element_bytes, layers))
        same_as = (
            () if first is None else (*first.same_as, *({name} - {first.name, *first.same_as}))
        )
        found[element_bytes, layers] = Precision(
            name if first is None else first.name, layers, element_bytes, same_as
        )

    if names is None and shape.layers is not None and shape.precision is not None:
        if missing := target.missing(shape.layers.values()):
            left_out[f"{shape.precision}, as the bundle has it"] = (
                f"{target.name} does not run {', '.join(missing)}"
            )
        else:
            add(shape.precision, shape.layers, element_bytes)
    for name in asked:
        try:
            recipe = recipe_for([target], name)
        except TargetError as err:
            left_out[name] = str(err).partition(": it runs")[0]
            continue
        if recipe is None:
            add(name, {}, PRECISIONS[name])
        else:
            add(name, recipe.formats(every), element_bytes)
    return list(found.values()), left_out
