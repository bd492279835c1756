"""TensorRT engines from a bundle's device graph: one code path over the Builder API of TensorRT 10, 11 and TensorRT-RTX.

TensorRT-RTX builds ahead of time, without a GPU, for the compute capabilities that it is told; TensorRT builds on the
device and for it alone. Either parses ``device.onnx`` from its file, so weights are mapped, not copied through a second
model in memory. Networks are strongly typed: the graph's types are the engine's. Everything that the builder logs as an
error goes into the exception, and warnings that mean a part of the graph was ignored are errors.

Needs no torch and no onnx: a board finishes its own engine from the bundle. API and limits:
docs.nvidia.com/deeplearning/tensorrt (10.x, 11.x) and docs.nvidia.com/deeplearning/tensorrt-rtx (1.x).
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib
import importlib.util
import json
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from dlm_export import audit
from dlm_export.bundle import OutputError, sha256, write_manifest
from dlm_export.progress import Progress, Silent
from dlm_export.targets import Target, available_memory_bytes, device_sm, recipe_for, reported_sms, sm_text
from dlm_runtime.errors import DlmError

RTX, TENSORRT = "tensorrt_rtx", "tensorrt"  # builders, as the manifest calls them
RTX_MODULES = ("tensorrt_rtx", "tensorrt_rtx_bindings")
WORKSPACE_BYTES = 1 << 30
PLAIN_OPSET = 21  # of graphs in elementary operators, which every TensorRT 10 parses
# Warnings that mean the engine would not compute the graph; all others are shown.
FATAL_WARNINGS = ("unused input", "out of range int64", "ignoring", "logger is ignored", "not supported")
HOST_OVERHEAD_BYTES, HOST_FACTOR = 1 << 30, 2.5  # of a build, over the weights: see BENCHMARKS.md
DEVICE_OVERHEAD_BYTES = 768 << 20  # CUDA's context, kernels and the builder's own scratch on a device


class EngineError(DlmError):
    """An engine cannot be built as asked; nothing was written."""

    exit_code = 2


class BuilderError(EngineError):
    """TensorRT refused the graph or failed on it."""

    exit_code = 1


@dataclass(frozen=True)
class EngineOptions:
    """How an engine is built. ``canvas``, ``block``: most tokens of a canvas and of a cached pass; None takes the bundle's."""

    canvas: int | None = None
    block: int | None = None
    workspace_bytes: int = WORKSPACE_BYTES
    timing_cache: Path | None = None
    allow_fallback: bool = False
    builder: str | None = None


@dataclass(frozen=True)
class Limits:
    """The largest passes that an engine takes: canvas without cache; block, also the most scored rows, with one."""

    canvas: int
    block: int

    def profiles(self) -> dict[str, dict[str, list[int]]]:
        """Optimisation profiles: ``[min, opt, max]`` of tokens T, cached S and scored rows R."""
        rows = [1, min(32, self.block), self.block]
        return {
            "prefill": {"tokens": [1, max(1, self.canvas // 2), self.canvas], "cached": [0, 0, 0], "rows": rows},
            "block": {
                "tokens": [1, min(32, self.block), self.block],
                "cached": [0, self.canvas // 2, self.canvas],
                "rows": rows,
            },
        }


@dataclass(frozen=True)
class Estimate:
    """Bytes that an engine takes, by formula. ``device``: weights, cache, passes and the context; ``host``: while building."""

    weights: int
    cache: int
    passes: int
    device: int
    host: int


@dataclass(frozen=True)
class Built:
    """What a build gave: the manifest's entry, seconds, and warnings for people."""

    target: str
    entry: dict[str, Any]
    seconds: float
    warnings: list[str] = field(default_factory=list)


def limits_of(denoiser: Mapping[str, Any], block_length: int, options: EngineOptions) -> Limits:
    """The passes that a loop of ``block_length`` makes, within what was asked. Raises EngineError."""
    longest = denoiser["max_canvas_length"]
    canvas = options.canvas or longest
    if canvas > longest:
        raise EngineError(f"--canvas {canvas} is longer than the denoiser's {longest} tokens")
    block = options.block or max(block_length or canvas, 32)
    if options.block and options.block > canvas:
        raise EngineError(f"--block {options.block} is longer than the canvas of {canvas} tokens")
    return Limits(canvas, min(block, canvas))


def estimate(denoiser: Mapping[str, Any], weights_bytes: int, limits: Limits) -> Estimate:
    """Memory by formula, in bytes; ``denoiser`` has the sizes that a manifest's does.

    cache = 2 (past, present) * 2 (keys, values) * layers * kv_heads * canvas * head_size * 2 bytes. Passes hold the
    activations of one layer (residual, norm, q, k, v, attention, the two halves of the MLP and their product), and fp32
    logits, probabilities and sorted rows of the scored ones.
    """
    d = denoiser
    canvas, rows = limits.canvas, limits.block
    cache = 2 * 2 * d["layers"] * d["kv_heads"] * canvas * d["head_size"] * 2
    width = 4 * d["hidden_size"] + 2 * (d["heads"] + d["kv_heads"]) * d["head_size"] + 3 * d["mlp_size"]
    passes = canvas * width * 2 + 4 * rows * d["vocab_size"] * 4
    device = weights_bytes + cache + passes + DEVICE_OVERHEAD_BYTES
    return Estimate(weights_bytes, cache, passes, device, int(HOST_FACTOR * weights_bytes) + HOST_OVERHEAD_BYTES)


def check_memory(denoiser: Mapping[str, Any], target: Target, weights_bytes: int, limits: Limits, *, on_host: bool) -> Estimate:
    """The estimate. Raises EngineError, with figures and what would fit, if the target is too small for it; ``on_host``:
    or this machine for building.
    """
    found = estimate(denoiser, weights_bytes, limits)
    if target.memory_bytes is not None and found.device > target.memory_bytes:
        raise EngineError(
            f"{target.name} has {_gb(target.memory_bytes)}, and a canvas of {limits.canvas} tokens in blocks of {limits.block} "
            f"needs {_gb(found.device)} (weights {_gb(found.weights)}, cache {_gb(found.cache)}, passes {_gb(found.passes)}). "
            f"{_what_fits(denoiser, target.memory_bytes, weights_bytes, limits)}"
        )
    available = available_memory_bytes()
    if on_host and available is not None and found.host > available:
        raise EngineError(
            f"building for {target.name} takes about {_gb(found.host)} of host memory, and {_gb(available)} are available. "
            "Run `dlm-export engine` on a larger machine (`dlm-export build --no-engine` leaves it out here)."
        )
    return found


def _what_fits(denoiser: Mapping[str, Any], memory: int, weights_bytes: int, limits: Limits) -> str:
    low, high = 0, limits.canvas  # the longest canvas that fits lies in [low, high)
    while high - low > 1:
        middle = (low + high) // 2
        if estimate(denoiser, weights_bytes, Limits(middle, min(limits.block, middle))).device <= memory:
            low = middle
        else:
            high = middle
    if low < 1:
        return "No canvas fits: choose a smaller precision, or a larger device."
    return f"--canvas {low} fits."


def _gb(count: int) -> str:
    return f"{count / 1e9:.2f} GB"


# ---- Which TensorRT ----


@dataclass(frozen=True)
class Builder:
    """A TensorRT that can build for a target here and now. ``sms``: compute capabilities, tens and ones."""

    kind: str
    module: ModuleType
    sms: tuple[int, ...]


def deferred_command(folder: Path, target: Target) -> str:
    """What finishes the engine on the device."""
    return f"dlm-export engine {folder} --target {target.name}"


def find_builder(target: Target, options: EngineOptions) -> Builder | None:
    """The TensorRT that builds for ``target`` here; None if that has to happen on the device.

    Raises EngineError if TensorRT-RTX, which could, is not installed, if the GPU of this machine is another one, or if an
    option is nothing that the builder takes.
    """
    wanted = options.builder
    assert target.sm is not None, target.name
    kinds = [{"rtx": RTX, "tensorrt": TENSORRT}[kind] for kind in target.engine_kinds]
    if wanted is not None and wanted not in kinds:
        raise EngineError(f"{wanted} does not build for {target.name} (SM {sm_text(target.sm)}): {' or '.join(kinds)} does")
    if RTX in kinds and wanted != TENSORRT:
        module = _rtx_module()
        if module is not None:
            if options.timing_cache is not None:
                # Since TensorRT-RTX 1.2 its timing caches hold nothing, and asking for one fails where there is no GPU.
                raise EngineError("TensorRT-RTX keeps no timings: leave --timing-cache out")
            return Builder(RTX, module, (target.sm,))
        if wanted == RTX or importlib.util.find_spec("tensorrt") is None:
            raise EngineError(
                f"building for {target.name} here needs TensorRT-RTX, which is not installed: "
                "pip install 'dlm-export[rtx]'. Or build it on the device (`dlm-export build --no-engine` leaves it out)."
            )
    found = device_sm()
    if found in reported_sms(target.sm) and importlib.util.find_spec("tensorrt") is None:
        raise EngineError(
            f"this is a device of SM {sm_text(target.sm)}, and TensorRT {target.tensorrt} is not installed for this Python: "
            "pip install tensorrt; on a Jetson apt-get install python3-libnvinfer, and a venv made with --system-site-packages."
        )
    if found is None or importlib.util.find_spec("tensorrt") is None:
        return None
    if found not in reported_sms(target.sm):
        raise EngineError(
            f"TensorRT builds for the GPU that it runs on: this one is SM {sm_text(found)}, {target.name} is SM "
            f"{sm_text(target.sm)}. Run `dlm-export engine` there (`dlm-export build --no-engine` leaves it out here)."
        )
    return Builder(TENSORRT, importlib.import_module("tensorrt"), (found,))


def _rtx_module() -> ModuleType | None:
    for name in RTX_MODULES:
        if importlib.util.find_spec(name) is not None:
            if importlib.util.find_spec("tensorrt_rtx_libs") is not None:
                importlib.import_module("tensorrt_rtx_libs")  # loads the libraries that the bindings link
            try:
                return importlib.import_module(name)
            except ImportError as err:
                raise EngineError(
                    f"{name} is installed but does not load ({err}): pip install --force-reinstall 'dlm-export[rtx]'"
                ) from err
    return None


# ---- Building ----


def build_engine(
    folder: Path,
    manifest: Mapping[str, Any],
    files: Mapping[str, Mapping[str, Any]],
    target: Target,
    builder: Builder,
    options: EngineOptions,
    output: Path,
    progress: Progress | None = None,
) -> Built:
    """Write the engine of a bundle's device graph to ``output``; the manifest is the caller's to change.

    ``files`` has size and SHA-256 of the bundle's files by name. Raises EngineError, BuilderError, audit.AuditError, OSError;
    ``output`` is then the caller's to remove. KeyboardInterrupt cancels the builder first.
    """
    progress = progress or Silent()
    _check_device_graph(folder, manifest, target)
    graph = manifest["graph"]["device_file"]
    default = manifest["presets"][manifest["default_preset"]]
    limits = limits_of(manifest["denoiser"], default["block_length"], options)
    weights = _weights_file(manifest)
    expected_bytes = files[weights]["bytes"]
    found = check_memory(manifest["denoiser"], target, expected_bytes, limits, on_host=True)
    began = time.perf_counter()
    trt = builder.module
    logger = _logger(trt.ILogger)
    logger.reset()
    trt_builder = trt.Builder(logger)
    network = trt_builder.create_network(_network_flags(trt))
    parser = trt.OnnxParser(network, logger)
    parsed = parser.parse_from_file(str(folder / graph))
    _raise_logged(logger, f"{folder / graph}: TensorRT {trt.__version__} cannot parse it", parsed)
    table = audit.network_table(network)
    asked = manifest["precision"].get("layers") or dict.fromkeys(_layers(manifest), manifest["graph"]["cache_dtype"])
    audit.check(table, asked, target.name, allow_fallback=options.allow_fallback)
    config = _make_config(trt, trt_builder, network, manifest, builder, limits, options)
    with _cancellable(trt, config, progress, f"build engine {target.name}"):
        succeeded = _serialise(trt, trt_builder, network, config, output)
    _raise_logged(logger, f"TensorRT {trt.__version__} cannot build the engine for {target.name}", succeeded)
    audit.check_size(output.stat().st_size, expected_bytes, target.name, allow_fallback=options.allow_fallback)
    method = "network"
    device_bytes = found.device
    if builder.kind == TENSORRT:
        method = "inspector"
        engine = trt.Runtime(logger).deserialize_cuda_engine(output.read_bytes())
        _raise_logged(logger, f"the engine for {target.name} does not load again", engine is not None)
        information = engine.create_engine_inspector().get_engine_information(trt.LayerInformationFormat.JSON)
        table = audit.inspector_table(information, table)
        audit.check(table, asked, target.name, allow_fallback=options.allow_fallback)
    if options.timing_cache is not None:
        options.timing_cache.write_bytes(memoryview(config.get_timing_cache().serialize()))
    entry = {
        "file": engine_file(target),
        "builder": builder.kind,
        "version": trt.__version__,
        "sm": list(builder.sms),
        "graph": {
            "judged": files[manifest["graph"]["file"]]["sha256"],
            "device": files[graph]["sha256"],
            "weights": files[weights]["sha256"],
        },
        "profiles": limits.profiles(),
        "audit": {"method": method, "layers": table, "fallbacks": audit.fallbacks(table, asked)},
        "device_bytes": device_bytes,
    }
    return Built(target.name, entry | {"seal": seal(entry)}, round(time.perf_counter() - began, 3), logger.shown)


def _serialise(trt: Any, trt_builder: Any, network: Any, config: Any, output: Path) -> bool:
    """Build the engine into a file; False: the logger has the reason.

    A builder that writes in pieces never holds the whole engine beside the weights; older ones cannot.
    """
    if not hasattr(trt_builder, "build_serialized_network_to_stream"):
        plan = trt_builder.build_serialized_network(network, config)
        if plan is not None:
            output.write_bytes(memoryview(plan))
        return plan is not None

    failures: list[OSError] = []
    with output.open("wb") as file:

        class Writer(trt.IStreamWriter):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()

            def write(self, data: bytes) -> int:
                try:
                    return file.write(data)
                except OSError as err:  # it must not cross the builder's frames
                    failures.append(err)
                    return 0

        succeeded = bool(trt_builder.build_serialized_network_to_stream(network, config, Writer()))
    if failures:
        raise failures[0]
    return succeeded


def engine_file(target: Target) -> str:
    """Where a target's engine lies in a bundle."""
    return f"engines/{target.name}.engine"


def seal(entry: Mapping[str, Any]) -> str:
    """SHA-256 of an entry without its seal, as canonical JSON: what tells an edited entry from the one that was written."""
    bare = {key: value for key, value in entry.items() if key != "seal"}
    return hashlib.sha256(json.dumps(bare, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _layers(manifest: Mapping[str, Any]) -> list[str]:
    """Module paths of the denoiser's matrix multiplications by weights of their own."""
    d = manifest["denoiser"]
    each = [f"attention.{name}" for name in ("q", "k", "v", "out")] + [f"mlp.{name}" for name in ("gate", "up", "down")]
    return [f"blocks.{i}.{name}" for i in range(d["layers"]) for name in each] + ([] if d["tied_head"] else ["head"])


def _weights_file(manifest: Mapping[str, Any]) -> str:
    return f"{manifest['graph']['file']}.data"


def _network_flags(trt: Any) -> int:
    flag = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    return 0 if flag is None else 1 << int(flag)  # TensorRT 11 knows no other networks


@functools.cache
def _logger(base: Any) -> Any:
    """The ILogger that keeps errors and warnings: one a process, as TensorRT ignores all but the first while it lives."""
    levels = base.Severity

    class Logger(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.reset()

        def reset(self) -> None:
            self.errors: list[str] = []
            self.shown: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            text = " ".join(str(message).split())
            if severity in (levels.INTERNAL_ERROR, levels.ERROR):
                self.errors.append(text)
            elif severity == levels.WARNING:
                is_fatal = any(pattern in text.lower() for pattern in FATAL_WARNINGS)
                into = self.errors if is_fatal else self.shown
                if "Int64 binding" not in text and text not in into:  # int64 ids are what the runtime feeds
                    into.append(text)

    return Logger()


def _raise_logged(logger: Any, what: str, succeeded: Any) -> None:
    """BuilderError with everything that the logger kept; errors count even where the call claims success."""
    if succeeded and not logger.errors:
        return
    reasons = "; ".join(dict.fromkeys(logger.errors)) or "it gave no reason"
    if "OutOfMemory" in reasons:
        reasons += ". Without a GPU the builder has little room for constants: a shorter --canvas, or build on the device"
    raise BuilderError(f"{what}: {reasons[:4000]}")


def _make_config(
    trt: Any,
    trt_builder: Any,
    network: Any,
    manifest: Mapping[str, Any],
    builder: Builder,
    limits: Limits,
    options: EngineOptions,
) -> Any:
    config = trt_builder.create_builder_config()
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options.workspace_bytes)
    if builder.kind == RTX:
        config.num_compute_capabilities = len(builder.sms)
        for i, sm in enumerate(builder.sms):
            config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{sm}"), i)
    else:
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED  # the inspector tells types only then
    if options.timing_cache is not None:
        known = options.timing_cache.read_bytes() if options.timing_cache.is_file() else b""
        config.set_timing_cache(config.create_timing_cache(known), False)
    d = manifest["denoiser"]
    for ranges in limits.profiles().values():
        profile = trt_builder.create_optimization_profile()
        for i in range(network.num_inputs):
            name = network.get_input(i).name
            of = {"input_ids": "tokens", "position_ids": "tokens", "score_rows": "rows"}.get(name, "cached")
            cache = (d["kv_heads"],), (d["head_size"],)
            before, behind = cache if of == "cached" else ((), ())
            profile.set_shape(name, *((1, *before, size, *behind) for size in ranges[of]))
        if config.add_optimization_profile(profile) < 0:
            raise BuilderError(f"TensorRT {trt.__version__} refuses the profile {ranges}")
    return config


@contextmanager
def _cancellable(trt: Any, config: Any, progress: Progress, stage: str) -> Iterator[None]:
    """Show the builder's phases as progress, and let Ctrl-C and SIGTERM stop it between two steps."""
    stopped: list[int] = []

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.root: str | None = None

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            if self.root is None:
                self.root = phase_name
                progress.start(stage, max(1, num_steps))

        def step_complete(self, phase_name: str, step: int) -> bool:
            if phase_name == self.root:
                progress.advance()
            return not stopped

        def phase_finish(self, phase_name: str) -> None:
            if phase_name == self.root:
                self.root = None

    monitor = Monitor()
    config.progress_monitor = monitor
    # An exception must not cross the builder's frames: the handlers only remember, the monitor says no.
    is_main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM) if is_main else ()
    before = {number: signal.signal(number, lambda got, _: stopped.append(got)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        config.progress_monitor = None
    if stopped:
        if stopped[0] == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + stopped[0])


# ---- Into a bundle that is there ----


def add_engine(
    folder: Path,
    manifest: dict[str, Any],
    target: Target,
    options: EngineOptions,
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> Built:
    """Build an engine into an existing bundle. ``manifest`` is the bundle's, checked by the runtime.

    The engine and then the manifest are renamed into place; until then the bundle is as it was. Raises EngineError,
    AuditError, TargetError, OutputError.
    """
    entries = manifest.get("engines", {})
    if target.name in entries and not force:
        raise EngineError(f"{folder}: has an engine for {target.name}. Pass --force to build it again.")
    _check_device_graph(folder, manifest, target)
    _check_precision(target, manifest["precision"])
    builder = find_builder(target, options)
    if builder is None:
        if target.needs_plain_graph and manifest["graph"]["opset"] > PLAIN_OPSET:
            raise EngineError(
                f"{folder}: holds a graph of opset {manifest['graph']['opset']}, which JetPack 6's TensorRT 10.3 cannot parse. "
                f"Build a bundle with --target {target.name}; JetPack 7.2 takes this one, on the device: "
                f"`{deferred_command(folder, target)}`."
            )
        raise EngineError(
            f"an engine for {target.name} (SM {sm_text(target.sm or 0)}) is built on the device: copy the bundle there and run "
            f"`{deferred_command(folder, target)}`. There, TensorRT {target.tensorrt} is needed."
        )
    name = engine_file(target)
    staged = folder / f"{name}.new"
    with _changing(folder / name):
        try:
            built = build_engine(folder, manifest, manifest["files"], target, builder, options, staged, progress)
            made = {"bytes": staged.stat().st_size, "sha256": sha256(staged)}
            os.replace(staged, folder / name)
            targets = list(dict.fromkeys([*manifest["targets"], target.name]))
            changed = manifest | {"targets": targets, "engines": entries | {target.name: built.entry}}
            write_manifest(folder, changed, manifest["files"] | {name: made})
        finally:
            staged.unlink(missing_ok=True)
    return built


def remove_engine(folder: Path, manifest: dict[str, Any], target: Target) -> int:
    """Take an engine out of a bundle; returns the bytes that its file had. Raises EngineError, OutputError."""
    entries = dict(manifest.get("engines", {}))
    if target.name not in entries:
        raise EngineError(f"{folder}: has no engine for {target.name}, only for {', '.join(entries) or 'none'}")
    path = folder / entries.pop(target.name)["file"]
    with _changing(path):
        size = path.stat().st_size if path.is_file() else 0
        files = {name: entry for name, entry in manifest["files"].items() if name != engine_file(target)}
        write_manifest(folder, manifest | {"engines": entries}, files)
        path.unlink(missing_ok=True)
    return size


@contextmanager
def _changing(path: Path) -> Iterator[None]:
    """Hold the lock of a bundle while its engine ``path`` changes. OutputError: no way to write, or someone has it."""
    folder = path.parent.parent
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.parent.mkdir(exist_ok=True)
        try:
            yield
        finally:
            if not any(path.parent.iterdir()):
                path.parent.rmdir()
    except BlockingIOError as err:
        raise OutputError(f"{folder}: another dlm-export is changing its engines. Wait for it, and try again.") from err
    except OSError as err:
        raise OutputError(f"{path}: cannot write ({err.strerror})") from err
    finally:
        os.close(held)


def _check_device_graph(folder: Path, manifest: Mapping[str, Any], target: Target) -> None:
    """EngineError if there is nothing to build for ``target`` from."""
    if target.sm is None:
        raise EngineError(f"target {target.name} needs no engine: ONNX Runtime runs its graph")
    if "device_file" not in manifest["graph"]:
        raise EngineError(
            f"{folder}: was built for {', '.join(manifest['targets'])} and has no device graph. "
            f"Build it with --target {target.name}."
        )


def _check_precision(target: Target, precision: Mapping[str, Any]) -> None:
    """TargetError if a bundle's precision is nothing that ``target`` runs."""
    if "layers" in precision:
        target.check_layers(precision["layers"])
    else:
        recipe_for([target], precision["name"])
