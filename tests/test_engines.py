"""Tests of engines that TensorRT-RTX builds on a machine without a GPU: the engines' content, their
entries in the manifest, and errors.

No test runs an engine, because an engine only runs on the kind of GPU for which it was built.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema
import onnx
import pytest
import torch
from checkpoints import sdar_config, stable_diffcoder_config, wedlm_config, write_checkpoint
from engine_bundles import (
    BLOCK,
    BUILDS,
    LONGEST,
    check_audits,
    contents,
    copy_of,
    dlm_export,
    edit_device_graph,
    gpu_bundle,
    read_manifest,
    refused,
    tiny,
    with_engines,
)
from referencing import Registry
from slow_cases import slow_except

import dlm_runtime
from dlm_export import targets
from dlm_export.sources import open_source
from dlm_export.tensorrt import builders, bundled, engine, estimate
from dlm_export.tensorrt.estimate import EngineOptions
from dlm_runtime.manifest import schema

trt = pytest.importorskip("tensorrt_rtx_bindings")

SCHEMA = schema()
SM = {"rtx4090": 89, "rtx5090": 120, "gb10": 121}


@pytest.fixture
def fp16(tmp_path: Path) -> Path:
    """A copy of the fp16 bundle that contains an engine for rtx5090. Tests may change the copy."""
    return copy_of(with_engines("fp16"), tmp_path / "fp16")


@pytest.fixture(params=slow_except(["int4", "mixed"], BUILDS))
def build(request: pytest.FixtureRequest) -> tuple[str, tuple[str, ...], Path]:
    """Return a precision, its targets, and the bundle with an engine for each target."""
    return request.param, BUILDS[request.param], with_engines(request.param)


def test_every_layer_of_an_engine_is_held_as_the_recipe_asks(
    build: tuple[str, tuple[str, ...], Path],
) -> None:
    precision, names, bundle = build
    manifest = read_manifest(bundle)
    layers = list(open_source(tiny()).network.quantisable())
    recipe = targets.recipe_for(targets.find_all(names), precision)
    if recipe is None:
        asked = dict.fromkeys(layers, {"fp16": "float16", "bf16": "bfloat16"}[precision])
    else:
        asked = recipe.formats(layers)
        # The checkpoint is stored in bf16, so activations and unquantised layers are computed in
        # bf16.
        asked = {layer: "bfloat16" if name == "high" else name for layer, name in asked.items()}
    assert sorted(manifest["loop"]["engines"]) == sorted(manifest["audits"]) == sorted(names)
    for audit in manifest["audits"].values():
        assert (audit["method"], audit["layers"], audit["fallbacks"]) == ("network", asked, {})


@pytest.mark.slow
@pytest.mark.parametrize("config", [wedlm_config, stable_diffcoder_config])
def test_engines_of_further_families_hold_every_layer_as_asked(
    config: Callable[[], dict[str, Any]], tmp_path: Path
) -> None:
    source = write_checkpoint(tmp_path / "checkpoint", config())
    bundle = gpu_bundle("fp8", "rtx5090", source=source, engines=True)
    check_audits(bundle, ["rtx5090"])
    held = set(read_manifest(bundle)["audits"]["rtx5090"]["layers"].values())
    assert "fp8" in held


def test_the_manifest_says_what_an_engine_is(build: tuple[str, tuple[str, ...], Path]) -> None:
    _, names, bundle = build
    manifest = read_manifest(bundle)
    jsonschema.validate(manifest, SCHEMA, registry=Registry())
    for name in names:
        entry = manifest["loop"]["engines"][name]
        assert entry["file"] == f"engines/{name}.engine"
        told = entry["builder"], entry["version"], entry["sm"]
        assert told == ("tensorrt_rtx", trt.__version__, [SM[name]])
        rows = [1, BLOCK, BLOCK]
        assert entry["profiles"] == {
            "prefill": {"tokens": [1, LONGEST // 2, LONGEST], "cached": [0, 0, 0], "rows": rows},
            "block": {"tokens": rows, "cached": [0, LONGEST // 2, LONGEST], "rows": rows},
        }
        least = (bundle / entry["file"]).stat().st_size - estimate.DEVICE_OVERHEAD_BYTES
        assert manifest["audits"][name]["device_bytes"] > least


@pytest.mark.slow
def test_an_engine_takes_its_weights_and_little_more(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """The embedding table is also the output head. An engine must contain the table only once.

    The denoiser has one wide layer, so that its weights take more space than compiled kernels.
    """
    wide = {"hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 12_000}
    config = sdar_config(tie_word_embeddings=True, num_hidden_layers=1, **wide)
    source = write_checkpoint(tmp_path_factory.mktemp("wide"), config, dtype=torch.float16)
    bundle = gpu_bundle("nvfp4", "rtx5090", source=source, engines=True)
    weights, engine = (
        (bundle / name).stat().st_size for name in ("denoiser.onnx.data", "engines/rtx5090.engine")
    )
    # A second table, or the layers in fp16, would take 24 MB more.
    assert weights < engine < weights + (12 << 20)


# ---- Settings of the builder ----


class Seen:
    """The TensorRT objects of the last build.

    Tests read their settings with TensorRT's own getters.
    """

    config: Any
    profiles: list[Any]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """The real TensorRT-RTX.

    The builder configuration of each build is stored, so that tests can read it.
    """
    kept = Seen()

    class Builder(trt.Builder):  # type: ignore[misc,name-defined]
        def create_builder_config(self) -> Any:
            kept.config, kept.profiles = super().create_builder_config(), []
            return kept.config

        def create_optimization_profile(self) -> Any:
            kept.profiles.append(super().create_optimization_profile())
            return kept.profiles[-1]

    module = ModuleType("spied")
    vars(module).update({**vars(trt), "Builder": Builder})
    monkeypatch.setattr(builders, "_rtx_module", lambda: module)
    return kept


def test_a_second_engine_leaves_everything_else_as_it_was(fp16: Path, seen: Seen) -> None:
    """The builder gets two profiles, the compute capability and the workspace."""
    before, manifest = contents(fp16), read_manifest(fp16)
    options = ("--canvas", 96, "--block", 16, "--workspace", 64)
    result = dlm_export("engine", fp16, "--target", "gb10", *options, "--json")
    assert result.exit_code == 0, result.output
    assert seen.config.get_memory_pool_limit(trt.MemoryPoolType.WORKSPACE) == 64 << 20
    assert seen.config.num_compute_capabilities == 1
    assert seen.config.get_compute_capability(0) == trt.ComputeCapability.SM121
    assert seen.config.num_optimization_profiles == 2

    def shapes(profile: Any, name: str) -> list[tuple[int, ...]]:
        return [tuple(shape) for shape in profile.get_shape(name)]

    prefill, block = seen.profiles
    for name in ("input_ids", "position_ids"):
        assert shapes(prefill, name) == [(1, 1), (1, 48), (1, 96)]
        assert shapes(block, name) == [(1, 1), (1, 16), (1, 16)]
    for name in ("past_key.0", "past_value.1"):
        assert shapes(prefill, name) == [(1, 2, 0, 16)] * 3
        assert shapes(block, name) == [(1, 2, 0, 16), (1, 2, 48, 16), (1, 2, 96, 16)]
    for profile in seen.profiles:
        assert shapes(profile, "score_rows") == [(1, 1), (1, 16), (1, 16)]
    after, changed = contents(fp16), read_manifest(fp16)
    new = "engines/gb10.engine"
    assert set(after) == {*before, new}
    assert {name for name in before if after[name] != before[name]} == {"manifest.json"}
    assert changed["targets"] == ["rtx5090", "gb10"]
    entry, audit = changed["loop"]["engines"].pop("gb10"), changed["audits"].pop("gb10")
    assert entry["profiles"]["prefill"]["tokens"] == [1, 48, 96]
    assert entry["profiles"]["block"]["cached"] == [0, 48, 96]
    sha256 = hashlib.sha256(after[new]).hexdigest()
    assert changed["files"].pop(new) == {"bytes": len(after[new]), "sha256": sha256}
    assert changed | {"targets": ["rtx5090"]} == manifest
    printed = json.loads(result.stdout)["engines"]["gb10"]
    assert printed | entry | {"audit": audit} == printed
    jsonschema.validate(read_manifest(fp16), SCHEMA, registry=Registry())
    with dlm_runtime.open(fp16, engine="none") as opened:
        assert set(opened.manifest["loop"]["engines"]) == {"rtx5090", "gb10"}


# ---- Existing bundles ----


class Interrupting:
    """A progress display that ends this process when the builder reports its first step."""

    total = steps = 0

    def start(self, stage: str, total: int) -> None:
        self.total += total

    def advance(self, units: int = 1) -> None:
        self.steps += units
        if self.steps == 1:
            os.kill(os.getpid(), signal.SIGTERM)


class Ended(BaseException):
    """An exception that a signal handler raises, as the handler of a program that calls the build
    may do.
    """


def test_a_signal_stops_the_builder_and_leaves_the_bundle_as_it_was(fp16: Path) -> None:
    def end(number: int, _: object) -> None:
        raise Ended(number)

    before, progress = contents(fp16), Interrupting()
    handler = signal.signal(signal.SIGTERM, end)
    try:
        with pytest.raises(Ended, match=str(int(signal.SIGTERM))):
            bundled.add_engine(
                fp16, read_manifest(fp16), targets.find("gb10"), EngineOptions(), progress=progress
            )
        assert signal.getsignal(signal.SIGTERM) is end
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert contents(fp16) == before
    assert 0 < progress.steps < progress.total, "the builder went on to its end"


def _truncate(bundle: Path) -> None:
    os.truncate(bundle / "engines" / "rtx5090.engine", 1000)


def _edit(bundle: Path) -> None:
    manifest = read_manifest(bundle)
    manifest["loop"]["engines"]["rtx5090"]["profiles"]["block"]["rows"] = [1, 1, 1]
    (bundle / "manifest.json").write_text(json.dumps(manifest))


def _unlink(bundle: Path) -> None:
    (bundle / "engines" / "rtx5090.engine").unlink()


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (_truncate, "truncated"),
        (_edit, "loop.engines.rtx5090: was edited"),
        (_unlink, "rtx5090.engine"),
    ],
)
def test_a_damaged_engine_is_built_again_or_taken_out(
    fp16: Path, damage: Callable[[Path], None], says: str
) -> None:
    command, path = ("engine", fp16, "--target", "rtx5090"), fp16 / "engines" / "rtx5090.engine"
    before = contents(fp16)
    refused(dlm_export(*command), 2, ["has an engine for rtx5090", "--force"])
    assert contents(fp16) == before
    damage(fp16)
    run = ("run", fp16, "--tokens", "1,2,3", "--max-new-tokens", 4)
    refused(dlm_export(*run), 2, [says])
    assert dlm_export(*run, "--engine", "onnxruntime").exit_code == 0
    assert dlm_export(*command, "--canvas", 64, "--force").exit_code == 0
    after, manifest = contents(fp16), read_manifest(fp16)
    changed = {name for name in after if after[name] != before[name]}
    assert changed == {"manifest.json", "engines/rtx5090.engine"}
    profiles = manifest["loop"]["engines"]["rtx5090"]["profiles"]
    assert profiles["prefill"]["tokens"] == [1, 32, 64]
    assert path.stat().st_size == manifest["files"]["engines/rtx5090.engine"]["bytes"]
    assert dlm_export(*command, "--remove").exit_code == 0
    assert not path.exists()
    assert "engines/rtx5090.engine" not in read_manifest(fp16)["files"]
    refused(dlm_export(*command, "--remove"), 2, ["has no engine for rtx5090"])
    says_how = f"dlm-export engine {fp16} --target rtx5090,"
    refused(dlm_export(*run), 2, ["has no TensorRT engine", says_how])


def test_a_bundle_that_cannot_be_written_or_is_being_changed_is_left_alone(
    fp16: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, command = contents(fp16), ("engine", fp16, "--target", "gb10")
    held = os.open(fp16, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    refused(dlm_export(*command), 1, ["another dlm-export is changing it"])
    os.close(held)

    def fail(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(engine, "_serialise", fail)
    refused(dlm_export(*command), 1, ["gb10.engine: cannot write (Read-only file system)"])
    assert contents(fp16) == before


# ---- Graphs that the builder rejects ----


@pytest.fixture
def unbuilt(tmp_path: Path) -> Iterator[Path]:
    """A copy of the fp16 bundle without engines. The test must not change it."""
    yield copy_of(gpu_bundle("fp16", "rtx5090"), tmp_path / "unbuilt")
    assert not (tmp_path / "unbuilt" / "engines").exists()


def test_an_operator_that_tensorrt_lacks_is_told_in_its_own_words(unbuilt: Path) -> None:
    def edit(model: onnx.ModelProto) -> None:
        next(node for node in model.graph.node if node.op_type == "Softmax").op_type = "Hardmax2"

    edit_device_graph(unbuilt, edit)
    before = contents(unbuilt)
    result = dlm_export("engine", unbuilt, "--target", "rtx5090")
    refused(result, 1, ["device.onnx: TensorRT", "cannot parse it", "Hardmax2"])
    assert contents(unbuilt) == before


def test_an_input_that_the_builder_would_ignore_stops_the_build(unbuilt: Path) -> None:
    def edit(model: onnx.ModelProto) -> None:
        past = next(value for value in model.graph.input if value.name == "past_key.0")
        model.graph.input.add().CopyFrom(past)
        model.graph.input[-1].name = "past_key.2"  # the network has no layer 2

    edit_device_graph(unbuilt, edit)
    before = contents(unbuilt)
    refused(dlm_export("engine", unbuilt, "--target", "rtx5090"), 1, ["Unused Input: past_key.2"])
    assert contents(unbuilt) == before


def test_what_the_logger_says_is_sorted_by_what_it_means() -> None:
    logger = engine._logger(trt.ILogger)
    logger.reset()
    levels = trt.ILogger.Severity
    logger.log(levels.INTERNAL_ERROR, "assertion\n failed")
    logger.log(levels.ERROR, "no kernel")
    logger.log(levels.WARNING, "Unused Input: nonpad")
    logger.log(levels.WARNING, "Make sure input input_ids has Int64 binding.")
    logger.log(levels.WARNING, "timing is noisy")
    logger.log(levels.WARNING, "timing is noisy")
    logger.log(levels.INFO, "Unused Input: told as a detail only")
    assert logger.errors == ["assertion failed", "no kernel", "Unused Input: nonpad"]
    assert logger.shown == ["timing is noisy"]


def test_tensorrt_rtx_that_is_not_there_is_named_with_its_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, unbuilt: Path
) -> None:
    for name in [name for name in sys.modules if name.startswith("tensorrt")]:
        monkeypatch.delitem(sys.modules, name)
    find_spec = builders.importlib.util.find_spec

    def without(name: str, package: str | None = None) -> Any:
        return None if name.startswith("tensorrt") else find_spec(name, package)

    monkeypatch.setattr(builders.importlib.util, "find_spec", without)
    says = ["needs TensorRT-RTX, which is not installed", "dlm-export[rtx]", "--no-engine"]
    new = tmp_path / "new" / "bundle"
    refused(dlm_export("engine", unbuilt, "--target", "rtx5090"), 1, says)
    refused(dlm_export("build", tiny(), "--target", "rtx5090", "-o", new), 1, says)
    assert not new.parent.exists()
