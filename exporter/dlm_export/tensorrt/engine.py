"""Builds an engine from a bundle's device graph, with TensorRT 10, TensorRT 11 or TensorRT-RTX.

All versions parse ``device.onnx`` from its file, so the weights are memory-mapped and not copied.
Networks are strongly typed, which means that the engine uses the types of the graph. If the builder
logs an error, an exception with the text of the error is raised. A warning that a part of the graph
was ignored also raises an exception.
"""

from __future__ import annotations

import functools
import hashlib
import json
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dlm_export.bundle.manifest import network_of
from dlm_export.engines import RTX, TENSORRT
from dlm_export.graph import MOE_LAYER
from dlm_export.outputs import replaced
from dlm_export.progress import Progress, Silent
from dlm_export.signals import handled_by
from dlm_export.targets import Target
from dlm_export.tensorrt import audit
from dlm_export.tensorrt.builders import Builder
from dlm_export.tensorrt.estimate import (
    BuilderError,
    EngineError,
    EngineOptions,
    Limits,
    check_memory,
    limits_of,
)
from dlm_runtime.files import read_bytes

# TIMINGS_LIMIT_BYTES is the maximum size of a timing cache. If a warning of the builder contains a
# text in FATAL_WARNINGS, the engine would not compute the whole graph, so the build fails. All
# other warnings are shown.
TIMINGS_LIMIT_BYTES = 1 << 30
FATAL_WARNINGS = (
    "unused input",
    "out of range int64",
    "ignoring",
    "logger is ignored",
    "not supported",
)


@dataclass(frozen=True)
class Built:
    """The result of building an engine.

    ``entry`` is the engine's record for ``loop.engines`` in the manifest, and ``audit`` is the
    engine's record for ``audits``. ``seconds`` is the duration of the build, and ``host_bytes`` is
    the host memory that it was estimated to need.
    """

    target: str
    entry: dict[str, Any]
    audit: dict[str, Any]
    seconds: float
    host_bytes: int
    warnings: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return self.entry | {
            "audit": self.audit,
            "seconds": self.seconds,
            "host_bytes": self.host_bytes,
        }


def with_engine(manifest: Mapping[str, Any], built: Built) -> dict[str, Any]:
    """Return a copy of the manifest that also describes the engine ``built``.

    An old engine of the same target is replaced. The field ``files`` is not changed.
    """
    loop, audits = manifest["loop"], manifest.get("audits", {})
    engines = loop.get("engines", {}) | {built.target: built.entry}
    return {
        **manifest,
        "loop": loop | {"engines": engines},
        "audits": audits | {built.target: built.audit},
    }


def without_engine(manifest: Mapping[str, Any], target: str) -> dict[str, Any]:
    """Return a copy of the manifest without the engine of a target.

    The field ``files`` is not changed.
    """

    def others(entries: Mapping[str, Any]) -> dict[str, Any]:
        return {name: entry for name, entry in entries.items() if name != target}

    loop, audits = manifest["loop"], manifest.get("audits", {})
    return {
        **manifest,
        "loop": loop | {"engines": others(loop["engines"])},
        "audits": others(audits),
    }


def check_device_graph(folder: Path, manifest: Mapping[str, Any], target: Target) -> None:
    """Check that the bundle contains a graph from which an engine for ``target`` can be built.

    Otherwise, raises EngineError.
    """
    if target.sm is None:
        raise EngineError(f"target {target.name} needs no engine: ONNX Runtime runs its graph")
    if "device_file" not in manifest["loop"]["graph"]:
        raise EngineError(
            f"{folder}: was built for {', '.join(manifest['targets'])} and has no device graph. "
            f"Build it with --target {target.name}."
        )
    if manifest["targets"] == ["cuda"]:
        raise EngineError(
            f"{folder}: was built for cuda, so its graph is for ONNX Runtime. "
            f"Build a bundle with --target {target.name}."
        )
    if has_moe_layer(folder, manifest) and not target.has_moe_layer:
        raise EngineError(
            f"{folder}: its graph contains TensorRT's MoE layer, which {target.name} does not run. "
            f"Build a bundle with --target {target.name}."
        )


def joins_experts(folder: Path, manifest: Mapping[str, Any]) -> bool:
    """Return whether the graphs of a bundle for GPUs compute all experts of a layer."""
    if manifest["targets"] == ["cuda"]:
        return network_of(manifest).joins_experts("cuda")
    return not has_moe_layer(folder, manifest)


def has_moe_layer(folder: Path, manifest: Mapping[str, Any]) -> bool:
    """Return whether the bundle's device graph contains TensorRT's MoE layer."""
    graph = folder / manifest["loop"]["graph"]["device_file"]
    return MOE_LAYER.encode() in graph.read_bytes()


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
    """Build an engine from a bundle's device graph, and write it to the file ``output``.

    The manifest is not changed. If a signal would end the process, the builder is cancelled first.

    Args:
        folder: The bundle.
        manifest: The bundle's manifest.
        files: A dict that maps the name of each file of the bundle to the file's size and SHA-256.
        target: The device.
        builder: The installed TensorRT that builds the engine.
        options: Options of the build.
        output: The file to write. After an error, the caller removes this file.
        progress: Receives the phases of the builder.

    Raises:
        EngineError, BuilderError, audit.AuditError, OSError: The engine cannot be built or written.
    """
    progress = progress or Silent()
    check_device_graph(folder, manifest, target)
    loop, denoiser = manifest["loop"], network_of(manifest)
    judged, graph = loop["graph"]["file"], loop["graph"]["device_file"]
    default = loop["presets"][loop["default_preset"]]
    limits = limits_of(denoiser.max_canvas_length, default["block_length"], options)
    weights = f"{judged}.data"
    expected_bytes = files[weights]["bytes"]
    formats = manifest["precision"].get("layers", {}).values()
    found = check_memory(
        denoiser,
        target,
        expected_bytes,
        limits,
        formats,
        on_host=True,
        all_experts=not has_moe_layer(folder, manifest),
    )
    began = time.perf_counter()
    trt = builder.module
    logger = _logger(trt.ILogger)
    logger.reset()
    trt_builder = trt.Builder(logger)
    # TensorRT 11 does not define this flag, because its networks are always strongly typed.
    flag = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    network = trt_builder.create_network(0 if flag is None else 1 << int(flag))
    parser = trt.OnnxParser(network, logger)
    parsed = parser.parse_from_file(str(folder / graph))
    _raise_logged(logger, f"{folder / graph}: TensorRT {trt.__version__} cannot parse it", parsed)
    table = audit.network_table(network)
    asked = manifest["precision"].get("layers") or dict.fromkeys(
        denoiser.quantisable(), loop["graph"]["cache_dtype"]
    )
    audit.check(table, asked, target.name, allow_fallback=options.allow_fallback)
    workspace = options.workspace_bytes or found.workspace
    config = _make_config(trt, trt_builder, loop, builder, limits, workspace, options)
    with _cancellable(trt, config, progress, f"build engine {target.name}"):
        succeeded = _serialise(trt, trt_builder, network, config, output)
    _raise_logged(
        logger, f"TensorRT {trt.__version__} cannot build the engine for {target.name}", succeeded
    )
    audit.check_size(
        output.stat().st_size, expected_bytes, target.name, allow_fallback=options.allow_fallback
    )
    method = "network"
    if builder.kind == TENSORRT.name:
        method = "inspector"
        engine = trt.Runtime(logger).deserialize_cuda_engine(output.read_bytes())
        _raise_logged(
            logger,
            f"the engine for {target.name} cannot be loaded after its build",
            engine is not None,
        )
        information = engine.create_engine_inspector().get_engine_information(
            trt.LayerInformationFormat.JSON
        )
        table = audit.inspector_table(information, table)
        audit.check(table, asked, target.name, allow_fallback=options.allow_fallback)
    if options.timing_cache is not None:
        with replaced(options.timing_cache) as new:
            new.write_bytes(memoryview(config.get_timing_cache().serialize()))
    entry = {
        "file": engine_file(target),
        "builder": builder.kind,
        "version": trt.__version__,
        "sm": list(builder.sms),
        "built_from": {
            "judged": files[judged]["sha256"],
            "device": files[graph]["sha256"],
            "weights": files[weights]["sha256"],
        },
        "profiles": limits.profiles(),
    }
    if options.version_compatible:
        entry["version_compatible"] = True
    audited = {
        "method": method,
        "layers": table,
        "fallbacks": audit.fallbacks(table, asked),
        "device_bytes": found.device,
    }
    return Built(
        target.name,
        entry | {"seal": seal(entry)},
        audited,
        round(time.perf_counter() - began, 3),
        found.host,
        logger.shown,
    )


def _serialise(trt: Any, trt_builder: Any, network: Any, config: Any, output: Path) -> bool:
    """Write the engine to a file, part by part if TensorRT can. Returns False if it fails."""
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
                except OSError as err:  # an exception must not pass through the builder's C++ code
                    failures.append(err)
                    return 0

        succeeded = bool(trt_builder.build_serialized_network_to_stream(network, config, Writer()))
    if failures:
        raise failures[0]
    return succeeded


def engine_file(target: Target) -> str:
    """Return the path of a target's engine within a bundle."""
    return f"engines/{target.name}.engine"


def seal(entry: Mapping[str, Any]) -> str:
    """Return the seal of an engine's record: a SHA-256 hash of all other fields.

    The seal shows whether the record was edited later.
    """
    bare = {key: value for key, value in entry.items() if key != "seal"}
    return hashlib.sha256(
        json.dumps(bare, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()


@functools.cache
def _logger(base: Any) -> Any:
    """Return the process's only ILogger, which collects errors and warnings."""
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
                # This warning is expected, because the runtime passes int64 ids.
                if "Int64 binding" not in text and text not in into:
                    into.append(text)

    return Logger()


def _raise_logged(logger: Any, what: str, succeeded: Any) -> None:
    """Raise a BuilderError with all logged errors, even if the builder reports success."""
    if succeeded and not logger.errors:
        return
    reasons = "; ".join(dict.fromkeys(logger.errors)) or "no reason was given"
    if "OutOfMemory" in reasons:
        reasons += (
            ". A pass needs more scratch memory: use a larger --workspace, or a shorter --canvas"
        )
    raise BuilderError(f"{what}: {reasons[:4000]}")


def _make_config(
    trt: Any,
    trt_builder: Any,
    loop: Mapping[str, Any],
    builder: Builder,
    limits: Limits,
    workspace: int,
    options: EngineOptions,
) -> Any:
    ports = loop["graph"]["ports"]
    config = trt_builder.create_builder_config()
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, workspace)
    if builder.kind == RTX.name:
        config.num_compute_capabilities = len(builder.sms)
        for i, sm in enumerate(builder.sms):
            config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{sm}"), i)
    else:
        # The engine inspector reports types only with this setting.
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    if options.version_compatible:
        config.set_flag(trt.BuilderFlag.VERSION_COMPATIBLE)
        config.set_flag(trt.BuilderFlag.EXCLUDE_LEAN_RUNTIME)
    if options.timing_cache is not None:
        path = options.timing_cache
        known = read_bytes(path, TIMINGS_LIMIT_BYTES, BuilderError) if path.exists() else b""
        config.set_timing_cache(config.create_timing_cache(known), False)
    for ranges in limits.profiles().values():
        profile = trt_builder.create_optimization_profile()
        for port, of in (
            ("input_ids", "tokens"),
            ("position_ids", "tokens"),
            ("score_rows", "rows"),
        ):
            profile.set_shape(ports[port], *((1, size) for size in ranges[of]))
        for layer in ports["layers"]:
            shapes = [(1, layer["kv_heads"], size, layer["head_size"]) for size in ranges["cached"]]
            for port in ("past_key", "past_value"):
                profile.set_shape(layer[port], *shapes)
        if (width := loop.get("conditioning_size")) is not None:
            embedded = [(1, size, width) for size in ranges["tokens"]]
            profile.set_shape(ports["conditioning"], *embedded)
            profile.set_shape(ports["temperature"], *((1, size) for size in ranges["rows"]))
        if config.add_optimization_profile(profile) < 0:
            raise BuilderError(f"TensorRT {trt.__version__} rejects the profile {ranges}")
    return config


@contextmanager
def _cancellable(trt: Any, config: Any, progress: Progress, stage: str) -> Iterator[None]:
    """Return a context that shows the builder's phases as progress.

    If a signal ends the process, the builder is stopped between two steps.
    """
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
    # An exception must not pass through the builder's C++ code. The signal handler therefore only
    # records the signal. The monitor then cancels the build. Afterwards, the original handler is
    # called with the first signal.
    with handled_by(lambda got, _: stopped.append(got)):
        try:
            yield
        finally:
            config.progress_monitor = None
    if stopped:
        signal.raise_signal(stopped[0])
