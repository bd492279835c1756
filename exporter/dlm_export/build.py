"""Builds a bundle from a checkpoint or from an unquantised bundle, stage by stage."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dlm_export.building import work
from dlm_export.building.options import BuildOptions, QuantiseOptions
from dlm_export.building.proving import Proof, prove
from dlm_export.building.quantising import Quantised, quantise
from dlm_export.building.request import Job, check_job, check_request, engine_limits
from dlm_export.building.writing import (
    Text,
    Written,
    table_dtype,
    write_graph,
    write_text,
)
from dlm_export.bundle import folder as bundle_folder
from dlm_export.bundle.manifest import make_manifest
from dlm_export.checkpoints.hub import Hub
from dlm_export.families.base import Overrides
from dlm_export.graph import OPSET, PLAIN_OPSET, trace, write
from dlm_export.judging.accuracy.verdict import Judgement
from dlm_export.judging.parity.verdict import Parity
from dlm_export.judging.precision_search.layer_times import Tuning
from dlm_export.judging.precision_search.search import CurvePoint
from dlm_export.judging.report.page import ACCURACY_FILE, REPORT_FILE, write_report
from dlm_export.judging.sides.side import can_compare_commits
from dlm_export.judging.tuning.effort_levels import Levels
from dlm_export.judging.tuning.threshold import Refit
from dlm_export.network.spec import NetworkSpec
from dlm_export.outputs import check_outside
from dlm_export.progress import Progress, Stages
from dlm_export.quantising import experts
from dlm_export.sources import Source, open_source
from dlm_export.tensorrt import builders, engine
from dlm_export.tensorrt.engine import Built
from dlm_export.tensorrt.estimate import estimate

__all__ = ["BuildOptions", "BuildReport", "QuantiseOptions", "build", "build_from"]

SMALL_FILES_BYTES = 32 << 20  # disk space for all files of a bundle except weights and engines


@dataclass(frozen=True)
class BuildReport:
    """Everything that a finished build reports.

    The report includes the duration of each stage in seconds and the size of each file in bytes.
    The result of a check that did not run is ``None``.
    """

    output: Path
    network: NetworkSpec
    precision: str
    simulated: bool
    kernels: dict[str, Any] | None
    """The number of calls of each native kernel, and the modules that use slower operators, with
    the reasons (see ``Fused.as_dict``). ``None`` for a GPU target.
    """
    stages_s: dict[str, float]
    files_bytes: dict[str, int]
    parity: Parity | None
    judgement: Judgement | None
    threshold: Refit | None
    levels: Levels | None
    cache: dict[str, Any] | None
    """The loss of accuracy because the cache stores rounded keys and values (the result of
    ``rounded_cache.judge_cache``). ``None`` if the cache does not round keys and values.
    """
    curve: list[CurvePoint]
    tuning: Tuning | None
    """The layer times that the search measured, or ``None`` if the search did not measure layers.
    """
    engines: list[Built]
    deferred: dict[str, str]
    """Maps each target without an engine to the command that builds its engine on the device."""
    engine_host_bytes: int | None
    """The estimated host memory for building an engine. ``None`` if the bundle needs no engine."""
    warnings: list[str]

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain Python objects, which ``--json`` prints."""
        return {
            "bundle": str(self.output),
            "family": self.network.family,
            "parameters": self.network.parameter_count(),
            "stages_s": self.stages_s,
            "files_bytes": self.files_bytes,
            "precision": self.precision,
            "simulated": self.simulated,
            "kernels": self.kernels,
            "warnings": self.warnings,
            "parity": None if self.parity is None else self.parity.as_dict(),
            "judgement": None if self.judgement is None else self.judgement.as_dict(),
            "threshold": None if self.threshold is None else self.threshold.as_dict(),
            "effort": None if self.levels is None else asdict(self.levels),
            "cache": self.cache,
            "curve": [asdict(point) for point in self.curve],
            "tuning": None if self.tuning is None else self.tuning.as_dict(),
            "engines": {built.target: built.as_dict() for built in self.engines},
            "deferred_engines": self.deferred,
            "engine_host_bytes": self.engine_host_bytes,
        }


def build(
    source_path: Path,
    output: Path,
    options: BuildOptions | None = None,
    *,
    overrides: Overrides | None = None,
    hub: Hub | None = None,
    progress: Progress | None = None,
) -> BuildReport:
    """Build a bundle from a checkpoint folder or an unquantised bundle.

    A failed build leaves no files behind.

    Args:
        source_path: The checkpoint or bundle.
        output: Folder of the new bundle.
        options: What to build. ``None`` builds an fp32 bundle for the CPU.
        overrides: Values to use where the checkpoint's values are missing or wrong.
        hub: The origin of a downloaded checkpoint, which the manifest records. ``None`` if the
            checkpoint was not downloaded.
        progress: The object that is notified when a stage starts or advances.

    Returns:
        A report of the build.

    Raises:
        CheckpointError, TargetError, RecipeError, CalibrationError, OutputError, EngineError,
            DeviceError, ResumeError, MemoryLimitError: The bundle cannot be built.
        ParityError: The finished bundle differs from torch.
        AccuracyError: The bundle exceeds an accuracy budget.
        AuditError: An engine uses number formats that differ from the requested formats.
    """
    request, stages = check_request(options or BuildOptions()), Stages(progress)
    stages.progress.start("read source", 1)
    return _make(
        check_job(request, replace(open_source(source_path, overrides), hub=hub)), output, stages
    )


def build_from(
    source: Source,
    output: Path,
    options: BuildOptions | None = None,
    *,
    progress: Progress | None = None,
) -> BuildReport:
    """Like ``build``, but takes a source that is already open."""
    return _make(
        check_job(check_request(options or BuildOptions()), source), output, Stages(progress)
    )


def _make(job: Job, output: Path, stages: Stages) -> BuildReport:
    """Run the stages of the build in order."""
    request, source = job.request, job.source
    check_outside(output, source.path)
    kept = request.options.resume
    if kept is not None and output.resolve() in (kept.resolve(), *kept.resolve().parents):
        raise work.ResumeError(
            f"--resume {kept}: is inside the new bundle, which is replaced as a whole; choose another folder"
        )
    # In addition to the weight file, each engine contains its own copy of the weights.
    needed = (1 + len(request.builders)) * (
        write.data_bytes(source.network, job.base, job.formats, table_dtype(job).itemsize)
        + SMALL_FILES_BYTES
    )
    with (
        bundle_folder.staged(output, force=request.options.force, needed_bytes=needed) as folder,
        work.opened(job, folder, stages) as workplace,
    ):
        text = write_text(source.text, folder)
        quantised = (
            quantise(job, text.tokenizer, workplace, stages) if request.is_quantised else None
        )
        written = write_graph(job, quantised, folder, stages)
        manifest = _make_manifest(job, quantised, text, written)
        hashed = bundle_folder.finish(folder, manifest, written.hashed)
        engines = _build_engines(job, folder, manifest, hashed, stages)
        for built in engines:
            manifest = engine.with_engine(manifest, built)
        if engines:
            hashed = bundle_folder.finish(folder, manifest, hashed)
        proof = None
        if request.options.check_parity:
            proof = prove(job, quantised, written.taps, manifest, folder, output, workplace, stages)
            manifest = proof.applied(manifest)
            record = json.dumps(proof.record, indent=1, allow_nan=False)
            (folder / ACCURACY_FILE).write_text(record + "\n")
            if proof.judgement is not None:
                sizes = {name: entry["bytes"] for name, entry in hashed.items()}
                page, speed = folder / REPORT_FILE, proof.judgement.speed
                write_report(page, manifest, proof.record, sizes, speed)
            bundle_folder.finish(folder, manifest, hashed)
    return _report(job, output, manifest, quantised, engines, proof, stages)


def _make_manifest(
    job: Job, quantised: Quantised | None, text: Text, written: Written
) -> dict[str, Any]:
    request, source, fused = job.request, job.source, written.fused
    precision = {"name": job.base} if quantised is None else quantised.precision_record()
    if written.embedding_dtype is not None:
        precision["embedding_dtype"] = written.embedding_dtype
    # The accuracy of a bundle for GPUs is measured on this CPU. Mark the bundle as simulated in its
    # manifest, so that the CPU computes all operators in floating point. The results of the CPU's
    # integer kernels could differ from a GPU's results.
    is_simulated = quantised is not None and (request.on_gpu or quantised.is_simulated_on_cpu)
    return make_manifest(
        source,
        text,
        graph=trace.describe(
            source.network,
            job.cache_dtype,
            is_simulated=is_simulated,
            for_device=request.on_gpu,
            has_segments=fused is not None and fused.has_segments,
            chooses_rows=request.form == "cuda",
        ),
        opset=PLAIN_OPSET if request.is_plain else OPSET,
        precision=precision,
        kernels=None if fused is None else fused.as_dict(),
        targets=[target.name for target in request.targets],
    )


def _build_engines(
    job: Job, folder: Path, manifest: Mapping[str, Any], hashed: Mapping[str, Any], stages: Stages
) -> list[Built]:
    """Build the engines of all targets for which this machine can build engines."""
    request, made = job.request, []
    for target in request.targets:
        if target.name in request.builders:
            assert request.options.engine is not None
            output = folder / engine.engine_file(target)
            output.parent.mkdir(exist_ok=True)
            builder = request.builders[target.name]
            built = engine.build_engine(
                folder,
                manifest,
                hashed,
                target,
                builder,
                request.options.engine,
                output,
                stages.progress,
            )
            stages.seconds[f"build engine {target.name}"] = built.seconds
            made.append(built)
    return made


def _report(
    job: Job,
    output: Path,
    manifest: Mapping[str, Any],
    quantised: Quantised | None,
    engines: list[Built],
    proof: Proof | None,
    stages: Stages,
) -> BuildReport:
    request = job.request
    warnings = [*job.source.notes, *job.notes]
    if quantised is not None and quantised.calibration is not None:
        is_judged = proof is not None and proof.judgement is not None
        data = quantised.calibration.data
        warnings += data.doubts(
            option="--calib", has_ranges=bool(quantised.numbers.amax), is_judged=is_judged
        )
        if is_judged:
            effort = request.options.quantise.effort
            warnings += effort.shortage(data.judging, option="--calib")
    if quantised is not None:
        warnings += experts.doubts(quantised.numbers.reached)
    if job.wants_cache_judged and not job.is_cache_judged:
        warnings.append(
            "the accuracy lost by rounding the cache was not measured, because this version cannot measure it for networks "
            "with draft passes"
        )
    is_full = request.is_judged and request.options.quantise.effort.name == "full"
    if is_full and not can_compare_commits(job.source.network, job.source.presets[job.preset]):
        reason = (
            "the denoiser has no mask token"
            if not job.source.network.has_mask_token
            else f"the preset {job.preset} "
            + ("rewrites blocks" if job.source.network.rewrites else "has no threshold")
        )
        warnings.append(f"no threshold and no effort levels were fitted, because {reason}")
    levels = None if proof is None else proof.levels
    if job.source.has_effort and levels is None:
        warnings.append(
            f"the effort levels of {job.source.path} were fitted to it and are not in this bundle: "
            f"`dlm-export effort {output} --data FILE` fits new ones"
        )
    warnings += [
        f"TensorRT, {built.target}: {warning}" for built in engines for warning in built.warnings
    ]
    elsewhere = [
        target
        for target in request.targets
        if target.engine_kinds and target.name not in request.builders
    ]
    host_bytes = None
    if request.form == "tensorrt":
        weights_bytes = (output / f"{manifest['loop']['graph']['file']}.data").stat().st_size
        formats = manifest["precision"].get("layers", {}).values()
        host_bytes = estimate(job.source.network, weights_bytes, engine_limits(job), formats).host
    return BuildReport(
        output=output,
        network=job.source.network,
        precision=manifest["precision"]["name"],
        simulated=manifest["loop"]["graph"]["simulated"],
        kernels=manifest.get("kernels"),
        stages_s=stages.seconds,
        files_bytes={
            path.relative_to(output).as_posix(): path.stat().st_size
            for path in sorted(output.rglob("*"))
            if path.is_file()
        },
        parity=None if proof is None else proof.parity,
        judgement=None if proof is None else proof.judgement,
        threshold=None if proof is None else proof.threshold,
        levels=levels,
        cache=None if proof is None else proof.cache,
        curve=[] if quantised is None else quantised.curve,
        tuning=None if quantised is None else quantised.tuning,
        engines=engines,
        deferred={
            target.name: builders.deferred_command(output, target, request.options.engine)
            for target in elsewhere
        },
        engine_host_bytes=host_bytes,
        warnings=warnings,
    )
