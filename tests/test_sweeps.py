"""Tests of calibration layer by layer.

Calibration layer by layer and calibration with the whole denoiser in memory must give the same
codes.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dlm_calibration.errors import CalibrationError
from dlm_calibration.precision_rounding import NUMBER_FORMATS, quantise_weight
from dlm_calibration.precisions import FORMATS, HIGH, Recipe
from dlm_calibration.states import State, read_states
from dlm_export import build as building
from dlm_export import families
from dlm_export.build import BuildOptions, QuantiseOptions, build
from dlm_export.building.work import ResumeError
from dlm_export.network.layered import MemoryLimitError, make_batches
from dlm_export.quantising import calibrate, gptq, samples
from dlm_export.quantising.samples import CalibrationOptions
from dlm_export.quantising.solved import Solved
from dlm_export.sources import Source, open_source
from dlm_export.workplace import DeviceError
from dlm_runtime.errors import RequestError


def _states(source: Source) -> list[State]:
    c, rng = source.network, np.random.default_rng(5)
    states = []
    for length in (24, 16, 24, 24, 16):
        canvas = rng.integers(0, c.mask_token_id, length)
        canvas[8:][rng.random(length - 8) < 0.5] = c.mask_token_id
        states.append(State(canvas, "masked", 0.5, 8))
    return states


@torch.no_grad()
def _whole(source: Source, states: list[State], formats: dict[str, str]) -> dict[str, Any]:
    """Calibrate a denoiser whose layers are all in memory. Returns the codes of GPTQ."""
    c = source.network
    denoiser = families.load(source.parameters, c)
    grams: dict[str, gptq.Gram] = {}
    layers = {path: layer for path, layer in c.quantisable().items() if formats[path] != HIGH}
    modules = dict(denoiser.named_modules())

    def look(path: str, weight: torch.Tensor) -> Any:
        def hook(_: Any, inputs: tuple[torch.Tensor, ...]) -> None:
            x = inputs[0].flatten(0, -2)
            grams.setdefault(path, gptq.Gram(x.shape[1], x.device)).add(x, weight)

        return hook

    rows: dict[int, torch.Tensor] = {}
    for batch in make_batches([state.canvas for state in states]):
        weight = torch.where(batch.ids == c.mask_token_id, 1.0, gptq.COMMITTED_WEIGHT).flatten()
        sites = {layer.site for layer in layers.values()} - {"head"}
        handles = [modules[site].register_forward_pre_hook(look(site, weight)) for site in sites]
        features, _ = denoiser.hidden(
            batch.ids, torch.arange(batch.ids.shape[1]).expand_as(batch.ids)
        )
        for handle in handles:
            handle.remove()
        rows |= {
            n: x[ids == c.mask_token_id]
            for n, x, ids in zip(batch.numbers, features, batch.ids, strict=True)
        }
    for number in sorted(rows):
        look("head", torch.ones(len(rows[number])))(None, (rows[number],))
    found = {}
    for path, layer in layers.items():
        chosen = FORMATS[formats[path]]
        assert chosen.weights is not None
        w = source.parameters.read(f"{path}.weight", np.dtype(np.float32))
        factor = gptq.inverse_factor(grams[layer.site].matrix)
        found[path] = gptq.gptq(w, factor, format=chosen.weights, group_size=chosen.group_size)
    return found


@pytest.mark.parametrize("name", ["int4-g32", "nvfp4"])
def test_codes_are_those_of_a_denoiser_held_whole(
    name: str, dream_checkpoint: Path, tmp_path: Path
) -> None:
    source = open_source(dream_checkpoint)
    recipe = Recipe("test", (("*", name),), solver="gptq")
    formats = recipe.formats(list(source.network.quantisable()))
    states, done = _states(source), []
    workplace = building.work.Workplace(activation_bytes=0, folder=tmp_path, solved=tmp_path)
    found = calibrate.calibrate(
        source.parameters,
        source.network,
        recipe,
        formats,
        states,
        lambda: done.append(1),
        workplace=workplace,
    )
    assert len(done) == calibrate.units(recipe, formats, source.network, len(states))
    for path, expected in _whole(source, states, formats).items():
        ours = found.weight(path)
        # Sums are added in another order, so rounding errors may change a few codes.
        assert np.mean(ours.codes != expected.codes) <= 0.01, path
        np.testing.assert_allclose(ours.scales, expected.scales, rtol=1e-4, err_msg=path)
        assert ours.global_scale == expected.global_scale


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(list(NUMBER_FORMATS)),
    st.integers(1, 5),
    st.integers(1, 9),
    st.sampled_from([16, 32]),
)
@settings(max_examples=60)
def test_a_solved_weight_survives_its_file(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    format: str,
    groups: int,
    columns: int,
    size: int,
) -> None:
    w = np.random.default_rng(seed).standard_normal((16 * groups, columns)).astype(np.float32)
    weight = quantise_weight(w, format, group_size=size if format == "int4" else None)
    kept = Solved(tmp_path_factory.mktemp("solved"))
    kept["blocks.0.mlp.up"] = weight
    assert "blocks.0.mlp.up" in kept
    assert "blocks.0.mlp.down" not in kept
    found = kept["blocks.0.mlp.up"]
    assert (found.format, found.group_size, found.global_scale) == (
        weight.format,
        weight.group_size,
        weight.global_scale,
    )
    for ours, theirs in ((found.codes, weight.codes), (found.scales, weight.scales)):
        assert ours.dtype == theirs.dtype
        assert np.array_equal(ours.astype(np.float32), theirs.astype(np.float32))


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 no archive"])
def test_damaged_files_of_finished_stages_are_named(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "states.npz"
    path.write_bytes(content)
    with pytest.raises(CalibrationError, match=r"states\.npz: not a file of calibration states"):
        read_states(path)
    (tmp_path / "head.safetensors").write_bytes(content)
    with pytest.raises(
        CalibrationError, match=r"head\.safetensors: not a solved weight written by a build"
    ):
        Solved(tmp_path)["head"]


def _options(precision: str = "int4", **changes: Any) -> BuildOptions:
    quantise = QuantiseOptions(calibration=CalibrationOptions(samples=3, states_per_sample=2))
    return BuildOptions(
        precision=precision, check_parity=False, force=True, quantise=quantise, **changes
    )


@pytest.fixture(scope="module")
def built(llada_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a bundle. The build of the bundle stored intermediate results in "kept"."""
    folder = tmp_path_factory.mktemp("sweeps")
    build(llada_checkpoint, folder / "bundle", _options(resume=folder / "kept"))
    return folder


def _never(*_: Any, **__: Any) -> None:
    raise AssertionError("a finished stage ran again")


def test_an_interrupted_build_is_taken_up(
    built: Path, llada_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, output = tmp_path / "kept", tmp_path / "bundle"

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(building, "write_graph", interrupted)
        with pytest.raises(KeyboardInterrupt):
            build(llada_checkpoint, output, _options(resume=kept))
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    monkeypatch.setattr(gptq, "gptq", _never)
    monkeypatch.setattr(samples, "calibration_states", _never)
    report = build(llada_checkpoint, output, _options(resume=kept))
    assert "make states" not in report.stages_s
    for file in ("denoiser.onnx", "denoiser.onnx.data"):
        assert (output / file).read_bytes() == (built / "bundle" / file).read_bytes()
    assert not (output / "work").exists()


def test_a_finished_layer_that_is_damaged_or_anothers_is_refused_before_anything_else(
    built: Path, llada_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = shutil.copytree(built / "kept", tmp_path / "kept")
    up, gate = (
        next((kept / "solved").glob(f"*/blocks.0.mlp.{name}.safetensors"))
        for name in ("up", "gate")
    )
    sound = up.read_bytes()
    flipped = bytearray(sound)
    flipped[-1000] ^= 1
    monkeypatch.setattr(building, "write_text", _never)
    for content in (bytes(flipped), gate.read_bytes(), sound[:1000]):
        up.write_bytes(content)
        with pytest.raises(
            CalibrationError,
            match=r"mlp\.up\.safetensors: not a solved weight written by a build .* Remove it",
        ):
            build(llada_checkpoint, tmp_path / "bundle", _options(resume=kept))


@pytest.mark.parametrize("inside", [".", "kept"])
def test_what_is_kept_does_not_lie_where_the_bundle_goes(
    inside: str, llada_checkpoint: Path, tmp_path: Path
) -> None:
    with pytest.raises(ResumeError, match="is inside the new bundle"):
        build(llada_checkpoint, tmp_path / "bundle", _options(resume=tmp_path / "bundle" / inside))
    assert not list(tmp_path.iterdir())


def test_builds_in_other_precisions_take_up_the_states_alone(
    built: Path, llada_checkpoint: Path, tmp_path: Path
) -> None:
    kept = shutil.copytree(built / "kept", tmp_path / "kept")
    shared = build(llada_checkpoint, tmp_path / "shared", _options("int4-g128", resume=kept))
    fresh = build(llada_checkpoint, tmp_path / "fresh", _options("int4-g128"))
    assert "make states" in fresh.stages_s
    assert "make states" not in shared.stages_s
    for file in ("denoiser.onnx", "denoiser.onnx.data"):
        assert (tmp_path / "shared" / file).read_bytes() == (tmp_path / "fresh" / file).read_bytes()


def test_finished_stages_of_another_build_are_refused(
    built: Path, llada_checkpoint: Path, tmp_path: Path
) -> None:
    kept, output = shutil.copytree(built / "kept", tmp_path / "kept"), tmp_path / "bundle"
    checkpoint = shutil.copytree(llada_checkpoint, tmp_path / "checkpoint")
    weights = next(checkpoint.glob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-2] ^= 1
    weights.write_bytes(content)
    with pytest.raises(
        ResumeError,
        match=rf"the checkpoint has changed since: {weights.name} now has SHA-256 [0-9a-f]+",
    ):
        build(checkpoint, output, _options(resume=kept))
    options = _options(resume=kept)
    other = replace(options.quantise.calibration, seed=1)
    changed = replace(options, quantise=replace(options.quantise, calibration=other))
    with pytest.raises(ResumeError, match="belongs to another build: its calibration is different"):
        build(llada_checkpoint, output, changed)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(ResumeError, match=r"is not empty, but has no work\.json"):
        build(llada_checkpoint, output, _options(resume=tmp_path / "other"))
    assert (tmp_path / "other" / "notes.txt").read_text() == "mine"


def test_too_little_memory_for_a_layer_is_told_with_what_would_do(
    llada_checkpoint: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        MemoryLimitError,
        match=r"--memory 1,000: to \w[\w ]* needs ([\d,]+) bytes, one layer at a time",
    ) as err:
        build(llada_checkpoint, tmp_path / "bundle", _options(memory_bytes=1000))
    assert not (tmp_path / "bundle").exists()
    enough = int(str(err.value).split(" needs ")[1].split(" bytes")[0].replace(",", ""))
    build(llada_checkpoint, tmp_path / "bundle", _options(memory_bytes=2 * enough))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    ("device", "says"),
    [
        ("cuda", "finds no CUDA device here"),
        ("tpu", "unknown device"),
    ],
)
def test_a_device_that_is_not_there_is_refused(
    device: str, says: str, llada_checkpoint: Path, tmp_path: Path
) -> None:
    with pytest.raises((DeviceError, RequestError), match=says):
        build(llada_checkpoint, tmp_path / "bundle", _options(device=device))
    assert not list(tmp_path.iterdir())
