"""Implements the stages of a build that quantise a denoiser.

1. If the recipe needs calibration states, make them. A calibration state is a canvas on which the
   build observes the inputs of layers.
2. If the user requested ``--precision auto``, search for a recipe.
3. Compute the ranges, scales and rounded weights that the recipe needs.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import onnx_ir as ir

from dlm_calibration.precisions import FORMATS, Recipe
from dlm_calibration.states import State, read_states, write_states
from dlm_export import families, targets
from dlm_export.building.request import Job
from dlm_export.checkpoints.folder import ALGORITHMS, CheckpointError
from dlm_export.families.base import table_type
from dlm_export.graph import trace
from dlm_export.judging.precision_search import layer_times, search
from dlm_export.judging.precision_search.layer_times import Tuning
from dlm_export.memory import give_back
from dlm_export.network.layered import Layered
from dlm_export.progress import Stages
from dlm_export.quantising import calibrate, samples
from dlm_export.quantising.quantisation import Quantisation
from dlm_export.sources import Source
from dlm_export.targets import STORED
from dlm_export.workplace import Workplace
from dlm_runtime.text.tokenizer import Tokenizer


@dataclass(frozen=True, eq=False)
class Calibration:
    """The calibration data, the states made from it, and the manifest's entry about calibration.

    ``states`` is empty if the recipe needs no states.
    """

    data: samples.Data
    states: list[State] = field(default_factory=list)
    provenance: dict[str, Any] | None = None


@dataclass(frozen=True, eq=False)
class Quantised:
    """A quantised denoiser: the results of the stages in this module.

    ``calibration`` is ``None`` if the build needs no data. The search of ``--precision auto`` sets
    two more fields. ``curve`` contains the size and the loss of each recipe that the search
    considered. ``tuning`` contains the measured times of layers, if the search minimised the time.
    """

    numbers: Quantisation
    calibration: Calibration | None
    curve: list[search.CurvePoint] = field(default_factory=list)
    tuning: Tuning | None = None

    @property
    def is_simulated_on_cpu(self) -> bool:
        """True if any layer has a format that CPUs can only simulate.

        To simulate a format, the CPU computes in fp32 with the exact values of the format.
        """
        return any(FORMATS[name].is_simulated_on_cpu for name in self.numbers.formats.values())

    def precision_record(self) -> dict[str, Any]:
        """Return the entry ``precision`` of the manifest."""
        return {
            "name": self.numbers.recipe.name,
            **self.numbers.summary(),
            "calibration": None if self.calibration is None else self.calibration.provenance,
            "threshold": None,
            **({} if self.tuning is None else {"tuning": self.tuning.as_dict()}),
        }


def quantise(
    job: Job, tokenizer: Tokenizer | None, workplace: Workplace, stages: Stages
) -> Quantised:
    """Quantise the denoiser of ``job``, or use the quantised weights of its checkpoint.

    Raises CheckpointError, RecipeError, CalibrationError or TargetError.
    """
    request, source = job.request, job.source
    options = request.options.quantise
    is_stored = request.options.precision == STORED
    layers = source.network.quantisable()
    recipe = stored_recipe(source) if is_stored else request.recipe
    formats = job.formats
    if is_stored and recipe is not None:
        formats = recipe.formats(list(layers))
    # The search for a recipe measures losses on calibration states. A pre-quantised checkpoint
    # needs no calibration states, because the checkpoint contains the ranges of activations.
    needs_states = (
        recipe is None or formats is None or (not is_stored and recipe.needs_states(formats))
    )
    calibration = None
    if needs_states or request.is_judged:
        calibration = Calibration(
            samples.load_data(source.network, source.path, tokenizer, options.calibration)
        )
        if needs_states or options.effort.name == "full":
            calibration = _make_states(job, calibration.data, workplace, stages)
    curve: list[search.CurvePoint] = []
    tuned = None
    if recipe is None or formats is None:
        assert calibration is not None
        if options.auto.tune:
            tuned = _tune(job, stages)
        found = _search(job, calibration, tuned, workplace, stages)
        recipe, curve = replace(found.recipe, **options.recipe_changes), found.curve
        formats = recipe.formats(list(layers))
    scale_dtype = trace.element_type(job.base).numpy()
    if is_stored:
        targets.check(request.targets, formats.values(), STORED)
        numbers = calibrate.take_stored(
            source.parameters, source.network, recipe, formats, scale_dtype
        )
        return Quantised(numbers, calibration)
    states = [] if calibration is None else calibration.states
    units = calibrate.units(recipe, formats, source.network, len(states), options.calibrator)
    with stages.stage("calibrate", max(1, units)) as advance:
        numbers = calibrate.calibrate(
            source.parameters,
            source.network,
            recipe,
            formats,
            states,
            advance,
            options.calibrator,
            scale_dtype,
            workplace,
            fewest_tokens=options.min_tokens_per_expert,
            is_dense=source.network.joins_experts(job.request.form),
        )
    return Quantised(numbers, calibration, curve, tuned)


def stored_recipe(source: Source) -> Recipe:
    """Create a recipe with the formats in which a pre-quantised checkpoint stores its layers.

    Raises CheckpointError if the checkpoint is not quantised.
    """
    quantised = (
        source.parameters.quantised if isinstance(source.parameters, families.Weights) else {}
    )
    if not quantised:
        raise CheckpointError(
            f"{source.path}: not a pre-quantised checkpoint; choose a precision to quantise it to"
        )
    layers = tuple(
        (name.removesuffix(".weight"), ALGORITHMS[algorithm])
        for name, algorithm in quantised.items()
    )
    return Recipe(STORED, layers)


def _make_states(job: Job, data: samples.Data, workplace: Workplace, stages: Stages) -> Calibration:
    source, options = job.source, job.request.options.quantise
    if workplace.states is not None and workplace.states.exists():
        states = read_states(workplace.states)
    else:
        policy = samples.comparable(source.presets[job.preset])
        with stages.stage("make states", len(data.calibration)) as advance:
            runs = samples.trajectories(
                _layered(job, workplace), policy, workplace.activation_bytes, advance
            )
            states = list(samples.calibration_states(source, data, options.calibration, runs))
        give_back()
        states = conditioned(job, states, workplace, stages)
        if workplace.states is not None:
            write_states(states, workplace.states)
    digest = hashlib.sha256("".join(state.sha256 for state in states).encode()).hexdigest()
    provenance = {
        "samples": len(data.calibration),
        "states": len(states),
        "sources": dict(Counter(state.source for state in states)),
        "data": data.provenance(),
        "states_sha256": digest,
        "seed": options.calibration.seed,
        "preset": job.preset,
        "calibrator": options.calibrator,
    }
    return Calibration(data, states, provenance)


def conditioned(job: Job, states: list[State], workplace: Workplace, stages: Stages) -> list[State]:
    """Add soft embeddings to the states that need them (see ``samples.with_conditioning``)."""
    network = job.source.network
    if not any(samples.lacks_conditioning(network, state) for state in states):
        return states
    policy = samples.comparable(job.source.presets[job.preset])
    with stages.stage("condition states", len(network.layers)) as advance:
        return samples.with_conditioning(
            states,
            _layered(job, workplace),
            policy,
            workplace.activation_bytes,
            workplace.folder,
            advance,
        )


def _layered(job: Job, workplace: Workplace) -> Layered:
    source, device = job.source, workplace.device
    dtype = calibrate.computing_dtype(source.network, device)
    return families.layered(source.parameters, source.network, dtype, device)


def _tune(job: Job, stages: Stages) -> Tuning:
    """Measure on this processor how long each layer takes in each format.

    The input of each layer has one row for each token of a decoding block.
    """
    layers = [
        layer for members in search.searched(job.source.network).values() for layer in members
    ]
    formats = search.formats_for(job.request.targets, job.request.options.quantise.auto)
    rows = job.source.presets[job.preset].block_length
    with stages.stage("tune", len(layer_times.shapes_of(layers, rows))) as advance:
        table = ir.DataType.from_numpy(
            table_type(job.source.network, job.source.parameters.stored_type)
        )
        return layer_times.measure(layers, formats, rows, advance, table=table)


def _search(
    job: Job, calibration: Calibration, tuned: Tuning | None, workplace: Workplace, stages: Stages
) -> search.Found:
    """Find the cheapest recipe whose loss is within the budget, for ``--precision auto``."""
    request, options = job.request, job.request.options.quantise
    formats = search.formats_for(request.targets, options.auto)
    network, exact = job.source.network, options.effort.name == "full"
    with stages.stage("search", search.units(network, formats, exact=exact)) as advance:
        return search.search(
            job.source,
            calibration.states,
            options.effort.chosen(calibration.data.calibration),
            formats,
            samples.comparable(job.source.presets[job.preset]),
            options.budgets.max_ce_increase,
            options.calibration.seed,
            advance,
            exact=exact,
            form=request.form,
            tuning=tuned,
            workplace=workplace,
            fewest_tokens=options.min_tokens_per_expert,
        )
