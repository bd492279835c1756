"""Parity of a quantised graph, part by part from equal inputs.

A value near a rounding boundary takes one code here and the next one there, and every later layer carries that on: two right
computations of a whole pass may end far apart. So the graph runs once and shows what goes into every quantised layer and what
comes out. Then torch runs beside it. At each layer its own input is compared, which proves what lies between two layers; it
goes on with the graph's input, and its output is compared, which proves the layer; and it goes on with the graph's output. By
induction the whole graph is proven, and no difference is carried on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import dlm_runtime
from dlm_calibration.formats import quantise_activation
from dlm_calibration.recipes import FORMATS, HIGH
from dlm_calibration.solvers import rotate
from dlm_calibration.states import MASK_RATIOS
from dlm_export import families
from dlm_export.graph import taps as graph_taps
from dlm_export.graph import trace
from dlm_export.graph.taps import Tap
from dlm_export.judging.parity import (
    LOGITS,
    PART_TOLERANCES,
    Canvas,
    LayerRow,
    Parity,
    compare_logits,
    make_canvases,
    random_prompts,
)
from dlm_export.network.denoiser import Denoiser
from dlm_export.network.spec import NetworkSpec
from dlm_export.quantising import calibrate
from dlm_export.quantising.calibrate import Quantisation
from dlm_runtime import _native

# How far an input may be from a boundary for either code to be right: a few roundings of fp32, in which codes are found.
_BOUNDARY = 2.0**-20


UNITS = 3 * len(MASK_RATIOS)
"""How often ``check_layers`` calls ``on_done``."""


def check_layers(
    folder: Path,
    network: NetworkSpec,
    done: Quantisation,
    base: str,
    taps: Mapping[str, Tap],
    *,
    is_simulated: bool,
    seed: int = 0,
    on_done: Callable[[], None],
) -> Parity:
    """Compare a quantised bundle with torch on random canvases: its layers from equal inputs and, held to nothing, a pass.

    ``base`` is the full precision around quantised layers, ``taps`` say where these stand in the graph, ``is_simulated`` is the
    manifest's. Graph, torch and runtime hold the weights one after the other. Raises DlmError.
    """
    canvases = make_canvases(network, random_prompts(network, 1, seed), seed)
    shown = run_shown(folder, network, base, is_simulated=is_simulated, taps=taps, canvases=canvases, on_done=on_done)
    denoiser = families.load(done.parameters, network)
    calibrate.simulate(denoiser, done)
    whole = [_logits(denoiser, canvas) for canvas in canvases]
    layers = compare_layers(denoiser, done, taps, shown, on_done)
    del denoiser
    with dlm_runtime.open(folder, engine="onnxruntime", check_hashes=False) as bundle:
        graph = compare_logits(bundle, canvases, whole, on_done)
    return Parity(f"quantised, {base}", PART_TOLERANCES[base], graph, [], layers=layers)


@torch.no_grad()
def _logits(denoiser: Denoiser, canvas: Canvas) -> np.ndarray:
    ids = torch.from_numpy(canvas.tokens.astype(np.int64)).unsqueeze(0)
    features, _ = denoiser.hidden(ids, torch.arange(ids.shape[1]).unsqueeze(0))
    logits: np.ndarray = denoiser.project(features[0, torch.from_numpy(canvas.rows)]).numpy()
    return logits


@dataclass(frozen=True, eq=False)
class Shown:
    """What a graph showed of one canvas: values of taps by name, fp32 ``[1, T or R, ...]``, and logits ``[R, V]``."""

    canvas: Canvas
    values: dict[str, np.ndarray]
    logits: np.ndarray


def run_shown(
    folder: Path,
    network: NetworkSpec,
    base: str,
    *,
    is_simulated: bool,
    taps: Mapping[str, Tap],
    canvases: Sequence[Canvas],
    on_done: Callable[[], None],
) -> list[Shown]:
    """Run a bundle's graph with its layers shown, by the kernels that the native runtime takes; ``base``: its full precision.

    ``is_simulated`` is the manifest's; ``on_done`` is called once a canvas. The weights are released at the end.
    """
    import onnxruntime

    model, there = graph_taps.show(folder, taps)
    options = onnxruntime.SessionOptions()
    # As the native runtime sets it up.
    options.log_severity_level, options.enable_mem_pattern = 4, False
    for key, value in {
        "session.force_spinning_stop": "1",
        "session.qdq_matmulnbits_accuracy_level": "1",
        "session.disable_quant_qdq": str(int(is_simulated)),
        "session.model_external_initializers_file_folder_path": str(folder),
    }.items():
        options.add_session_config_entry(key, value)
    options.register_custom_ops_library(_native.library()._name)
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    names = ["logits", *(f"tap:{name}" for name in sorted(there))]
    element = trace.element_type(base)
    found = []
    for canvas in canvases:
        integers = {
            "input_ids": canvas.tokens[None],
            "position_ids": np.arange(len(canvas.tokens))[None],
            "score_rows": canvas.rows[None],
        }
        given = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array.astype(np.int64)) for name, array in integers.items()}
        for i, (kv_heads, head_size) in enumerate(network.cache_shapes()):
            nothing = np.zeros((1, kv_heads, 0, head_size), np.uint16 if element.itemsize == 2 else np.float32)
            for kind in ("key", "value"):
                made = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(nothing, element.value)
                given[f"past_{kind}.{i}"] = made
        logits, *values = (value.numpy() for value in session.run_with_ort_values(names, given))
        found.append(Shown(canvas, dict(zip(sorted(there), values, strict=True)), logits[0]))
        on_done()
    return found


@torch.no_grad()
def compare_layers(
    denoiser: Denoiser, done: Quantisation, taps: Mapping[str, Tap], shown: Sequence[Shown], on_done: Callable[[], None]
) -> list[LayerRow]:
    """Compare a graph with a torch denoiser that computes with the same quantised values: a row for every quantised layer, and
    one for the logits where the head is none of them.

    ``denoiser`` is the folded one under ``calibrate.simulate``. ``on_done`` is called once a canvas.
    """
    rows: dict[str, LayerRow] = {}
    modules: dict[str, Any] = dict(denoiser.named_modules())
    now: dict[str, np.ndarray] = {}
    handles = []

    def note(layer: str, format: str, input_relative: float, output_relative: float | None) -> None:
        row = rows.get(layer, LayerRow(layer, format, 0.0, None))
        outputs = [each for each in (row.output_relative, output_relative) if each is not None]
        # Of NaN and a number, max gives either: np.maximum keeps the NaN.
        worst = float(np.maximum(row.input_relative, input_relative))
        rows[layer] = LayerRow(layer, format, worst, float(np.max(outputs)) if outputs else None)

    def before(layer: str, format: str, tap: Tap) -> Callable[..., Tensor | None]:
        def hook(_: Any, inputs: tuple[Tensor, ...]) -> Tensor | None:
            theirs = now[tap.input]
            note(layer, format, _relative(inputs[0].numpy(), theirs), None)
            return torch.from_numpy(theirs) if np.isfinite(theirs).all() else None

        return hook

    def after(layer: str, format: str, tap: Tap) -> Callable[..., Tensor | None]:
        def hook(module: Any, _: Any, output: Tensor) -> Tensor | None:
            if tap.output not in now:
                return None
            theirs = now[tap.output]
            if not (np.isfinite(theirs).all() and np.isfinite(now[tap.input]).all()):
                note(layer, format, 0.0, float("inf"))
                return None
            slack = _slack(done, layer, now[tap.input], module.weight)
            note(layer, format, 0.0, _relative(output.numpy(), theirs, slack))
            return torch.from_numpy(theirs)

        return hook

    for layer, format in done.formats.items():
        if format == HIGH:
            continue
        tap = taps[layer]
        # Before the quantisation that ``simulate`` put there.
        handles.append(modules[layer].register_forward_pre_hook(before(layer, format, tap), prepend=True))
        handles.append(modules[layer].register_forward_hook(after(layer, format, tap)))
    try:
        for one in shown:
            now = one.values
            ids = torch.from_numpy(one.canvas.tokens.astype(np.int64)).unsqueeze(0)
            features, _ = denoiser.hidden(ids, torch.arange(ids.shape[1]).unsqueeze(0))
            logits = denoiser.project(features[:, torch.from_numpy(one.canvas.rows)])
            if done.formats.get("head", HIGH) == HIGH:
                note(LOGITS, HIGH, _relative(logits[0].numpy(), one.logits), None)
            on_done()
    finally:
        for handle in handles:
            handle.remove()
    return list(rows.values())


def _relative(ours: np.ndarray, theirs: np.ndarray, slack: np.ndarray | float = 0.0) -> float:
    """The worst difference, less what ``slack`` allows each element, over the range of values; infinite for NaN."""
    worst = float(np.maximum(np.abs(ours - theirs) - slack, 0).max())
    return worst / max(float(theirs.max() - theirs.min()), 1e-30) if np.isfinite(worst) else float("inf")


def _slack(done: Quantisation, layer: str, x: np.ndarray, weight: Tensor) -> np.ndarray | float:
    """By how much each output may differ because inputs lie on a boundary between codes: those take one code or the next.

    Inputs are moved by a few roundings, all of them and all but the largest of a row, whose range they would move as well.
    """
    chosen = FORMATS[done.formats[layer]]
    if chosen.activations is None:
        return 0.0
    if layer in done.rotated:
        x = rotate(x)
    size = np.abs(x)
    inner = np.where(size < size.max(-1, keepdims=True), _BOUNDARY, 0.0).astype(np.float32)

    def rounded(moved: np.ndarray) -> np.ndarray:
        return quantise_activation(moved, chosen.activations or "", done.amax.get(layer), done.scale_dtype)

    apart = np.zeros_like(x)
    for step in (inner, np.full_like(x, _BOUNDARY)):
        apart = np.maximum(apart, np.abs(rounded(x * (1 + step)) - rounded(x * (1 - step))))
    # Moving a range moves every code with it by as little: what counts is a whole code's step.
    apart[apart <= 4 * _BOUNDARY * np.abs(x)] = 0
    return apart @ np.abs(weight.numpy()) if apart.any() else 0.0
