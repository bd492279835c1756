"""Checks what was asked for before any work: first alone, then against the source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from dlm_calibration.recipes import FORMATS, HIGH, Recipe, RecipeError, abridged, for_experts
from dlm_export import graph, memory, targets
from dlm_export.building.options import BuildOptions
from dlm_export.graph import quantise as operands
from dlm_export.judging.parity import by_layer
from dlm_export.judging.precision_search import search
from dlm_export.network.spec import ExpertsSpec, LinearSpec, NetworkSpec
from dlm_export.planning import roofline
from dlm_export.quantising import modelopt, samples
from dlm_export.sources import Source
from dlm_export.targets import AUTO, STORED, Target, TargetError
from dlm_export.tensorrt import builders, estimate
from dlm_export.tensorrt.builders import Builder
from dlm_export.tensorrt.estimate import EngineOptions
from dlm_export.workplace import find_device


@dataclass(frozen=True)
class Request:
    """Options that were found good, and what their names stand for."""

    options: BuildOptions
    targets: tuple[Target, ...]
    recipe: Recipe | None
    """None in full precision, and where it is found on the way: ``auto``, ``stored``."""
    builders: Mapping[str, Builder]
    """Target -> what builds its engine here; those without are built on the device."""
    device: torch.device
    """Where torch works."""

    @property
    def on_gpu(self) -> bool:
        return self.targets[0].is_gpu

    @property
    def form(self) -> operands.Form:
        """Whom the graph that runs is written for."""
        if not self.on_gpu:
            return "cpu"
        return "cuda" if self.targets[0].provider == "cuda" else "tensorrt"

    @property
    def is_plain(self) -> bool:
        """Whether the graph is of elementary operators only."""
        return self.targets[0].needs_plain_graph or self.options.plain_graph

    @property
    def is_quantised(self) -> bool:
        return self.options.precision not in graph.PRECISIONS

    @property
    def is_judged(self) -> bool:
        """Whether what quantisation costs is to be found out."""
        return (
            self.is_quantised
            and self.options.check_parity
            and self.options.quantise.effort.name != "none"
        )

    def base_of(self, source: Source) -> str:
        """The precision of what is not quantised: parameters, activations, cache."""
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
    """A request for one source: what every stage of its build starts from."""

    request: Request
    source: Source
    base: str
    """Full precision of what is not quantised."""
    preset: str
    """The loop whose canvases calibrate, and by which the bundle is judged."""
    formats: Mapping[str, str] | None
    """Layer -> its format, where the recipe is known beforehand."""
    notes: tuple[str, ...] = ()
    """Layers that are held in another format than was asked for, for people."""

    @property
    def cache_dtype(self) -> str:
        """Of keys and values between passes, as the manifest has it."""
        return graph.CACHE_DTYPES[self.request.options.cache_dtype or self.base]

    @property
    def is_cache_judged(self) -> bool:
        """Whether what a cache costs that rounds keys and values is to be found out."""
        is_rounded = self.cache_dtype != graph.CACHE_DTYPES[self.base]
        return is_rounded and self.request.options.quantise.effort.name != "none"


def check_request(options: BuildOptions) -> Request:
    """Raises TargetError, RecipeError, CalibrationError, EngineError, DeviceError for options that
    cannot be met, whatever the source.
    """
    devices = targets.find_all(options.targets)
    on_gpu = devices[0].is_gpu
    recipe = targets.recipe_for(devices, options.precision)
    if recipe is not None and options.quantise.recipe_changes:
        recipe = replace(recipe, **options.quantise.recipe_changes)
    if on_gpu and recipe is not None and recipe.embedding is not None:
        raise TargetError(
            "a quantised embedding table is for the CPU: leave --embedding out for GPUs"
        )
    if options.activations is not None:
        if options.precision in graph.PRECISIONS or not on_gpu:
            raise TargetError(
                f"activations in {options.activations} are for quantised bundles for GPUs"
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
            "--resume is for a recipe that is known beforehand, and no full precision"
        )
    return Request(options, tuple(devices), recipe, found, find_device(options.device))


def _check_cache(options: BuildOptions, *, on_gpu: bool) -> None:
    """TargetError for a cache of another type than what is asked for with it can have."""
    asked = f"--cache-dtype {options.cache_dtype}"
    if on_gpu:
        raise TargetError(
            f"{asked} is for CPUs: on a GPU keys and values are in the type of its activations. Leave it out."
        )
    if options.plain_graph:
        raise TargetError(
            f"{asked} needs an operator of ours, which --plain-graph keeps out. Leave one of the two out."
        )
    if options.precision in ("fp16", "bf16") and options.cache_dtype != options.precision:
        raise TargetError(
            f"{asked} is for graphs that compute in fp32, and --precision {options.precision} keeps keys and values in "
            f"{options.precision}. Take fp32 or a quantised precision, or leave it out."
        )


def check_job(request: Request, source: Source) -> Job:
    """Raises RequestError, RecipeError, EngineError or DlmError if it cannot be built so."""
    options, network = request.options, source.network
    if request.on_gpu:
        _check_dense(request, network)
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
    if request.recipe is not None and request.recipe.embedding is not None and network.tied_head:
        raise RecipeError(
            "this denoiser's embedding table is also the weight of its head: leave out the format of the embedding, and give "
            'the head one, as in head = "int8-dynamic"'
        )
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


DENSE_EXPERTS = 16
"""Experts that a GPU's graph may have: all of them are computed for every token."""


def _check_dense(request: Request, network: NetworkSpec) -> None:
    """TargetError for mixtures of which a GPU's graph would compute far more than what a token is
    routed to.
    """
    for i, layer in enumerate(network.layers):
        if isinstance(layer.mlp, ExpertsSpec) and layer.mlp.count > DENSE_EXPERTS:
            raise TargetError(
                f"target {request.targets[0].name}: layer {i} routes a token to {layer.mlp.active} of {layer.mlp.count} "
                "experts. A GPU's graph has no operator for that and computes all of them for every token, which is done for "
                f"up to {DENSE_EXPERTS}. Build for cpu."
            )


def held_in(request: Request, layer: LinearSpec, name: str) -> str:
    """The format that a layer is held in: the one asked for or, where its shape does not suit that,
    the next that all targets take.
    """
    choices = [
        name,
        *(
            other
            for other in FORMATS[name].next
            if not any(target.missing([other]) for target in request.targets)
        ),
    ]
    fitting = (
        other for other in choices if operands.misfit(layer, other, on_gpu=request.on_gpu) is None
    )
    return next(fitting, HIGH)


def _held_together(
    request: Request, network: NetworkSpec, asked: Mapping[str, str]
) -> dict[str, str]:
    """The formats of experts, whose three stacks one kernel multiplies: one that suits them all.
    Raises RecipeError.
    """
    found: dict[str, str] = {}
    for stacks in network.mixtures():
        wanted = {asked[stack.path] for stack in stacks}
        if len(wanted) > 1:
            named = ", ".join(f"{stack.path} {asked[stack.path]}" for stack in stacks)
            raise RecipeError(
                f"experts have one format for gate, up and down, and the recipe asks for {named}"
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
    """One sentence for all layers that are held in the same format for the same reason."""
    kept: dict[tuple[str | None, str], list[str]] = {}
    for path, layer in network.quantisable().items():
        if held[path] != asked[path]:
            why = operands.misfit(layer, asked[path], on_gpu=request.on_gpu)
            kept.setdefault((why, held[path]), []).append(path)
    return tuple(
        f"{why}: {len(paths)} layer{'s' * (len(paths) > 1)} ({abridged(paths)}) in {'full precision' if name == HIGH else name}"
        for (why, name), paths in kept.items()
    )


def _check_device_memory(job: Job) -> None:
    """EngineError if a target's memory is known beforehand to be too small for what is asked."""
    request, network = job.request, job.source.network
    block_length = job.source.presets[job.source.default_preset].block_length
    limits = estimate.limits_of(
        network.max_canvas_length, block_length, request.options.engine or EngineOptions()
    )
    element_bytes = graph.PRECISIONS[job.base]
    kinds = roofline.kinds_of(network, job.formats or {}, element_bytes)
    weights_bytes = roofline.weights_bytes(network, kinds, element_bytes)
    for target in request.targets:
        estimate.check_memory(
            network, target, weights_bytes, limits, on_host=target.name in request.builders
        )
