"""DiffusionGemma, quantised: calibration states with random tokens, and bundles that are judged."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import diffusion_gemma_config, write_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from quantised_drafts import (
    BLOCK,
    after_a_file,
    check_generations,
    check_layers,
    invoke,
    make_samples,
    states_of,
)
from safetensors.torch import load_file, save_file
from torch_side import TorchPredictor

import dlm_runtime
from dlm_calibration.errors import CalibrationError
from dlm_calibration.precisions import Recipe
from dlm_calibration.samples import Sample
from dlm_calibration.states import (
    NOISE_RATIOS,
    Draft,
    State,
    noise_block,
    read_states,
    write_states,
)
from dlm_export import build as building
from dlm_export import families
from dlm_export.build import BuildOptions, BuildReport, QuantiseOptions
from dlm_export.building import memory
from dlm_export.building.quantising import Quantised
from dlm_export.building.request import check_job, check_request
from dlm_export.judging.accuracy.effort import Effort
from dlm_export.judging.accuracy.masked import masked_canvases
from dlm_export.judging.sides.bundle import BundlePredictor
from dlm_export.judging.sides.layerwise import SweptPredictor
from dlm_export.judging.sides.side import DraftPass, View
from dlm_export.network import reference
from dlm_export.network.loop_random import temperature_before, temperature_of
from dlm_export.network.states import features_of
from dlm_export.quantising import calibrate, samples
from dlm_export.quantising.quantisation import Quantisation
from dlm_export.quantising.samples import CalibrationOptions
from dlm_export.sources import Source, open_source

VOCAB = 160


def write_calm(folder: Path, **changes: Any) -> Path:
    """Write a checkpoint whose layers add small numbers to the hidden states.

    Otherwise, a tiny change of a random network makes routers choose other experts.
    """
    path = write_checkpoint(folder / "checkpoint", diffusion_gemma_config(**changes), seed=3)
    tensors = load_file(path / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")):
            tensor *= 0.1
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_calm(tmp_path_factory.mktemp("gemma"))


@pytest.fixture(scope="module")
def source(checkpoint: Path) -> Source:
    return open_source(checkpoint)


# ---- Calibration states ----


@settings(max_examples=80)
@given(
    seed=st.integers(0, 1 << 20),
    prompt=st.integers(0, 20),
    answer=st.integers(1, 30),
    ratio=st.sampled_from(NOISE_RATIOS),
    length=st.none() | st.integers(1, 30),
)
def test_only_tokens_of_one_block_become_random(
    seed: int, prompt: int, answer: int, ratio: float, length: int | None
) -> None:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, VOCAB, prompt + answer)
    origin = prompt or len(tokens) // 2
    end = None if length is None else min(origin + length, len(tokens))
    canvas, start, is_noised = noise_block(tokens, ratio, VOCAB, BLOCK, rng, prompt, end)
    assert (start - origin) % BLOCK == 0
    assert origin <= start < (len(tokens) if end is None else end)
    assert len(canvas) == min(start + BLOCK, len(tokens))
    assert not is_noised[:start].any()
    assert np.array_equal(canvas[~is_noised], tokens[: len(canvas)][~is_noised])
    assert abs(is_noised.sum() - max(1, ratio * (len(canvas) - start))) <= 0.5


CLEAN = 5  # the only token of the samples whose random tokens are examined


def states(source: Source, samples: Sequence[Sample], **options: Any) -> list[State]:
    return states_of(source, samples, noise_vocab_size=VOCAB, **options)


def test_states_contain_random_tokens_at_every_noise_ratio(source: Source) -> None:
    constant = [replace(each, tokens=np.full(27, CLEAN)) for each in make_samples(20)]
    made = states(source, constant)
    noised = [state for state in made if state.draft is not None]
    assert {state.source for state in noised} == {"masked"}
    assert {state.source for state in made if state.draft is None} == {"clean"}
    # With blocks of 8 tokens, the ratios of neighbouring buckets may be rounded to the same number.
    assert len({state.bucket for state in noised}) >= 8
    random = np.concatenate([state.canvas[state.canvas != CLEAN] for state in noised])
    assert len(np.unique(random)) > VOCAB / 2
    assert (random.min(), random.max()) == (0, VOCAB - 1)
    assert all(state.draft and len(state.canvas) - state.draft.start == BLOCK for state in noised)


@pytest.fixture(scope="module")
def conditioned(source: Source) -> list[State]:
    """States with and without soft embeddings, some of them from a generation."""
    policy = replace(source.presets["diffusion-gemma"], steps_per_block=4, stable_entropy=0.0)
    layered = families.layered(source.parameters, source.network)
    runs = samples.trajectories(layered, policy, None, lambda: None)
    made = states(source, make_samples(4), per_sample=5, trajectories=runs)
    return samples.with_conditioning(made, layered, policy, None, None)


def test_only_first_passes_read_no_soft_embeddings(conditioned: list[State]) -> None:
    """As in the loop, all tokens of the block are random in such a pass."""
    read: dict[tuple[str, bool], set[bool]] = {}
    for state in conditioned:
        if state.draft is not None:
            is_read = state.draft.conditioning is not None
            read.setdefault((state.source, state.mask_ratio == 1), set()).add(is_read)
    assert read["masked", True] == read["trajectory", True] == {False}
    assert read["masked", False] == read["trajectory", False] == {True}


def test_soft_embeddings_have_the_temperature_of_the_loop(source: Source) -> None:
    policy = replace(source.presets["diffusion-gemma"], steps_per_block=4)
    temperatures = [temperature_before(policy, ratio, BLOCK) for ratio in (1, 0.75, 0.5, 0.25)]
    wanted = [temperature_of(policy, step, 4) for step in (0, 0, 1, 2)]
    assert temperatures == wanted
    state = next(state for state in states(source, make_samples(6)) if 0 < state.mask_ratio < 0.5)
    layered = families.layered(source.parameters, source.network)
    (found,) = samples.with_conditioning([state], layered, policy, None, None)
    assert found.draft is not None
    assert found.draft.conditioning is not None
    denoiser = families.load(source.parameters, source.network)
    rows = torch.arange(found.draft.start, len(state.canvas))
    with torch.no_grad():
        logits = denoiser.project(features_of(denoiser, state.canvas, rows, Draft(int(rows[0]))))
        before = torch.tensor(temperature_before(policy, state.mask_ratio, BLOCK))
        soft = denoiser.soft_embedding(logits, before)
    ours = torch.from_numpy(found.draft.conditioning).float()
    torch.testing.assert_close(ours, soft, rtol=2e-3, atol=2e-3)


def test_states_survive_a_file(conditioned: list[State], tmp_path: Path) -> None:
    found = after_a_file(conditioned, tmp_path / "states.npz")
    assert len({each.sha256 for each in found}) == len(found)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("is_conditioned", lambda array: array[1:]),
        ("is_conditioned", np.logical_not),
        ("conditioning", lambda array: array[1:]),
        ("draft_starts", lambda array: array + 1000),
    ],
)
def test_damaged_files_of_states_are_refused(
    conditioned: list[State],
    tmp_path: Path,
    name: str,
    change: Callable[[np.ndarray], np.ndarray],
) -> None:
    path = tmp_path / "states.npz"
    write_states(conditioned, path)
    with np.load(path) as file:
        arrays = dict(file)
    np.savez(path, **arrays | {name: change(arrays[name])})
    with pytest.raises(CalibrationError, match="not a file of calibration states"):
        read_states(path)


def test_states_of_a_generation_are_the_passes_that_the_loop_makes(source: Source) -> None:
    policy = replace(
        source.presets["diffusion-gemma"], steps_per_block=3, entropy_bound=3.0, stable_entropy=0.0
    )
    for made in check_generations(source, policy, 2):
        assert len(made) == 6
        assert made[0].mask_ratio == 1
        assert all(0 <= state.mask_ratio <= 1 for state in made)


def test_layers_compute_a_draft_pass_after_a_causal_pass(
    source: Source, conditioned: list[State]
) -> None:
    """The window of the sliding layers is shorter than the prompts."""
    made = [state for state in conditioned if state.draft is not None][:12]
    check_layers(source, [*made, replace(made[0], canvas=made[0].canvas[:5], draft=Draft(0))])


# ---- Losses of layers ----


@pytest.mark.parametrize(
    "changes",
    [{"smoothing": 0.5}, pytest.param({"solver": "awq"}, marks=pytest.mark.slow)],
    ids=str,
)
def test_scales_leave_the_function_as_it_was(
    source: Source, conditioned: list[State], changes: dict[str, Any]
) -> None:
    recipe = Recipe("test", (("blocks.0.*", "int4-g32-dynamic"),), **changes)
    formats = recipe.formats(list(source.network.quantisable()))
    done = calibrate.calibrate(
        source.parameters, source.network, recipe, formats, conditioned, lambda: None
    )
    assert {"blocks.0.mlp.experts_norm.weight", "blocks.0.mlp.shared_norm.weight"} <= set(
        done.parameters.columns
    )
    state = next(
        state for state in conditioned if state.draft and state.draft.conditioning is not None
    )
    rows = torch.from_numpy(np.flatnonzero(state.is_masked(VOCAB)))
    exact, folded = (
        features_of(families.load(each, source.network), state.canvas, rows, state.draft)
        for each in (source.parameters, done.parameters)
    )
    torch.testing.assert_close(folded, exact, rtol=1e-3, atol=1e-3)


# ---- Bundles ----


@dataclass(frozen=True)
class Built:
    report: BuildReport
    numbers: Quantisation


def options(precision: str, name: str = "default") -> BuildOptions:
    effort = Effort(name, judged=1)
    few = CalibrationOptions(samples=4, states_per_sample=4)
    return BuildOptions(
        ("cpu",), precision, quantise=QuantiseOptions(few, effort=effort, min_tokens_per_expert=8)
    )


@pytest.fixture(scope="module")
def built(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Built]:
    made: dict[str, Built] = {}

    def build(precision: str) -> Built:
        if precision not in made:
            with pytest.MonkeyPatch.context() as patch:
                kept: list[Quantised] = []
                quantise = building.quantise

                def keep(*given: Any) -> Quantised:
                    kept.append(quantise(*given))
                    return kept[0]

                patch.setattr(building, "quantise", keep)
                output = tmp_path_factory.mktemp(precision) / "bundle"
                report = building.build(checkpoint, output, options(precision))
                made[precision] = Built(report, kept[0].numbers)
        return made[precision]

    return build


SLOW = ("int8", "fp8", "nvfp4")
PRECISIONS = ("int4", *(pytest.param(each, marks=pytest.mark.slow) for each in SLOW))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_bundle_is_built_and_judged(built: Callable[[str], Built], precision: str) -> None:
    report = built(precision).report
    assert report.parity is not None
    assert report.parity.misses == []
    layers = json.loads((report.output / "manifest.json").read_text())["precision"]["layers"]
    held = {"int8": "int8-dynamic", "int4": "int4-g32-dynamic"}.get(precision, precision)
    assert {layers[f"blocks.1.mlp.experts.{role}"] for role in ("gate", "up", "down")} == {held}
    assert not {"head", "embed.conditioning.gate", "blocks.1.mlp.router"} & set(layers)
    judged = report.judgement
    assert judged is not None
    assert "condition states" in report.stages_s
    assert [bucket["mask_ratio"] for bucket in judged.buckets] == [0.05, 0.55]
    assert judged.overall["reference_bits_per_byte"] is None
    assert (judged.frontier, judged.free_running) == (None, None)
    assert judged.overall["top1"] > 0.8
    assert judged.overall["kl_mean"] < 0.5
    assert all(row["kl"] > 0 for row in judged.layers)
    page = (report.output / "report.html").read_text()
    assert "The frontier was not compared." in page
    assert "the mask ratio is the share of random tokens in a block" in page


@pytest.mark.parametrize("precision", PRECISIONS[:2])
def test_the_native_loop_generates_the_texts_of_the_quantised_network(
    built: Callable[[str], Built], source: Source, precision: str
) -> None:
    done = built(precision)
    denoiser = families.load(done.numbers.parameters, source.network)
    calibrate.simulate(dict(denoiser.named_modules()), done.numbers)
    with dlm_runtime.open(done.report.output, threads=1) as bundle:
        policy = bundle.policy().with_fields({"steps_per_block": 5, "entropy_bound": 6.0})
        for sample in make_samples(3, seed=6):
            prompt = sample.tokens[:11].tolist()
            wanted = reference.generate(denoiser, prompt, policy, 2 * BLOCK)
            out = bundle.generate(tokens=prompt, max_new_tokens=2 * BLOCK, **policy.as_dict())
            assert (out.tokens, out.nfe) == (wanted.tokens, wanted.nfe)


def test_all_sides_of_a_comparison_predict_the_same(
    checkpoint: Path, source: Source, tmp_path: Path
) -> None:
    """The bundle is in fp32, because rounding in one pass would change the next pass."""
    bundle_path = tmp_path / "bundle"
    building.build(checkpoint, bundle_path, BuildOptions(check_parity=False))
    swept = SweptPredictor(families.layered(source.parameters, source.network), "swept")
    whole = TorchPredictor(families.load(source.parameters, source.network), "whole")
    views = []
    for number, sample in enumerate(make_samples(3, seed=7)):
        rng = np.random.default_rng(number)
        canvas, start, is_noised = noise_block(
            sample.tokens, 0.6, VOCAB, BLOCK, rng, 11 if number else 1
        )
        draft = DraftPass(start, 0.4 + 0.2 * number)
        views.append(View(canvas, np.flatnonzero(is_noised), draft))
    swept.see(views)
    with dlm_runtime.open(bundle_path, threads=1) as bundle:
        ours = BundlePredictor(bundle, "bundle")
        threads = ours._draft_passes._session.get_session_options().intra_op_num_threads
        assert threads == 1
        for view in views:
            wanted = whole.logits(*view)
            for side in (swept, ours):
                assert np.abs(side.logits(*view) - wanted).max() <= 1e-4 * np.ptp(wanted)


def test_random_tokens_after_an_end_token_are_not_judged(source: Source) -> None:
    """The answer ends in its second block, and a third block follows."""
    side = SweptPredictor(families.layered(source.parameters, source.network), "swept")
    end, prompt = 11 + BLOCK + 2, 11
    tokens = np.full(prompt + 3 * BLOCK, CLEAN)
    tokens[end:] = source.network.end_token_id
    sample = Sample(tokens, prompt, "an answer", "a prompt")
    policy = replace(source.presets["diffusion-gemma"], block_length=0)
    seen = [
        each
        for seed in range(4)
        for each in masked_canvases(sample, 0, side, policy=policy, limit=64, seed=seed)
    ]
    starts = {each.draft.start for each in seen if each.draft is not None}
    assert starts == {prompt, prompt + BLOCK}
    assert max(each.positions.max() for each in seen) == end
    assert any(
        (each.canvas[end + 1 :] != tokens[end + 1 : len(each.canvas)]).any() for each in seen
    )
    for each in seen:
        assert each.truth.tolist() == tokens[each.positions].tolist()
        assert each.draft is not None
        ratio = float(
            np.mean(each.canvas[each.draft.start :] != tokens[each.draft.start : len(each.canvas)])
        )
        assert abs(each.draft.temperature - temperature_before(policy, ratio, BLOCK)) < 0.1


def test_the_memory_for_judging_includes_the_graph(
    built: Callable[[str], Built], source: Source
) -> None:
    """If texts are generated, the native runtime opens the graph too."""
    needed = [
        memory.needed_bytes(check_job(check_request(options("int4", effort)), source))["judge"]
        for effort in ("default", "full")
    ]
    weights = (built("int4").report.output / "denoiser.onnx.data").stat().st_size
    assert weights <= needed[1] - needed[0] < needed[0]


# ---- What is rejected ----


def test_the_embedding_table_stays_in_full_precision(checkpoint: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('embedding = "int8"\n\n[layers]\n"*" = "int8-dynamic"\n')
    out = tmp_path / "bundle"
    refused = invoke("build", checkpoint, "--precision", recipe, "-o", out)
    assert refused.exit_code == 2
    assert "soft embeddings are computed from its embedding table" in refused.stderr
    assert not out.exists()


def test_effort_levels_are_refused(built: Callable[[str], Built]) -> None:
    refused = invoke("effort", built("int4").report.output)
    assert refused.exit_code == 2
    assert "has no mask token, and effort levels cannot be fitted" in refused.stderr
