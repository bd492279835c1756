"""Implements the stages of a build that write the tokenizer's files and the graph."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir

from dlm_calibration.pieces import Lazy
from dlm_calibration.precision_rounding import FP16, FP32, QuantisedWeight
from dlm_calibration.precisions import HIGH
from dlm_export.building.quantising import Quantised
from dlm_export.building.request import Job, joins_experts
from dlm_export.checkpoints.tokenizer import TokenizerFiles
from dlm_export.families.base import Parameters, later, table_type
from dlm_export.graph import (
    cuda,
    cuda_experts,
    experts,
    fuse,
    operators,
    quantise,
    row_choice,
    tied_table,
    trace,
    updates,
    wide_heads,
    widen,
    write,
)
from dlm_export.graph.fuse import Fused
from dlm_export.graph.taps import Tap, find_taps
from dlm_export.network.spec import EMBEDDING
from dlm_export.progress import Stages
from dlm_export.quantising.quantisation import Quantisation
from dlm_export.text.compiled import TEXT_FILE, compile_text
from dlm_runtime.precision import CUDA_BLOCK
from dlm_runtime.text.tokenizer import Tokenizer

ReadParameter = Callable[[str, np.dtype], np.ndarray | Lazy]
"""The type of a function that returns the array of an initialiser.

``write.write_graph`` calls it with the name and the element type of the initialiser.
"""

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


@dataclass(frozen=True, eq=False)
class Text:
    """The tokenizer of a bundle, and two entries of the manifest.

    ``chat_template`` is the entry for the chat template. ``compiled`` is the entry for the compiled
    form of the tokenizer and the chat template.
    """

    tokenizer: Tokenizer | None = None
    chat_template: dict[str, Any] | None = None
    compiled: dict[str, str] | None = None


def write_text(files: TokenizerFiles, folder: Path) -> Text:
    """Write the tokenizer and the chat template into ``folder``.

    If the native runtime supports the tokenizer, a compiled form of the tokenizer is written too.
    """
    if files.tokenizer is None:
        return Text()
    (folder / "tokenizer.json").write_text(files.tokenizer, encoding="utf-8")
    template = None
    if files.chat_template is not None:
        template = folder / "chat_template.jinja"
        template.write_text(files.chat_template, encoding="utf-8")
    tokenizer = Tokenizer.from_files(folder / "tokenizer.json", template, files.special_tokens)
    compiled = compile_text(tokenizer, files.chat_template)
    if compiled.data is not None:
        (folder / TEXT_FILE).write_bytes(compiled.data)
    chat = (
        None
        if template is None
        else {"file": template.name, "special_tokens": files.special_tokens}
    )
    return Text(tokenizer, chat, compiled.entry)


@dataclass(frozen=True, eq=False)
class Written:
    """Facts about the written graph, for later stages.

    - ``taps``: maps the path of each layer to its inputs and outputs in the graph.
    - ``fused``: the native kernels that the graph calls. ``None`` if the graph is for GPUs, because
      TensorRT chooses its own kernels.
    - ``hashed``: size and hash of the weight file. ``bundle.folder.finish`` uses these values.
    """

    taps: dict[str, Tap]
    fused: Fused | None
    hashed: dict[str, Any]
    embedding_dtype: str | None = None
    """Type of the embedding table in the weight file, or ``None`` if the table is quantised."""


def write_graph(job: Job, quantised: Quantised | None, folder: Path, stages: Stages) -> Written:
    """Create the denoiser's graph, quantise it, insert native kernels, and write all weights."""
    request, source = job.request, job.source
    with stages.stage("trace graph", 1) as advance:
        traced = trace.trace_pass(source.network, job.base, is_plain=request.is_plain)
        taps, stacks = find_taps(traced), {}
        formats = {} if quantised is None else quantised.numbers.formats
        is_joined = joins_experts(job, formats)
        if is_joined:
            stacks = experts.spread(traced.model, source.network)
            taps |= find_taps(traced)  # add the inputs and outputs of stacked experts
        if request.on_gpu:
            updates.select_rows(traced.model)
        device = traced.clone() if request.on_gpu else None
        if device is not None and not is_joined and request.form == "tensorrt":
            experts.call_moe_layer(device.model, source.network)
        advance()
    read: ReadParameter = functools.partial(later, source.parameters, source.network)
    if quantised is not None:
        numbers, parts = quantised.numbers, {}
        for form in filter(None, (traced, device)):
            parts = quantise.rewrite(
                form,
                numbers.formats,
                numbers.amax,
                rotated=numbers.rotated,
                embedding=numbers.recipe.embedding,
                form=request.form if form is device or request.form == "cuda" else "cpu",
                is_shared=device is not None,
            )
        read = _quantised_reader(numbers, parts)
    if request.form == "cuda" and not is_joined and source.network.mixtures():
        for form in filter(None, (traced, device)):
            stacks = cuda_experts.replace_mixtures(form, formats)
    if device is not None and request.form == "cuda":
        tied_table.multiply_transposed(device)
        row_choice.choose_rows(device)
        cuda.check_operators(device)
    if device is not None and request.form == "tensorrt":
        wide_heads.let_decompose(device)
    if job.base == "bf16":
        widen.compute_in_fp32(traced)
    if not request.on_gpu and job.base == "fp32":
        amax = {} if quantised is None else quantised.numbers.amax
        stacks = experts.lay_out(traced.model, source.network, formats, amax)
    if stacks:
        read = _expert_reader(read, job, quantised, stacks)
    if not request.on_gpu:
        tied_table.hold_once(traced, ir.DataType.from_numpy(table_dtype(job)))
    fused = None if request.on_gpu else fuse.fuse(traced, job.cache_dtype)
    with stages.stage(
        "write weights",
        write.data_bytes(source.network, job.base, formats, table_dtype(job).itemsize),
    ) as advance:
        hashed = write.write_graph(traced, read, folder, advance, device)
    table = traced.model.graph.initializers.get(EMBEDDING)
    stored = None if table is None or table.dtype is None else table.dtype.numpy().name
    return Written(taps, fused, hashed, stored)


def table_dtype(job: Job) -> np.dtype:
    """Return the type of the embedding table in the weight file, if the table is not quantised.

    Only an fp32 graph for CPUs may have a table whose type differs from the graph's type.
    """
    if job.request.on_gpu or job.base != "fp32":
        return trace.element_type(job.base).numpy()
    return table_type(job.source.network, job.source.parameters.stored_type)


def _quantised_reader(numbers: Quantisation, parts: Mapping[str, quantise.Part]) -> ReadParameter:
    """Return a function that reads the initialisers of a quantised graph.

    ``parts`` maps the initialisers of quantised layers to the layer and the part.
    """
    held: dict[str, QuantisedWeight] = {}

    def read(name: str, dtype: np.dtype) -> np.ndarray | Lazy:
        part = parts.get(name)
        if part is None:
            return later(numbers.parameters, numbers.parameters.network, name, dtype)
        if part.layer not in held:
            # ``graph.write`` requests all parts of a layer one after the other, so it is enough to
            # keep one layer in memory.
            held.clear()
            held[part.layer] = (
                numbers.embedding() if part.layer == "embed" else numbers.weight(part.layer)
            )
        array = part_of(held[part.layer], part)
        if isinstance(array, np.ndarray) and part.part not in ("codes", "rows"):
            array = array.astype(dtype, copy=False)
        return array

    return read


def _expert_reader(
    read: ReadParameter,
    job: Job,
    quantised: Quantised | None,
    parts: Mapping[str, experts.StackPart],
) -> ReadParameter:
    """Return a function that reads the initialisers of a graph with experts.

    The experts of a layer are read and quantised one at a time, to save memory.
    """
    parameters: Parameters = (
        job.source.parameters if quantised is None else quantised.numbers.parameters
    )
    layers = job.source.network.quantisable()
    # Quantising an expert creates codes and scales together, but ``graph.write`` first requests the
    # codes, and later the scales. The dict ``found`` stores the scales in the meantime.
    found: dict[tuple[str, int, str], np.ndarray] = {}

    def matrix(layer: str, expert: int, dtype: np.dtype) -> np.ndarray:
        stored = parameters.read(f"{layer}.weight", dtype, (slice(expert, expert + 1),))
        of_one: np.ndarray = stored[0]
        return of_one

    def of_expert(part: experts.StackPart, expert: int) -> np.ndarray:
        if part.part in ("scales", "panel_scales"):
            return found.pop((part.layer, expert, part.part))
        if quantised is None or quantised.numbers.formats.get(part.layer, HIGH) == HIGH:
            return experts.fp32_panels(matrix(part.layer, expert, FP32))
        weight = quantised.numbers.expert(part.layer, expert)
        scales = {"codes": "scales", "panels": "panel_scales"}[part.part]
        kept = part_of(weight, quantise.Part(part.layer, scales))
        found[part.layer, expert, scales] = _bytes_of(kept)
        return _bytes_of(part_of(weight, quantise.Part(part.layer, part.part)))

    def for_cuda(part: experts.StackPart, dtype: np.dtype, expert: int) -> np.ndarray:
        if part.part.endswith("_scales"):
            return found.pop((part.layer, expert, part.part)).astype(dtype)
        joined = cuda_experts.layers_of(part)
        if quantised is None or quantised.numbers.formats.get(part.layer, HIGH) == HIGH:
            return cuda_experts.rows_of([matrix(layer, expert, dtype) for layer in joined])
        weights = [quantised.numbers.expert(layer, expert) for layer in joined]
        found[part.layer, expert, f"{part.part}_scales"] = cuda_experts.scales_of(weights)
        return cuda_experts.codes_of(weights)

    def with_experts(name: str, dtype: np.dtype) -> np.ndarray | Lazy:
        part = parts.get(name)
        if part is None:
            return read(name, dtype)
        if part.part.startswith("fc"):
            return experts.stacked(part.shape, functools.partial(for_cuda, part, dtype))
        if part.part == "wide":
            of_layer = functools.partial(parameters.read, f"{part.layer}.weight", dtype)
            return experts.join(layers[part.layer], of_layer)
        if part.part == "global_scale":
            assert quantised is not None
            return np.asarray(quantised.numbers.expert(part.layer, 0).global_scale)
        return experts.stacked(part.shape, functools.partial(of_expert, part))

    return with_experts


def _bytes_of(array: np.ndarray | Lazy) -> np.ndarray:
    """Return the whole array. E4M3 values become bytes, which kernels for experts expect."""
    whole = array[(slice(0, array.shape[0]),)]
    return whole.view(np.uint8) if whole.dtype == E4M3 else whole


def part_of(weight: QuantisedWeight, part: quantise.Part) -> np.ndarray | Lazy:
    """Return one initialiser of a quantised layer, for example its codes or its scales."""
    if part.part == "panels":
        return operators.lazy_panels(weight.format, weight.codes)
    if part.part == "panel_scales":
        if weight.format == "int8":
            count = weight.scales.size
            return np.pad(weight.scales, (0, operators.padded(count) - count))
        is_nvfp4 = weight.format == "nvfp4"
        return operators.panel_scales(weight.scales if is_nvfp4 else weight.scales.T.astype(FP16))
    if part.part == "blocks":
        size = weight.group_size or CUDA_BLOCK
        return operators.lazy_blocks(weight.codes, operators.BITS[weight.format], size)
    if part.part == "block_scales":
        scales: np.ndarray = weight.scales.T
        if weight.group_size is None:
            blocks = -(-weight.shape[0] // CUDA_BLOCK)
            scales = np.repeat(weight.scales[:, None], blocks, axis=1)
        return scales
    arrays: dict[str, np.ndarray] = {
        "codes": weight.codes,
        "scales": weight.scales,
        "global_scale": np.asarray(weight.global_scale),
        "rows": weight.codes.T,
        "row_scales": weight.scales[:, None],
    }
    return arrays[part.part]
