"""Tests of quantised mixtures of experts: calibration, solvers, bundles and engines of all formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import (
    llada2_config,
    llada_moe_config,
    qwen3_moe_config,
    sdar_config,
    write_checkpoint,
)
from engine_bundles import SMALL
from hypothesis import given, settings
from hypothesis import strategies as st
from mixtures import read_tensors, rewritten
from slow_cases import slow_except

from dlm_calibration.precisions import RECIPES, Recipe
from dlm_calibration.samples import Sample
from dlm_calibration.states import State
from dlm_export import families
from dlm_export.build import BuildOptions, BuildReport, QuantiseOptions, build
from dlm_export.building import writing
from dlm_export.families.base import later
from dlm_export.judging.accuracy.effort import Effort
from dlm_export.judging.parity.verdict import ParityError
from dlm_export.judging.precision_search import search, sensitivity
from dlm_export.network.experts import RoutedMLPs, Router
from dlm_export.network.spec import ExpertsSpec, RouterSpec
from dlm_export.quantising import calibrate, experts
from dlm_export.quantising.quantisation import Quantisation
from dlm_export.quantising.samples import CalibrationOptions
from dlm_export.sources import Source, open_source
from dlm_export.tensorrt.estimate import EngineOptions

LENGTH = 32
MIXTURE = "blocks.1.mlp.experts"
CONFIGS = {
    "llada-moe": llada_moe_config(),
    "llada2": llada2_config(),
    "sdar": sdar_config(intermediate_size=128),
    "sdar-moe": qwen3_moe_config("SDARMoeForCausalLM", block_size=4),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """A denoiser with the layers of LLaDA2.

    The second layer is a mixture of experts. The router never chooses expert 5 of this layer.
    """
    path = write_checkpoint(
        tmp_path_factory.mktemp("unreached") / "llada2", CONFIGS["llada2"], seed=7
    )
    name = "model.layers.1.mlp.gate.expert_bias"
    bias = read_tensors(path)[name]
    bias[5] = -9.0
    return open_source(rewritten(path, {name: bias}))


def states(source: Source, count: int, seed: int) -> list[State]:
    c, rng = source.network, np.random.default_rng(seed)
    canvases = rng.integers(0, c.mask_token_id, (count, LENGTH))
    canvases[:, LENGTH // 2 :][rng.random((count, LENGTH // 2)) < 0.5] = c.mask_token_id
    return [State(canvas, "masked", 0.5, 4) for canvas in canvases]


def calibrated(source: Source, recipe: Recipe, count: int = 24, **options: Any) -> Quantisation:
    formats = recipe.formats(list(source.network.quantisable()))
    seen = states(source, count, 5)
    return calibrate.calibrate(
        source.parameters, source.network, recipe, formats, seen, lambda: None, **options
    )


@torch.no_grad()
def entering(source: Source, seen: list[State]) -> tuple[torch.Tensor, ...]:
    """Run the denoiser, and return the inputs of its mixture of experts.

    The inputs are the tokens' vectors, the experts chosen for each token, and the experts' weights.
    """
    denoiser, found = families.load(source.parameters, source.network), []
    mixture = dict(denoiser.named_modules())[MIXTURE]
    mixture.register_forward_pre_hook(lambda _, inputs: found.append(inputs))
    for state in seen:
        denoiser(torch.from_numpy(state.canvas)[None])
    return tuple(torch.cat(each, 1) for each in zip(*found, strict=True))


def test_calibration_counts_the_tokens_of_each_expert(source: Source) -> None:
    done = calibrated(source, RECIPES["nvfp4"], count=6, fewest_tokens=40)
    reached = done.reached[MIXTURE]
    _, chosen, _ = entering(source, states(source, 6, 5))
    assert list(reached.tokens) == np.bincount(chosen.flatten().numpy(), minlength=16).tolist()
    assert reached.never == [5]
    assert reached.few == [expert for expert, count in enumerate(reached.tokens) if count < 40]
    assert 1 < len(reached.few) < 16


def test_an_unreached_expert_takes_its_stacks_range_and_is_named(source: Source) -> None:
    done = calibrated(source, RECIPES["fp8"], count=6, fewest_tokens=1)
    solved = [
        experts.member(f"{MIXTURE}.{role}", expert) in done.solved
        for role in ("gate", "down")
        for expert in (4, 5)
    ]
    assert solved == [True, False, True, False]
    assert done.amax[f"{MIXTURE}.down"] > 0
    np.testing.assert_allclose(  # GPTQ rounds the weights of an expert without tokens to nearest
        done.expert(f"{MIXTURE}.up", 5).dequantise(),
        done.parameters.read(f"{MIXTURE}.up.weight", np.dtype("f4"))[5],
        rtol=0.07,
    )
    (told,) = experts.doubts(done.reached)
    assert told.startswith(f"1 of 16 experts received no calibration token ({MIXTURE}.5)")


def error_of(source: Source, done: Quantisation, given: tuple[torch.Tensor, ...]) -> float:
    """Return the mean squared error of the mixture's results with quantised weights.

    The inputs are not quantised.
    """
    denoiser = families.load(done.parameters, source.network)
    mixture = dict(denoiser.named_modules())[MIXTURE]
    assert isinstance(mixture, RoutedMLPs)
    with torch.no_grad():
        exact = mixture(*given)
        for role in ("gate", "up", "down"):
            stack = f"{MIXTURE}.{role}"
            getattr(mixture, role).read = lambda expert, stack=stack: torch.from_numpy(
                done.expert(stack, expert).dequantise()
            )
        return float((mixture(*given) - exact).square().mean())


def test_solvers_that_use_each_experts_tokens_lose_less_than_rounding(source: Source) -> None:
    """The test measures errors on tokens that were not used for calibration."""
    x, *routes = entering(source, states(source, 24, 6))
    formats, lost = (("*.experts.*", "int4-g32-dynamic"),), {}
    before = source.parameters.read("blocks.1.mlp_norm.weight", np.dtype("f4"))
    for solver in ("nearest", "gptq", "awq"):
        done = calibrated(source, Recipe("test", formats, solver=solver), 48)
        folded = done.parameters.read("blocks.1.mlp_norm.weight", np.dtype("f4"))
        given = (x * torch.from_numpy(folded / before), *routes)
        lost[solver] = error_of(source, done, given)
    assert lost["gptq"] < 0.9 * lost["nearest"], lost
    assert lost["awq"] < lost["nearest"], lost


@pytest.mark.parametrize("changes", [{"solver": "awq"}, {"smoothing": 0.5}], ids=str)
def test_scales_by_expert_leave_the_function_as_it_was(
    source: Source, changes: dict[str, Any]
) -> None:
    formats = (("*.experts.*", "int4-g32-dynamic"),)
    done = calibrated(source, Recipe("test", formats, **changes), fewest_tokens=40)
    scales = done.parameters.rows[f"{MIXTURE}.down.weight"]
    assert scales.shape == (16, 64)
    assert len(np.unique(scales[0])) > 1
    ids = torch.from_numpy(states(source, 1, 9)[0].canvas)[None]
    exact, folded = (
        families.load(each, source.network)(ids) for each in (source.parameters, done.parameters)
    )
    assert float((exact - folded).abs().max() / exact.abs().max()) < 1e-5


def test_an_expert_with_just_enough_tokens_gets_its_own_scales(source: Source) -> None:
    """AWQ leaves the features of all experts with fewer tokens as they were."""
    _, chosen, _ = entering(source, states(source, 6, 5))
    tokens = np.bincount(chosen.flatten().numpy(), minlength=16)
    fewest = int(np.sort(tokens)[8])
    recipe = Recipe("test", (("*.experts.*", "int4-g32-dynamic"),), solver="awq")
    done = calibrated(source, recipe, count=6, fewest_tokens=fewest)
    scales = done.parameters.rows[f"{MIXTURE}.down.weight"]
    assert (scales != 1).any(1).tolist() == (tokens >= fewest).tolist()


@torch.no_grad()
def test_all_experts_as_one_mlp_are_the_routed_ones() -> None:
    mixture = RoutedMLPs(ExpertsSpec(6, 2, 24), 16)
    for parameter in mixture.parameters():
        parameter.normal_(generator=torch.Generator().manual_seed(int(parameter.numel())))
    x = torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(0))
    weights, chosen = torch.rand(2, 9, 6, generator=torch.Generator().manual_seed(1)).topk(2)
    routed = mixture(x, chosen, weights)
    mixture.is_dense = True
    torch.testing.assert_close(mixture(x, chosen, weights), routed, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@settings(max_examples=60)
@given(st.integers(0, 1 << 20), st.sampled_from([(8, 3, 1, 1), (16, 4, 4, 2), (12, 3, 3, 1)]))
def test_a_choice_falls_short_by_how_much_worse_it_is(
    seed: int, sizes: tuple[int, int, int, int]
) -> None:
    count, active, groups, active_groups = sizes
    router = Router(
        ExpertsSpec(
            count, active, 8, router=RouterSpec(groups=groups, active_groups=active_groups)
        ),
        4,
        1e-6,
    )
    generator = torch.Generator().manual_seed(seed)
    router.weight.data = torch.randn(4, count, generator=generator)
    x = torch.randn(5, 4, generator=generator)
    (chosen, _), (_, judged) = router(x), router.scores(x)
    assert float(router.shortfall(judged, chosen).max()) == 0
    # Within the chosen groups, exchange the worst chosen expert and the best other expert.
    inside = judged.view(5, groups, -1).where(
        torch.zeros(5, groups, dtype=torch.bool)
        .scatter(-1, chosen // (count // groups), True)
        .unsqueeze(-1),
        -torch.inf,
    )
    others = inside.flatten(-2).scatter(-1, chosen, -torch.inf)
    if bool(others.amax(-1).isinf().any()):
        return
    swapped = torch.cat([chosen[:, :-1], others.argmax(-1, keepdim=True)], -1)
    wanted = judged.gather(-1, chosen[:, -1:]) - judged.gather(-1, swapped[:, -1:])
    torch.testing.assert_close(router.shortfall(judged, swapped), wanted[:, 0])
    assert bool(
        router.shortfall(judged, torch.cat([chosen[:, :-1], chosen[:, :1]], -1)).isinf().all()
    )


def options(
    precision: str, *targets: str, preset: str | None = None, engine: bool = True
) -> BuildOptions:
    few = CalibrationOptions(samples=4, states_per_sample=2, preset=preset)
    return BuildOptions(
        targets or ("cpu",),
        precision,
        engine=EngineOptions() if targets and engine else None,
        quantise=QuantiseOptions(
            effort=Effort("default", judged=2), calibration=few, min_tokens_per_expert=16
        ),
    )


@pytest.fixture(scope="module")
def llada2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llada2") / "llada2", CONFIGS["llada2"], seed=7)


@pytest.mark.parametrize("target", slow_except(["rtx5090"], ["rtx5090", "b200", "cuda"]))
def test_a_choice_between_experts_as_good_is_no_error(target: str, tmp_path: Path) -> None:
    """If two experts have almost equal scores, rounding errors can make the graph and torch choose
    different experts.

    The canvases then differ, but the check must accept them as ties.
    """
    path = write_checkpoint(tmp_path / "checkpoint", CONFIGS["llada2"], seed=7)
    weight, bias = "model.layers.1.mlp.gate.weight", "model.layers.1.mlp.gate.expert_bias"
    tensors = read_tensors(path)
    rewritten(path, {weight: tensors[weight][:1] + 1e-7 * tensors[weight], bias: tensors[bias] * 0})
    report = build(
        path, tmp_path / "bundle", options("fp16", target, preset="llada2", engine=False)
    )
    assert report.parity is not None
    assert report.parity.misses == []
    assert {row.layer for row in report.parity.layers} == {
        MIXTURE,
        "blocks.1.mlp.router",
        "logits",
    }, "passes agreed"
    rows = report.parity.loop
    assert [row.canvases_equal for row in rows] == [row.canvases for row in rows]
    assert sum(row.canvases_tied for row in rows) > 0


def swapped_router(parameters: Any, network: Any, parameter: str, *dtype: np.dtype) -> Any:
    """Read a parameter, and exchange two experts if the parameter is a router's weight."""
    found = later(parameters, network, parameter, *dtype)
    if not parameter.endswith("router.weight"):
        return found
    whole = found[(slice(0, found.shape[0]),)].copy()
    whole[:, [2, 9]] = whole[:, [9, 2]]
    return whole


def test_a_wrong_router_is_refused(
    llada2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "later", swapped_router)
    wrong = options("fp16", "rtx5090", preset="llada2", engine=False)
    with pytest.raises(
        ParityError, match=r"blocks\.1\.mlp\.router chooses worse experts than torch"
    ):
        build(llada2, tmp_path / "bundle", wrong)


def test_a_wrong_expert_is_refused(
    llada2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test changes one code of one expert by 16, which cannot be a rounding error.

    The error must name the ONNX function that computes all experts.
    """
    read = Quantisation.expert

    def off(done: Quantisation, layer: str, expert: int) -> Any:
        weight = read(done, layer, expert)
        if layer == f"{MIXTURE}.down" and expert == 2 and not is_proving:
            weight.codes[3, 4] += 16 if weight.codes[3, 4] < 0 else -16
        return weight

    is_proving = False
    monkeypatch.setattr(Quantisation, "expert", off)
    written = writing.write_graph

    def then_prove(*given: Any) -> Any:
        nonlocal is_proving
        done = written(*given)
        is_proving = True
        return done

    monkeypatch.setattr("dlm_export.build.write_graph", then_prove)
    with pytest.raises(
        ParityError, match=r"blocks\.1\.mlp\.experts \(int8-dynamic\) gives a different result"
    ):
        build(llada2, tmp_path / "bundle", options("int8", preset="llada2"))


def test_experts_are_one_layer_that_loses_what_it_loses_alone(source: Source) -> None:
    done, seen = (
        calibrated(source, Recipe("test", (("*", "int4-g32-dynamic"),), solver="gptq")),
        states(source, 12, 8),
    )
    (found,), (exact,) = (
        sensitivity.losses(
            done.parameters, source.network, [done], seen, lambda: None, exact=is_exact
        )
        for is_exact in (False, True)
    )
    assert found.keys() == exact.keys() == source.network.units().keys()
    assert [
        row["layer"] for row in sensitivity.as_rows(exact, source.network, done.formats)
    ] == list(source.network.units())
    assert exact[MIXTURE][0] > 0
    assert 0.5 < found[MIXTURE][0] / exact[MIXTURE][0] < 2


def test_auto_holds_all_stacks_of_a_mixture_in_one_format(source: Source) -> None:
    seen, formats = states(source, 8, 8), ("int8-dynamic", "int4-g32-dynamic")
    tokens = np.random.default_rng(3).integers(0, 140, (6, LENGTH))
    samples = [Sample(each, LENGTH // 2, None, None) for each in tokens]
    found = search.search(
        source, seen, samples, formats, source.presets["llada2"], 0.5, 0, lambda: None
    )
    held = dict(found.recipe.layers)
    assert len({held[f"{MIXTURE}.{role}"] for role in ("gate", "up", "down")}) == 1
    sizes = [point.weight_bytes for point in found.curve]
    # The largest and the smallest size differ by more than 3 bytes per weight of all experts.
    assert max(sizes) - min(sizes) > 3 * 16 * 3 * 64 * 64


PRESETS = {"llada2": "llada2", "sdar": "sdar", "sdar-moe": "sdar", "llada-moe": None}
HELD = {
    "int8": ("int8-dynamic", "int8-dynamic"),
    "int4": ("int4-g32-dynamic", "int4-g32-dynamic"),
    "fp8": ("fp8", "fp8"),
    "nvfp4": ("nvfp4", "fp8"),
}
"""For each precision: the formats that a bundle for a CPU uses for experts and for attention."""


def built(tmp_path: Path, family: str, precision: str, *targets: str) -> BuildReport:
    path = write_checkpoint(tmp_path / "checkpoint", CONFIGS[family], seed=7)
    report = build(path, tmp_path / "bundle", options(precision, *targets, preset=PRESETS[family]))
    assert report.parity is not None
    assert report.parity.misses == []
    assert report.judgement is not None
    return report


@pytest.mark.parametrize(
    ("family", "precision"),
    [
        ("llada-moe", "nvfp4"),
        pytest.param("llada-moe", "int4", marks=pytest.mark.slow),
        pytest.param("llada2", "int8", marks=pytest.mark.slow),
        pytest.param("llada2", "fp8", marks=pytest.mark.slow),
    ],
)
def test_a_bundle_for_cpus_is_built_and_judged(tmp_path: Path, family: str, precision: str) -> None:
    report = built(tmp_path, family, precision)
    manifest = json.loads((report.output / "manifest.json").read_text())
    layers, (of_experts, of_attention) = manifest["precision"]["layers"], HELD[precision]
    held = {
        layer: layers[layer]
        for layer in (f"{MIXTURE}.gate", f"{MIXTURE}.up", f"{MIXTURE}.down", "blocks.1.attention.q")
    }
    assert list(held.values()) == [of_experts] * 3 + [of_attention]
    recorded = json.loads((report.output / "accuracy.json").read_text()).get("calibration") or {}
    assert [row["layer"] for row in recorded.get("experts", [])][-1:] == [MIXTURE] * (
        precision != "int8"
    )
    is_shown = (
        f'<th scope="row"><code>{MIXTURE}</code></th><td>'
        in (report.output / "report.html").read_text()
    )
    assert is_shown == (precision != "int8")


MATRIX = [
    (family, precision)
    for family in ("sdar", "llada2", "llada-moe")
    for precision in ("int8", "int4", "fp8", "nvfp4")
]
QUICK = ("llada2", "nvfp4")


@pytest.mark.parametrize(
    ("family", "precision"),
    slow_except([QUICK], MATRIX),
)
def test_engines_are_built_judged_and_audited(tmp_path: Path, family: str, precision: str) -> None:
    pytest.importorskip("tensorrt_rtx_bindings")
    targets = ("rtx5090",) if precision == "nvfp4" else ("rtx4090", "rtx5090")
    report = built(tmp_path, family, precision, *targets)
    assert [engine.target for engine in report.engines] == list(targets)
    for engine in report.engines:
        assert engine.audit["fallbacks"] == {}
        layers = engine.audit["layers"]
        stacks = ["gate", "up", "down"]
        if family == "sdar":
            held = {layers[f"blocks.1.mlp.{role}"] for role in stacks}
        else:
            held = {layers[f"{MIXTURE}.{role}"] for role in stacks}
            assert layers["blocks.1.mlp.router"] == "float32"
        assert held == {{"int8": "int8-weight", "int4": "int4-g64"}.get(precision, precision)}
        attention = "fp8" if precision == "nvfp4" and family != "sdar" else next(iter(held))
        assert layers["blocks.1.attention.q"] == attention


@pytest.mark.parametrize(("precision", "held"), [("fp16", "float16"), ("nvfp4", "nvfp4")])
def test_a_pass_of_many_experts_fits_into_the_builders_workspace(
    precision: str, held: str, tmp_path: Path
) -> None:
    """With 1 GiB, or without room for the codes of NVFP4, TensorRT-RTX fails with "OutOfMemory"."""
    pytest.importorskip("tensorrt_rtx_bindings")
    config = llada_moe_config(
        num_experts=128,
        expert_intermediate_size=384,
        num_hidden_layers=1,
        moe_layer_freq=[1],
        max_position_embeddings=4096,
    )
    path = write_checkpoint(tmp_path / "checkpoint", config)
    without_checks = BuildOptions(
        ("rtx5090",), precision, engine=EngineOptions(), check_parity=False, quantise=SMALL
    )
    report = build(path, tmp_path / "bundle", without_checks)
    (engine,) = report.engines
    assert engine.audit["layers"]["blocks.0.mlp.experts.down"] == held
    assert engine.audit["layers"].keys() >= {"blocks.0.mlp.router", "blocks.0.mlp.experts.gate"}


def test_a_full_precision_bundle_gives_its_experts_back(llada2: Path, tmp_path: Path) -> None:
    """A bundle stores the experts' weights as panels. Reading the bundle must give the original
    matrices, so that it can be quantised.
    """
    bundle = build(llada2, tmp_path / "bundle", BuildOptions(check_parity=False)).output
    ours, theirs = open_source(bundle), open_source(llada2)
    for role in ("gate", "down"):
        name = f"{MIXTURE}.{role}.weight"
        for at in (
            (),
            (slice(3, 5),),
            (slice(0, 16), slice(8, 24)),
            (slice(2, 3), slice(0, 64), slice(5, 9)),
        ):
            found, wanted = (
                each.parameters.read(name, np.dtype("f4"), at) for each in (ours, theirs)
            )
            np.testing.assert_array_equal(found, wanted)
