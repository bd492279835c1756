"""What a quantised bundle costs: the judge's figures, against its source or against another bundle.

Two bundles are compared where there is no torch: what a source in torch needs is imported where it
is opened.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dlm_runtime
from dlm_calibration.metrics import summarise
from dlm_calibration.states import Sample
from dlm_export.bundle import network_of, read_manifest
from dlm_export.judging.accuracy.evidence import Evidence
from dlm_export.judging.accuracy.masked import compare_masked, masked_canvases
from dlm_export.judging.accuracy.rounds import LARGE_PILOT, PILOT_SAMPLES, Effort, judge_in_rounds
from dlm_export.judging.accuracy.verdict import Budgets, Judgement
from dlm_export.judging.report.page import (
    ACCURACY_FILE,
    REPORT_FILE,
    require_matplotlib,
    write_report,
)
from dlm_export.judging.sides.side import (
    BundlePredictor,
    Generator,
    JudgeError,
    Predictor,
    Scorer,
    Seer,
)
from dlm_export.judging.tuning.effort_levels import Levels, fit_levels
from dlm_export.judging.tuning.replay import Recording, record
from dlm_export.judging.tuning.threshold import (
    Refit,
    check_policy,
    refit_by_replay,
    refit_steps,
    refit_threshold,
)
from dlm_export.network.spec import NetworkSpec
from dlm_export.opening import ON_CPU, Opening
from dlm_export.outputs import TakenError, claimed_file
from dlm_export.progress import Progress
from dlm_export.quantising.samples import CalibrationOptions, load_data, threshold_preset
from dlm_runtime.errors import BundleError
from dlm_runtime.files import read_object
from dlm_runtime.manifest import MANIFEST_FILE, check_manifest
from dlm_runtime.policy import Policy

if TYPE_CHECKING:
    import torch

    from dlm_export.judging.sides.layerwise import SweptPredictor
    from dlm_export.quantising.numbers import Quantisation
    from dlm_export.sources import Source
    from dlm_export.workplace import Workplace

VERIFY_SECONDS = 60.0  # that the default effort may take where there is no build to measure it by
_MOST_BYTES = 12 << 20  # of accuracy.json: four hundred times the demo's


def new_tokens(samples: Sequence[Sample], policy: Policy, network: NetworkSpec) -> int:
    """Mask tokens for a free run: the longest response in whole blocks, as far as every prompt
    leaves room.
    """
    block_length = policy.block_length or 32
    starts = [sample.prompt_length or len(sample.tokens) // 2 for sample in samples]
    longest = max(len(sample.tokens) - start for sample, start in zip(samples, starts, strict=True))
    wanted = -(-longest // block_length) * block_length
    return max(1, min(wanted, network.max_canvas_length - max(starts)))


def judge_source(
    source: Source,
    bundle: dlm_runtime.Bundle,
    samples: Sequence[Sample],
    name: str,
    policy: Policy,
    seed: int,
    effort: Effort,
    budgets: Budgets,
    on_done: Callable[[], None],
    workplace: Workplace | None = None,
) -> Judgement:
    """A bundle against its source in torch fp32, with bf16 as the noise floor where the denoiser is
    small.

    The source is held whole only where it runs freely; otherwise it is read a layer at a time, in a
    ``workplace`` (None: the CPU, and all of its memory).
    """
    import torch

    from dlm_export import families
    from dlm_export.judging.sides.torch import TorchPredictor
    from dlm_export.quantising import calibrate
    from dlm_export.workplace import threads_for

    c = source.network
    is_small = c.parameter_count() <= calibrate.LARGE

    def runs_freely(name: str, dtype: torch.dtype) -> TorchPredictor:
        return TorchPredictor(
            families.load(source.parameters, c, dtype).to(
                None if workplace is None else workplace.device
            ),
            name,
        )

    def is_shown(name: str, dtype: torch.dtype) -> SweptPredictor:
        return shown_source(source, name, dtype, workplace)

    with threads_for(c.largest_matrix()):
        make = runs_freely if effort.name == "full" else is_shown
        free = (
            runs_freely("fp32", torch.float32)
            if effort.name == "full" or effort.free_runs
            else None
        )
        return _judge(
            free if free is not None and effort.name == "full" else is_shown("fp32", torch.float32),
            free,
            BundlePredictor(bundle, name),
            samples,
            c,
            policy,
            seed,
            effort,
            budgets,
            make("bf16", torch.bfloat16) if is_small else None,
            PILOT_SAMPLES if is_small else LARGE_PILOT,
            on_done,
        )


def shown_source(
    source: Source, name: str, dtype: torch.dtype, workplace: Workplace | None
) -> SweptPredictor:
    """A source in torch that is shown its canvases, and is read a layer at a time."""
    from dlm_export import families
    from dlm_export.judging.sides.layerwise import SweptPredictor
    from dlm_export.workplace import Workplace

    place = workplace or Workplace()
    layered = families.layered(source.parameters, source.network, dtype, place.device)
    return SweptPredictor(layered, name, memory_bytes=place.activation_bytes, folder=place.folder)


def _judge(
    reference: Scorer,
    free: Predictor | None,
    candidate: BundlePredictor,
    samples: Sequence[Sample],
    network: NetworkSpec,
    policy: Policy,
    seed: int,
    effort: Effort,
    budgets: Budgets,
    floor: Scorer | None,
    pilot: int,
    on_done: Callable[[], None],
) -> Judgement:
    pool = list(samples[: effort.most])
    is_full = effort.name == "full"
    evidence = Evidence(
        reference,
        candidate,
        pool,
        policy=policy,
        max_new_tokens=new_tokens(pool, policy, network),
        decode=decoder(candidate.bundle),
        seed=seed,
        noise_floor=floor,
        states_of="reference" if is_full else "candidate",
        free=free,
        free_runs=effort.free_runs if isinstance(reference, Seer) else None,
    )
    found = judge_in_rounds(evidence, effort, budgets, pilot, on_done)
    return replace(found, speed=candidate.speed())


def decoder(bundle: dlm_runtime.Bundle) -> Callable[[list[int]], str | None]:
    """Generated ids to text, up to the first end token; None without a tokenizer."""
    tokenizer, stops = bundle.tokenizer, bundle.eos_token_ids

    def decode(tokens: list[int]) -> str | None:
        end = next((i for i, token in enumerate(tokens) if token in stops), len(tokens))
        return None if tokenizer is None else tokenizer.decode(tokens[:end])

    return decode


@dataclass(frozen=True)
class JudgingOptions:
    """What a finished bundle is judged by: which data, how thoroughly, budgets; and what runs it."""

    data: CalibrationOptions = field(default_factory=CalibrationOptions)
    effort: Effort = field(default_factory=lambda: Effort(seconds=VERIFY_SECONDS))
    budgets: Budgets = field(default_factory=Budgets)
    opening: Opening = ON_CPU


def judge_bundle(
    folder: Path,
    source: Source,
    options: JudgingOptions,
    progress: Progress,
    warn: Callable[[str], None] = lambda _: None,
) -> Judgement:
    """Judge a finished bundle against its source on the judging part of the data. Raises DlmError."""
    with options.opening.open(folder) as bundle:
        data = load_data(
            source.network, source.path, bundle.tokenizer, options.data, is_calibrating=False
        )
        for doubt in data.doubts(option="--data"):
            warn(doubt)
        samples = data.judging[: options.effort.most]
        preset, _ = threshold_preset(source.network, source.presets, options.data.preset)
        progress.start("judge", judge_units(samples))
        result = judge_source(
            source,
            bundle,
            samples,
            _title(folder, bundle),
            source.presets[preset].greedy(),
            options.data.seed,
            options.effort,
            options.budgets,
            progress.advance,
        )
    return replace(result, **_known_layers(folder)).with_budgets(options.budgets)


def compare_bundles(
    reference: Path,
    candidate: Path,
    options: JudgingOptions,
    progress: Progress,
    warn: Callable[[str], None] = lambda _: None,
) -> Judgement:
    """Judge one bundle by another. Raises DlmError, and JudgeError if they do not predict the same
    tokens.
    """
    with (
        options.opening.open(reference) as first,
        options.opening.open(candidate) as second,
    ):
        check_manifest(first.manifest, reference)
        check_manifest(second.manifest, candidate)
        c = network_of(first.manifest)
        _check_one_source(reference, first.manifest, candidate, second.manifest, warn)
        theirs, ours = (
            BundlePredictor(first, _title(reference, first)),
            BundlePredictor(second, _title(candidate, second)),
        )
        data = load_data(c, reference, first.tokenizer, options.data, is_calibrating=False)
        for doubt in data.doubts(option="--data"):
            warn(doubt)
        samples = data.judging[: options.effort.most]
        presets = {name: first.policy(name) for name in first.manifest["loop"]["presets"]}
        _, policy = threshold_preset(c, presets, options.data.preset)
        progress.start("judge", judge_units(samples))
        seed, effort = options.data.seed, options.effort
        result = _judge(
            theirs,
            theirs,
            ours,
            samples,
            c,
            policy,
            seed,
            effort,
            options.budgets,
            None,
            PILOT_SAMPLES,
            progress.advance,
        )
    return replace(result, **_known_layers(candidate)).with_budgets(options.budgets)


def _check_one_source(
    reference: Path,
    first: Mapping[str, Any],
    candidate: Path,
    second: Mapping[str, Any],
    warn: Callable[[str], None],
) -> None:
    """JudgeError if two bundles describe two networks; a warning if they were built from one under
    two configurations.
    """
    found = network_of(second).difference(network_of(first), but=("max_canvas_length",))
    if found is not None:
        raise JudgeError(
            f"{candidate} is another denoiser than {reference}: {found}. Compare bundles of one checkpoint."
        )
    configs = [manifest.get("source", {}).get("config_sha256") for manifest in (first, second)]
    if None not in configs and configs[0] != configs[1]:
        warn(
            f"{candidate} was built from another config.json than {reference} (SHA-256 {configs[1]}, not {configs[0]}): what "
            "differs may be two checkpoints, not two precisions"
        )


def _title(folder: Path, bundle: dlm_runtime.Bundle) -> str:
    return f"{folder.name} ({bundle.manifest['precision']['name']})"


def _known_layers(folder: Path) -> dict[str, Any]:
    """The sensitivity sweep that the bundle's build recorded, if it did: ``layers`` and
    ``layers_method`` of a judgement.
    """
    judgement = recorded(folder).get("judgement")
    layers, method = (
        (judgement.get("layers"), judgement.get("layers_method"))
        if isinstance(judgement, dict)
        else ([], None)
    )
    kinds = {
        "layer": (str,),
        "format": (str,),
        "kl": (float, type(None)),
        "frontier_kl": (float, type(None)),
    }

    def is_loss(row: Any) -> bool:
        return isinstance(row, dict) and all(
            type(row.get(key, row)) in kind for key, kind in kinds.items()
        )

    if (
        not isinstance(layers, list)
        or not all(map(is_loss, layers))
        or method not in (None, "fisher", "exact")
    ):
        raise BundleError(
            f"{folder / ACCURACY_FILE}: judgement.layers is not what a build writes. Build the bundle again."
        )
    return {"layers": layers, "layers_method": method}


def recorded(bundle: Path) -> dict[str, Any]:
    """accuracy.json of a bundle, empty where it has none. Raises BundleError."""
    path = bundle / ACCURACY_FILE
    return read_object(path, _MOST_BYTES, BundleError) if path.exists() else {}


@contextmanager
def claimed_files(folder: Path, *, force: bool) -> Iterator[tuple[Path, Path]]:
    """Where to ``write_files`` what is to become accuracy.json and report.html of ``folder``: see
    ``outputs.claimed``.

    Raises TakenError for a bundle's folder, whose own files these are; ReportError without
    matplotlib.
    """
    if (folder / MANIFEST_FILE).exists():
        raise TakenError(
            f"{folder} is a bundle, and its files stay as they were built. Choose another folder for the report."
        )
    require_matplotlib()
    with (
        claimed_file(folder / ACCURACY_FILE, force=force) as accuracy,
        claimed_file(folder / REPORT_FILE, force=force) as report,
    ):
        yield accuracy, report


def write_files(paths: tuple[Path, Path], bundle: Path, judgement: Judgement) -> None:
    """accuracy.json and report.html of a judgement, to paths of ``claimed_files``; what its build
    recorded goes along.
    """
    manifest = read_manifest(bundle, check_hashes=False)
    accuracy = recorded(bundle) | {"judgement": judgement.as_dict()}
    paths[0].write_text(json.dumps(accuracy, indent=1, allow_nan=False) + "\n")
    sizes = {name: entry["bytes"] for name, entry in manifest["files"].items()}
    write_report(paths[1], manifest, accuracy, sizes, judgement.speed)


def record_runs(
    source: Source,
    bundle: dlm_runtime.Bundle,
    samples: Sequence[Sample],
    preset: str,
    on_done: Callable[[], None],
) -> Recording:
    """The bundle's runs under a preset of its source, for thresholds and effort levels to be fitted
    by a replay of them.

    ``on_done`` is called once a run, of which there are as many as samples at most.
    """
    policy, candidate = source.presets[preset].greedy(), BundlePredictor(bundle, "candidate")
    check_policy(policy)
    length = new_tokens(samples, policy, source.network)
    return record(candidate, samples, policy, length, candidate.max_canvas_length, on_done)


def fit_threshold(
    source: Source,
    bundle: dlm_runtime.Bundle,
    samples: Sequence[Sample],
    preset: str,
    seed: int,
    on_done: Callable[[], None],
    *,
    recording: Recording | None,
    workplace: Workplace | None = None,
) -> Refit:
    """Whether the bundle wants another threshold than its source; on samples that are not judged
    by. See ``judge_source``.

    Thresholds are tried by a replay of ``recording``; None: by generations of both.
    """
    import torch

    from dlm_export import families
    from dlm_export.judging.sides.torch import TorchPredictor

    c, policy, candidate = (
        source.network,
        source.presets[preset].greedy(),
        BundlePredictor(bundle, "candidate"),
    )
    length, decode = new_tokens(samples, policy, c), decoder(bundle)
    if recording is not None:
        seer = shown_source(source, "fp32", torch.float32, workplace)
        return refit_by_replay(
            seer, candidate, recording, length, decode, preset=preset, seed=seed, on_done=on_done
        )
    reference = TorchPredictor(families.load(source.parameters, c), "fp32")
    return refit_threshold(
        reference,
        candidate,
        samples,
        policy,
        length,
        decode,
        preset=preset,
        seed=seed,
        on_done=on_done,
    )


def fit_effort(
    source: Source,
    bundle: dlm_runtime.Bundle,
    samples: Sequence[Sample],
    threshold: Refit,
    on_done: Callable[[], None],
    *,
    recording: Recording | None,
) -> Levels:
    """Effort levels of the preset that ``threshold`` was fitted for, with what came of that. See
    ``fit_threshold``.
    """
    assert threshold.preset is not None
    policy = (
        source.presets[threshold.preset]
        .greedy()
        .with_fields({"threshold": threshold.refitted.threshold})
    )
    length, decode = new_tokens(samples, policy, source.network), decoder(bundle)
    side: Generator = BundlePredictor(bundle, "candidate") if recording is None else recording.side
    return fit_levels(
        side,
        samples if recording is None else recording.samples,
        policy,
        length,
        decode,
        preset=threshold.preset,
        found_by="generations" if recording is None else "replay",
        on_done=on_done,
    )


def judge_units(samples: Sequence[Sample]) -> int:
    """How often ``judge_source`` calls ``on_done``, at most."""
    return 2 * len(samples)


def fit_units(samples: Sequence[Sample], policy: Policy) -> int:
    """How often ``fit_threshold`` calls ``on_done``, at most."""
    return refit_steps(len(samples), policy)


class MaskedLoss:
    """The relative increase of masked cross-entropy alone, over all mask ratios, of one candidate
    after another.
    """

    def __init__(
        self, reference: Scorer, samples: Sequence[Sample], policy: Policy, seed: int
    ) -> None:
        """A reference that has to be shown the canvases is shown them once."""
        limit = reference.max_canvas_length
        self._canvases = [
            seen
            for number, sample in enumerate(samples)
            for seen in masked_canvases(
                sample, number, reference, block_length=policy.block_length, limit=limit, seed=seed
            )
        ]
        self._reference, self._samples, self._seed = reference, len(samples), seed
        self._show(reference)

    def _show(self, side: Scorer) -> None:
        if isinstance(side, Seer):
            side.see([seen.view for seen in self._canvases])

    def of(self, candidate: Scorer) -> float:
        """A candidate's; infinite where the reference loses nothing."""
        self._show(candidate)
        (found,) = compare_masked(self._reference, [candidate], self._canvases)
        increase = summarise(found.rows, found.sample, self._samples, self._seed)["ce_increase"]
        return float("inf") if increase is None else float(increase)


def statistics(done: Quantisation, provenance: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The calibration record of accuracy.json: provenance, and the ranges of every layer that was
    observed.
    """
    if provenance is None or done.observers is None:
        return None
    layers = [observer.summary() for observer in done.observers.values()]
    reached = [each.as_dict() for each in done.reached.values()]
    return {**provenance, "observer": done.recipe.observer, "layers": layers, "experts": reached}
