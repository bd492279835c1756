"""Compares the accuracy of a bundle with the accuracy of its source, or of a second bundle.

Only the functions that need torch import torch, because the comparison of two bundles must work
without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dlm_runtime
from dlm_calibration.samples import Sample
from dlm_export.bundle.manifest import network_of
from dlm_export.judging.accuracy.effort import Effort
from dlm_export.judging.accuracy.evidence import judge
from dlm_export.judging.accuracy.files import recorded
from dlm_export.judging.accuracy.verdict import Budgets, Judgement
from dlm_export.judging.report.page import ACCURACY_FILE
from dlm_export.judging.sides.bundle import BundlePredictor
from dlm_export.judging.sides.prompts import decoder, new_tokens
from dlm_export.judging.sides.side import JudgeError, Side
from dlm_export.network.spec import NetworkSpec
from dlm_export.opening import ON_CPU, Opening
from dlm_export.progress import Progress
from dlm_export.quantising.samples import CalibrationOptions, load_data, threshold_preset
from dlm_runtime.errors import BundleError
from dlm_runtime.manifest import check_manifest
from dlm_runtime.policy import Policy

if TYPE_CHECKING:
    from dlm_export.sources import Source
    from dlm_export.workplace import Workplace


REUSE_BYTES = 1 << 30
"""Limit of the prefix cache of a candidate with ``reuse_prompt``, in bytes."""


@dataclass(frozen=True)
class JudgingOptions:
    """Options for measuring a bundle's accuracy. ``opening`` describes how the bundle is opened."""

    data: CalibrationOptions = field(default_factory=CalibrationOptions)
    effort: Effort = field(default_factory=Effort)
    budgets: Budgets = field(default_factory=Budgets)
    opening: Opening = ON_CPU


def judge_source(
    source: Source,
    bundle: dlm_runtime.Bundle,
    samples: Sequence[Sample],
    name: str,
    policy: Policy,
    options: JudgingOptions,
    on_done: Callable[[], None],
    workplace: Workplace | None = None,
) -> Judgement:
    """Compare the accuracy of a bundle with its source, which runs in torch in fp32.

    If the source is small, the source in bf16 is also compared with the source in fp32. The
    difference between their accuracies is the noise floor.

    The source's layers are loaded one at a time, with the memory and device of ``workplace``. If
    ``workplace`` is ``None``, the function uses the CPU and all available memory.
    """
    import torch

    from dlm_export.judging.sides.layerwise import shown_source
    from dlm_export.quantising import calibrate
    from dlm_export.workplace import threads_for

    c = source.network
    is_small = c.parameter_count() <= calibrate.LARGE
    with threads_for(c.largest_matrix()):
        reference = shown_source(source, "fp32", torch.float32, workplace)
        floor = shown_source(source, "bf16", torch.bfloat16, workplace) if is_small else None
        ours = BundlePredictor(bundle, name)
        return _judge(reference, ours, samples, c, policy, options, floor, on_done)


def _judge(
    reference: Side,
    candidate: BundlePredictor,
    samples: Sequence[Sample],
    network: NetworkSpec,
    policy: Policy,
    options: JudgingOptions,
    floor: Side | None,
    on_done: Callable[[], None],
    candidate_policy: Policy | None = None,
) -> Judgement:
    effort = options.effort
    has_texts = effort.has_texts(network) or candidate_policy is not None
    options.budgets.check_texts(has_texts=has_texts)
    options.budgets.check(samples)
    found = judge(
        reference,
        candidate,
        samples,
        policy=policy,
        max_new_tokens=new_tokens(samples, policy, network, candidate.bundle),
        decode=decoder(candidate.bundle),
        seed=options.data.seed,
        noise_floor=floor,
        has_texts=has_texts,
        candidate_policy=candidate_policy,
        canvases=effort.canvases,
        on_done=on_done,
    )
    if candidate_policy is not None:
        prompt_tokens, cached_tokens = candidate.reused()
        loop = {
            "policy": candidate_policy.as_dict(),
            "prompt_tokens": prompt_tokens,
            "cached_tokens": cached_tokens,
        }
        found = replace(found, candidate_loop=loop)
    return replace(found, effort=effort.name, speed=candidate.speed())


def judge_bundle(
    folder: Path,
    source: Source,
    options: JudgingOptions,
    progress: Progress,
    warn: Callable[[str], None] = lambda _: None,
) -> Judgement:
    """Compare a finished bundle's accuracy with its source's accuracy.

    The comparison does not use the samples with which the bundle was calibrated. Raises DlmError.
    """
    with options.opening.open(folder) as bundle:
        samples = _samples(source.network, source.path, bundle, options, progress, warn)
        _, policy = threshold_preset(source.network, source.presets, options.data.preset)
        name, on_done = _title(folder, bundle), progress.advance
        result = judge_source(source, bundle, samples, name, policy, options, on_done)
    return replace(result, **_known_layers(folder)).with_budgets(options.budgets)


def compare_bundles(
    reference: Path,
    candidate: Path,
    options: JudgingOptions,
    progress: Progress,
    warn: Callable[[str], None] = lambda _: None,
    candidate_changes: Mapping[str, Any] | None = None,
) -> Judgement:
    """Compare the accuracy of two bundles of the same denoiser.

    ``candidate_changes`` changes fields of the policy with which the candidate generates text. The
    reference generates text with the unchanged policy. Both sides may be the same bundle.

    Raises JudgeError if the denoisers differ. Raises other kinds of DlmError if a bundle cannot be
    opened or run.
    """
    reuses = bool((candidate_changes or {}).get("reuse_prompt"))
    own_opening = (
        replace(options.opening, prefix_cache_bytes=REUSE_BYTES) if reuses else options.opening
    )
    with options.opening.open(reference) as first, own_opening.open(candidate) as second:
        check_manifest(first.manifest, reference)
        check_manifest(second.manifest, candidate)
        c = network_of(first.manifest)
        found = network_of(second.manifest).difference(c, but=("max_canvas_length",))
        if found is not None:
            raise JudgeError(
                f"{candidate} is a different denoiser from {reference}: {found}. Compare bundles of one checkpoint."
            )
        configs = [each.manifest.get("source", {}).get("config_sha256") for each in (first, second)]
        if None not in configs and configs[0] != configs[1]:
            warn(
                f"{candidate} and {reference} were built from different config.json files (SHA-256 {configs[1]} and "
                f"{configs[0]}): the differences may come from the checkpoints, not from precision"
            )
        theirs = BundlePredictor(first, _title(reference, first))
        ours = BundlePredictor(second, _title(candidate, second))
        presets = {name: first.policy(name) for name in first.manifest["loop"]["presets"]}
        _, policy = threshold_preset(c, presets, options.data.preset)
        own = policy.with_fields(dict(candidate_changes)) if candidate_changes else None
        samples = _samples(c, reference, first, options, progress, warn)
        on_done = progress.advance
        result = _judge(theirs, ours, samples, c, policy, options, None, on_done, own)
        if reuses and not ours.reused()[1]:
            warn(
                "no prompt was reused, so reuse_prompt was not judged: give data whose prompts start with the same tokens"
            )
    return replace(result, **_known_layers(candidate)).with_budgets(options.budgets)


def _samples(
    network: NetworkSpec,
    folder: Path,
    bundle: dlm_runtime.Bundle,
    options: JudgingOptions,
    progress: Progress,
    warn: Callable[[str], None],
) -> list[Sample]:
    """Load the samples, warn about their shortcomings, and start the stage "judge"."""
    data = load_data(network, folder, bundle.tokenizer, options.data, is_calibrating=False)
    effort = options.effort
    for doubt in [*data.doubts(option="--data"), *effort.shortage(data.judging, option="--data")]:
        warn(doubt)
    samples = effort.chosen(data.judging)
    progress.start("judge", judge_units(samples))
    return samples


def _title(folder: Path, bundle: dlm_runtime.Bundle) -> str:
    return f"{folder.name} ({bundle.manifest['precision']['name']})"


def _known_layers(folder: Path) -> dict[str, Any]:
    """Return the fields ``layers`` and ``layers_method`` that the bundle's build measured."""
    judgement = recorded(folder).get("judgement")
    layers: Any = []
    method: Any = None
    if isinstance(judgement, dict):
        layers, method = judgement.get("layers"), judgement.get("layers_method")
    text, loss = (str,), (float, type(None))
    kinds = {"layer": text, "format": text, "kl": loss, "frontier_kl": loss}

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
            f"{folder / ACCURACY_FILE}: judgement.layers has an unexpected form. Build the bundle again."
        )
    return {"layers": layers, "layers_method": method}


def judge_units(samples: Sequence[Sample]) -> int:
    """Return the maximum number of times that ``judge_source`` calls ``on_done``."""
    return 2 * len(samples)
