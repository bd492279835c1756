"""Compares rotary positions and their scaling with transformers.

The expected values are computed without this project's code. The canvases are longer than the
length before scaling, except for the kind ``dynamic``.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import a2d_config, write_checkpoint
from click.testing import CliRunner
from denoisers import load
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from trunk_logits import trunk_logits

import dlm_runtime
from dlm_export import families
from dlm_export.build import build
from dlm_export.checkpoints.folder import Checkpoint, CheckpointError, Config
from dlm_export.cli import main
from dlm_export.families.base import Overrides
from dlm_export.families.rope_config import read_rope
from dlm_export.network.denoiser import cosines_and_sines
from dlm_export.network.rope_scaling import (
    HIGHEST,
    LOWEST,
    Dynamic,
    Llama3,
    RotaryTable,
    Yarn,
    scaling_from,
)
from dlm_export.network.spec import AttentionSpec, rotary_table
from dlm_runtime.manifest import schema, validator

transformers = pytest.importorskip("transformers", reason="transformers is not installed here")

ORIGINAL = 16
LENGTH = 75
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": ORIGINAL}
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "yarn": YARN,
    "yarn, all settings": YARN
    | {
        "beta_fast": 4,
        "beta_slow": 0.5,
        "mscale": 1.5,
        "mscale_all_dim": 0.5,
        "truncate": False,
    },
    "yarn, attention_factor": YARN | {"attention_factor": 1.5},
}
TRUNKS = ("Llama", "Qwen3")


def _write(path: Path, trunk: str, rope: dict[str, Any] | None) -> Path:
    return write_checkpoint(path, a2d_config(trunk, rope_theta=1e4, rope_scaling=rope), seed=6)


def _canvas() -> torch.Tensor:
    return torch.randint(0, 140, (1, LENGTH), generator=torch.Generator().manual_seed(0))


def _distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / (expected.max() - expected.min()))


@torch.no_grad()
@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("trunk", TRUNKS)
def test_logits_equal_those_of_the_transformers_class(
    trunk: str, rope: str, tmp_path: Path
) -> None:
    checkpoint = _write(tmp_path / "scaled", trunk, ROPES[rope])
    expected = trunk_logits(checkpoint, f"{trunk}ForCausalLM", None, _canvas())
    assert _distance(load(checkpoint)(_canvas()), expected) < 2e-4
    unscaled = load(_write(tmp_path / "unscaled", trunk, None))(_canvas())
    assert (_distance(unscaled, expected) > 1e-2) == (rope != "dynamic")


def test_the_graph_of_a_bundle_equals_the_transformers_class(tmp_path: Path) -> None:
    checkpoint = _write(tmp_path / "checkpoint", "Qwen3", ROPES["yarn, all settings"])
    build(checkpoint, tmp_path / "bundle")
    found = dlm_runtime.open(tmp_path / "bundle").logits(_canvas()[0].tolist())
    expected = trunk_logits(checkpoint, "Qwen3ForCausalLM", None, _canvas())[0]
    assert _distance(torch.from_numpy(found), expected) < 2e-4
    told = CliRunner().invoke(main, ["inspect", str(tmp_path / "bundle")])
    assert "theta 10000, yarn scaling, factor 8" in told.output


@pytest.mark.parametrize("rope", ROPES)
def test_a_scaling_is_valid_in_a_manifest(rope: str, tmp_path: Path) -> None:
    network = families.read_network(Checkpoint(_write(tmp_path, "Llama", ROPES[rope])), Overrides())
    described = network.as_dict()["layers"][0]["attention"]["rope"]
    assert described["scaling"]["kind"] == ROPES[rope]["rope_type"]
    layer = schema()["$defs"]["layer"]
    rule = layer["properties"]["attention"]["properties"]["rope"]
    check = validator().evolve(schema=rule)
    check.validate(json.loads(json.dumps(described)))
    assert not check.is_valid(described | {"scaling": {"factor": 2.0}})
    assert asdict(scaling_from(described["scaling"])) == described["scaling"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"kind": "spiral"}, "scaling 'spiral' is not one of linear, dynamic, llama3, yarn"),
        ({"other": 1}, "scaling yarn has the fields kind, factor, original_length, .*'other'"),
        ({"factor": 0}, "factor must be a number between 1e-06 and 1e.06, found 0"),
        ({"factor": "8"}, "factor must be a number between 1e-06 and 1e.06, found '8'"),
        ({"factor": True}, "factor must be a number .* found True"),
        ({"original_length": 16.5}, "original_length must be an integer .* 16777216, found 16.5"),
        ({"original_length": 1 << 25}, "original_length must be an integer .* found 33554432"),
        ({"truncate": 1}, "truncate must be true or false, found 1"),
    ],
)
def test_a_wrong_scaling_of_a_manifest_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        scaling_from(asdict(Yarn(8.0, 16, 1.0, 32.0, 1.0, True)) | changes)


# ---- Tables ----

thetas, factors = st.floats(1e2, 1e7), st.floats(1, 64)
lengths = {"original_max_position_embeddings": st.integers(16, 1 << 16)}
magnitudes = st.one_of(
    st.just({}),
    st.fixed_dictionaries({"attention_factor": st.floats(0.1, 2)}),
    st.fixed_dictionaries({"mscale": st.floats(0.1, 2), "mscale_all_dim": st.floats(0.1, 2)}),
)
scalings = st.one_of(
    st.fixed_dictionaries({"rope_type": st.just("linear"), "factor": factors}),
    st.fixed_dictionaries({"rope_type": st.just("dynamic"), "factor": factors}),
    st.builds(
        lambda values, low, width: (
            values | {"low_freq_factor": low, "high_freq_factor": low + width}
        ),
        st.fixed_dictionaries(
            {"rope_type": st.just("llama3"), "factor": factors}, optional=lengths
        ),
        st.floats(0.1, 8),
        st.floats(0.5, 8),
    ),
    st.builds(
        dict.__or__,
        st.fixed_dictionaries(
            {"rope_type": st.just("yarn"), "factor": st.floats(0.05, 64)},
            optional=lengths
            | {
                "beta_fast": st.floats(1, 64),
                "beta_slow": st.floats(0.01, 1),
                "truncate": st.booleans(),
            },
        ),
        magnitudes,
    ),
)


def _older(theta: float, fraction: float, scaling: dict[str, Any]) -> dict[str, Any]:
    return {
        "rope_theta": theta,
        "partial_rotary_factor": fraction,
        "rope_scaling": scaling,
    }


def _oldest(theta: float, fraction: float, scaling: dict[str, Any]) -> dict[str, Any]:
    renamed = {"type" if name == "rope_type" else name: scaling[name] for name in scaling}
    return _older(theta, fraction, renamed)


def _newer(theta: float, fraction: float, scaling: dict[str, Any]) -> dict[str, Any]:
    own = {"rope_theta": theta, "partial_rotary_factor": fraction}
    return {"rope_parameters": scaling | own}


def _table(values: dict[str, Any], head_size: int) -> RotaryTable:
    rope = read_rope(Config(Path("config.json"), values))
    table = rotary_table(AttentionSpec(1, 1, head_size, rope))
    assert table is not None
    return table


@settings(max_examples=200)
@given(
    theta=thetas,
    fraction=st.sampled_from([0.5, 1.0]),
    scaling=scalings,
    head_size=st.sampled_from([8, 16, 64, 128]),
    positions=st.integers(1, 1 << 17),
    form=st.sampled_from([_oldest, _older, _newer]),
)
@example(1e4, 1.0, YARN | {"beta_fast": 1, "beta_slow": 1, "truncate": False}, 64, 128, _older)
@example(20.0, 1.0, YARN | {"original_max_position_embeddings": 1 << 16}, 64, 128, _older)
def test_tables_equal_those_of_transformers(
    theta: float,
    fraction: float,
    scaling: dict[str, Any],
    head_size: int,
    positions: int,
    form: Any,
) -> None:
    own = {"max_position_embeddings": positions}
    table = _table(form(theta, fraction, scaling) | own, head_size)
    config = transformers.LlamaConfig(
        hidden_size=head_size,
        num_attention_heads=1,
        head_dim=head_size,
        **_newer(theta, fraction, dict(scaling)) | own,
    )
    function = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[scaling["rope_type"]]
    expected, magnitude = function(config, torch.device("cpu"))
    # transformers computes in fp32, which causes the largest errors in sums that are almost 0.
    np.testing.assert_allclose(table.frequencies(), expected.numpy(), rtol=1e-4)
    assert table.magnitude == pytest.approx(magnitude, rel=1e-12)


def test_the_factor_of_yarn_may_be_the_ratio_of_the_lengths() -> None:
    values = {"max_position_embeddings": 128, "rope_theta": 1e4}
    ratio = _table(values | {"rope_scaling": YARN | {"factor": None}}, 32)
    assert ratio == _table(values | {"rope_scaling": YARN}, 32)


def test_the_original_length_may_be_outside_of_the_scaling() -> None:
    inside = {"max_position_embeddings": 128, "rope_theta": 1e4, "rope_scaling": YARN}
    without = {name: value for name, value in YARN.items() if "original" not in name}
    outside = inside | {"rope_scaling": without, "original_max_position_embeddings": ORIGINAL}
    assert _table(inside, 32) == _table(outside, 32)


def test_the_attention_factor_multiplies_cosines_and_sines() -> None:
    plain, twice = (
        cosines_and_sines(RotaryTable(1e4, Yarn(4.0, 16, factor, 32.0, 1.0, True), 8), 99)
        for factor in (1.0, 2.0)
    )
    for one, two in zip(plain, twice, strict=True):
        torch.testing.assert_close(2 * one, two)


numbers = st.floats(LOWEST, HIGHEST)


@settings(max_examples=200)
@given(
    theta=st.floats(1, 1e300, exclude_min=True),
    factor=st.floats(1, HIGHEST),
    length=st.sampled_from([1, 2, 4096, 1 << 24]),
    two=st.tuples(numbers, numbers),
    attention_factor=numbers,
    truncate=st.booleans(),
    size=st.sampled_from([2, 4, 128]),
)
def test_all_numbers_within_the_limits_give_finite_tables(
    theta: float,
    factor: float,
    length: int,
    two: tuple[float, float],
    attention_factor: float,
    truncate: bool,
    size: int,
) -> None:
    low, high = sorted(two)
    assume(low < high)
    for scaling in (
        Llama3(factor, length, low, high),
        Yarn(factor, length, attention_factor, high, low, truncate),
    ):
        tables = cosines_and_sines(RotaryTable(theta, scaling, size), 9)
        assert all(bool(torch.isfinite(table).all()) for table in tables)


# ---- The length of canvases ----


def test_the_longest_canvas_is_max_position_embeddings_unless_the_user_says_more(
    tmp_path: Path,
) -> None:
    """Scaling does not change the longest canvas, as in transformers."""
    opened = Checkpoint(_write(tmp_path, "Llama", YARN))
    assert families.read_network(opened, Overrides()).max_canvas_length == 256
    longer = families.read_network(opened, Overrides(max_canvas_length=1024))
    assert longer.max_canvas_length == 1024


def test_dynamic_scaling_is_refused_for_canvases_longer_than_the_original_length(
    tmp_path: Path,
) -> None:
    opened = Checkpoint(_write(tmp_path, "Llama", ROPES["dynamic"]))
    network = families.read_network(opened, Overrides(max_canvas_length=256))
    assert network.layers[0].attention.rope is not None
    assert network.layers[0].attention.rope.scaling == Dynamic(4.0, 256)
    with pytest.raises(CheckpointError, match=r"rope_type dynamic .* Pass --max-canvas-length 256"):
        families.read_network(opened, Overrides(max_canvas_length=257))


# ---- Rejected settings ----

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "yarn without a factor": (
        {"rope_type": "yarn"},
        "factor in rope_scaling is missing, and a guess would change",
    ),
    "a factor below 1": (
        {"rope_type": "linear", "factor": 0.5},
        "factor must be a number between 1 and 1e",
    ),
    "a factor of nothing": (
        YARN | {"factor": 0},
        "factor in rope_scaling must be a positive number",
    ),
    "an original length that is not an integer": (
        YARN | {"original_max_position_embeddings": 16.0},
        "original_max_position_embeddings must be an integer in 1..16777216, found 16.0",
    ),
    "an original length of nothing": (
        YARN | {"original_max_position_embeddings": 0},
        "original_max_position_embeddings must be an integer",
    ),
    "betas in the wrong order": (
        YARN | {"beta_fast": 1.0, "beta_slow": 32.0},
        "beta_fast 1 must be at least beta_slow 32. Correct the numbers of rope_type yarn",
    ),
    "a beta of nothing": (YARN | {"beta_slow": 0}, "beta_slow in rope_scaling must be a positive"),
    "an attention_factor of nothing": (
        YARN | {"attention_factor": 0},
        "attention_factor in rope_scaling must be a positive number",
    ),
    "truncate as a number": (
        YARN | {"truncate": 1},
        "truncate in rope_scaling must be true or false, found 1",
    ),
    "mscale alone": (
        YARN | {"mscale": 1.0, "mscale_all_dim": 0},
        "rope_scaling contains mscale, but one of mscale and mscale_all_dim has no effect",
    ),
    "mscale_all_dim beside attention_factor": (
        YARN | {"mscale_all_dim": 0.5, "attention_factor": 1.0},
        "contains mscale_all_dim, but mscale and mscale_all_dim have no effect beside attention_f",
    ),
    "mscale as a flag": (
        YARN | {"mscale": False, "mscale_all_dim": 1.0},
        "mscale in rope_scaling must be a positive number, found False",
    ),
    "a number of llama3 in yarn": (
        YARN | {"low_freq_factor": 1.0},
        "'low_freq_factor' in rope_scaling or rope_parameters is not supported with rope_type yarn",
    ),
    "llama3 without low_freq_factor": (
        {name: value for name, value in ROPES["llama3"].items() if name != "low_freq_factor"},
        "low_freq_factor in rope_scaling is missing",
    ),
    "llama3 in the wrong order": (
        ROPES["llama3"] | {"high_freq_factor": 1.0},
        "high_freq_factor 1 must be greater than low_freq_factor 1",
    ),
    "an original length for dynamic": (
        ROPES["dynamic"] | {"original_max_position_embeddings": 16},
        "'original_max_position_embeddings' in .* is not supported with rope_type dynamic",
    ),
    "longrope": (
        {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]},
        "rope_type 'longrope' is not supported, only default, linear, dynamic, llama3, yarn",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_scaling_that_is_wrong_is_refused_by_its_key(name: str) -> None:
    scaling, says = WRONG[name]
    values = {"rope_theta": 1e4, "max_position_embeddings": 128, "rope_scaling": scaling}
    with pytest.raises(CheckpointError, match=f"^config.json: .*{says}"):
        read_rope(Config(Path("config.json"), values))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"max_position_embeddings": None}, "original_max_position_embeddings is missing"),
        ({"rope_theta": 1.0}, "rope_theta must be greater than 1 if frequencies are scaled"),
        (
            {"rope_parameters": {"original_max_position_embeddings": 8}, "rope_scaling": YARN},
            "original_max_position_embeddings is 16 and, in rope_parameters, 8",
        ),
        (
            {"original_max_position_embeddings": 8, "rope_scaling": YARN},
            "original_max_position_embeddings is 8 and, in rope_scaling, 16",
        ),
        (
            {"max_position_embeddings": None, "rope_scaling": ROPES["dynamic"]},
            "max_position_embeddings is missing",
        ),
    ],
)
def test_a_scaling_that_contradicts_the_rest_is_refused(changes: dict[str, Any], says: str) -> None:
    scaling = {"rope_type": "yarn", "factor": 8.0}
    values = {"rope_theta": 1e4, "max_position_embeddings": 128, "rope_scaling": scaling}
    with pytest.raises(CheckpointError, match=says):
        read_rope(Config(Path("config.json"), values | changes))
