"""Compares calibration with NVIDIA's modelopt.

Calibration and modelopt must find the same ranges and scales. Neither may change the denoiser's
weights.

Tests that need the package ``nvidia-modelopt`` are skipped if it is not installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import warnings
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import denoisers
import numpy as np
import pytest
import torch
from checkpoints import dream_config, write_checkpoint
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch import nn

from dlm_calibration import solvers
from dlm_calibration.errors import CalibrationError
from dlm_calibration.precision_rounding import quantise_weight
from dlm_calibration.states import State
from dlm_export import families
from dlm_export.checkpoints.folder import Checkpoint
from dlm_export.cli import main
from dlm_export.families.base import Overrides
from dlm_export.network.denoiser import Denoiser
from dlm_export.network.linear import Linear
from dlm_export.quantising import modelopt
from dlm_export.quantising.modelopt import ModeloptError

needs_modelopt = pytest.mark.skipif(
    importlib.util.find_spec("modelopt") is None,
    reason="the package nvidia-modelopt is not installed",
)
MASK = 150
Q, DOWN = "blocks.1.attention.q", "blocks.0.mlp.down"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), dream_config(), seed=8)


@pytest.fixture
def denoiser(checkpoint: Path) -> Denoiser:
    return denoisers.load(checkpoint)


def _states(count: int = 3, ratio: float = 0.5) -> list[State]:
    rng = np.random.default_rng(5)
    states = []
    for _ in range(count):
        canvas = rng.integers(0, 140, 24)
        canvas[rng.random(24) < ratio] = MASK
        states.append(State(canvas, "masked" if ratio else "clean", ratio, 0))
    return states


def _layers(denoiser: Denoiser) -> list[str]:
    return [name for name, module in denoiser.named_modules() if isinstance(module, Linear)]


@torch.no_grad()
def _inputs(
    denoiser: Denoiser, layers: Sequence[str], states: Sequence[State]
) -> dict[str, np.ndarray]:
    """Return the inputs of each layer, fp32 ``[P, K]``.

    The inputs of the output head are the features at masked positions only.
    """
    seen: dict[str, list[np.ndarray]] = {layer: [] for layer in layers}
    handles = [
        denoiser.get_submodule(layer).register_forward_pre_hook(
            lambda _, x, layer=layer: seen[layer].append(x[0].reshape(-1, x[0].shape[-1]).numpy())
        )
        for layer in layers
    ]
    for state in states:
        ids = torch.from_numpy(state.canvas)[None]
        features, _ = denoiser.hidden(ids, torch.arange(24)[None])
        denoiser.project(features[0, ids[0] == MASK])
    for handle in handles:
        handle.remove()
    return {layer: np.concatenate(rows) for layer, rows in seen.items()}


def _weight(denoiser: Denoiser, layer: str) -> np.ndarray:
    weight: np.ndarray = denoiser.get_submodule(layer).weight.numpy()  # type: ignore[union-attr]
    return weight


# ---- Without the package ----


def _install(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    def found(package: str) -> str:
        if package == modelopt.PACKAGE:
            if version is None:
                raise metadata.PackageNotFoundError(package)
            return version
        return "9.9"

    monkeypatch.setattr(metadata, "version", found)


@pytest.mark.parametrize(
    ("version", "failure", "says"),
    [
        (
            None,
            None,
            r"needs the package nvidia-modelopt, which is not installed: pip install 'dlm-export\[modelopt\]'",
        ),
        ("0.9.3", None, r"nvidia-modelopt 0.9.3 is too old; 0.47 or later is needed"),
        (
            "1.2.0rc1",
            ImportError("no onnx"),
            r"cannot be imported with torch 9.9, onnx 9.9, onnxruntime 9.9 \(ImportError: no",
        ),
    ],
)
def test_what_is_missing_or_in_the_way_is_named_with_its_version(
    monkeypatch: pytest.MonkeyPatch,
    denoiser: Denoiser,
    version: str | None,
    failure: Exception | None,
    says: str,
) -> None:
    _install(monkeypatch, version)

    def load(name: str) -> Any:
        raise failure or AssertionError(name)

    monkeypatch.setattr(importlib, "import_module", load)
    with pytest.raises(ModeloptError, match=says):
        modelopt.amaxes(denoiser, _states(), {DOWN: "fp8"})


@pytest.mark.parametrize("rotated", [{}, {DOWN: 32}], ids=["plain", "rotated"])
@torch.no_grad()
def test_the_copy_with_torch_linears_computes_the_same(
    denoiser: Denoiser, rotated: dict[str, int]
) -> None:
    layers = _layers(denoiser)
    assert len(layers) == 15
    copied = modelopt._with_torch_linears(denoiser, layers, rotated, own_weights=False)
    assert not any(isinstance(module, Linear) for module in copied.modules())
    assert sum(isinstance(module, nn.Linear) for module in copied.modules()) == 15
    ids = torch.from_numpy(_states(1)[0].canvas)[None]
    assert torch.allclose(copied(ids), denoiser(ids), atol=1e-4)
    own = modelopt._with_torch_linears(denoiser, layers, {}, own_weights=True)
    for layer in layers:
        ours = denoiser.get_submodule(layer).weight
        if layer not in rotated:
            assert copied.get_submodule(layer).weight.data_ptr() == ours.data_ptr()
        assert own.get_submodule(layer).weight.data_ptr() != ours.data_ptr()
    assert isinstance(denoiser.get_submodule(DOWN), Linear)


# ---- With the package ----


@needs_modelopt
@pytest.mark.parametrize("number_format", ["int8-static", "fp8", "nvfp4"])
def test_ranges_are_the_largest_inputs(
    denoiser: Denoiser, number_format: str, capsys: pytest.CaptureFixture[str]
) -> None:
    layers, states, calls = _layers(denoiser), _states(), []
    before = {name: parameter.clone() for name, parameter in denoiser.named_parameters()}
    found = modelopt.amaxes(
        denoiser, states, dict.fromkeys(layers, number_format), on_state=lambda: calls.append(1)
    )
    assert capsys.readouterr().out == ""
    assert len(calls) == len(states)
    assert found == {
        layer: float(np.abs(x).max()) for layer, x in _inputs(denoiser, layers, states).items()
    }
    for name, parameter in denoiser.named_parameters():
        assert torch.equal(parameter, before[name]), name


@needs_modelopt
def test_the_range_of_a_rotated_input_is_taken_behind_the_rotation(denoiser: Denoiser) -> None:
    states = _states()
    found = modelopt.amaxes(denoiser, states, {DOWN: "fp8", Q: "fp8"}, rotated={DOWN: 32})
    inputs = _inputs(denoiser, [DOWN, Q], states)
    assert found[DOWN] == pytest.approx(np.abs(solvers.rotate(inputs[DOWN])).max(), rel=1e-5)
    assert found[DOWN] != pytest.approx(np.abs(inputs[DOWN]).max(), rel=1e-3)
    assert found[Q] == pytest.approx(np.abs(inputs[Q]).max(), rel=1e-5)


@needs_modelopt
def test_smoothquants_scales_are_ours(denoiser: Denoiser) -> None:
    states, alpha = _states(), 0.4
    before = {name: parameter.clone() for name, parameter in denoiser.named_parameters()}
    groups = {DOWN: [DOWN], "blocks.1.attention.out": ["blocks.1.attention.out"]}
    found = modelopt.scales(denoiser, states, dict.fromkeys(groups, "fp8"), groups, alpha=alpha)
    for layer, x in _inputs(denoiser, list(groups), states).items():
        expected = solvers.smooth_scales(
            np.abs(x).max(0), np.abs(_weight(denoiser, layer)).max(1), alpha
        )
        np.testing.assert_allclose(found[layer], expected, rtol=1e-5)
    for name, parameter in denoiser.named_parameters():
        assert torch.equal(parameter, before[name]), name


@needs_modelopt
def test_layers_that_share_an_input_get_one_scale(denoiser: Denoiser) -> None:
    members = [f"blocks.1.attention.{name}" for name in "qkv"]
    formats = dict.fromkeys(members, "int8-static")
    each = modelopt.scales(
        denoiser, _states(), formats, {layer: [layer] for layer in members}, alpha=0.5
    )
    together = modelopt.scales(denoiser, _states(), formats, {Q: members}, alpha=0.5)
    assert together.keys() == {Q}
    np.testing.assert_allclose(
        1 / together[Q], np.mean([1 / scale for scale in each.values()], axis=0), rtol=1e-5
    )


@needs_modelopt
def test_awq_lowers_the_error_of_int4_where_channels_stand_out(denoiser: Denoiser) -> None:
    # Make every 24th channel 100 times larger in one layer, and divide it by 100 in the next layer.
    with torch.no_grad():
        denoiser.blocks[0].mlp.up.weight[:, ::24] *= 100  # type: ignore[union-attr,operator]
        denoiser.blocks[0].mlp.down.weight[::24] /= 100  # type: ignore[union-attr,operator]
    states, calls = _states(), []
    found = modelopt.scales(
        denoiser, states, {DOWN: "int4-g32"}, {DOWN: [DOWN]}, on_state=lambda: calls.append(1)
    )[DOWN]
    assert len(calls) == modelopt.AWQ_SWEEPS * len(states)
    x, w = _inputs(denoiser, [DOWN], states)[DOWN], _weight(denoiser, DOWN)

    def loss(scale: np.ndarray) -> float:
        rounded = (
            quantise_weight(w * scale[:, None], "int4", group_size=32).dequantise() / scale[:, None]
        )
        return float(np.square(x @ (rounded - w)).mean())

    assert found.shape == (96,)
    assert (found > 0).all()
    assert loss(found) < 0.5 * loss(np.ones(96, np.float32))


@needs_modelopt
@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is there")
def test_awq_on_nvfp4_says_that_it_needs_cuda(denoiser: Denoiser) -> None:
    with pytest.raises(ModeloptError, match="NVFP4 weights with CUDA only"):
        modelopt.scales(denoiser, _states(1), {DOWN: "nvfp4"}, {DOWN: [DOWN]})


@needs_modelopt
@pytest.mark.parametrize("value", [float("nan")])
def test_broken_activations_are_refused(denoiser: Denoiser, value: float) -> None:
    denoiser.blocks[0].mlp_norm.weight.data[3] = value  # type: ignore[union-attr,index]
    with pytest.raises(CalibrationError, match=r"could not calibrate|is NaN or infinite"):
        modelopt.amaxes(denoiser, _states(1), {"blocks.0.mlp.up": "fp8"})


# ---- Checkpoints that modelopt exports ----


@needs_modelopt
@pytest.mark.parametrize("algorithm", ["FP8", "NVFP4"])
def test_a_matrix_that_modelopt_exported_reads_as_modelopt_reads_it(
    checkpoint: Path, tmp_path: Path, algorithm: str
) -> None:
    mtq = modelopt.require()
    export = importlib.import_module("modelopt.torch.export.unified_export_hf")
    qtensor = importlib.import_module("modelopt.torch.quantization.qtensor")
    tensors = load_file(checkpoint / "model.safetensors")
    name = "model.layers.0.mlp.down_proj"
    layer = nn.Sequential(nn.Linear(96, 64, bias=False))
    layer[0].weight.data = tensors[f"{name}.weight"].clone()
    x = torch.randn(8, 96, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        mtq.quantize(layer, getattr(mtq, f"{algorithm}_DEFAULT_CFG"), lambda m: m(x))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            export._export_quantized_weight(layer[0], torch.float32)
    exported = {
        key: tensor for key, tensor in layer[0].state_dict().items() if "quantizer" not in key
    }
    path = write_checkpoint(tmp_path, dream_config(), seed=8)
    save_file(
        tensors | {f"{name}.{key}": tensor for key, tensor in exported.items()},
        path / "model.safetensors",
    )
    said = {
        "producer": {"name": "modelopt"},
        "quantization": {"quant_algo": algorithm, "group_size": 16},
    }
    (path / "hf_quant_config.json").write_text(json.dumps(said))

    opened = Checkpoint(path)
    weights = families.open_weights(opened, families.read_network(opened, Overrides()))
    assert weights.quantised == {f"{DOWN}.weight": algorithm}
    stored = weights.stored(f"{DOWN}.weight")
    assert stored is not None
    assert stored.input_amax == float(x.abs().max())
    if algorithm == "FP8":
        theirs = exported["weight"].float() * exported["weight_scale"]
    else:
        packed = qtensor.NVFP4QTensor(torch.Size((64, 96)), torch.float32, exported["weight"])
        theirs = packed.dequantize(
            torch.float32,
            scale=exported["weight_scale"],
            double_scale=exported["weight_scale_2"],
            block_sizes={-1: 16},
        )
    np.testing.assert_array_equal(stored.weight.dequantise(), theirs.T.numpy())


@needs_modelopt
@pytest.mark.parametrize(
    ("recipe", "options"), [("fp8", ()), ("int8-static", ("--smoothing", "0.5")), ("int4-awq", ())]
)
def test_a_build_takes_its_ranges_and_scales(
    checkpoint: Path, recipe: str, options: Sequence[str], tmp_path: Path
) -> None:
    small = ("--calib-samples", "4", "--calib-states", "4", "--judged", "2")
    arguments = (
        "build",
        str(checkpoint),
        "--precision",
        recipe,
        "--calibrator",
        "modelopt",
        *small,
        *options,
    )
    result = CliRunner().invoke(main, [*arguments, "-o", str(tmp_path / "bundle"), "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["parity"]["passed"]
    manifest = json.loads((tmp_path / "bundle" / "manifest.json").read_text())
    assert manifest["precision"]["calibration"]["calibrator"] == "modelopt"


@pytest.mark.skipif(
    importlib.util.find_spec("modelopt") is not None, reason="nvidia-modelopt is installed"
)
def test_a_build_without_the_package_says_how_to_get_it(checkpoint: Path, tmp_path: Path) -> None:
    arguments = (
        "build",
        str(checkpoint),
        "--precision",
        "fp8",
        "--calibrator",
        "modelopt",
        "-o",
        str(tmp_path / "bundle"),
    )
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 1
    assert "pip install 'dlm-export[modelopt]'" in result.stderr
    assert not (tmp_path / "bundle").exists()
