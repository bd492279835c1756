"""Tests of engines that are built on the device, with a fake TensorRT.

A build prepares the files for the device, and a command on the device builds the engine.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import onnx
import pytest
from engine_bundles import (
    contents,
    copy_of,
    dlm_export,
    gpu_bundle,
    read_manifest,
    refused,
    tiny,
)
from fake_tensorrt import VERSION, Device, module
from interrupted import count_operations, in_child
from referencing import Registry

import dlm_runtime
from dlm_export.bundle.folder import sha256, write_manifest
from dlm_export.tensorrt import builders
from dlm_runtime.manifest import schema

SCHEMA = schema()


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A copy of a bundle in nvfp4 for thor, as a build on a machine without the device writes it."""
    return copy_of(gpu_bundle("nvfp4", "thor"), tmp_path / "nvfp4")


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Makes this machine look like the device, with a fake TensorRT."""

    def make(sm: int = 110, device: Device | None = None) -> Any:
        fake = module(device)
        monkeypatch.setitem(sys.modules, "tensorrt", fake)
        monkeypatch.setattr(builders, "device_sm", lambda: sm)
        return fake

    return make


# ---- On the machine that builds the bundle ----


def test_a_build_for_a_device_elsewhere_says_what_finishes_it_there(
    tmp_path: Path,
) -> None:
    out = tmp_path / "bundle"
    given = ("--target", "thor", "--precision", "fp16", "--no-verify", "-o", out)
    result = dlm_export("build", tiny(), *given)
    assert result.exit_code == 0, result.output
    manifest = read_manifest(out)
    jsonschema.validate(manifest, SCHEMA, registry=Registry())
    assert "engines" not in manifest["loop"]
    assert manifest["loop"]["graph"]["device_file"] == "device.onnx"
    assert (out / "device.onnx").is_file()
    assert not (out / "engines").exists()
    tensorrt = (
        "TensorRT 10.14 or later, 11 or later for experts in fp16 or bf16 "
        "(with 10.13 of JetPack 7.0, a bundle built with --plain-graph)"
    )
    words = (
        "No engine for thor yet; its build needs about 1.0 GiB of host memory. "
        f"Where it can be built (`dlm-export targets`), by {tensorrt}: "
    )
    assert f"{words}dlm-export engine {out} --target thor\n" in result.stdout
    with dlm_runtime.open(out, engine="none") as opened:
        assert opened.manifest["targets"] == ["thor"]


def test_quantising_a_bundle_for_gpus_gives_one_for_the_same_gpus(
    tmp_path: Path,
) -> None:
    source, out = gpu_bundle("fp16", "thor", "h100"), tmp_path / "int8"
    few = ("--calib-samples", "2", "--calib-states", "2")
    result = dlm_export("quantize", source, "--no-verify", "--activations", "fp16", *few, "-o", out)
    assert result.exit_code == 0, result.output
    manifest = read_manifest(out)
    assert manifest["targets"] == ["thor", "h100"]
    assert (manifest["precision"]["name"], manifest["loop"]["graph"]["device_file"]) == (
        "int8-weight",
        "device.onnx",
    )
    result = dlm_export("build", source, "--no-verify", "-o", tmp_path / "again")
    assert result.exit_code == 0, result.output
    manifest = read_manifest(tmp_path / "again")
    assert (manifest["targets"], manifest["precision"]["name"]) == (["thor", "h100"], "fp16")


# ---- On the device ----


def test_the_command_on_the_device_goes_through_to_the_builder(
    bundle: Path, on_device: Callable[..., Any]
) -> None:
    """The entry in the manifest rests on the inspector."""
    fake, before = on_device(), contents(bundle)
    options = ("--canvas", 96, "--block", 16, "--workspace", 64)
    result = dlm_export("engine", bundle, "--target", "thor", *options)
    assert result.exit_code == 0, result.output
    arguments = {name: given for name, given in fake.calls if "set_shape" not in name}
    assert [name for name, _ in fake.calls if "set_shape" not in name] == [
        "ILogger.__init__",
        "Builder.__init__",
        "Builder.create_network",
        "OnnxParser.__init__",
        "OnnxParser.parse_from_file",
        "Builder.create_builder_config",
        "IBuilderConfig.set_memory_pool_limit",
        "IBuilderConfig.profiling_verbosity",
        *("Builder.create_optimization_profile", "IBuilderConfig.add_optimization_profile") * 2,
        "IProgressMonitor.__init__",
        "IBuilderConfig.progress_monitor",
        "IStreamWriter.__init__",
        "Builder.build_serialized_network_to_stream",
        "IBuilderConfig.progress_monitor",
        "Runtime.__init__",
        "Runtime.deserialize_cuda_engine",
        "ICudaEngine.create_engine_inspector",
        "EngineInspector.get_engine_information",
    ]
    flag = fake.NetworkDefinitionCreationFlag.STRONGLY_TYPED
    assert arguments["Builder.create_network"] == {"flags": 1 << flag.value}
    assert arguments["OnnxParser.parse_from_file"] == {"model": str(bundle / "device.onnx")}
    room = {"pool": fake.MemoryPoolType.WORKSPACE, "pool_size": 64 << 20}
    assert arguments["IBuilderConfig.set_memory_pool_limit"] == room
    detailed = {"value": fake.ProfilingVerbosity.DETAILED}
    assert arguments["IBuilderConfig.profiling_verbosity"] == detailed
    assert arguments["IBuilderConfig.progress_monitor"] == {"value": None}
    as_json = {"format": fake.LayerInformationFormat.JSON}
    assert arguments["EngineInspector.get_engine_information"] == as_json
    shaped = [given["input"] for name, given in fake.calls if name.endswith("set_shape")]
    graph = onnx.load(bundle / "device.onnx", load_external_data=False).graph
    assert sorted(shaped) == sorted(2 * [port.name for port in graph.input])
    after, manifest = contents(bundle), read_manifest(bundle)
    changed = {name for name in after if before.get(name) != after[name]}
    assert changed == {"manifest.json", "engines/thor.engine"}
    jsonschema.validate(manifest, SCHEMA, registry=Registry())
    entry, audit = manifest["loop"]["engines"]["thor"], manifest["audits"]["thor"]
    assert (entry["builder"], entry["version"], entry["sm"]) == ("tensorrt", VERSION, [110])
    layers = manifest["precision"]["layers"].items()
    held = {layer: "bfloat16" if name == "high" else name for layer, name in layers}
    assert audit.pop("device_bytes") > 0
    assert audit == {"method": "inspector", "layers": held, "fallbacks": {}}
    with dlm_runtime.open(bundle, engine="none") as opened:
        assert list(opened.manifest["loop"]["engines"]) == ["thor"]


def test_an_older_tensorrt_that_does_not_stream_builds_too(
    bundle: Path, on_device: Callable[..., Any]
) -> None:
    fake = on_device(device=Device(is_old=True))
    result = dlm_export("engine", bundle, "--target", "thor")
    assert result.exit_code == 0, result.output
    assert "Builder.build_serialized_network" in dict(fake.calls)
    assert read_manifest(bundle)["loop"]["engines"]["thor"]["version"] == "10.3.0"
    assert (bundle / "engines" / "thor.engine").stat().st_size == (
        bundle / "denoiser.onnx.data"
    ).stat().st_size


@pytest.mark.parametrize(("target", "sm", "says"), [("thor", 87, "11.0"), ("b200", 103, "10.0")])
def test_another_gpu_than_the_targets_is_refused(
    bundle: Path, on_device: Callable[..., Any], target: str, sm: int, says: str
) -> None:
    fake = on_device(sm)
    before = contents(bundle)
    refused(
        dlm_export("engine", bundle, "--target", target),
        1,
        [f"SM {sm // 10}.{sm % 10}", f"{target} is SM {says}"],
    )
    assert contents(bundle) == before
    assert fake.calls == []


def test_a_layer_that_the_inspector_shows_in_another_type_fails_the_audit(
    bundle: Path, on_device: Callable[..., Any]
) -> None:
    on_device(device=Device(shown_as={"blocks.1.mlp.up": ["Half", "BFloat16"]}))
    before = contents(bundle)
    says = [
        "1 of 15 layers do not have the requested format",
        "blocks.1.mlp.up is BFloat16 and Half, nvfp4 was asked for",
    ]
    refused(dlm_export("engine", bundle, "--target", "thor"), 3, says)
    assert contents(bundle) == before
    assert dlm_export("engine", bundle, "--target", "thor", "--allow-fallback").exit_code == 0
    assert read_manifest(bundle)["audits"]["thor"]["fallbacks"] == {
        "blocks.1.mlp.up": {"asked": "nvfp4", "held": "BFloat16 and Half"}
    }


def test_the_timing_cache_is_read_and_written(
    bundle: Path, on_device: Callable[..., Any], tmp_path: Path
) -> None:
    fake = on_device(101)  # Thor may call itself 10.1
    cache = tmp_path / "timings"
    command = ("engine", bundle, "--target", "thor", "--force", "--timing-cache", cache)
    for _ in range(2):
        assert dlm_export(*command).exit_code == 0
    created = "IBuilderConfig.create_timing_cache"
    given = [each["serialized_timing_cache"] for name, each in fake.calls if name == created]
    assert given == [b"", b"timed "]
    assert cache.read_bytes() == b"timed timed "
    assert read_manifest(bundle)["loop"]["engines"]["thor"]["sm"] == [101]


def test_a_version_compatible_engine_is_recorded_and_contains_no_lean_runtime(
    bundle: Path, on_device: Callable[..., Any]
) -> None:
    fake = on_device()
    result = dlm_export("engine", bundle, "--target", "thor", "--version-compatible")
    assert result.exit_code == 0, result.output
    flags = [given["flag"] for name, given in fake.calls if name == "IBuilderConfig.set_flag"]
    assert flags == [fake.BuilderFlag.VERSION_COMPATIBLE, fake.BuilderFlag.EXCLUDE_LEAN_RUNTIME]
    manifest = read_manifest(bundle)
    jsonschema.validate(manifest, SCHEMA, registry=Registry())
    assert manifest["loop"]["engines"]["thor"]["version_compatible"] is True
    with dlm_runtime.open(bundle, engine="none") as opened:
        assert list(opened.manifest["loop"]["engines"]) == ["thor"]


# All packages but numpy, click and rich: those of the export extra, and others that the command
# must not need either.
MISSING = ["matplotlib", "ml_dtypes", "onnx", "onnx_ir", "onnxscript", "safetensors", "scipy"]
MISSING += ["torch", "tensorrt_rtx", "tensorrt_rtx_bindings", "jinja2", "onnxruntime", "tokenizers"]
ON_DEVICE = """
import json, sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in json.loads(sys.argv[1]):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Block())
sys.path.insert(0, sys.argv[2])
from fake_tensorrt import module
sys.modules["tensorrt"] = module()
from dlm_export.tensorrt import builders, engine
from dlm_export.cli import main
builders.device_sm = lambda: 110
main(sys.argv[3:])
"""


def test_a_device_without_the_export_extra_finishes_its_engine(bundle: Path) -> None:
    given = (json.dumps(MISSING), str(Path(__file__).parent))
    command = [sys.executable, "-c", ON_DEVICE, *given, "engine", str(bundle), "--target", "thor"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert read_manifest(bundle)["audits"]["thor"]["layers"]["blocks.0.mlp.down"] == "nvfp4"
    with dlm_runtime.open(bundle, engine="none") as opened:
        assert list(opened.manifest["loop"]["engines"]) == ["thor"]


# ---- Commands that are killed ----


def test_a_kill_while_an_engine_is_replaced_leaves_a_bundle_that_opens(
    bundle: Path, on_device: Callable[..., Any]
) -> None:
    """The test kills the command at every operation on its files.

    The manifest must never list an engine whose file is missing or contains something else.
    """
    on_device()
    assert dlm_export("engine", bundle, "--target", "thor").exit_code == 0
    path, manifest = bundle / "engines" / "thor.engine", read_manifest(bundle)
    path.write_bytes(b"of an older TensorRT")
    files = manifest.pop("files") | {
        "engines/thor.engine": {"bytes": path.stat().st_size, "sha256": sha256(path)}
    }
    write_manifest(bundle, manifest, files)
    replace = ("engine", bundle, "--target", "thor", "--force")

    def ended_at(number: int) -> int:
        def work() -> None:
            count_operations(
                bundle, lambda at: os.kill(os.getpid(), signal.SIGKILL) if at == number else None
            )
            sys.exit(dlm_export(*replace).exit_code)

        return in_child(work)[0]

    number = 1
    while (code := ended_at(number)) == -signal.SIGKILL:
        files = read_manifest(bundle)["files"]
        for name, entry in files.items():
            assert sha256(bundle / name) == entry["sha256"], (number, name)
        with dlm_runtime.open(bundle, engine="none") as opened:
            assert list(opened.manifest["loop"].get("engines", {})) in (["thor"], [])
        number += 1
    assert (code, number > 5) == (0, True)
    with dlm_runtime.open(bundle, engine="none") as opened:
        assert list(opened.manifest["loop"]["engines"]) == ["thor"]
    assert not list(bundle.rglob("*.new"))
