"""From a checkpoint to a bundle: check, trace, write the weights, prove parity, move into place."""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

import dlm_runtime
from dlm_calibration.formats import QuantisedWeight
from dlm_calibration.recipes import FORMATS, Recipe
from dlm_calibration.states import MASK_RATIOS, State
from dlm_export import bundle as bundle_files
from dlm_export import families, graph, targets
from dlm_export.checkpoints.folder import ALGORITHMS, CheckpointError
from dlm_export.families.base import Overrides
from dlm_export.graph import functions, fuse, quantise, trace, widen, write
from dlm_export.judging import accuracy, auto, verify
from dlm_export.judging.accuracy import ACCURACY_FILE, REPORT_FILE
from dlm_export.judging.judge import Budgets, Judgement
from dlm_export.judging.report import write_report
from dlm_export.judging.threshold import Refit
from dlm_export.memory import give_back
from dlm_export.network.denoiser import Denoiser
from dlm_export.network.spec import LinearSpec, NetworkSpec
from dlm_export.progress import Progress, Silent
from dlm_export.quantising import calibrate, modelopt, samples
from dlm_export.sources import Source, open_source
from dlm_export.targets import STORED, TargetError
from dlm_export.tensorrt import builders, engine, estimate
from dlm_export.tensorrt.builders import Builder
from dlm_export.tensorrt.engine import Built
from dlm_export.tensorrt.estimate import EngineOptions
from dlm_runtime.errors import DlmError, RequestError
from dlm_runtime.policy import Policy
from dlm_runtime.tokenizer import Tokenizer

FITTED = 4  # times as many samples as are judged by: a threshold moves single answers


class ParityError(DlmError):
    """The bundle does not compute what PyTorch computes."""

    exit_code = 3


@dataclass
class BuildReport:
    """What a build did: seconds a stage, bytes a file, and the parity that it proved (None when it was told not to)."""

    output: Path
    network: NetworkSpec
    precision: str = "fp32"
    simulated: bool = False
    stages_s: dict[str, float] = field(default_factory=dict)
    files_bytes: dict[str, int] = field(default_factory=dict)
    parity: verify.Parity | None = None
    judgement: Judgement | None = None
    threshold: Refit | None = None
    curve: list[auto.CurvePoint] = field(default_factory=list)
    engines: list[Built] = field(default_factory=list)
    deferred: dict[str, str] = field(default_factory=dict)
    """Target -> the command that builds its engine, on the device."""
    warnings: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return {
            "bundle": str(self.output),
            "family": self.network.family,
            "parameters": self.network.parameter_count(),
            "stages_s": self.stages_s,
            "files_bytes": self.files_bytes,
            "precision": self.precision,
            "simulated": self.simulated,
            "warnings": self.warnings,
            "parity": None if self.parity is None else self.parity.as_dict(),
            "judgement": None if self.judgement is None else self.judgement.as_dict(),
            "threshold": None if self.threshold is None else self.threshold.as_dict(),
            "curve": [point.as_dict() for point in self.curve],
            "engines": {built.target: built.as_dict() for built in self.engines},
            "deferred_engines": self.deferred,
        }


@dataclass(frozen=True)
class QuantiseOptions:
    """How a quantised bundle is calibrated and judged. ``judged``: samples; ``budgets`` missed: no bundle is written."""

    calibration: samples.CalibrationOptions = field(default_factory=samples.CalibrationOptions)
    budgets: Budgets = field(default_factory=Budgets)
    judged: int = 32
    recipe_changes: Mapping[str, Any] = field(default_factory=dict)
    calibrator: str = "own"
    auto: auto.AutoOptions = field(default_factory=auto.AutoOptions)


def build(
    source_path: Path,
    output: Path,
    *,
    target: str | Sequence[str] = "cpu",
    precision: str = "fp32",
    activations: str | None = None,
    engine: EngineOptions | None = None,
    plain_graph: bool = False,
    force: bool = False,
    overrides: Overrides | None = None,
    check_parity: bool = True,
    options: QuantiseOptions | None = None,
    progress: Progress | None = None,
) -> BuildReport:
    """Build the bundle ``output`` from a checkpoint folder or a full-precision bundle; nothing is left of a failed one.

    ``target`` names one device or several GPUs; ``precision`` is a full one (fp32 and fp16 on a CPU, fp16 and bf16 on GPUs),
    the name or file of a recipe, or ``auto``. ``activations`` (fp16, bf16) are of quantised bundles for GPUs, None: as the
    source is stored. ``engine`` says how engines are built, None: not here. ``plain_graph`` writes elementary operators only,
    for TensorRT before 10.14. ``check_parity=False`` skips parity, and the judging of a quantised bundle.

    Raises CheckpointError, TargetError, RecipeError, CalibrationError, OutputError, EngineError; ParityError when the finished
    bundle differs from torch; AccuracyError when it misses a budget; AuditError when an engine is not what was asked for.
    """
    work = _Build(output, target, precision, activations, engine, plain_graph, options, check_parity, progress)
    work.progress.start("read source", 1)
    return work.run(open_source(source_path, overrides), force)


def build_from(
    source: Source,
    output: Path,
    *,
    target: str | Sequence[str] = "cpu",
    precision: str = "fp32",
    activations: str | None = None,
    engine: EngineOptions | None = None,
    plain_graph: bool = False,
    force: bool = False,
    check_parity: bool = True,
    options: QuantiseOptions | None = None,
    progress: Progress | None = None,
) -> BuildReport:
    """``build`` from a source that is open already."""
    work = _Build(output, target, precision, activations, engine, plain_graph, options, check_parity, progress)
    return work.run(source, force)


class _Build:
    def __init__(
        self,
        output: Path,
        target: str | Sequence[str],
        precision: str,
        activations: str | None,
        engine: EngineOptions | None,
        plain_graph: bool,
        options: QuantiseOptions | None,
        check_parity: bool,
        progress: Progress | None,
    ) -> None:
        self.output, self.precision, self.check_parity = output, precision, check_parity
        self.options, self.engine_options = options or QuantiseOptions(), engine
        self.progress = progress or Silent()
        self.targets = targets.find_all([target] if isinstance(target, str) else target)
        self.on_gpu = self.targets[0].sm is not None
        self.is_plain = self.targets[0].needs_plain_graph or plain_graph
        self.recipe = targets.recipe_for(self.targets, precision)
        if self.recipe is not None and self.options.recipe_changes:
            self.recipe = replace(self.recipe, **self.options.recipe_changes)
        if self.on_gpu and self.recipe is not None and self.recipe.embedding is not None:
            raise TargetError("a quantised embedding table is for the CPU: leave --embedding out for GPUs")
        self.activations = activations
        if activations is not None:
            if self.precision in graph.PRECISIONS or not self.on_gpu:
                raise TargetError(f"activations in {activations} are for quantised bundles for GPUs")
            targets.recipe_for(self.targets, activations)
        if self.options.calibrator == "modelopt":
            modelopt.require()  # before any work
        self.builders: dict[str, Builder] = {}
        if self.on_gpu and engine is not None:
            found = {target.name: builders.find_builder(target, engine) for target in self.targets}
            self.builders = {name: builder for name, builder in found.items() if builder is not None}

    def base_of(self, source: Source) -> str:
        """The precision of what is not quantised: parameters, activations, cache."""
        if self.precision in graph.PRECISIONS:
            return self.precision
        if not self.on_gpu:
            return "fp32"
        takes_bf16 = all("bf16" in target.full_precisions for target in self.targets)
        return self.activations or ("bf16" if source.precision == "bf16" and takes_bf16 else "fp16")

    @contextmanager
    def stage(self, name: str, total: int) -> Iterator[None]:
        self.progress.start(name, total)
        began = time.perf_counter()
        yield
        self.report.stages_s[name] = round(time.perf_counter() - began, 3)

    def run(self, source: Source, force: bool) -> BuildReport:
        self.source = source
        c = self.network = source.network
        self.base = self.base_of(source)
        self.scale_dtype = trace.element_type(self.base).numpy()
        self.report = BuildReport(self.output, c, warnings=list(source.notes))
        self.presets = dict(source.presets)
        self.preset = samples.threshold_preset(c, source.presets, self.options.calibration.preset)[0]
        if self.check_parity:
            _check_memory(c.parameter_count())
        # Every tensor starts on a page of its own; the rest (graph, tokenizer, manifest) is small.
        needed = (1 + len(self.builders)) * (write.data_bytes(c, self.base) + (32 << 20))
        self.check_memory()
        if self.output.resolve() == source.path.resolve():
            raise bundle_files.OutputError(f"{self.output}: is what the bundle is built from; choose another folder")
        with bundle_files.staged(self.output, force=force, needed_bytes=needed) as folder:
            self.folder = folder
            chat_template = self.write_text()
            done = None if self.precision in graph.PRECISIONS else self.quantise()
            with self.stage("trace graph", 1):
                traced = trace.trace_pass(c, self.base, is_plain=self.is_plain)
                device = traced.clone() if self.on_gpu else None
                self.progress.advance()
            if done is not None:
                for form in filter(None, (traced, device)):
                    self.parts = quantise.rewrite(
                        form,
                        done.formats,
                        done.amax,
                        rotated=done.rotated,
                        embedding=done.recipe.embedding,
                        for_tensorrt=form is device,
                    )
            if self.base == "bf16":
                widen.compute_in_fp32(traced)
            if not (self.on_gpu or self.is_plain):
                fuse.fuse(traced)
            with self.stage("write weights", write.data_bytes(c, self.base)):
                write.write_graph(traced, self.reader(traced, done), folder, self.progress.advance, device)
            del traced, device
            self.manifest = bundle_files.make_manifest(
                c,
                graph=trace.describe(c, self.base, is_simulated=self.is_simulated(done), for_device=self.on_gpu),
                opset=graph.PLAIN_OPSET if self.is_plain else graph.OPSET,
                precision=self.precision_record(done),
                targets=[target.name for target in self.targets],
                presets=self.presets,
                default_preset=source.default_preset,
                tokenizer=None if source.text.tokenizer is None else "tokenizer.json",
                chat_template=chat_template,
            )
            with self.stage("hash files", 1):
                hashed = bundle_files.finish(folder, self.manifest)
                self.progress.advance()
            if self.on_gpu:
                self.build_engines(hashed)
                hashed = bundle_files.finish(folder, self.manifest, hashed)
            if self.check_parity:
                proof = self.prove(done)
                (folder / ACCURACY_FILE).write_text(json.dumps(proof, indent=1, allow_nan=False) + "\n")
                if done is not None:
                    sizes = {name: entry["bytes"] for name, entry in hashed.items()}
                    write_report(folder / REPORT_FILE, self.manifest, proof, sizes)
                bundle_files.finish(folder, self.manifest, hashed)
        for path in sorted(self.output.rglob("*")):
            if path.is_file():
                self.report.files_bytes[path.relative_to(self.output).as_posix()] = path.stat().st_size
        return self.report

    def check_memory(self) -> None:
        """EngineError if a target's memory cannot hold what is asked, as far as it is known before anything is quantised."""
        c = self.network
        if not self.on_gpu or self.precision in (targets.AUTO, STORED):
            return
        shapes = c.quantisable()
        formats = {} if self.recipe is None else self.recipe.formats(list(shapes))
        element_bytes = trace.element_type(self.base).itemsize
        weights_bytes = int(element_bytes * c.parameter_count())
        for layer, name in formats.items():
            if FORMATS[name].weights is not None:
                inputs, outputs = shapes[layer].inputs, shapes[layer].outputs
                weights_bytes += FORMATS[name].weight_bytes(inputs, outputs) - int(element_bytes * inputs * outputs)
        options = self.engine_options or EngineOptions()
        limits = estimate.limits_of(c.max_canvas_length, self.source.presets[self.source.default_preset].block_length, options)
        for target in self.targets:
            estimate.check_memory(c, target, weights_bytes, limits, on_host=target.name in self.builders)

    def build_engines(self, hashed: dict[str, Any]) -> None:
        """An engine for every target that can be built here; commands for the others."""
        for target in self.targets:
            builder = self.builders.get(target.name)
            if builder is None:
                self.report.deferred[target.name] = builders.deferred_command(self.output, target)
                continue
            assert self.engine_options is not None
            output = self.folder / engine.engine_file(target)
            output.parent.mkdir(exist_ok=True)
            built = engine.build_engine(
                self.folder, self.manifest, hashed, target, builder, self.engine_options, output, self.progress
            )
            self.report.engines.append(built)
            self.report.warnings += [f"TensorRT, {target.name}: {warning}" for warning in built.warnings]
            self.report.stages_s[f"build engine {target.name}"] = built.seconds
            self.manifest = engine.with_engine(self.manifest, built)

    def write_text(self) -> dict[str, Any] | None:
        """Tokenizer and chat template into the folder; what the manifest says of the template."""
        text, self.tokenizer = self.source.text, None
        if text.tokenizer is None:
            return None
        (self.folder / "tokenizer.json").write_text(text.tokenizer, encoding="utf-8")
        template = None
        if text.chat_template is not None:
            template = self.folder / "chat_template.jinja"
            template.write_text(text.chat_template, encoding="utf-8")
        self.tokenizer = Tokenizer.from_files(self.folder / "tokenizer.json", template, text.special_tokens)
        return None if template is None else {"file": template.name, "special_tokens": text.special_tokens}

    def quantise(self) -> calibrate.Quantisation:
        """Find the recipe's numbers."""
        shapes = self.network.quantisable()
        self.data: samples.Data | None = None
        self.states: list[State] = []
        self.provenance: dict[str, Any] | None = None
        if self.precision == STORED:
            self.recipe = stored_recipe(self.source)
        recipe = self.recipe
        formats = None
        if recipe is not None:
            formats = recipe.formats(list(shapes))
            quantise.check(shapes, formats, for_tensorrt=self.on_gpu)
        is_run = recipe is None or formats is None or recipe.needs_states(formats)
        if self.precision == STORED:
            is_run = False  # the checkpoint brings its ranges along
        if is_run or self.check_parity:
            self.data = samples.load_data(self.network, self.source.path, self.tokenizer, self.options.calibration)
            if self.data.warning:
                self.report.warnings.append(self.data.warning)
            self.states = self.make_states()
        if recipe is None or formats is None:
            recipe, formats = self.search(shapes, self.states)
        if self.precision == STORED:
            targets.check(self.targets, formats.values(), STORED)
            return calibrate.take_stored(self.source.parameters, self.network, recipe, formats, self.scale_dtype)
        sweeps = calibrate.sweeps(recipe, formats, self.network, self.options.calibrator)
        with self.stage("calibrate", max(1, sweeps * len(self.states))):
            return calibrate.calibrate(
                self.source.parameters,
                self.network,
                recipe,
                formats,
                self.states,
                self.progress.advance,
                self.options.calibrator,
                self.scale_dtype,
            )

    def make_states(self) -> list[State]:
        """The calibration states, with their provenance for the manifest."""
        assert self.data is not None
        options = self.options.calibration
        with self.stage("make states", len(self.data.calibration)):
            denoiser = families.load(self.source.parameters, self.network, calibrate.holding_dtype(self.network))
            states = list(samples.calibration_states(self.source, denoiser, self.data, options, self.progress.advance))
        del denoiser
        give_back()
        digest = hashlib.sha256("".join(state.sha256 for state in states).encode()).hexdigest()
        self.provenance = {
            "samples": len(self.data.calibration),
            "states": len(states),
            "sources": dict(Counter(state.source for state in states)),
            "data": self.data.provenance(),
            "states_sha256": digest,
            "seed": options.seed,
            "preset": self.preset,
            "calibrator": self.options.calibrator,
        }
        return states

    def search(self, shapes: dict[str, LinearSpec], states: list[State]) -> tuple[Recipe, dict[str, str]]:
        """``--precision auto``: the cheapest recipe within the budget."""
        assert self.data is not None
        options = self.options
        formats = auto.formats_for(self.targets, options.auto)
        for name in formats if self.on_gpu else ():
            quantise.check(shapes, dict.fromkeys(shapes, name), for_tensorrt=True)
        with self.stage("search", auto.units(self.network, formats, len(states))):
            found = auto.search(
                self.source,
                states,
                self.data.calibration[: options.judged],
                formats,
                self.source.presets[self.preset],
                options.budgets.max_ce_increase,
                options.calibration.seed,
                self.progress.advance,
            )
        self.report.curve = found.curve
        recipe = replace(found.recipe, **options.recipe_changes)
        return recipe, recipe.formats(list(shapes))

    def reader(self, traced: trace.Graph, done: calibrate.Quantisation | None) -> Callable[[str, np.dtype], np.ndarray]:
        """Where ``write.write_graph`` gets an initialiser from."""
        if done is None:
            return self.source.parameters.read
        held: dict[str, QuantisedWeight] = {}

        def read(name: str, dtype: np.dtype) -> np.ndarray:
            part = self.parts.get(name)
            if part is None:
                return done.parameters.read(name, dtype)
            if part.layer not in held:
                held.clear()  # a layer's parts are written one after the other
                held[part.layer] = done.embedding() if part.layer == "embed" else done.weight(part.layer)
            array = part_of(held[part.layer], part)
            return array if part.part == "codes" else array.astype(dtype, copy=False)

        return read

    def is_simulated(self, done: calibrate.Quantisation | None) -> bool:
        """Whether the CPU computes in floating point on quantised values, exactly as the graph is written."""
        if done is None:
            return False
        # A graph for a GPU is judged as it is written: no kernel of the CPU's may take its integers another way.
        return self.on_gpu or any(FORMATS[name].is_simulated_on_cpu for name in done.formats.values())

    def precision_record(self, done: calibrate.Quantisation | None) -> dict[str, Any]:
        """What the manifest says of the precision."""
        if done is None:
            self.report.precision = self.precision
            return {"name": self.precision}
        self.report.precision, self.report.simulated = done.recipe.name, self.is_simulated(done)
        return {
            "name": done.recipe.name,
            **done.summary(),
            "calibration": self.provenance,
            "threshold": None,
        }

    def prove(self, done: calibrate.Quantisation | None) -> dict[str, Any]:
        """Parity with torch, and what quantisation costs; returns accuracy.json. Raises ParityError, AccuracyError."""
        c, parameters = self.network, self.source.parameters if done is None else done.parameters

        def load() -> Denoiser:
            denoiser = families.load(parameters, c)
            if done is not None:
                calibrate.simulate(denoiser, done)
            return denoiser

        kind = self.base if done is None else self.parity_kind(done)
        with self.stage("check parity", 2 * check_units(self.presets)):
            self.report.parity = check(self.folder, c, load, self.presets, kind, progress=self.progress)
        if self.report.parity.misses:
            raise ParityError(f"{self.output}: not written, it differs from PyTorch: {self.report.parity.summary}")
        proof: dict[str, Any] = {"parity": self.report.parity.as_dict()}
        return proof if done is None else proof | self.judge(done)

    def parity_kind(self, done: calibrate.Quantisation) -> str:
        """Which of ``verify.TOLERANCES`` a quantised bundle is held to."""
        if self.base != "bf16":
            return "quantised"
        is_four_bit = any(FORMATS[name].activations == "nvfp4" for name in done.formats.values())
        return "four-bit activations, bf16" if is_four_bit else "quantised, bf16"

    def judge(self, done: calibrate.Quantisation) -> dict[str, Any]:
        """What quantisation costs, and the threshold that makes up for it. Raises AccuracyError."""
        assert self.data is not None
        judging = self.data.judging[: self.options.judged]
        fitting = self.data.calibration[: FITTED * self.options.judged]
        seed = self.options.calibration.seed
        with dlm_runtime.open(self.folder, engine="onnxruntime", check_hashes=False) as bundle:
            with self.stage("judge", accuracy.judge_units(judging)):
                policy = self.source.presets[self.preset]
                judgement = accuracy.judge_source(
                    self.source, bundle, judging, done.recipe.name, policy, seed, self.progress.advance
                )
            with self.stage("fit threshold", accuracy.fit_units(fitting)):
                fitted = accuracy.fit_threshold(self.source, bundle, fitting, self.preset, self.progress.advance)
        with self.stage("sweep layers", len(done.formats)):
            layers = accuracy.layer_losses(
                families.load(done.parameters, self.network),
                done,
                self.states or self.make_states(),
                self.progress.advance,
            )
        judgement = replace(judgement, layers=layers, threshold=fitted.as_dict()).with_budgets(self.options.budgets)
        accuracy.check_budgets(judgement, f"{self.output}: not written")
        self.report.judgement, self.report.threshold = judgement, fitted
        if fitted.reached:
            changed = self.presets[self.preset].with_fields({"threshold": fitted.refitted.threshold})
            self.manifest["loop"]["presets"][self.preset] = changed.as_dict()
        self.manifest["precision"]["threshold"] = fitted.as_dict()
        return {
            "judgement": judgement.as_dict(),
            "calibration": accuracy.statistics(done, self.provenance),
            "auto": [point.as_dict() for point in self.report.curve],
        }


PROMPT_COUNT, NEW_TOKENS = 2, 16  # of the check at the end of a build


def check_units(presets: dict[str, Policy], prompts: int = PROMPT_COUNT) -> int:
    """How often ``check`` advances its progress in each of its two halves."""
    return len(MASK_RATIOS) + len(verify.make_cases(presets, [[0]] * prompts, 1))


def check(
    folder: Path,
    network: NetworkSpec,
    load: Callable[[], Denoiser],
    presets: dict[str, Policy],
    precision: str,
    *,
    prompts: list[list[int]] | None = None,
    max_new_tokens: int = NEW_TOKENS,
    seed: int = 0,
    threads: int = 0,
    engine: str = "onnxruntime",
    progress: Progress | None = None,
) -> verify.Parity:
    """Compare a bundle with a denoiser in torch; random prompts where none are given.

    ``load`` gives the denoiser: torch is done before the bundle is opened, so that only one of them holds weights.
    Raises DlmError.
    """
    progress = progress or Silent()
    if prompts is None:
        prompts = verify.random_prompts(network, PROMPT_COUNT, seed)
        max_new_tokens = max(1, min(max_new_tokens, network.max_canvas_length - len(prompts[0])))
    longest = max(len(prompt) for prompt in prompts)
    room = network.max_canvas_length - longest
    if max_new_tokens > room:
        raise RequestError(
            f"a prompt of {longest} tokens leaves room for {room} on the canvas of {network.max_canvas_length}, "
            f"not for {max_new_tokens}"
        )
    denoiser = load()
    cases = verify.make_cases(presets, prompts, max_new_tokens)
    expected = verify.expect(denoiser, prompts, cases, seed, progress.advance)
    del denoiser
    with dlm_runtime.open(folder, engine=engine, threads=threads, check_hashes=False) as opened:
        return verify.compare(opened, expected, precision, progress.advance)


def stored_recipe(source: Source) -> Recipe:
    """The formats that a pre-quantised checkpoint came in. Raises CheckpointError if it is not one."""
    quantised = source.parameters.quantised if isinstance(source.parameters, families.Weights) else {}
    if not quantised:
        raise CheckpointError(f"{source.path}: not a pre-quantised checkpoint; choose a precision to quantise it to")
    layers = tuple((name.removesuffix(".weight"), ALGORITHMS[algorithm]) for name, algorithm in quantised.items())
    return Recipe(STORED, layers)


def check_same_denoiser(folder: Path, manifest: dict[str, Any], network: NetworkSpec) -> None:
    """Raises DlmError if a bundle's manifest describes another denoiser than a checkpoint's."""
    theirs = bundle_files.network_of(manifest)
    for name in network.__dataclass_fields__:
        ours, found = getattr(network, name), getattr(theirs, name)
        if ours != found:
            raise DlmError(f"{folder}: built from another checkpoint: its {name} is {found}, the checkpoint's is {ours}")


def _check_memory(parameters: int) -> None:
    available = targets.available_memory_bytes()
    needed = 4 * parameters
    if available is not None and needed > available:
        raise DlmError(
            f"the parity check holds the denoiser in fp32, {needed:,} bytes, and {available:,} are available. "
            "Pass --no-verify, and run `dlm-export verify` on a larger machine."
        )


def part_of(weight: QuantisedWeight, part: quantise.Part) -> np.ndarray:
    """One initialiser of a quantised layer; the embedding table's codes and scales go by rows, not by columns."""
    if part.part == "panels":
        return functions.panels(weight.codes)
    if part.part == "panel_scales":
        return np.pad(weight.scales, (0, functions.padded(weight.scales.size) - weight.scales.size))
    array = {"codes": weight.codes, "scales": weight.scales, "global_scale": np.asarray(weight.global_scale)}[part.part]
    if part.layer == "embed":
        array = array.T if part.part == "codes" else array[:, None]
    return np.ascontiguousarray(array) if array.ndim else array
