"""Tests of loading quantised checkpoints in the unified format of NVIDIA's modelopt.

Values must be loaded exactly, and damaged checkpoints must be rejected.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from checkpoints import E2M1, dream_config, llada_config, write_checkpoint, write_quantised
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import dlm_runtime
from dlm_calibration.precision_rounding import activation_scale, quantise_weight
from dlm_export import families
from dlm_export.checkpoints.folder import Checkpoint, CheckpointError, weight_format
from dlm_export.checkpoints.prequantised import StoredQuantised
from dlm_export.cli import main
from dlm_export.families.base import Overrides
from dlm_export.graph.operators import nvfp4_panels, panel_scales

ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "W4A16_NVFP4", "MIXED_PRECISION")
CONFIGS = {"llada": llada_config(n_kv_heads=2), "dream": dream_config()}
WEIGHTS, SAID = "model.safetensors", "hf_quant_config.json"
LAYER, RELEASED = "blocks.1.mlp.down", "model.layers.1.mlp.down_proj"
FLOAT32 = np.dtype(np.float32)
Change = Callable[[dict[str, torch.Tensor]], Any]


def _weights(path: Path) -> families.Weights:
    checkpoint = Checkpoint(path)
    return families.open_weights(checkpoint, families.read_network(checkpoint, Overrides()))


def _retensor(path: Path, change: Change) -> None:
    tensors = load_file(path / WEIGHTS)
    change(tensors)
    save_file(tensors, path / WEIGHTS)


def _say(path: Path, **values: Any) -> None:
    said = json.loads((path / SAID).read_text())
    said["quantization"] |= values
    (path / SAID).write_text(json.dumps(said))


def _dequantised(tensors: dict[str, torch.Tensor], base: str) -> torch.Tensor:
    """Return the values of a stored matrix ``[out, in]`` in float64.

    The computation follows the definition of the format.
    """
    codes = tensors[f"{base}.weight"]
    if codes.dtype == torch.float32:
        return codes.double()
    scale = tensors[f"{base}.weight_scale"]
    if codes.dtype == torch.float8_e4m3fn:
        return codes.double() * (scale.double()[:, None] if scale.dim() else scale.double())
    values = torch.cat((E2M1, -E2M1)).double()
    pairs = torch.stack((values[(codes & 15).long()], values[(codes >> 4).long()]), -1).flatten(1)
    return (
        pairs * scale.double().repeat_interleave(16, 1) * tensors[f"{base}.weight_scale_2"].double()
    )


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("family", CONFIGS)
def test_every_matrix_reads_as_the_values_that_its_codes_stand_for(
    tmp_path: Path, family: str, algorithm: str
) -> None:
    path = write_quantised(tmp_path, CONFIGS[family], algorithm, seed=3, head=True)
    weights, tensors = _weights(path), load_file(path / WEIGHTS)
    assert len(weights.quantised) == 15
    assert weights.checkpoint.notes == []
    for parameter, origin in weights.origins.items():
        base = origin.whole.removesuffix(".weight")
        expected = (
            _dequantised(tensors, base).T if origin.transpose else tensors[origin.whole].double()
        )
        array = weights.read(parameter, FLOAT32)
        assert array.flags.c_contiguous
        # The expected values are float64. The exporter multiplies twice in fp32, so its values
        # differ by at most 2 units in the last place.
        np.testing.assert_allclose(array, expected.numpy(), rtol=2.5e-7, atol=0, err_msg=parameter)


@given(
    st.floats(min_value=2.0**-100, max_value=2.0**100, width=32), st.sampled_from(["FP8", "NVFP4"])
)
def test_the_range_of_an_input_gives_its_scale_back_to_the_bit(amax: float, algorithm: str) -> None:
    number_format = weight_format(algorithm)
    scale = np.float32(np.float32(amax) / np.float32(448 if algorithm == "FP8" else 6 * 448))
    weight = quantise_weight(np.ones((16, 1), np.float32), number_format)
    assert activation_scale(number_format, StoredQuantised(weight, scale).input_amax) == scale


# ---- Metadata of checkpoints ----


def test_a_quantised_checkpoint_says_by_whom_and_how(tmp_path: Path) -> None:
    quantisation = Checkpoint(
        write_quantised(tmp_path / "a", CONFIGS["dream"], "NVFP4")
    ).quantisation
    assert str(quantisation) == "NVFP4 (modelopt 0.47.0)"
    mixed = Checkpoint(
        write_quantised(tmp_path / "b", CONFIGS["dream"], "MIXED_PRECISION")
    ).quantisation
    assert str(mixed) == "FP8 and NVFP4 (modelopt 0.47.0)"
    assert Checkpoint(write_checkpoint(tmp_path / "c", CONFIGS["dream"])).quantisation is None


def test_config_json_alone_is_enough(tmp_path: Path) -> None:
    path = write_quantised(tmp_path, CONFIGS["dream"], "NVFP4")
    (path / SAID).unlink()
    embedded = {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "ignore": ["lm_head"],
        "kv_cache_scheme": {"num_bits": 8, "type": "float"},
        "producer": {"name": "modelopt", "version": "0.29.0"},
        "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 16}}},
    }
    (path / "config.json").write_text(
        json.dumps(CONFIGS["dream"] | {"quantization_config": embedded})
    )
    checkpoint = Checkpoint(path)
    assert str(checkpoint.quantisation) == "NVFP4 (modelopt 0.29.0)"
    assert checkpoint.quantisation is not None
    assert checkpoint.quantisation.kv_cache == "FP8"
    assert len(_weights(path).quantised) == 14


@pytest.mark.parametrize(
    "pattern",
    ["lm_head", "model.layers.0*", "*.k_proj"],
)
def test_modules_that_a_pattern_leaves_out_are_expected_in_full_precision(
    tmp_path: Path, pattern: str
) -> None:
    path = write_quantised(tmp_path, CONFIGS["dream"], "FP8", head=True)
    _say(path, exclude_modules=[pattern])
    with pytest.raises(
        CheckpointError,
        match=r"tensors of the wrong type: .* is F8_E4M3, expected BF16 or F16 or F32",
    ):
        _weights(path)


def test_a_matrix_in_full_precision_is_read_and_said_where_nothing_leaves_it_out(
    tmp_path: Path,
) -> None:
    path = write_quantised(tmp_path, CONFIGS["dream"], "FP8")
    _say(path, exclude_modules=None)
    weights = _weights(path)
    assert weights.checkpoint.notes == [
        "1 matrices are in full precision, although hf_quant_config.json does not exclude them: lm_head.weight"
    ]
    assert weights.stored("head.weight") is None


def test_scales_of_a_quantised_cache_are_left_aside_aloud(tmp_path: Path) -> None:
    path = write_quantised(tmp_path, CONFIGS["dream"], "FP8")
    _say(path, kv_cache_quant_algo="FP8")
    names = [f"model.layers.{i}.self_attn.{kv}_proj.{kv}_scale" for i in range(2) for kv in "kv"]
    _retensor(path, lambda t: t.update({name: torch.tensor(0.5) for name in names}))
    (note,) = _weights(path).checkpoint.notes
    assert note.startswith("4 scales of a quantised FP8 cache are not used")
    assert names[0] in note


# ---- Damage ----


def _nan_code(tensors: dict[str, torch.Tensor], name: str) -> None:
    bits = tensors[name].view(torch.uint8).clone()
    bits[3, 2] = 0x7F
    tensors[name] = bits.view(torch.float8_e4m3fn)


TENSORS: dict[str, tuple[str, Change, str]] = {
    "a scale is missing": (
        "NVFP4",
        lambda t: t.pop(f"{RELEASED}.weight_scale"),
        f"1 tensors missing: {RELEASED}.weight_scale",
    ),
    "the weight is missing": (
        "NVFP4",
        lambda t: t.pop(f"{RELEASED}.weight"),
        f"1 tensors missing: {RELEASED}.weight",
    ),
    "a scale too many": (
        "FP8",
        lambda t: t.update({f"{RELEASED}.weight_scale_2": torch.tensor(1.0)}),
        f"1 tensors not known: {RELEASED}.weight_scale_2",
    ),
    "an input scale where inputs stay": (
        "W4A16_NVFP4",
        lambda t: t.update({f"{RELEASED}.input_scale": torch.tensor(1.0)}),
        "1 tensors not known",
    ),
    "scales of another width": (
        "NVFP4",
        lambda t: t.update(
            {f"{RELEASED}.weight_scale": t[f"{RELEASED}.weight_scale"][:, :3].contiguous()}
        ),
        r"weight_scale is \[64, 3\], expected \[64, 6\]",
    ),
    "codes of another format": (
        "NVFP4",
        lambda t: t.update({f"{RELEASED}.weight": torch.zeros(64, 48).to(torch.float8_e4m3fn)}),
        "weight is F8_E4M3, expected U8",
    ),
    "a quantised norm": (
        "FP8",
        lambda t: t.update({"model.norm.weight": t["model.norm.weight"].to(torch.float8_e4m3fn)}),
        "model.norm.weight is F8_E4M3, expected BF16 or F16 or F32",
    ),
    # The first read of a tensor finds these faults.
    "a code is NaN": (
        "FP8",
        lambda t: _nan_code(t, f"{RELEASED}.weight"),
        "1 of 6144 codes are NaN in",
    ),
    "a group scale is negative": (
        "NVFP4",
        lambda t: t[f"{RELEASED}.weight_scale"].view(torch.uint8).add_(128),
        "negative",
    ),
    "the tensor's scale is infinite": (
        "NVFP4",
        lambda t: t[f"{RELEASED}.weight_scale_2"].fill_(np.inf),
        "not finite and",
    ),
    "an input was never seen": (
        "NVFP4",
        lambda t: t[f"{RELEASED}.input_scale"].fill_(0),
        f"in {RELEASED}.input_scale",
    ),
}


@pytest.mark.parametrize("name", TENSORS)
def test_damaged_tensors_are_named(tmp_path: Path, name: str) -> None:
    algorithm, change, says = TENSORS[name]
    path = write_quantised(tmp_path, CONFIGS["dream"], algorithm)
    _retensor(path, change)
    with pytest.raises(CheckpointError, match=says):
        _weights(path).read(f"{LAYER}.weight", FLOAT32)


SAYS: dict[str, tuple[dict[str, Any], str]] = {
    "an algorithm that is not read": (
        {"quant_algo": "W4A16_AWQ"},
        r"'W4A16_AWQ', which is not read; FP8, FP8_PER_CHANNEL",
    ),
    "an algorithm that is a list": ({"quant_algo": ["FP8"]}, r"\['FP8'\], which is not read"),
    "groups of 32": ({"group_size": 32}, "group_size is 32; NVFP4 has groups of 16"),
    "patterns that are a text": ({"exclude_modules": "lm_head"}, "must be a list of names"),
    "mixed without layers": ({"quant_algo": "MIXED_PRECISION"}, "needs quantized_layers"),
    "mixed with an unknown algorithm": (
        {"quant_algo": "MIXED_PRECISION", "quantized_layers": {RELEASED: {"quant_algo": "INT3"}}},
        f"quant_algo of '{RELEASED}' is 'INT3', which is not read",
    ),
}


@pytest.mark.parametrize("name", SAYS)
def test_what_the_file_says_is_checked(tmp_path: Path, name: str) -> None:
    values, says = SAYS[name]
    path = write_quantised(tmp_path, CONFIGS["dream"], "NVFP4")
    _say(path, **values)
    with pytest.raises(CheckpointError, match=says) as caught:
        _weights(path)
    assert SAID in str(caught.value)


@pytest.mark.parametrize("text", ["[]", '{"quantization": 3}', "{}"])
def test_a_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    path = write_quantised(tmp_path, CONFIGS["dream"], "NVFP4")
    (path / SAID).write_text(text)
    with pytest.raises(CheckpointError, match=SAID):
        Checkpoint(path)


@pytest.mark.parametrize(
    ("embedded", "says"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quantised by 'gptq', which is not read"),
        ({}, "quantised by a tool that it does not name"),
        ("fp8", "quantization_config must be an object, found str"),
        (
            {"quant_method": "modelopt", "quant_algo": "FP8"},
            "quant_algo is 'NVFP4', but config.json says 'FP8'",
        ),
    ],
)
def test_config_json_is_checked_too(tmp_path: Path, embedded: Any, says: str) -> None:
    path = write_quantised(tmp_path, CONFIGS["dream"], "NVFP4")
    (path / "config.json").write_text(
        json.dumps(CONFIGS["dream"] | {"quantization_config": embedded})
    )
    with pytest.raises(CheckpointError, match=says):
        Checkpoint(path)


def test_quantised_tensors_without_a_word_on_them_are_refused(tmp_path: Path) -> None:
    path = write_quantised(tmp_path, CONFIGS["dream"], "FP8")
    (path / SAID).unlink()
    with pytest.raises(
        CheckpointError,
        match=f"stored as F8_E4M3; only BF16, F16, F32 .* need {SAID} beside them",
    ):
        Checkpoint(path)


def test_a_cache_alone_being_quantised_leaves_the_weights_plain(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, CONFIGS["dream"])
    said = {"producer": {}, "quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    (path / SAID).write_text(json.dumps(said))
    _retensor(
        path, lambda t: t.update({"model.layers.0.self_attn.k_proj.k_scale": torch.tensor(1.0)})
    )
    weights = _weights(path)
    assert weights.quantised == {}
    assert len(weights.checkpoint.notes) == 1


@pytest.mark.parametrize("algorithm", ["FP8", "MIXED_PRECISION"])
def test_a_bundle_keeps_the_stored_codes_scales_and_ranges(algorithm: str, tmp_path: Path) -> None:
    path = write_quantised(tmp_path / "checkpoint", CONFIGS["llada"], algorithm, seed=4)
    out = tmp_path / "bundle"
    result = CliRunner().invoke(
        main, ["build", str(path), "--precision", "stored", "-o", str(out), "--no-verify"]
    )
    assert result.exit_code == 0, result.output
    weights = _weights(path)
    tensors = {
        name: value.const_value
        for name, value in ir.load(out / "denoiser.onnx").graph.initializers.items()
    }
    stored = weights.stored(f"{LAYER}.weight")
    assert stored is not None
    if stored.weight.format == "nvfp4":  # the kernel needs NVFP4 codes in another order
        assert (
            tensors[f"{LAYER}.weight.panels"].tobytes()
            == nvfp4_panels(stored.weight.codes).tobytes()
        )
        assert (
            tensors[f"{LAYER}.weight.panel_scales"].tobytes()
            == panel_scales(stored.weight.scales).tobytes()
        )
    else:
        assert tensors[f"{LAYER}.weight.codes"].tobytes() == stored.weight.codes.tobytes()
        assert tensors[f"{LAYER}.weight.scales"].tobytes() == stored.weight.scales.tobytes()
    released = load_file(path / WEIGHTS)["model.transformer.blocks.1.ff_out.input_scale"]
    assert tensors[f"{LAYER}.input_scale"].numpy() == stored.input_scale == released.item()
    with dlm_runtime.open(out, threads=1) as bundle:
        assert bundle.manifest["precision"]["name"] == "stored"
        assert bundle.manifest["loop"]["graph"]["simulated"] is True
        ids = list(range(20))
        ours = bundle.logits(ids)
    theirs = families.load(weights, families.read_network(Checkpoint(path), Overrides()))(
        torch.tensor([ids])
    )[0].numpy()
    # The weights are equal. The difference is caused by the quantised activations.
    assert np.abs(ours - theirs).max() / (theirs.max() - theirs.min()) < 0.2


def test_stored_needs_a_quantised_checkpoint(llada_checkpoint: Path, tmp_path: Path) -> None:
    output = tmp_path / "bundle"
    arguments = ["build", str(llada_checkpoint), "--precision", "stored", "-o", str(output)]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert "not a pre-quantised checkpoint" in result.stderr
    assert not output.exists()
