"""Compares the facts about a machine with what dlm-export needs.

Each comparison yields findings. A finding says that a part works, or says what is missing and how
to get the missing part.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from dlm_export.doctor.findings import MISSING, NOTE, OK, Finding, needed, note, ok
from dlm_export.doctor.machine import Machine
from dlm_export.engines import ENGINE_BUILDERS, RTX, TENSORRT
from dlm_export.machine import Builders, engine_here, reported_sms
from dlm_export.processors import KERNEL_SETS
from dlm_export.targets import GENERIC, find, sm_text

PYTHONS = ((3, 10), (3, 13))
LEAST_ONNXRUNTIME, LEAST_FOR_GPU = (1, 23), (1, 24)
LITTLE_DISK_BYTES = 2 << 30

# Maps each extra of pyproject.toml to its purpose, except the extra "dev", which is for developers.
EXTRAS = {
    "export": "building bundles from checkpoints",
    "report": "figures of reports and plans",
    "rtx": "engines for RTX 20 to 50 and other GPUs of TensorRT-RTX, built without a GPU",
    "rtx-run": "ONNX Runtime's TensorRT-RTX provider",
    "gpu": "ONNX Runtime on an NVIDIA GPU; only one of the two wheels of ONNX Runtime may be installed",
    "modelopt": "calibrating by NVIDIA's modelopt",
    "serve": "the HTTP server of `dlm-export serve`",
    "ray": "replicas of the HTTP server in Ray Serve",
    "hub": "checkpoints by name, such as hf:ORG/NAME",
    "capture": "running a release's own code, for golden logits",
    "optimum": "the command of optimum-cli",
    "eval": "running tasks of lm-eval",
    "docs": "building the documentation site",
}


def examine(machine: Machine) -> list[Finding]:
    """Check everything about the machine. The findings are in the order of the report."""
    needed_first = (_python, _native_library, _onnxruntime, _gpu, _tensorrt)
    parts = (*needed_first, _board, _memory, _building, _extras)
    return [finding for part in parts for finding in part(machine)]


def numbers(version: str | None) -> tuple[int, ...]:
    """Split the start of a version into numbers: "1.31.1rc2" gives (1, 31, 1)."""
    start = re.match(r"[\d.]*", version or "") or [""]
    return tuple(int(part) for part in re.findall(r"\d+", start[0]))


def size(count: int | None) -> str:
    if count is None:
        return "an unknown amount"
    is_large = count >= 1 << 30 or count == 0
    return f"{count / (1 << 30):.1f} GiB" if is_large else f"{count / (1 << 20):.1f} MiB"


def _python(m: Machine) -> Iterator[Finding]:
    text, (least, most) = f"{m.python[0]}.{m.python[1]}", PYTHONS
    wanted = f"{least[0]}.{least[1]} to {most[0]}.{most[1]}"
    lacking = []
    if not least <= m.python <= most:
        lacking.append((f"Python {text}; {wanted} is needed", f"a venv of Python {wanted}"))
    yield needed("base", "Python", lacking, f"{text}, {m.executable}, {m.architecture}")
    there = {name: version for name, version in m.packages.items() if version is not None}
    replaced = {"onnxruntime"} if "onnxruntime-gpu" in m.onnxruntime_wheels else set()
    absent = [name for name in m.packages if name not in {*there, *replaced}]
    lacking = []
    if absent:
        lacking.append((f"not installed: {', '.join(absent)}", f"pip install {' '.join(absent)}"))
    if m.version is None:
        what = "dlm-export runs from its source and is not installed"
        lacking.append((what, "pip install . in its folder"))
    listed = ", ".join(f"{name} {version}" for name, version in there.items())
    yield needed("base", "packages", lacking, f"dlm-export {m.version}; {listed}")


def _native_library(m: Machine) -> Iterator[Finding]:
    from dlm_runtime.abi import native as _native

    native, lacking, engines = m.native, [], "without TensorRT"
    if native.failure:
        remedy = "pip install --force-reinstall --no-deps WHEEL, or . in the source folder"
        lacking.append((native.failure, remedy))
    if native.tensorrt is not None:
        engines = f"with {ENGINE_BUILDERS[native.tensorrt].title}"
    told = f"{native.version}, ABI {_native.ABI_VERSION}, {engines}, {native.path}"
    yield needed("base", "native library", lacking, told)
    if native.failure:
        return
    runs = [name for name, refusal in native.kernels.items() if refusal is None]
    not_here = "; ".join(
        f"{name}: {refusal}" for name, refusal in native.kernels.items() if refusal is not None
    )
    if runs:
        said = ", ".join(runs) + (f". Not here: {not_here}" if not_here else "")
        yield ok("base", "kernels", said)
    else:
        known = ", ".join(f"{each.name} ({each.processors})" for each in KERNEL_SETS)
        said = f"none runs here ({not_here or f'none is for {m.architecture}'}): ONNX Runtime computes everything, slower"
        remedy = f"use a processor, or a virtual machine that shows one, of {known}"
        yield note("base", "kernels", said, remedy)


def _onnxruntime(m: Machine) -> Iterator[Finding]:
    found, least = m.onnxruntime, ".".join(map(str, LEAST_ONNXRUNTIME))
    lacking = []
    if found.failure is not None:
        remedy = "pip install onnxruntime, or DLM_ONNXRUNTIME set to the path of libonnxruntime.so"
        lacking.append((found.failure, remedy))
    elif numbers(found.version) < LEAST_ONNXRUNTIME:
        what = f"{found.version} at {found.path}; {least} is needed"
        lacking.append((what, f"pip install 'onnxruntime>={least}'"))
    yield needed("base", "ONNX Runtime", lacking, f"{found.version}, {found.path}")
    if len(m.onnxruntime_wheels) > 1:
        both = " and ".join(f"{name} {version}" for name, version in m.onnxruntime_wheels.items())
        remedy = f"pip uninstall -y {' '.join(m.onnxruntime_wheels)}, then pip install the one that is wanted"
        said = f"{both} are installed in the same folder, so one has overwritten files of the other"
        yield note("base", "ONNX Runtime wheels", said, remedy)
    if m.providers:
        shown = ", ".join(name.removesuffix("ExecutionProvider") for name in m.providers)
        yield ok("base", "ONNX Runtime providers", f"{shown} (of the installed wheel)")
    if m.telemetry in (None, "1"):
        said = "off: ORT_DISABLE_TELEMETRY=1 is set when a bundle is opened"
        yield ok("base", "ONNX Runtime telemetry", said)
    else:
        said = f"ORT_DISABLE_TELEMETRY={m.telemetry} leaves it on: a device id is stored and telemetry is sent"
        yield note(
            "base", "ONNX Runtime telemetry", said, "unset ORT_DISABLE_TELEMETRY, or set it to 1"
        )


def _gpu(m: Machine) -> Iterator[Finding]:
    driver, is_there = m.driver, m.has_nvidia_hardware or m.board is not None
    if driver.gpus:
        gpus = "; ".join(
            f"{gpu.name}, SM {sm_text(gpu.sm)}, {size(gpu.memory_bytes)}" for gpu in driver.gpus
        )
        yield ok("GPU", "driver", f"runs CUDA up to {driver.cuda}: {gpus}")
    elif is_there:
        what = "there is an NVIDIA GPU on the PCI bus, but its driver"
        remedy = "install NVIDIA's driver (Debian: nvidia-driver; in a container: NVIDIA's container toolkit, --gpus all)"
        if m.board is not None:
            what = "this Jetson"
            remedy = "the JetPack that goes with the board (in a container: --runtime nvidia)"
        said = f"{what} does not answer: {driver.failure}"
        yield Finding("GPU", "driver", MISSING, said, remedy)
    else:
        yield note(
            "GPU", "driver", f"none ({driver.failure}). Bundles for the CPU do not need a driver"
        )
    if m.cuda_libraries:
        failures = [
            f"{name.rpartition('/')[2]} ({why})"
            for name, why in m.cuda_libraries.items()
            if why is not None
        ]
        remedy = "pip install 'onnxruntime-gpu[cuda,cudnn]', or their folders in LD_LIBRARY_PATH"
        if failures:
            said = f"libraries of the CUDA provider that do not load: {', '.join(failures)}"
            yield note("GPU", "CUDA's libraries", said, remedy)
        else:
            said = f"all {len(m.cuda_libraries)} libraries of the CUDA provider load"
            yield ok("GPU", "CUDA's libraries", said)


def _tensorrt(m: Machine) -> Iterator[Finding]:
    names = {name: builder.title for name, builder in ENGINE_BUILDERS.items()}
    found = {kind: library for kind, library in m.tensorrt.items() if library.version is not None}
    for kind, library in found.items():
        what = "lean runtime" if library.is_lean else "library"
        yield ok("GPU", names[kind], f"{what} {library.version}, {library.path}")
    for kind, version in m.builders.items():
        if version is not None:
            yield ok("GPU", f"{names[kind]}, builder", f"Python module of {version}")
    if m.driver.gpus and m.native.failure is None:
        if lacking := lacking_tensorrt(m):
            yield note("GPU", "running engines", *lacking[0])
        else:
            kind = m.native.tensorrt or ""
            some = "version-compatible engines" if m.tensorrt[kind].is_lean else "engines"
            said = f"{some} of {names[kind]} {m.tensorrt[kind].version}, exactly this version"
            yield ok("GPU", "running engines", said)
    here = builders_of(m)
    built = [name for name in GENERIC if engine_here(find(name), here)[0]]
    if built:
        sms = ", ".join(sm_text(GENERIC[name]) for name in built)
        yield ok("GPU", "engines", f"built here for {sms} (SM)")
    else:
        said = (
            "none can be built here; build bundles with --no-engine, and finish them on the device"
        )
        remedy = "pip install 'dlm-export[rtx]' builds those of RTX 20 to 50 without a GPU"
        if m.board is not None:
            remedy = "sudo apt-get install python3-libnvinfer, and a venv made with --system-site-packages"
        yield note("GPU", "engines", said, remedy)


Lacking = list[tuple[str, str]]
"""The type of a list of missing parts. Each entry consists of a description and a remedy."""


def lacking_tensorrt(m: Machine) -> Lacking:
    """List the missing parts that TensorRT engines need.

    TensorRT engines need a native library that was compiled for TensorRT, and the TensorRT library
    itself.
    """
    if m.native.failure is not None:
        return [("the native library does not load", "see above")]
    kind = m.native.tensorrt
    if kind is None:
        remedy = f"pip install . -C cmake.define.DLM_TENSORRT_INCLUDE_DIR={m.tensorrt_headers or '...'}, from the source"
        return [("the native library was compiled without TensorRT's headers", remedy)]
    if (library := m.tensorrt[kind]).version is None:
        name = ENGINE_BUILDERS[kind].title
        remedy = f"install {name}, or set DLM_TENSORRT to the path of its library"
        return [(f"{name}'s library does not load: {library.failure}", remedy)]
    return []


def builders_of(m: Machine) -> Builders:
    """Return the facts that determine which engines the machine can build."""
    has = {kind: version is not None for kind, version in m.builders.items()}
    return Builders(m.onnxruntime.version is not None, has[RTX.name], has[TENSORRT.name], m.sm)


def _board(m: Machine) -> Iterator[Finding]:
    board = m.board
    if board is None:
        return
    if board.sm is None:
        said = f"{board.model}, for which dlm-export has no target"
        yield note("board", "Jetson", said, "bundles for the CPU run here")
    else:
        yield ok("board", "Jetson", f"{board.model}, SM {sm_text(board.sm)}")
    if board.sm is not None and m.sm is not None and m.sm not in reported_sms(board.sm):
        said = f"the driver reports SM {sm_text(m.sm)}"
        yield note("board", "GPU", said, "engines are chosen by the driver's SM")
    if board.linux is None and board.jetpack is None:
        said = "/etc/nv_tegra_release and the package nvidia-jetpack are both missing, as in some containers"
        yield note("board", "JetPack", said)
    else:
        said = f"{board.jetpack or 'unknown'}, Jetson Linux {board.linux or 'unknown'}"
        if board.has_old_tensorrt:
            remedy = "flash JetPack 6.1 or 6.2 to run engines; bundles for the CPU run here"
            yield note("board", "JetPack", f"{said}: its TensorRT 8.6 runs no engine", remedy)
        else:
            yield ok("board", "JetPack", said)
    if board.power_mode is None:
        yield note("board", "power mode", "nvpmodel gives no answer", "sudo nvpmodel -q")
    elif board.power_mode.startswith("MAXN"):
        yield ok("board", "power mode", board.power_mode)
    else:
        said = f"{board.power_mode}: clocks are capped"
        yield note(
            "board", "power mode", said, "for the most speed, the mode MAXN: docs/guides/boards.md"
        )


def _memory(m: Machine) -> Iterator[Finding]:
    said = f"{size(m.memory_bytes)}, {size(m.available_bytes)} available, {size(m.swap_bytes)} swap"
    if m.memory_limit_bytes is not None:
        said += f"; this container may use {size(m.memory_limit_bytes)} more"
    yield Finding("memory", "memory", OK if m.memory_bytes is not None else NOTE, said)
    said = f"{size(m.free_disk_bytes)} free"
    if m.free_disk_bytes is None or m.free_disk_bytes >= LITTLE_DISK_BYTES:
        yield ok("memory", "disk", said)
    else:
        remedy = "a build checks the free space before it starts: docs/guides/large-checkpoints.md says how much it needs"
        yield note("memory", "disk", said, remedy)


def _building(m: Machine) -> Iterator[Finding]:
    if m.compiler is None:
        said = "no c++: wheels do not need it, building from the source does"
        yield note("source", "compiler", said, "sudo apt-get install g++")
    else:
        yield ok("source", "compiler", m.compiler)
    if m.tensorrt_headers is not None:
        yield ok("source", "TensorRT's headers", m.tensorrt_headers)
    elif m.driver.gpus or m.board is not None:
        said = "NvInferRuntime.h is not in the system's folders: the source builds without TensorRT"
        yield note("source", "TensorRT's headers", said, "sudo apt-get install libnvinfer-dev")


def _extras(m: Machine) -> Iterator[Finding]:
    for extra, purpose in EXTRAS.items():
        packages = m.extras.get(extra)
        if not packages:
            # skip the extra: its packages are for a different processor, or dlm-export is not
            # installed
            continue
        absent = [name for name, version in packages.items() if version is None]
        if not absent:
            yield ok("extras", extra, f"installed: {purpose}")
        else:
            some = f", lacking {', '.join(absent)}" if len(absent) < len(packages) else ""
            said = f"not installed{some}: {purpose}"
            yield note("extras", extra, said, f"pip install 'dlm-export[{extra}]'")
