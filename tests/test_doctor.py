"""Tests of ``dlm-export doctor`` on made-up machines.

Unusual files, programs or libraries must not make the command fail.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import a2d_qwen3_config, write_checkpoint
from click.testing import CliRunner

from dlm_export.build import BuildOptions, build
from dlm_export.cli import main
from dlm_export.doctor import report
from dlm_export.doctor.board import Board, find_board
from dlm_export.doctor.bundled import memory_needed
from dlm_export.doctor.findings import MISSING, NOTE, OK, Finding, Report
from dlm_export.doctor.machine import (
    Driver,
    Gpu,
    Library,
    Machine,
    Native,
    look,
)
from dlm_export.doctor.system import FILE_LIMIT_BYTES, System, run_bounded
from dlm_export.targets import find
from dlm_runtime.abi.native import tensorrt_libraries
from dlm_runtime.providers import installed_version

GIB = 1 << 30
NO_DRIVER = Driver(failure="libcuda.so.1: cannot open shared object file")
NO_LIBRARY = Library(failure="libnvinfer.so.10: cannot open shared object file")
RTX_5090 = Gpu("NVIDIA GeForce RTX 5090", 120, 32 * GIB)

BARE = Machine(
    python=(3, 12),
    executable="/venv/bin/python",
    architecture="x86_64",
    version="0.1.0",
    packages={"numpy": "2.4.6", "onnxruntime": "1.31.1"},
    extras={"export": {"torch": None, "onnx": None}, "report": {"matplotlib": "3.11.2"}},
    native=Native(
        "/venv/libdlm_runtime.so",
        "0.1.0",
        None,
        {"avx512-vnni": "the processor has no VNNI", "avx2": None},
    ),
    onnxruntime=Library("/venv/libonnxruntime.so", "1.31.1"),
    onnxruntime_wheels={"onnxruntime": "1.31.1"},
    providers=["CPUExecutionProvider"],
    telemetry=None,
    driver=NO_DRIVER,
    has_nvidia_hardware=False,
    cuda_libraries={},
    tensorrt={"tensorrt": NO_LIBRARY, "tensorrt_rtx": NO_LIBRARY},
    builders={"tensorrt": None, "tensorrt_rtx": None},
    board=None,
    memory_bytes=16 * GIB,
    available_bytes=12 * GIB,
    swap_bytes=0,
    memory_limit_bytes=None,
    free_disk_bytes=100 * GIB,
    compiler="c++ 12.2.0",
    tensorrt_headers=None,
)
"""A machine with only a processor, on which the base install works."""

ORIN = replace(
    BARE,
    architecture="aarch64",
    native=Native("/venv/libdlm_runtime.so", "0.1.0", "tensorrt", {"neon-dotprod": None}),
    driver=Driver("12.6", (Gpu("Orin", 87, 61 * GIB),)),
    tensorrt={"tensorrt": Library("libnvinfer.so.10", "10.3.0.30"), "tensorrt_rtx": NO_LIBRARY},
    builders={"tensorrt": "10.3.0", "tensorrt_rtx": None},
    board=Board("NVIDIA Jetson AGX Orin Developer Kit", 87, "36.4.3", "6.2", "MAXN"),
    tensorrt_headers="/usr/include/aarch64-linux-gnu",
)
LEAN_LIBRARY = Library("libnvinfer_lean.so.10", "10.3.0.30", is_lean=True)
LEAN = replace(ORIN, tensorrt={"tensorrt": LEAN_LIBRARY, "tensorrt_rtx": NO_LIBRARY})
RTX = replace(
    BARE,
    native=Native("/venv/libdlm_runtime.so", "0.1.0", "tensorrt_rtx", {"avx2": None}),
    driver=Driver("13.0", (RTX_5090,)),
    has_nvidia_hardware=True,
    tensorrt={
        "tensorrt": NO_LIBRARY,
        "tensorrt_rtx": Library("/venv/libtensorrt_rtx.so.1", "1.7.1.116"),
    },
    builders={"tensorrt": None, "tensorrt_rtx": "1.7.1.116"},
)


def told(made: Report) -> dict[tuple[str, str], Finding]:
    return {(each.part, each.name): each for each in made.findings}


def of(machine: Machine, *targets: str) -> dict[tuple[str, str], Finding]:
    return told(report.judge(machine, targets=[find(name) for name in targets]))


def works(machine: Machine, *targets: str) -> bool:
    return report.judge(machine, targets=[find(name) for name in targets]).works


# ---- Made-up machines ----


def test_a_bare_processor_works_and_lacks_nothing_that_it_needs() -> None:
    found = of(BARE, "cpu")
    assert works(BARE, "cpu")
    assert not [each for each in found.values() if each.state == MISSING]
    assert found["GPU", "driver"].state == NOTE
    assert found["base", "kernels"].said == "avx2. Not here: avx512-vnni: the processor has no VNNI"
    assert found["extras", "export"].remedy == "pip install 'dlm-export[export]'"
    assert found["extras", "report"].state == OK
    assert not works(BARE, "thor")


@pytest.mark.parametrize(
    ("changes", "name", "says", "remedy"),
    [
        ({"python": (3, 9)}, "Python", "3.10 to 3.13 is needed", "a venv of Python"),
        (
            {"native": Native(failure="it has ABI version 2")},
            "native library",
            "ABI version 2",
            "reinstall",
        ),
        (
            {"onnxruntime": Library("/x.so", "1.20.1")},
            "ONNX Runtime",
            "1.23 is needed",
            "onnxruntime>=1.23",
        ),
    ],
)
def test_what_the_base_lacks_is_missing_with_a_remedy_and_fails_the_report(
    changes: dict[str, object], name: str, says: str, remedy: str
) -> None:
    machine = replace(BARE, **changes)  # type: ignore[arg-type]
    finding = of(machine)["base", name]
    assert (finding.state, finding.is_needed) == (MISSING, True)
    assert says in finding.said
    assert remedy in finding.remedy
    assert not works(machine)


def test_onnxruntimes_gpu_wheel_stands_for_the_other_and_both_are_noted() -> None:
    gpu = replace(
        BARE, packages={"onnxruntime": None}, onnxruntime_wheels={"onnxruntime-gpu": "1.31.1"}
    )
    assert of(gpu)["base", "packages"].state == OK
    both = of(
        replace(BARE, onnxruntime_wheels={"onnxruntime": "1.31.1", "onnxruntime-gpu": "1.31.1"})
    )
    assert both["base", "ONNX Runtime wheels"].remedy.startswith(
        "pip uninstall -y onnxruntime onnxruntime-gpu"
    )


def test_a_pc_whose_gpu_has_no_driver_is_told_so_and_its_base_still_works() -> None:
    machine = replace(RTX, driver=NO_DRIVER)
    driver = of(machine)["GPU", "driver"]
    assert driver.state == MISSING
    assert "an NVIDIA GPU on the PCI bus" in driver.said
    assert "nvidia-driver" in driver.remedy
    assert works(machine)
    asked = of(machine, "rtx5090")
    assert asked["target rtx5090", "runs here"].state == MISSING
    # A machine without the GPU can still build engines for this GPU.
    assert asked["target rtx5090", "is built here"].state == OK


def test_an_rtx_pc_builds_and_runs_its_own_targets_and_no_other() -> None:
    found = of(RTX, "rtx5090", "rtx4090", "thor")
    assert found["target rtx5090", "runs here"].state == OK
    assert (
        found["target rtx4090", "runs here"].said
        == "NVIDIA GeForce RTX 5090 is SM 12.0, rtx4090 is SM 8.9"
    )
    assert found["target rtx4090", "is built here"].state == OK
    assert (
        found["target thor", "is built here"].remedy
        == "on the device: dlm-export engine BUNDLE --target thor"
    )
    assert works(RTX, "rtx5090")
    assert not works(RTX, "rtx4090")


def test_an_orin_runs_what_it_builds() -> None:
    found = of(ORIN, "agx-orin")
    assert works(ORIN, "agx-orin")
    assert found["board", "JetPack"].said == "6.2, Jetson Linux 36.4.3"
    assert ORIN.board is not None
    old = of(replace(ORIN, board=replace(ORIN.board, linux="36.3.0", jetpack="6.0")), "agx-orin")
    assert old["board", "JetPack"].said.endswith("its TensorRT 8.6 runs no engine")
    assert found["board", "power mode"].state == OK
    assert found["target agx-orin", "is built here"].state == OK
    assert "gpu" not in {name for part, name in found if part == "extras"}


def test_a_jetson_in_a_container_without_the_hosts_files_is_still_judged() -> None:
    machine = replace(ORIN, board=None, driver=NO_DRIVER, memory_limit_bytes=2 * GIB)
    found = of(machine)
    assert found["GPU", "driver"].state == NOTE
    assert "this container may use 2.0 GiB more" in found["memory", "memory"].said
    assert machine.usable_bytes == 2 * GIB
    half = of(
        replace(ORIN, board=Board("NVIDIA Jetson AGX Orin", 87, None, None, None), driver=NO_DRIVER)
    )
    assert half["GPU", "driver"].state == MISSING
    assert "--runtime nvidia" in half["GPU", "driver"].remedy
    assert half["board", "JetPack"].state == NOTE


def test_libraries_that_the_cuda_provider_lacks_are_named() -> None:
    machine = replace(
        RTX, cuda_libraries={"libcudart.so.13": None, "/venv/libcudnn.so.9": "not found"}
    )
    assert (
        of(machine)["GPU", "CUDA's libraries"].said
        == "libraries of the CUDA provider that do not load: libcudnn.so.9 (not found)"
    )
    assert (
        of(machine, "cuda")["target cuda", "runs here"].said
        == "this ONNX Runtime has no CUDA provider"
    )
    ready = replace(
        RTX, onnxruntime_wheels={"onnxruntime-gpu": "1.31.1"}, providers=["CUDAExecutionProvider"]
    )
    assert works(ready, "cuda")
    assert not works(replace(ready, onnxruntime=Library("/x.so", "1.23.0")), "cuda")


# ---- Bundles ----


def _judged(
    machine: Machine,
    bundle: Path,
    monkeypatch: pytest.MonkeyPatch,
    engines: dict[str, object],
    targets: list[str],
) -> dict[tuple[str, str], Finding]:
    """Return the findings of doctor about a bundle.

    The manifest says that the bundle has these engines.

    In reality, ``bundle`` was built for the CPU. Only the manifest that doctor reads is changed.
    """
    manifest = json.loads((bundle / "manifest.json").read_text())
    manifest["loop"]["graph"]["device_file"] = "device.onnx"
    manifest |= {"loop": manifest["loop"] | {"engines": engines}, "targets": targets}
    monkeypatch.setattr(report, "read_manifest", lambda folder, check_hashes: manifest)
    return told(report.judge(machine, bundle))


def test_a_bundle_for_the_cpu_runs_on_every_machine_and_takes_what_the_formula_says(
    llada_bundle: Path,
) -> None:
    for machine in (BARE, ORIN, RTX):
        made = report.judge(machine, llada_bundle)
        assert made.works
        assert told(made)["bundle", "runs here"].said == "ONNX Runtime 1.31.1 on the CPU"
        assert told(made)["bundle", "memory"].state == OK
    found = memory_needed(json.loads((llada_bundle / "manifest.json").read_text()))
    assert found.weights == (llada_bundle / "denoiser.onnx.data").stat().st_size
    assert found.device == found.weights + found.cache + found.passes


def test_the_kernels_that_run_a_bundle_are_named_and_what_it_costs_to_have_none(
    tmp_path: Path,
) -> None:
    bundle = tmp_path / "bundle"
    source = write_checkpoint(tmp_path / "tied", a2d_qwen3_config(), dtype=torch.bfloat16)
    build(source, bundle, BuildOptions(check_parity=False))
    here = told(report.judge(BARE, bundle))["bundle", "kernels"]
    assert (here.state, here.said.partition(" runs ")[0]) == (OK, "avx2")
    assert "1 Bf16TiedHead" in here.said
    none = replace(BARE, native=replace(BARE.native, kernels={"avx2": "the processor has no AVX2"}))
    lacking = told(report.judge(none, bundle))["bundle", "kernels"]
    assert lacking.state == NOTE
    assert "copies the embedding table in fp32" in lacking.said


def test_a_bundle_larger_than_the_memory_is_missing_it_and_one_whose_canvas_is_has_a_note(
    llada_bundle: Path,
) -> None:
    found = memory_needed(json.loads((llada_bundle / "manifest.json").read_text()))
    tight = report.judge(replace(BARE, available_bytes=found.device - 1), llada_bundle)
    assert tight.works
    assert told(tight)["bundle", "memory"].state == NOTE
    small = report.judge(replace(BARE, available_bytes=found.weights - 1), llada_bundle)
    assert not small.works
    assert told(small)["bundle", "memory"].state == MISSING


def test_a_bundle_for_gpus_wants_an_engine_of_this_gpu_and_this_tensorrt(
    llada_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = {"sm": [87], "builder": "tensorrt", "version": "10.3.0.30"}
    fits = _judged(ORIN, llada_bundle, monkeypatch, {"agx-orin": entry}, ["agx-orin"])
    assert fits["bundle", "runs here"].state == OK
    assert fits["bundle", "runs here"].said == "TensorRT on Orin"
    for change, reason in (
        ({"sm": [110]}, "agx-orin is for SM 11.0"),
        ({"version": "10.7.0.23"}, "agx-orin needs TensorRT 10.7.0.23, not 10.3.0.30"),
        (
            {"builder": "tensorrt_rtx"},
            "agx-orin is for TensorRT-RTX, the native library is for TensorRT",
        ),
        ({"version_compatible": False}, "agx-orin needs the complete TensorRT, not its lean"),
    ):
        machine = LEAN if "version_compatible" in change else ORIN
        found = _judged(
            machine, llada_bundle, monkeypatch, {"agx-orin": entry | change}, ["agx-orin"]
        )["bundle", "runs here"]
        assert found.state == MISSING
        assert reason in found.said
        assert found.remedy.startswith(f"dlm-export engine {llada_bundle} --target sm87")
        assert "--engine onnxruntime" in found.remedy
    engines: dict[str, object] = {"agx-orin": entry | {"version_compatible": True}}
    lean = _judged(LEAN, llada_bundle, monkeypatch, engines, ["agx-orin"])
    assert lean["bundle", "runs here"].state == OK
    assert lean["GPU", "TensorRT"].said == "lean runtime 10.3.0.30, libnvinfer_lean.so.10"
    said = "version-compatible engines of TensorRT 10.3.0.30, exactly this version"
    assert lean["GPU", "running engines"].said == said
    none = _judged(ORIN, llada_bundle, monkeypatch, {}, ["agx-orin"])["bundle", "runs here"]
    assert none.said == "no engine for SM 8.7: the bundle has none yet"
    bare = _judged(BARE, llada_bundle, monkeypatch, {"agx-orin": entry}, ["agx-orin"])
    assert bare["bundle", "runs here"].said.startswith("no GPU: libcuda.so.1")
    assert bare["bundle", "memory"].said.endswith("there is no GPU here to compare this with")
    cuda = _judged(RTX, llada_bundle, monkeypatch, {}, ["cuda"])["bundle", "runs here"]
    assert cuda.said == "this ONNX Runtime has no CUDA provider"


# ---- Odd files, programs and libraries ----


class Elsewhere(System):
    """A made-up machine.

    All files of this machine are in one folder, and its programs are in the subfolder bin. The
    machine has no packages of NVIDIA.
    """

    def __init__(self, root: Path, **variables: str) -> None:
        super().__init__(root, {"PATH": str(root / "bin"), **variables})
        (root / "bin").mkdir(parents=True, exist_ok=True)

    def write(self, path: str, content: bytes) -> None:
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)

    def script(self, name: str, body: str) -> None:
        file = self.root / "bin" / name
        file.write_text(f"#!/bin/sh\n{body}\n")
        file.chmod(0o755)


ORIN_RELEASE = b"# R36 (release), REVISION: 4.3, GCID: 38968081, BOARD: generic, EABI: aarch64, DATE: Wed Jan  8 2025\n"


def test_an_orins_files_and_programs_are_read(tmp_path: Path) -> None:
    there = Elsewhere(tmp_path)
    there.write("/proc/device-tree/model", b"NVIDIA Jetson AGX Orin Developer Kit\x00")
    there.write("/etc/nv_tegra_release", ORIN_RELEASE)
    there.script("nvpmodel", "echo 'NV Power Mode: MODE_30W'; echo 2")
    there.script("dpkg-query", "printf 6.2+b77")
    assert find_board(there) == Board(
        "NVIDIA Jetson AGX Orin Developer Kit", 87, "36.4.3", "6.2", "MODE_30W"
    )
    there.script("dpkg-query", "echo no packages found >&2; exit 1")
    board = find_board(there)
    assert board is not None
    assert board.jetpack == "6"


@pytest.mark.parametrize(
    "model",
    [b"\xff\xfe\x1b[2J", b"A" * (FILE_LIMIT_BYTES + 1)],
    ids=["no text", "huge"],
)
def test_what_is_no_jetsons_device_tree_is_no_jetson(tmp_path: Path, model: bytes) -> None:
    there = Elsewhere(tmp_path)
    there.write("/proc/device-tree/model", model)
    assert find_board(there) is None


def test_a_program_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    began = time.monotonic()
    marker = tmp_path / "child"
    body = f"sleep 60 & echo $! > {marker}; echo early; wait"
    assert run_bounded(["sh", "-c", body], os.environ, 0.5) is None
    assert time.monotonic() - began < 30
    child = int(marker.read_text())
    for _ in range(100):
        state = Path(f"/proc/{child}/stat")
        if not state.exists() or state.read_text().split()[2] == "Z":
            break
        time.sleep(0.05)
    else:
        pytest.fail("the child of the program lives on")
    assert run_bounded(["sh", "-c", "echo told; exit 3"], os.environ, 5) is None
    assert run_bounded(["sh", "-c", "echo told"], os.environ, 5) == "told\n"
    assert run_bounded(["/no/such/program"], os.environ, 5) is None


FAKE_DRIVER = """
#include <stddef.h>
#include <stdio.h>
#include <string.h>
int cuDriverGetVersion(int *version) { return *version = 13000, 0; }
int cuInit(unsigned flags) { puts("a driver that talks"); return %(init)s; }
int cuDeviceGetCount(int *count) { return *count = 2, 0; }
int cuDeviceGet(int *device, int index) { return *device = index, 0; }
int cuDeviceGetName(char *name, int size, int device) { return strncpy(name, device ? "\\xff\\x1b[1m" : "Made Up", size), 0; }
int cuDeviceGetAttribute(int *value, int what, int device) { return *value = what == 75 ? 12 : device, 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { return *bytes = (size_t)1 << 35, 0; }
"""


def _library(folder: Path, name: str, source: str) -> str:
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("gcc is not installed")
    (folder / "source.c").write_text(source)
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-w", folder / "source.c", "-o", folder / name], check=True
    )
    return str(folder / name)


@pytest.mark.parametrize(
    ("init", "failure"),
    [("0", None), ("100", "CUresult 100"), ("*(volatile int *)0", "libcuda.so.1 crashed")],
)
def test_the_driver_is_asked_in_a_process_of_its_own(
    tmp_path: Path, init: str, failure: str | None
) -> None:
    path = _library(tmp_path, "libcuda.so.1", FAKE_DRIVER % {"init": init})
    machine = look(Elsewhere(tmp_path / "root", DLM_CUDA_LIBRARY=path), tmp_path)
    if failure is None:
        assert machine.driver.cuda == "13.0"
        assert machine.driver.gpus[0] == Gpu("Made Up", 120, 32 * GIB)
        assert machine.driver.gpus[1].sm == 121
    else:
        assert machine.driver.failure is not None
        assert failure in machine.driver.failure
    json.dumps(report.judge(machine).as_dict())


def test_a_library_that_is_none_is_told_with_the_loaders_reason(tmp_path: Path) -> None:
    junk = tmp_path / "libnvinfer.so.10"
    junk.write_text("no library")
    empty = _library(tmp_path, "libonnxruntime.so", "int nothing;")
    there = Elsewhere(tmp_path / "root", DLM_TENSORRT=str(junk), DLM_ONNXRUNTIME=empty)
    machine = look(there, tmp_path)
    assert "file too short" in (machine.tensorrt["tensorrt"].failure or "") or "invalid ELF" in (
        machine.tensorrt["tensorrt"].failure or ""
    )
    assert machine.tensorrt["tensorrt_rtx"].version is None
    assert "OrtGetApiBase" in (machine.onnxruntime.failure or "")
    assert not report.judge(machine).works


def test_tensorrts_lean_runtime_is_found_and_told_from_the_complete_library(
    tmp_path: Path,
) -> None:
    """Loads NVIDIA's library, which needs no driver for this."""
    package = "tensorrt-lean-cu13-libs"
    if (version := installed_version(package)) is None:
        pytest.skip(f"{package} is not installed")
    path = tensorrt_libraries()["tensorrt"]
    assert path.rpartition("/")[2].startswith("libnvinfer_lean.so.")
    there = Elsewhere(tmp_path / "root", DLM_TENSORRT=path)
    assert look(there, tmp_path).tensorrt["tensorrt"] == Library(path, version, is_lean=True)


def test_memory_gpus_on_the_bus_headers_and_a_containers_limit_are_read(tmp_path: Path) -> None:
    there = Elsewhere(tmp_path)
    there.write(
        "/proc/meminfo",
        b"MemTotal:       16384 kB\nMemAvailable:    8192 kB\nSwapTotal:  junk kB\n",
    )
    there.write("/sys/bus/pci/devices/0000:01:00.0/vendor", b"0x10de\n")
    there.write("/sys/bus/pci/devices/0000:01:00.0/class", b"0x030000\n")
    there.write("/sys/fs/cgroup/memory.max", b"4194304\n")
    there.write("/sys/fs/cgroup/memory.current", b"1048576\n")
    there.write(f"/usr/include/{there.architecture}-linux-gnu/NvInferRuntime.h", b"")
    machine = look(there, tmp_path)
    assert (machine.memory_bytes, machine.available_bytes, machine.swap_bytes) == (
        16 << 20,
        8 << 20,
        None,
    )
    assert machine.has_nvidia_hardware
    assert machine.usable_bytes == 3 << 20
    assert machine.tensorrt_headers == f"/usr/include/{there.architecture}-linux-gnu"
    there.write("/sys/fs/cgroup/memory.max", b"max\n")
    # This PCI class says that the device is a network card.
    there.write("/sys/bus/pci/devices/0000:01:00.0/class", b"0x020000\n")
    machine = look(there, tmp_path)
    assert machine.memory_limit_bytes is None
    assert not machine.has_nvidia_hardware


# ---- The command ----


def test_the_command_exits_with_1_where_what_was_asked_for_cannot_run(llada_bundle: Path) -> None:
    done = CliRunner().invoke(main, ["doctor", str(llada_bundle), "--json"])
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert said["works"] is True
    assert {each["state"] for each in said["findings"]} <= {OK, NOTE, MISSING}
    assert {"part", "name", "state", "said", "remedy", "is_needed"} == said["findings"][0].keys()
    failed = CliRunner().invoke(main, ["doctor", "--target", "b300"])
    assert failed.exit_code == 1
    assert "What to do:" in failed.output


def test_the_command_takes_no_damaged_bundle_and_no_unknown_target(
    llada_bundle: Path, tmp_path: Path
) -> None:
    broken = shutil.copytree(llada_bundle, tmp_path / "bundle")
    (broken / "denoiser.onnx").write_bytes(b"")
    assert CliRunner().invoke(main, ["doctor", str(broken)]).exit_code == 2
    assert CliRunner().invoke(main, ["doctor", "--target", "rtx9999"]).exit_code == 2
