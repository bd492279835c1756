"""Checks the options of a build before the work starts.

``check_request`` checks the options before the checkpoint or bundle is opened. ``check_job`` then
checks whether the checkpoint or bundle can be built with these options.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from dlm_calibration.precisions import FORMATS, HIGH, Recipe, RecipeError, abridged, for_experts
from dlm_export import graph, memory, targets
from dlm_export.building.options import BuildOptions
from dlm_export.graph import quantise as operands
from dlm_export.judging.parity import by_layer
from dlm_export.judging.precision_search import search
from dlm_export.network.spec import LinearSpec, NetworkSpec
from dlm_export.planning import roofline
from dlm_export.planning.shapes import computes_all_experts
from dlm_export.quantising import modelopt, samples
from dlm_export.sources import Source
from dlm_export.targets import AUTO, STORED, Target, TargetError
from dlm_export.tensorrt import builders, estimate
from dlm_export.tensorrt.builders import Builder
from dlm_export.tensorrt.estimate import EngineOptions
from dlm_export.workplace import find_device
from dlm_runtime.cache_dtypes import CACHE_DTYPES


@dataclass(frozen=True)
class Request:
    """The checked options of a build, with objects such as ``Target`` instead of their names."""

    options: BuildOptions
    targets: tuple[Target, ...]
    recipe: Recipe | None
    """The recipe that the option ``precision`` names.

    ``None`` for a full precision. Also ``None`` for ``auto`` and ``stored``, because the build
    finds the recipe later.
    """
    builders: Mapping[str, Builder]
    """Maps the name of a target to the builder of its engine.

    If the mapping does not contain a target, this machine does not build the target's engine.
    """
    device: torch.device
    """The device on which torch runs."""

    @property
    def on_gpu(self) -> bool:
        return self.targets[0].is_gpu

    @property
    def form(self) -> operands.Form:
        """The engine for which the graph is written: "cpu", "cuda" or "tensorrt"."""
        if not self.on_gpu:
            return "cpu"
        return "cuda" if self.targets[0].provider == "cuda" else "tensorrt"

    @property
    def is_plain(self) -> bool:
        """True if the graph must consist of elementary operators only."""
        return self.targets[0].needs_plain_graph or self.options.plain_graph

    @property
    def is_quantised(self) -> bool:
        return self.options.precision not in graph.PRECISIONS

    @property
    def is_judged(self) -> bool:
        """True if the build measures how much accuracy quantisation costs."""
        return (
            self.is_quantised
            and self.options.check_parity
            and self.options.quantise.effort.name != "none"
        )

    def base_of(self, source: Source) -> str:
        """Return the precision of all parts that are not quantised."""
        if not self.is_quantised:
            return self.options.precision
        if not self.on_gpu:
            return "fp32"
        takes_bf16 = all("bf16" in target.full_precisions for target in self.targets)
        return self.options.activations or (
            "bf16" if source.precision == "bf16" and takes_bf16 else "fp16"
        )


@dataclass(frozen=True)
class Job:
    """A checked request, and its opened checkpoint or bundle. All stages of a build use it."""

    request: Request
    source: Source
    base: str
    """The precision of all parts that are not quantised."""
    preset: str
    """The preset that generates text for calibration and for measuring accuracy."""
    formats: Mapping[str, str] | None
    """Maps each layer to its format.

    ``None`` if there is no recipe, or if the recipe is not known yet.
    """
    notes: tuple[str, ...] = ()
    """Messages for the user about layers that do not get the requested format."""

    @property
    def cache_dtype(self) -> str:
        """The type of cached keys and values, in the manifest's spelling."""
        return CACHE_DTYPES[self.request.options.cache_dtype or self.base]

    @property
    def is_cache_judged(self) -> bool:
        """True if the build measures how much accuracy is lost by rounding the cache."""
        return self.wants_cache_judged and self.source.network.draft_block is None

    @property
    def wants_cache_judged(self) -> bool:
        """True if the cache is rounded, and the user wants to know how much accuracy this costs."""
        is_rounded = self.cache_dtype != CACHE_DTYPES[self.base]
        return is_rounded and self.request.options.quantise.effort.name != "none"


def check_request(options: BuildOptions) -> Request:
    """Check the options of a build without the source.

    Raises TargetError, RecipeError, CalibrationError, EngineError or DeviceError if no checkpoint
    or bundle can be built with the options.
    """
    devices = targets.find_all(options.targets)
    on_gpu = devices[0].is_gpu
    recipe = targets.recipe_for(devices, options.precision)
    if recipe is not None and options.quantise.recipe_changes:
        recipe = replace(recipe, **options.quantise.recipe_changes)
    if on_gpu and recipe is not None and recipe.embedding is not None:
        raise TargetError("a quantised embedding table is for CPUs only: omit --embedding for GPUs")
    if options.activations is not None:
        if options.precision in graph.PRECISIONS or not on_gpu:
            raise TargetError(
                f"activations in {options.activations} are for quantised bundles for GPUs only"
            )
        targets.recipe_for(devices, options.activations)
    if options.cache_dtype is not None:
        _check_cache(options, on_gpu=on_gpu)
    if options.quantise.calibrator == "modelopt":
        modelopt.require()
    if options.precision == AUTO:
        search.formats_for(devices, options.quantise.auto)
    found = {}
    if on_gpu and options.engine is not None:
        for target in devices:
            builder = builders.find_builder(target, options.engine) if target.engine_kinds else None
            if builder is not None:
                found[target.name] = builder
    if options.resume is not None and recipe is None:
        raise RecipeError(
            "--resume needs a recipe that is known in advance; it does not work with a full precision"
        )
    return Request(options, tuple(devices), recipe, found, find_device(options.device))


def _check_cache(options: BuildOptions, *, on_gpu: bool) -> None:
    """Raise TargetError if ``cache_dtype`` contradicts a different option."""
    asked = f"--cache-dtype {options.cache_dtype}"
    if on_gpu:
        raise TargetError(
            f"{asked} is for CPUs only: on a GPU, keys and values have the type of the activations. Omit it."
        )
    if options.plain_graph:
        raise TargetError(
            f"{asked} needs one of dlm-export's own operators, which --plain-graph excludes. Omit one of the two."
        )
    if options.precision in ("fp16", "bf16") and options.cache_dtype != options.precision:
        raise TargetError(
            f"{asked} is for graphs that compute in fp32, but --precision {options.precision} keeps keys and values in "
            f"{options.precision}. Use fp32 or a quantised precision, or omit it."
        )


def check_job(request: Request, source: Source) -> Job:
    """Check whether ``source`` can be built as requested, and prepare the build.

    Raises a DlmError, such as RecipeError, if the build is impossible.
    """
    options, network = request.options, source.network
    preset, _ = samples.threshold_preset(
        network, source.presets, options.quantise.calibration.preset
    )
    formats: dict[str, str] | None = None
    notes: tuple[str, ...] = ()
    if request.recipe is not None and network.mixtures():
        request = replace(request, recipe=for_experts(request.recipe))
    if request.recipe is not None:
        asked = request.recipe.formats(list(network.quantisable()))
        formats = {
            path: held_in(request, layer, asked[path])
            for path, layer in network.quantisable().items()
        }
        formats |= _held_together(request, network, asked)
        notes = _told(request, network, asked, formats)
    if request.form == "cuda" and network.mixtures() and network.joins_experts("cuda"):
        notes += ("ONNX Runtime has no operator for these experts: each pass computes all of them",)
    has_table = request.recipe is not None and request.recipe.embedding is not None
    if has_table and network.conditioning is not None:
        raise RecipeError(
            "this denoiser's soft embeddings are computed from its embedding table, which stays in full precision: omit the "
            "format of the embedding"
        )
    if has_table and network.tied_head:
        raise RecipeError(
            "this denoiser's embedding table is also the weight of its head: omit the format of the embedding, and give "
            'the head one, as in head = "int8-dynamic"'
        )
    quantising = options.quantise
    if request.is_judged:
        has_texts = quantising.effort.has_texts(network)
        quantising.budgets.check_texts(has_texts=has_texts)
    job = Job(request, source, request.base_of(source), preset, formats, notes)
    if options.check_parity:
        instead = "Pass --no-verify, and run `dlm-export verify` on a larger machine."
        if request.is_quantised:
            holder = "the parity check holds the denoiser's largest part in fp32"
            needed = by_layer.largest_bytes(network)
        else:
            holder = "the parity check holds the denoiser in fp32"
            needed = 4 * network.parameter_count()
        memory.check_host_memory(needed, holder, instead)
    if request.on_gpu and options.precision not in (AUTO, STORED):
        _check_device_memory(job)
    return job


def held_in(request: Request, layer: LinearSpec, name: str) -> str:
    """Return the format that a layer gets when the recipe requests the format ``name``.

    The result is ``name`` itself if the layer's shape allows this format. Otherwise, the function
    returns the first alternative format that the shape allows and that all targets support.
    """
    choices = [
        name,
        *(
            other
            for other in FORMATS[name].next
            if not any(target.missing([other]) for target in request.targets)
        ),
    ]
    fitting = (other for other in choices if operands.misfit(layer, other, request.form) is None)
    return next(fitting, HIGH)


def _held_together(
    request: Request, network: NetworkSpec, asked: Mapping[str, str]
) -> dict[str, str]:
    """Choose one format for gate, up and down, which one kernel multiplies. Raises RecipeError."""
    found: dict[str, str] = {}
    for stacks in network.mixtures():
        wanted = {asked[stack.path] for stack in stacks}
        if len(wanted) > 1:
            named = ", ".join(f"{stack.path} {asked[stack.path]}" for stack in stacks)
            raise RecipeError(
                f"experts need one format for gate, up and down, but the recipe asks for {named}"
            )
        held = [held_in(request, stack, asked[stack.path]) for stack in stacks]
        found |= dict.fromkeys(
            (stack.path for stack in stacks),
            next((each for each in held if each not in wanted), held[0]),
        )
    return found


def _told(
    request: Request, network: NetworkSpec, asked: Mapping[str, str], held: Mapping[str, str]
) -> tuple[str, ...]:
    """Return messages about layers that get another format, or are slow on the CUDA provider."""
    kept: dict[tuple[str | None, str], list[str]] = {}
    for path, layer in network.quantisable().items():
        chosen = FORMATS[held[path]]
        if held[path] != asked[path]:
            why = operands.misfit(layer, asked[path], request.form)
            kept.setdefault((why, held[path]), []).append(path)
        if request.form == "cuda" and chosen.weights is not None:
            slow = network.slow_on_cuda(layer, chosen)
            if slow is not None:
                why = f"each pass converts the matrix to fp16 ({slow})"
                kept.setdefault((why, held[path]), []).append(path)
    return tuple(
        f"{why}: {len(paths)} layer{'s' * (len(paths) > 1)} ({abridged(paths)}) in {'full precision' if name == HIGH else name}"
        for (why, name), paths in kept.items()
    )


def _check_device_memory(job: Job) -> None:
    """Raise EngineError if the memory of a target is known and too small."""
    request, network, formats = job.request, job.source.network, job.formats or {}
    weights = roofline.Costs(network, formats, graph.PRECISIONS[job.base]).weight_bytes
    limits, used, joins = engine_limits(job), set(formats.values()), joins_experts(job, formats)
    for target in request.targets:
        on_host = target.name in request.builders
        estimate.check_memory(
            network, target, weights, limits, used, on_host=on_host, all_experts=joins
        )


def joins_experts(job: Job, formats: Mapping[str, str]) -> bool:
    """Return whether the bundle's graphs compute all experts of a layer for every token."""
    request = job.request
    return computes_all_experts(
        job.source.network, request.targets, formats, is_plain=request.is_plain
    )


def engine_limits(job: Job) -> estimate.Limits:
    """Return the largest passes of the job's engines. Raises EngineError."""
    block_length = job.source.presets[job.source.default_preset].block_length
    options = job.request.options.engine or EngineOptions()
    return estimate.limits_of(job.source.network.max_canvas_length, block_length, options)
