"""Checks whether a machine can run a given bundle, or bundles for a given target."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dlm_export.bundle.manifest import network_of, table_bytes_of
from dlm_export.bundle.prompt_reuse import prompt_reuse_of
from dlm_export.devices import DEVICES
from dlm_export.doctor.checks import (
    LEAST_FOR_GPU,
    LEAST_ONNXRUNTIME,
    Lacking,
    builders_of,
    lacking_tensorrt,
    numbers,
    size,
)
from dlm_export.doctor.findings import Finding, needed, note, ok
from dlm_export.doctor.machine import Machine
from dlm_export.engines import ENGINE_BUILDERS, TENSORRT
from dlm_export.machine import engine_here, reported_sms
from dlm_export.targets import LEAST_SM, Target, sm_text
from dlm_export.tensorrt.estimate import EngineOptions, Estimate, estimate, limits_of
from dlm_runtime.cache_dtypes import CACHE_ROWS

ON_CPU = "or run its graph on the CPU: --engine onnxruntime"
NAMES = {name: builder.title for name, builder in ENGINE_BUILDERS.items()}
SHARED_SM = {sm for device in DEVICES if device.is_shared for sm in reported_sms(device.sm)}
"""The SMs that drivers report for GPUs that share the CPU's memory."""


def examine_target(machine: Machine, target: Target) -> Iterator[Finding]:
    """Check whether ``machine`` can run bundles and build engines for ``target``."""
    part = f"target {target.name}"
    if target.sm is None:
        is_cpu = target.provider == "cpu"
        lacking = _lacking_on_cpu(machine) if is_cpu else _lacking_for_cuda(machine, bf16=False)
        yield needed(part, "runs here", lacking, "ONNX Runtime runs the graph, nothing is built")
        return
    lacking = _lacking_gpu(machine, reported_sms(target.sm), target.name)
    lacking += lacking_tensorrt(machine)
    yield needed(part, "runs here", lacking, f"an engine for SM {sm_text(target.sm)}")
    is_built, how = engine_here(target, builders_of(machine))
    built = ok(part, "is built here", f"yes, {how}")
    yield built if is_built else note(part, "is built here", "no", how)


def examine_bundle(
    machine: Machine, folder: Path, manifest: Mapping[str, Any]
) -> Iterator[Finding]:
    """Check whether ``machine`` can run the bundle in ``folder``.

    ``manifest`` is the manifest of the bundle, and must be valid.
    """
    loop, precision, targets = manifest["loop"], manifest["precision"]["name"], manifest["targets"]
    part = "bundle"
    yield ok(
        part,
        "what it is",
        f"{folder}: {manifest['network']['architecture']}, {precision}, for {', '.join(targets)}",
    )
    if "device_file" not in loop["graph"]:
        lacking = _lacking_on_cpu(machine)
        engine = f"ONNX Runtime {machine.onnxruntime.version} on the CPU"
    elif "cuda" in targets:
        lacking = [
            (what, f"{remedy}; {ON_CPU}")
            for what, remedy in _lacking_for_cuda(machine, bf16=precision == "bf16")
        ]
        engine = f"ONNX Runtime {machine.onnxruntime.version}, --provider cuda"
    else:
        lacking = _lacking_gpu(machine, None, "") + lacking_tensorrt(machine)
        lacking = lacking or _lacking_engine(machine, folder, loop.get("engines", {}))
        lacking = [(what, f"{remedy}; {ON_CPU}") for what, remedy in lacking]
        kind = NAMES[machine.native.tensorrt or TENSORRT.name]
        engine = "" if lacking else f"{kind} on {machine.driver.gpus[0].name}"
    yield needed(part, "runs here", lacking, engine)
    yield from _kernels(machine, part, manifest)
    yield from _prompt_reuse(machine, part, manifest)
    yield _memory(machine, part, manifest)


def _kernels(m: Machine, part: str, manifest: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield a finding that names the kernels for a CPU bundle. For other bundles, yield nothing."""
    calls = manifest.get("kernels", {}).get("calls", {})
    is_for_gpu = "device_file" in manifest["loop"]["graph"]
    if not calls or is_for_gpu or m.native.failure is not None:
        return
    runs = [name for name, refusal in m.native.kernels.items() if refusal is None]
    listed = ", ".join(f"{count} {name}" for name, count in calls.items())
    if runs:
        yield ok(part, "kernels", f"{runs[0]} runs {listed}")
        return
    said = f"none runs here for {listed}: ONNX Runtime computes them, slower"
    if any(name.endswith("TiedHead") for name in calls):
        said += ", and copies the embedding table in fp32"
    yield note(part, "kernels", said, "a processor with kernels: see kernels above")


def _prompt_reuse(m: Machine, part: str, manifest: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield a finding that says whether a block-causal bundle can reuse prompts here."""
    if "visible_block" not in manifest["loop"]:
        return
    reuse, name = prompt_reuse_of(manifest), "reuse of prompts"
    if reuse.refusal is not None:
        yield note(part, name, f"no: {reuse.refusal}")
    elif None not in m.native.kernels.values():
        yield note(
            part, name, "no: it needs kernels", "a processor with kernels: see kernels above"
        )
    else:
        yield ok(part, name, f"yes, in pages of {reuse.page_tokens} tokens")


def _lacking_on_cpu(m: Machine) -> Lacking:
    """List what every bundle lacks on the CPU. Earlier lines of the report give the remedies."""
    if m.native.failure is not None:
        return [("the native library does not load", "see above")]
    if m.onnxruntime.failure is not None or numbers(m.onnxruntime.version) < LEAST_ONNXRUNTIME:
        return [("no ONNX Runtime that is new enough", "see above")]
    return []


def _lacking_for_cuda(m: Machine, *, bf16: bool) -> Lacking:
    lacking = _lacking_on_cpu(m) + _lacking_gpu(m, None, "")
    if len(m.onnxruntime_wheels) > 1:
        lacking.append(("both wheels of ONNX Runtime are installed, in one folder", "see above"))
    elif "CUDAExecutionProvider" not in m.providers:
        least = ".".join(map(str, LEAST_FOR_GPU))
        remedy = (
            f"pip uninstall -y onnxruntime, then pip install 'onnxruntime-gpu[cuda,cudnn]>={least}'"
        )
        if m.architecture != "x86_64":  # onnxruntime-gpu has wheels for x86-64 only
            remedy = f"an onnxruntime of {least} or later that was built with it"
        lacking.append(("this ONNX Runtime has no CUDA provider", remedy))
    elif numbers(m.onnxruntime.version) < LEAST_FOR_GPU:
        what = f"ONNX Runtime {m.onnxruntime.version} is too old for GPUs"
        lacking.append((what, "pip install -U onnxruntime-gpu"))
    if failed := [path for path, why in m.cuda_libraries.items() if why is not None]:
        names = ", ".join(path.rpartition("/")[2] for path in failed)
        lacking.append((f"{names} do not load", "see above"))
    if bf16 and m.sm is not None and m.sm < LEAST_SM["bf16"]:
        what = f"bf16 needs SM {sm_text(LEAST_SM['bf16'])}, this GPU is SM {sm_text(m.sm)}"
        lacking.append((what, "a bundle in fp16"))
    return lacking


def _lacking_gpu(m: Machine, sms: Sequence[int] | None, target: str) -> Lacking:
    """Return what is missing if the machine has no GPU with one of the SMs in ``sms``.

    If ``sms`` is None, any GPU is accepted. ``target`` is the target's name for the message.
    """
    if not m.driver.gpus:
        return [(f"no GPU: {m.driver.failure}", "NVIDIA's driver, and a GPU that it shows")]
    if sms is not None and m.sm not in sms:
        gpu = m.driver.gpus[0]
        what = f"{gpu.name} is SM {sm_text(gpu.sm)}, {target} is SM {sm_text(sms[0])}"
        return [(what, f"build for sm{gpu.sm} instead")]
    return []


def _lacking_engine(m: Machine, folder: Path, engines: Mapping[str, Mapping[str, Any]]) -> Lacking:
    """List the reasons why no engine of the bundle runs here. The list is empty if one does."""
    kind, gpu = m.native.tensorrt, m.driver.gpus[0]
    assert kind is not None
    version, reasons = m.tensorrt[kind].version, []
    for name, entry in engines.items():
        if gpu.sm not in entry["sm"]:
            reasons.append(f"{name} is for SM {', '.join(map(sm_text, entry['sm']))}")
        elif entry["builder"] != kind:
            reasons.append(
                f"{name} is for {NAMES[entry['builder']]}, the native library is for {NAMES[kind]}"
            )
        elif entry["version"] != version:
            reasons.append(f"{name} needs {NAMES[kind]} {entry['version']}, not {version}")
        elif m.tensorrt[kind].is_lean and not entry.get("version_compatible"):
            reasons.append(f"{name} needs the complete {NAMES[kind]}, not its lean runtime")
        else:
            return []
    why = "; ".join(reasons) or "the bundle has none yet"
    remedy = f"dlm-export engine {folder} --target sm{gpu.sm}, here"
    return [(f"no engine for SM {sm_text(gpu.sm)}: {why}", remedy)]


def memory_needed(manifest: Mapping[str, Any]) -> Estimate:
    """Estimate the memory that a bundle needs for its longest canvas.

    The block length is taken from the default preset. For a bundle for GPUs, ``tensorrt.estimate``
    computes the result. For a bundle for CPUs, the field ``device`` is the memory of the process.
    The process needs memory for the weights, the cache, and the intermediate results of a pass in
    fp32.
    """
    loop, network = manifest["loop"], network_of(manifest)
    graph = loop["graph"]
    weights = sum(
        entry["bytes"] for name, entry in manifest["files"].items() if name.endswith(".data")
    )
    block = loop["presets"][loop["default_preset"]]["block_length"]
    limits = limits_of(network.max_canvas_length, block, EngineOptions())
    # The MoE layer of TensorRT needs less memory than this.
    form = "cuda" if manifest["targets"] == ["cuda"] else "tensorrt"
    is_joined = "device_file" in graph and network.joins_experts(form)
    formats = manifest["precision"].get("layers", {}).values()
    found = estimate(network, weights, limits, formats, all_experts=is_joined)
    if "device_file" in graph:
        return found
    held = weights
    # The CPU computes some formats in fp32. ONNX Runtime therefore converts weights in these
    # formats to fp32 in memory, except for the embedding table.
    if graph["simulated"]:
        table = network.vocab_size * network.hidden_size
        stored = table * (table_bytes_of(manifest) or 1)
        held = max(weights, 4 * (network.parameter_count() - table) + stored)
    cache = network.canvas_bytes(network.max_canvas_length, *CACHE_ROWS[graph["cache_dtype"]])
    passes = 2 * found.passes  # ``estimate`` assumes fp16, but a CPU computes in fp32
    return Estimate(held, cache, passes, held + cache + passes, 0)


def _memory(m: Machine, part: str, manifest: Mapping[str, Any]) -> Finding:
    found, is_for_gpu = memory_needed(manifest), "device_file" in manifest["loop"]["graph"]
    room, where = m.usable_bytes, f"{size(m.usable_bytes)} are available"
    if is_for_gpu and m.sm is None:
        room, where = None, "there is no GPU here to compare this with"
    elif is_for_gpu and m.sm not in SHARED_SM:
        room = m.driver.gpus[0].memory_bytes
        where = f"the GPU has {size(room)}"
    parts = f"weights {size(found.weights)}, cache {size(found.cache)}, passes {size(found.passes)}"
    canvas = manifest["loop"]["max_canvas_length"]
    said = f"about {size(found.device)} for a canvas of {canvas} tokens ({parts}), by formula"
    remedy = "run fewer other programs, or use shorter canvases, a smaller precision or --cache-dtype int8"
    if room is not None and found.weights > room:
        return needed(part, "memory", [(f"{said}; {where}", remedy)], "")
    if room is not None and found.device > room:
        return note(part, "memory", f"{said}; {where}, so long canvases may not fit", remedy)
    return ok(part, "memory", f"{said}; {where}")
