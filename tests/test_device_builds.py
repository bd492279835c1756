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
import make_tensorrt_api
import onnx
import pytest
from engine_bundles import DEMO, contents, copy_of, dlm_export, gpu_bundle, read_manifest, refused
from fake_tensorrt import API, VERSION, Device, describe, module
from interrupted import count_operations, in_child
from referencing import Registry

import dlm_runtime
from dlm_export.bundle.folder import sha256, write_manifest
from dlm_export.tensorrt import audit, builders, engine
from dlm_runtime.manifest import schema

SCHEMA = schema()


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A copy of the demo in nvfp4 for thor, as a build on a machine without the device writes it."""
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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "bundle"
    arguments = (
        "--target",
        "thor",
        "--precision",
        "nvfp4",
        "--no-verify",
        "--calib-samples",
        2,
        "--calib-states",
        1,
    )
    result = dlm_export("build", DEMO, *arguments, "-o", out)
    assert result.exit_code == 0, result.output
    manifest = read_manifest(out)
    jsonschema.validate(manifest, SCHEMA, registry=Registry())
    assert "engines" not in manifest["loop"]
    assert manifest["loop"]["graph"]["device_file"] == "device.onnx"
    assert (out / "device.onnx").is_file()
    assert not (out / "engines").exists()
    command = f"dlm-export engine {out} --target thor"
    tensorrt = (
        "TensorRT 10.14 or later (with 10.13 of JetPack 7.0, a bundle built with --plain-graph)"
    )
    words = f"No engine for thor yet. Where it can be built (`dlm-export targets`), by {tensorrt}: {command}\n"
    assert words in result.stdout
    with dlm_runtime.open(out, engine="none") as opened:
        assert opened.manifest["targets"] == ["thor"]


def test_quantising_a_bundle_for_gpus_gives_one_for_the_same_gpus(
    llada_checkpoint: Path, tmp_path: Path
) -> None:
    source, out = gpu_bundle("fp16", "thor", "h100", source=llada_checkpoint), tmp_path / "int8"
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


def test_the_command_for_the_device_says_here_that_it_is_for_the_device(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builders, "device_sm", lambda: None)
    before = contents(bundle)
    says = [
        "is built on the device",
        f"dlm-export engine {bundle} --target thor",
        "TensorRT 10.14 or later",
    ]
    refused(dlm_export("engine", bundle, "--target", "thor"), 1, says)
    assert contents(bundle) == before


# ---- On the device ----


def test_the_command_on_the_device_goes_through_to_the_builder(
    bundle: Path, on_device: Callable[..., Any]
) -> None:
    fake = on_device()
    before = contents(bundle)
    result = dlm_export(
        "engine", bundle, "--target", "thor", "--canvas", 96, "--block", 16, "--workspace", 64
    )
    assert result.exit_code == 0, result.output
    once = [
        name
        for name, _ in fake.calls
        if not name.startswith(("ILayer", "ITensor", "INetworkDefinition", "IOptim"))
    ]
    assert once == [
        "ILogger.__init__",
        "Builder.__init__",
        "Builder.create_network",
        "OnnxParser.__init__",
        "OnnxParser.parse_from_file",
        "Builder.create_builder_config",
        "IBuilderConfig.set_memory_pool_limit",
        "IBuilderConfig.profiling_verbosity",
        "Builder.create_optimization_profile",
        "IBuilderConfig.add_optimization_profile",
        "Builder.create_optimization_profile",
        "IBuilderConfig.add_optimization_profile",
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
    arguments = dict(fake.calls)
    assert arguments["Builder.create_network"] == {
        "flags": 1 << fake.NetworkDefinitionCreationFlag.STRONGLY_TYPED.value
    }
    assert arguments["OnnxParser.parse_from_file"] == {"model": str(bundle / "device.onnx")}
    assert arguments["IBuilderConfig.set_memory_pool_limit"] == {
        "pool": fake.MemoryPoolType.WORKSPACE,
        "pool_size": 64 << 20,
    }
    assert arguments["IBuilderConfig.profiling_verbosity"] == {
        "value": fake.ProfilingVerbosity.DETAILED
    }
    assert arguments["IBuilderConfig.progress_monitor"] == {"value": None}
    assert arguments["EngineInspector.get_engine_information"] == {
        "format": fake.LayerInformationFormat.JSON
    }
    shapes = [
        tuple(each.values())
        for name, each in fake.calls
        if name == "IOptimizationProfile.set_shape"
    ]
    prefill, block = shapes[: len(shapes) // 2], shapes[len(shapes) // 2 :]
    for name in ("input_ids", "position_ids"):
        assert (name, (1, 1), (1, 48), (1, 96)) in prefill
        assert (name, (1, 1), (1, 16), (1, 16)) in block
    for name in ("past_key.0", "past_value.5"):
        assert (name, *[(1, 6, 0, 32)] * 3) in prefill
        assert (name, (1, 6, 0, 32), (1, 6, 48, 32), (1, 6, 96, 32)) in block
    assert ("score_rows", (1, 1), (1, 16), (1, 16)) in prefill
    inputs = {
        node.name
        for node in onnx.load(bundle / "device.onnx", load_external_data=False).graph.input
    }
    assert {name for name, *_ in prefill} == {name for name, *_ in block} == inputs
    after = contents(bundle)
    assert {name for name in after if before.get(name) != after[name]} == {
        "manifest.json",
        "engines/thor.engine",
    }


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


def test_a_disk_that_fills_while_the_engine_is_written_leaves_the_bundle_as_it_was(
    bundle: Path, on_device: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_device()
    before = contents(bundle)

    def full(*_: Any) -> bool:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(engine, "_serialise", full)
    refused(
        dlm_export("engine", bundle, "--target", "thor"),
        1,
        ["thor.engine: cannot write", "No space left on device"],
    )
    assert contents(bundle) == before


def test_the_entry_of_a_device_build_rests_on_the_inspector(
    bundle: Path, on_device: Callable[..., Any]
) -> None:
    on_device()
    assert dlm_export("engine", bundle, "--target", "thor").exit_code == 0
    manifest = read_manifest(bundle)
    jsonschema.validate(manifest, SCHEMA, registry=Registry())
    entry, audit = manifest["loop"]["engines"]["thor"], manifest["audits"]["thor"]
    assert (entry["builder"], entry["version"], entry["sm"]) == ("tensorrt", VERSION, [110])
    held = {
        layer: "bfloat16" if name == "high" else name
        for layer, name in manifest["precision"]["layers"].items()
    }
    assert audit.pop("device_bytes") > 0
    assert audit == {"method": "inspector", "layers": held, "fallbacks": {}}
    with dlm_runtime.open(bundle, engine="none") as opened:
        assert list(opened.manifest["loop"]["engines"]) == ["thor"]


def test_thor_may_call_itself_10_1(bundle: Path, on_device: Callable[..., Any]) -> None:
    on_device(101)
    assert dlm_export("engine", bundle, "--target", "thor").exit_code == 0
    assert read_manifest(bundle)["loop"]["engines"]["thor"]["sm"] == [101]


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
    on_device(device=Device(shown_as={"blocks.4.mlp.up": ["Half", "BFloat16"]}))
    before = contents(bundle)
    says = [
        "1 of 43 layers do not have the requested format",
        "blocks.4.mlp.up is BFloat16 and Half, nvfp4 was asked for",
    ]
    refused(dlm_export("engine", bundle, "--target", "thor"), 3, says)
    assert contents(bundle) == before
    assert dlm_export("engine", bundle, "--target", "thor", "--allow-fallback").exit_code == 0
    assert read_manifest(bundle)["audits"]["thor"]["fallbacks"] == {
        "blocks.4.mlp.up": {"asked": "nvfp4", "held": "BFloat16 and Half"}
    }


@pytest.mark.parametrize(
    ("severity", "text"),
    [
        ("ERROR", "[convert.cpp::convert::42] Error Code 4: no kernel for FP4"),
        ("WARNING", "Unused Input: past_key.3"),
    ],
)
def test_what_tensorrt_logs_as_wrong_stops_the_build(
    bundle: Path, on_device: Callable[..., Any], severity: str, text: str
) -> None:
    on_device(device=Device(logs=[(severity, text)]))
    before = contents(bundle)
    refused(dlm_export("engine", bundle, "--target", "thor"), 1, [f"TensorRT {VERSION}", text])
    assert contents(bundle) == before


def test_the_timing_cache_is_read_and_written(
    bundle: Path, on_device: Callable[..., Any], tmp_path: Path
) -> None:
    fake = on_device()
    cache = tmp_path / "timings"
    for _ in range(2):
        assert (
            dlm_export(
                "engine", bundle, "--target", "thor", "--force", "--timing-cache", cache
            ).exit_code
            == 0
        )
    given = [
        each["serialized_timing_cache"]
        for name, each in fake.calls
        if name == "IBuilderConfig.create_timing_cache"
    ]
    assert given == [b"", b"timed "]
    assert cache.read_bytes() == b"timed timed "


# Packages that a device without the export extra lacks, and other packages that the command must
# not need.
EXPORT = [
    "matplotlib",
    "ml_dtypes",
    "onnx",
    "onnx_ir",
    "onnxscript",
    "safetensors",
    "scipy",
    "torch",
]
EXPORT += ["tensorrt_rtx", "tensorrt_rtx_bindings"]
UNUSED = ["jinja2", "onnxruntime", "tokenizers"]
ON_DEVICE = """
import json, sys
from pathlib import Path

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in json.loads(sys.argv[1]):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Block())
sys.path.insert(0, sys.argv[2])
from fake_tensorrt import Device, module
sys.modules["tensorrt"] = module(Device(network=json.loads(Path(sys.argv[3]).read_text())))
from dlm_export.tensorrt import builders, engine
from dlm_export.cli import main
builders.device_sm = lambda: 110
main(sys.argv[4:])
"""


@pytest.mark.parametrize(
    "missing",
    [
        pytest.param(EXPORT + UNUSED, id="all but numpy, click and rich"),
    ],
)
def test_a_device_without_the_export_extra_finishes_its_engine(
    bundle: Path, tmp_path: Path, missing: list[str]
) -> None:
    network = tmp_path / "network.json"  # read by the fake TensorRT, which then does not need onnx
    network.write_text(json.dumps(describe(bundle / "device.onnx")))
    given = (json.dumps(missing), str(Path(__file__).parent), str(network))
    command = [sys.executable, "-c", ON_DEVICE, *given, "engine", str(bundle), "--target", "thor"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert read_manifest(bundle)["audits"]["thor"]["layers"]["blocks.0.mlp.down"] == "nvfp4"
    with dlm_runtime.open(bundle, engine="none") as opened:
        assert list(opened.manifest["loop"]["engines"]) == ["thor"]


# ---- The fake itself ----


def test_the_fakes_api_is_that_of_the_bindings() -> None:
    trt = pytest.importorskip("tensorrt_rtx_bindings")
    if trt.__version__ not in API["module"]:
        pytest.skip(f"the golden file is of {API['module']}, here is {trt.__version__}")
    assert json.loads(make_tensorrt_api.text()) == API


@pytest.mark.parametrize("precision", ["nvfp4", "mixed"])
def test_the_fakes_network_is_what_the_real_parser_makes(precision: str) -> None:
    trt = pytest.importorskip("tensorrt_rtx_bindings")
    path = gpu_bundle(precision, "rtx5090") / "device.onnx"
    logger = engine._logger(trt.ILogger)
    builder = trt.Builder(logger)
    real = builder.create_network(0)
    parser = trt.OnnxParser(real, logger)
    assert parser.parse_from_file(str(path))
    fake = module()
    faked = fake.Builder(fake.ILogger()).create_network(0)
    assert fake.OnnxParser(faked, fake.ILogger()).parse_from_file(str(path))
    wanted = ("MATRIX_MULTIPLY", "DEQUANTIZE", "QUANTIZE", "DYNAMIC_QUANTIZE")

    def layers(network: Any) -> list[Any]:
        found = [network.get_layer(i) for i in range(network.num_layers)]
        return sorted(
            (
                kind,
                layer.name,
                layer.metadata,
                [str(layer.get_input(i).dtype).rpartition(".")[2] for i in range(layer.num_inputs)],
                [
                    str(layer.get_output(i).dtype).rpartition(".")[2]
                    for i in range(layer.num_outputs)
                ],
            )
            for layer in found
            if (kind := str(layer.type).rpartition(".")[2]) in wanted
        )

    assert layers(faked) == layers(real)
    assert audit.network_table(faked) == audit.network_table(real)
    inputs = [
        [network.get_input(i).name for i in range(network.num_inputs)] for network in (faked, real)
    ]
    assert inputs[0] == inputs[1]


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
