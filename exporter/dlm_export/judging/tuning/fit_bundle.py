"""Fits effort levels or the block length of a finished bundle, and writes them to the bundle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from dlm_export.bundle.default_loop import published_presets
from dlm_export.bundle.folder import changing, sha256, write_manifest
from dlm_export.bundle.manifest import network_of, read_manifest
from dlm_export.judging.accuracy.files import recorded
from dlm_export.judging.report.page import REPORT_FILE, require_matplotlib, write_report
from dlm_export.judging.sides.bundle import BundlePredictor
from dlm_export.judging.sides.prompts import decoder, new_tokens
from dlm_export.judging.sides.side import check_tuned
from dlm_export.judging.tuning.block_length import (
    BlockTimes,
    block_units,
    time_blocks,
    with_block_length,
)
from dlm_export.judging.tuning.default_loop import with_levels
from dlm_export.judging.tuning.effort_levels import Levels, fit_levels, level_units
from dlm_export.opening import ON_CPU, Opening
from dlm_export.outputs import replaced
from dlm_export.progress import Progress
from dlm_export.quantising.samples import CalibrationOptions, load_data, threshold_preset
from dlm_runtime.manifest import MANIFEST_FILE


@dataclass(frozen=True)
class EffortOptions:
    """Options for fitting a bundle's effort levels.

    ``samples`` is the maximum number of samples to use. ``opening`` describes how the bundle is
    opened. ``by`` is ``passes`` or ``time``, and decides the default loop among loops that are as
    good.
    """

    data: CalibrationOptions = field(default_factory=CalibrationOptions)
    samples: int = 64
    opening: Opening = ON_CPU
    by: str = "passes"


def fit_bundle(
    folder: Path,
    options: EffortOptions,
    progress: Progress,
    warn: Callable[[str], None] = lambda _: None,
) -> Levels | BlockTimes:
    """Fit a bundle's effort levels, and write the levels to the bundle's manifest and report.

    If the preset verifies drafts, its block length is fitted instead. No file is written before all
    measurements are finished. Raises DlmError.
    """
    manifest = read_manifest(folder)
    has_report = REPORT_FILE in manifest["files"]
    if has_report:
        require_matplotlib()
    with options.opening.open(folder, check_hashes=False) as bundle:
        network = network_of(manifest)
        check_tuned(network)
        presets = {name: bundle.policy(name) for name in published_presets(manifest)}
        preset, policy = threshold_preset(network, presets, options.data.preset)
        data = load_data(network, folder, bundle.tokenizer, options.data, is_calibrating=False)
        for doubt in data.doubts(option="--data") if policy.commit != "verify" else ():
            warn(doubt)
        samples = data.judging[: options.samples]
        side = BundlePredictor(bundle, folder.name)
        longest = new_tokens(samples, policy, network, bundle)
        found: Levels | BlockTimes
        if policy.commit == "verify":
            progress.start("time block lengths", block_units(policy, len(samples)))
            found = time_blocks(bundle, samples, preset, longest, progress.advance)
            made = with_block_length(manifest, found)
        else:
            progress.start("fit effort", level_units(policy, side, len(samples)))
            found = fit_levels(
                side,
                samples,
                policy,
                longest,
                decoder(bundle),
                preset=preset,
                by=options.by,
                on_done=progress.advance,
            )
            made = with_levels(manifest, found)
    files = manifest["files"]
    with changing(folder, manifest, MANIFEST_FILE):
        if has_report:
            others = {name: entry for name, entry in files.items() if name != REPORT_FILE}
            sizes = {name: entry["bytes"] for name, entry in files.items()}
            with replaced(folder / REPORT_FILE) as new:
                write_report(new, made, recorded(folder), sizes, side.speed())
                files = others | {REPORT_FILE: {"bytes": new.stat().st_size, "sha256": sha256(new)}}
                # The report and the manifest cannot be replaced in one step. Therefore first write
                # a manifest that does not list the report. If the process is killed before the
                # final manifest is written, the bundle can still be opened.
                write_manifest(folder, manifest, others)
        write_manifest(folder, made, files)
    return found
