"""Tests of ``dlm-export plan``, which predicts speed and memory on target devices."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import a2d_qwen3_config, write_checkpoint
from click.testing import CliRunner, Result
from denoisers import ArithmeticDenoiser
from engine_bundles import SMALL as FEW
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from networks import make_network

import dlm_runtime
from dlm_export.build import build
from dlm_export.building import request
from dlm_export.building.options import BuildOptions
from dlm_export.bundle.manifest import network_of
from dlm_export.cli import main
from dlm_export.network.pass_plan import FULL_CACHES
from dlm_export.network.spec import MlpSpec
from dlm_export.planning import plan
from dlm_export.planning import predict as predicting
from dlm_export.planning.bench import PassSize
from dlm_export.planning.measured import (
    MeasuredError,
    MeasuredPass,
    interpolated_ratio,
    read_measured,
)
from dlm_export.planning.plan import make_plan
from dlm_export.planning.predict import (
    Request,
    costs_of,
    default_policy,
    memory_bytes,
    predict,
)
from dlm_export.planning.predicted_passes import Loop, PlannedPass, list_passes
from dlm_export.planning.roofline import Costs, Machine, limit_s
from dlm_export.planning.shapes import (
    Precision,
    Shape,
    precisions_of,
    read_shape,
    scaled_shape,
)
from dlm_export.sources import open_source
from dlm_export.targets import TARGETS, Target
from dlm_export.tensorrt.estimate import Limits, estimate
from dlm_runtime import Bundle, CallbackPass, PassCost, Policy, RequestError

H100, CPU = TARGETS["h100"], TARGETS["cpu"]
LLADA_8B = scaled_shape("8B")
TINY = Shape("tiny", make_network(), 256, {})


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def prediction(
    shape: Shape = LLADA_8B,
    target: Target = H100,
    precision: str = "fp16",
    request: Request | None = None,
    block: int = 32,
) -> predicting.Prediction:
    (found,), _ = precisions_of(shape, target, [precision])
    policy = replace(default_policy(shape.network), block_length=block)
    return predict(shape, target, found, request or Request(), policy)


def measurement(**changes: Any) -> dict[str, Any]:
    """Made-up output of ``bench --json`` for a bundle with the sizes of TINY.

    It only contains the fields that ``plan`` reads.
    """
    rates = {
        "read_bytes_per_s": 1e9,
        "int8_macs_per_s": 4e9,
        "int8_macs_per_s_32_rows": 2e9,
        "fp32_macs_per_s": 1e9,
    }
    machine = Machine(**rates)
    (precision,), _ = precisions_of(TINY, CPU, ["int8"])
    passes = []
    for tokens, cached, rows, ratio in ((8, 24, 8, 3.0), (32, 0, 8, 2.0), (32, 0, 32, 1.5)):
        work = predicting._work(TINY, precision, PassSize(tokens, cached, rows), 1)
        limit_ms = 1e3 * limit_s(work, machine.rates())
        made = {"tokens": tokens, "cached": cached, "rows": rows}
        passes.append(
            made
            | {"ms": ratio * limit_ms, "limit_ms": limit_ms, "ratio": ratio, "quartiles_ms": [0, 0]}
        )
    generation = {
        "preset": "fast-dllm",
        "changes": {},
        "prompt_tokens": 16,
        "new_tokens": 16,
        "nfe": 16,
        "tokens_per_s": 1000.0,
    }
    return {
        "machine": {"memory_bytes": 1 << 30},
        "bundle": {"precision": "int8", "parameters": TINY.network.parameter_count()},
        "roofline": rates,
        "passes": passes,
        "generation": generation,
    } | changes


@pytest.fixture
def measured_file(tmp_path: Path) -> Path:
    path = tmp_path / "measured.json"
    path.write_text(json.dumps(measurement()))
    return path


# ---- By hand ----


def test_an_example_worked_out_by_hand() -> None:
    """The network has one layer of width 32, with 4 * 32 * 32 + 3 * 32 * 64 = 10240 weights.

    The output head has 3200 weights, and the norms have 96. A weight takes 2 bytes.
    """
    # The target computes 2e7 multiply-adds per second.
    target = replace(H100, bandwidth_bytes_per_s=1e6, rates={"fp16": 4e7})
    request = Request(prompt_tokens=8, new_tokens=4, tokens_per_pass=(2,), prices={"h100": 3.6})
    got = prediction(TINY, target, request=request, block=4)
    weights = 2 * (10240 + 3200 + 96)
    token_bytes = 2 * 32 + 2 * 2 * 32  # bytes of an embedding row, a key and a value
    full_bytes = 1e3 * (weights + 12 * token_bytes) / 1e6
    block_bytes = 1e3 * (weights + 4 * token_bytes + 8 * 128) / 1e6
    full_macs = 1e3 * (12 * 10240 + 2 * 32 * 12 * 12 + 4 * 3200) / 2e7
    block_macs = 1e3 * (4 * 10240 + 2 * 32 * 4 * 12 + 4 * 3200) / 2e7
    assert got.full_pass.bytes_ms == pytest.approx(full_bytes)
    assert got.full_pass.arithmetic_ms == pytest.approx(full_macs)
    assert (got.full_pass.ms, got.full_pass.bound) == (pytest.approx(full_bytes), "bytes")
    assert got.block_pass.bytes_ms == pytest.approx(block_bytes)
    assert got.block_pass.arithmetic_ms == pytest.approx(block_macs)
    (speed,) = got.speeds
    assert speed.nfe == 2
    # In every pass, reading bytes takes longer than arithmetic, so only the bytes matter.
    assert speed.ms_per_token == pytest.approx((full_bytes + block_bytes) / 4)
    assert speed.tokens_per_s == pytest.approx(1e3 / speed.ms_per_token)
    assert speed.cost_per_million_tokens == pytest.approx(3.6 * 1e6 / speed.tokens_per_s / 3600)
    two = prediction(TINY, target, request=replace(request, batch=2), block=4)
    assert two.full_pass.bytes_ms == pytest.approx(1e3 * (weights + 2 * 12 * token_bytes) / 1e6)
    assert two.full_pass.arithmetic_ms == pytest.approx(2 * full_macs)
    (both,) = two.speeds
    total_ms = (two.full_pass.ms or 0) + (two.block_pass.ms or 0)
    assert both.ms_per_token == pytest.approx(total_ms / (2 * 4))


def test_eight_billion_is_llada_8b_to_the_parameter() -> None:
    """``plan --sizes 8B`` uses the sizes of LLaDA-8B, which has 8,015,581,184 parameters."""
    network = LLADA_8B.network
    attention, mlp = network.layers[0].attention, network.layers[0].mlp
    assert isinstance(mlp, MlpSpec)
    assert (len(network.layers), network.hidden_size, attention.heads, mlp.size) == (
        32,
        4096,
        32,
        12288,
    )
    assert network.parameter_count() == 8_015_581_184
    (fp16,), _ = precisions_of(LLADA_8B, H100, ["fp16"])
    assert _weights_bytes(LLADA_8B, fp16) == 2 * network.parameter_count()


@given(billions=st.floats(1, 500))
def test_a_scaled_shape_is_as_near_to_its_size_as_one_layer_allows(billions: float) -> None:
    got = scaled_shape(f"{billions}B").network
    attention = got.layers[0].attention
    assert abs(got.parameter_count() / (billions * 1e9) - 1) < 0.12
    assert got.hidden_size == attention.heads * attention.head_size


# ---- The loop ----


@st.composite
def loops(draw: st.DrawFn) -> Loop:
    """Return a strategy for loops: a policy, and properties of a network that supports the policy.

    The policies vary in all fields that affect the number or the sizes of passes.
    """
    visible_block, shift = draw(st.sampled_from((None, None, 1, 3, 4))), draw(st.integers(0, 1))
    block = draw(st.integers(1, 20))
    edit = "none" if shift else draw(st.sampled_from(("none", "edit")))
    if visible_block is None:
        cache = draw(st.sampled_from(("none", "prefix", "dual")))
        refresh = draw(st.sampled_from((0, 1, 5, 30))) if cache != "none" else 0
        return Loop(
            Policy(cache=cache, block_length=block, refresh=refresh, remask=edit), None, shift
        )
    cache = draw(st.sampled_from(("none", "block", "block-dual")))
    block = visible_block if cache == "block-dual" else visible_block * min(block, 5)
    policy = Policy(
        cache=cache,
        block_length=block,
        sub_block_length=draw(
            st.sampled_from([0, *(each for each in range(1, block + 1) if block % each == 0)])
        ),
        store="pass"
        if shift or cache != "block"
        else draw(st.sampled_from(("pass", "open", "reuse"))),
        remask="none" if cache == "block-dual" else edit,
    )
    return Loop(policy, visible_block, shift)


@settings(max_examples=60)
@given(loop=loops(), prompt=st.integers(0, 40), new=st.integers(1, 60), per_pass=st.integers(1, 5))
def test_the_passes_are_those_that_the_native_loop_makes(
    loop: Loop, prompt: int, new: int, per_pass: int
) -> None:
    made: list[PassSize] = []

    class Recording(ArithmeticDenoiser):
        def _run(self, p: CallbackPass) -> None:
            cached = p.past[0][0].shape[1] if p.past else 0
            made.append(PassSize(len(p.input_ids), cached, len(p.score_rows)))
            super()._run(p)

        def predict(self, position: int, token: int, masked: int) -> tuple[int, float]:
            return super().predict(position, token, masked)[
                0
            ], 0.5  # equal scores, so only the number of commits matters

    bundle = Recording(shift=loop.shift, visible_block=loop.visible_block).bundle
    # The fake denoiser gives each row an entropy of 0.5. The rule "entropy_bound" commits a row if
    # the entropies of the rows before it add up to at most the bound, so each pass commits
    # ``per_pass`` rows. No probability reaches the threshold for edits, so no token is edited.
    changes = {"commit": "entropy_bound", "entropy_bound": 0.5 * (per_pass - 1), "stop": "none"}
    if loop.shift and loop.policy.cache in FULL_CACHES:
        # With shift 1 and a cache of FULL_CACHES, the first pass of a block must commit the first
        # position, and counts its entropy as 0. The number of committed rows is then not
        # ``per_pass``, so the test uses a rule that commits one row per pass.
        changes, per_pass = {"commit": "static", "stop": "none"}, 1
    policy = loop.policy.with_fields(changes)
    bundle.generate(tokens=[1] * prompt, max_new_tokens=new, **policy.as_dict())
    assert made == [each.size for each in list_passes(prompt, new, per_pass, loop)]


PROMPT = np.random.default_rng(8).integers(2, 150, 200).tolist()
COST = PassCost(pass_ms=1.0, token_ms=1e3, row_ms=1e6, pair_ms=1e-5)


@pytest.fixture(scope="module")
def block_causal(several_bundle: Path) -> Iterator[Bundle]:
    with dlm_runtime.open(several_bundle, threads=1) as opened:
        yield opened


def cost_of_all(passes: Sequence[PlannedPass], canvases: int) -> float:
    sizes = [each.size for each in passes]
    of_canvas = (
        COST.token_ms * sum(size.tokens for size in sizes)
        + COST.row_ms * sum(each.size.rows for each in passes if each.commits)
        + COST.pair_ms * sum(size.tokens * (size.tokens + size.cached) for size in sizes)
    )
    return COST.pass_ms * len(sizes) + canvases * of_canvas


@settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow])
@given(
    prompt=st.integers(0, len(PROMPT)),
    new=st.integers(1, 40),
    common=st.integers(0, len(PROMPT)),
    max_tokens=st.integers(1, 250),
    blocks=st.integers(1, 3),
    store=st.sampled_from(("pass", "open", "reuse")),
    is_quick=st.booleans(),
    cfg_scale=st.sampled_from((0.0, 0.0, 1.5)),
)
def test_a_scheduler_reuses_and_splits_prompts_as_planned(
    block_causal: Bundle,
    prompt: int,
    new: int,
    common: int,
    max_tokens: int,
    blocks: int,
    store: str,
    is_quick: bool,
    cfg_scale: float,
) -> None:
    """``scheduler.stats`` contains the sum of the predicted costs of all passes.

    The test chooses the cost function so that the sum shows the sizes of the passes.
    """
    common = min(common, prompt)
    policy = Policy(
        cache="block",
        block_length=16 * blocks,
        store=store,
        stop="none",
        commit="threshold" if is_quick else "static",
        threshold=0.0,
        cfg_scale=cfg_scale,
    )
    asked = {"max_new_tokens": new, **policy.as_dict()}
    with block_causal.scheduler(max_tokens=max_tokens, cost=COST) as scheduler:
        # Run a request first that shares only the first ``common`` tokens with the tested request.
        scheduler.submit(tokens=PROMPT[:common] + [151] * 33, **asked).result(60)
        before = scheduler.stats
        made = scheduler.submit(tokens=PROMPT[:prompt], **asked).result(60)
        after = scheduler.stats
    request = Request(
        prompt_tokens=prompt, new_tokens=new, reused_tokens=common, max_tokens=max_tokens
    )
    loop = predicting.loop_for(policy, network_of(block_causal.manifest), request)
    planned = list_passes(prompt, new, 1000 if is_quick else 1, loop)
    assert made.cached_tokens == loop.reused
    assert made.nfe == after.passes - before.passes == len(planned)
    expected_ms = 1e3 * (after.expected_s - before.expected_s)
    assert expected_ms == pytest.approx(cost_of_all(planned, loop.canvases), rel=1e-9)


def planned_cache(bundle: Path, request: Request) -> plan.Cache:
    shape = read_shape(bundle, lambda path: pytest.fail("this is a bundle"))
    (found,) = make_plan([shape], [CPU], request, ["fp32"]).caches.values()
    return found


def test_a_scheduler_takes_a_request_with_the_planned_memory_and_not_with_less(
    several_bundle: Path, block_causal: Bundle, demo_bundle: Path
) -> None:
    for path in (several_bundle, demo_bundle):
        cache = planned_cache(path, Request(prompt_tokens=50, new_tokens=21))
        assert (cache.page_tokens, cache.tokens) == (16, 80)
        size = cache.bytes_by_type["fp32"]
        changes = {"tokens": PROMPT[:50], "max_new_tokens": 21, "steps_per_block": 1}
        with dlm_runtime.open(path, threads=1) as bundle:
            with bundle.scheduler(cache_bytes=size) as scheduler:
                assert scheduler.submit(**changes).result(60).nfe > 0
            with (
                bundle.scheduler(cache_bytes=size - 1) as scheduler,
                pytest.raises(RequestError, match="cache_bytes"),
            ):
                scheduler.submit(**changes)


@pytest.mark.parametrize("missing_bytes", [0, 1])
def test_requests_that_share_a_prompt_run_together_in_the_planned_memory(
    several_bundle: Path, block_causal: Bundle, missing_bytes: int
) -> None:
    request = Request(prompt_tokens=150, new_tokens=64, batch=2, reused_tokens=150)
    cache = planned_cache(several_bundle, request)
    assert (cache.reused_tokens, cache.tokens) == (144, 144 + 2 * 80)
    asked = {"tokens": PROMPT[:150], "max_new_tokens": 64, "preset": "sdar", "stop": "none"}
    size = cache.bytes_by_type["fp32"] - missing_bytes
    with block_causal.scheduler(cache_bytes=size) as scheduler:
        scheduler.submit(**asked).result(60)
        before = scheduler.stats
        # Each pass commits only one token, so the first request still runs when the second starts.
        slow = asked | {"commit": "static"}
        made = [job.result(60) for job in [scheduler.submit(**slow) for _ in range(2)]]
        after = scheduler.stats
    assert [each.cached_tokens for each in made] == [144, 144]
    has_shared = after.shares - before.shares > after.passes - before.passes
    assert has_shared == (missing_bytes == 0)


# ---- Memory ----


def _weights_bytes(shape: Shape, precision: Precision) -> int:
    return Costs(shape.network, dict(precision.layers), precision.element_bytes).weight_bytes


def test_memory_on_a_gpu_is_what_building_an_engine_estimates() -> None:
    (precision,), _ = precisions_of(LLADA_8B, H100, ["int4"])
    estimated = estimate(LLADA_8B.network, _weights_bytes(LLADA_8B, precision), Limits(300, 32))
    assert memory_bytes(LLADA_8B, precision, H100, 300, 32, 1) == estimated.device
    four = memory_bytes(LLADA_8B, precision, H100, 300, 32, 4)
    assert four == estimated.device + 3 * (estimated.cache + estimated.passes)


@pytest.mark.parametrize("precision", ["fp16", "int8", "fp8"])
def test_a_build_counts_weights_as_a_plan_does(
    llada_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    counted = []
    monkeypatch.setattr(
        request.estimate,
        "check_memory",
        lambda network, target, size, *_, **__: counted.append(size),
    )
    source = open_source(llada_checkpoint)
    request.check_job(
        request.check_request(BuildOptions(("h100",), precision, check_parity=False)), source
    )
    ((planned,), _) = precisions_of(Shape("a", source.network, None, {}), H100, [precision])
    assert counted == [_weights_bytes(Shape("a", source.network, None, {}), planned)]


def test_a_tied_head_is_quantised_on_cpus_and_not_on_gpus(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text('[layers]\nhead = "int8-weight"\n')
    tied = replace(TINY, network=replace(TINY.network, tied_head=True))
    for shape, target in ((TINY, H100), (TINY, CPU)):
        (found,), _ = precisions_of(shape, target, [str(recipe)])
        assert found.layers == (("head", "int8-weight"),)
    (found,), _ = precisions_of(tied, CPU, [str(recipe)])
    # The embedding and the output head share one table. The embedding reads single rows of the
    # table, which int8-dynamic supports.
    assert found.layers == (("head", "int8-dynamic"),)
    (found,), _ = precisions_of(tied, H100, [str(recipe)])
    assert found.layers == ()


@pytest.mark.parametrize(
    ("dtype", "precisions"),
    [
        (torch.bfloat16, ("fp32", "int8", "int4-g128")),
        pytest.param(torch.float32, ("fp16",), marks=pytest.mark.slow),
    ],
)
def test_a_tied_table_counts_once_in_the_format_that_it_has(
    tmp_path: Path, dtype: torch.dtype, precisions: tuple[str, ...]
) -> None:
    """``plan`` must predict the size of the weight file that a build of the checkpoint writes."""
    config = a2d_qwen3_config(
        vocab_size=8192, hidden_size=128, intermediate_size=384, max_position_embeddings=128
    )
    source = write_checkpoint(tmp_path / "source", config, dtype=dtype)
    result = invoke("plan", source, "--targets", "cpu", "--json", "--new-tokens", 32,
                    "--prompt-tokens", 32, "--precisions", ",".join(precisions))  # fmt: skip
    assert result.exit_code == 0, result.output
    planned = {}
    for each in json.loads(result.stdout)["predictions"]:
        planned |= dict.fromkeys((each["precision"], *each["same_as"]), each["file_bytes"])
    for precision in precisions:
        bundle = tmp_path / precision
        build(source, bundle, BuildOptions(precision=precision, check_parity=False, quantise=FEW))
        written = (bundle / "denoiser.onnx.data").stat().st_size
        # The file has about 40 tensors. Padding adds up to 4096 bytes to each of them.
        assert 0 <= written - planned[precision] < 50 * 4096, precision
        shape = read_shape(bundle, lambda path: pytest.fail("this is a bundle"))
        found, _ = precisions_of(shape, CPU)
        own = next(each for each in found if precision in (each.name, *each.same_as))
        assert costs_of(shape, own).weight_bytes <= planned[precision]
        told = invoke("plan", bundle, "--targets", "cpu", "--json", "--new-tokens", 32,
                      "--prompt-tokens", 32, "--precisions", precision)  # fmt: skip
        (again,) = json.loads(told.stdout)["predictions"]
        assert again["file_bytes"] == planned[precision]


# ---- What is unknown ----


def test_a_missing_rate_is_named_and_leaves_the_bytes() -> None:
    gb10 = TARGETS["gb10"]
    # This test needs a target without an fp16 rate. NVIDIA has not published the rate of gb10.
    assert "fp16" not in gb10.rates
    got = prediction(target=gb10, precision="nvfp4")
    assert got.missing == ("fp16 rate",)
    assert (got.speeds, got.full_pass.ms, got.full_pass.bound) == ((), None, None)
    assert got.full_pass.bytes_ms is not None
    assert got.fits is True


def test_the_cpu_is_unknown_until_it_is_measured() -> None:
    got = prediction(target=CPU, precision="int8")
    assert got.missing == ("this machine's bandwidth and rates: pass --measured",)
    assert got.speeds == ()


def test_what_does_not_fit_keeps_its_figure_and_gets_no_speed() -> None:
    got = prediction(scaled_shape("100B"), H100)
    assert (got.fits, got.speeds) == (False, ())
    assert got.memory_bytes > 2e11
    shown = invoke("plan", "--sizes", "100B", "--targets", "h100", "--precisions", "fp16")
    row = next(line for line in shown.stdout.splitlines() if line.startswith("fp16"))
    assert f"{got.memory_bytes / 1e9:.2f} !" in row
    assert "more than the memory of h100" in shown.stdout


def test_a_precision_that_a_target_does_not_run_is_left_out_with_the_reason() -> None:
    made = make_plan([LLADA_8B], [H100, TARGETS["b200"]], Request(), ["nvfp4"])
    assert [each.target for each in made.predictions] == ["b200"]
    assert "NVFP4 needs SM 10.0" in made.left_out["h100"]["nvfp4"]
    assert (
        make_plan([LLADA_8B], [CPU], Request()).left_out["cpu"]["nvfp4"]
        == "a CPU simulates it, at the speed of fp32"
    )


def test_every_precision_that_a_target_runs_is_there_once() -> None:
    for target in TARGETS.values():
        found, left_out = precisions_of(LLADA_8B, target)
        names = [name for each in found for name in (each.name, *each.same_as)] + list(left_out)
        assert sorted(names) == sorted(set(target.precisions) - {"auto", "stored"})


# ---- Calibration ----


def test_the_calibration_gives_the_measured_passes_back(measured_file: Path) -> None:
    measured = read_measured(measured_file)
    (precision,), _ = precisions_of(TINY, CPU, ["int8"])
    request = Request(prompt_tokens=24, new_tokens=8)
    policy = Policy(cache="dual", block_length=8)
    got = predict(TINY, CPU, precision, request, policy, measured)
    assert got.is_calibrated
    told = {
        (each["tokens"], each["cached"], each["rows"]): each["ms"]
        for each in measurement()["passes"]
    }
    assert got.full_pass.ms == pytest.approx(told[32, 0, 8])
    assert got.block_pass.ms == pytest.approx(told[8, 24, 8])
    assert (got.full_pass.ratio, got.block_pass.ratio) == (pytest.approx(2), pytest.approx(3))
    (other,), _ = precisions_of(TINY, CPU, ["fp32"])
    plain = predict(TINY, CPU, other, request, policy, measured)
    assert (plain.is_calibrated, plain.full_pass.ratio) == (False, 1)
    assert predict(TINY, H100, precision, request, policy, measured).full_pass.ratio == 1


@given(tokens=st.integers(1, 5000), cached=st.integers(0, 5000), rows=st.integers(0, 5000))
def test_an_interpolated_ratio_stays_within_what_was_measured(
    tokens: int, cached: int, rows: int
) -> None:
    known = [
        MeasuredPass(PassSize(8, 24, 8), 3, 1),
        MeasuredPass(PassSize(32, 0, 8), 2, 1),
        MeasuredPass(PassSize(32, 0, 32), 1.5, 1),
    ]
    assert (
        1.5 * (1 - 1e-9)
        <= interpolated_ratio(known, PassSize(tokens, cached, rows))
        <= 3 * (1 + 1e-9)
    )


def test_the_error_of_the_calibration_is_that_of_passes_left_out(tmp_path: Path) -> None:
    path = tmp_path / "measured.json"
    two = measurement()
    # The measured times of the two passes are 3 and 2 times the computed times. Each time is
    # predicted from the ratio of the other pass, and compared with the measurement.
    two["passes"] = two["passes"][:2]
    path.write_text(json.dumps(two))
    assert read_measured(path).leave_one_out() == pytest.approx([2 / 3 - 1, 3 / 2 - 1])
    path.write_text(json.dumps(two | {"passes": two["passes"][:1]}))
    assert read_measured(path).leave_one_out() == []
    told = invoke("plan", "--sizes", "1B", "--targets", "cpu", "--measured", path)
    assert "Only one pass was measured, so the error is unknown" in told.stdout


def test_the_measured_generation_is_predicted_for_the_same_denoiser(measured_file: Path) -> None:
    """The measured generation has 16 passes over a canvas of 16 tokens.

    Each block of 8 tokens takes one pass over the whole canvas and seven passes over the block.
    """
    measured = read_measured(measured_file)
    same = replace(TINY, presets={"fast-dllm": {"cache": "dual", "block_length": 8}})
    request = Request(prompt_tokens=16, new_tokens=16, tokens_per_pass=(1,), block_lengths=(8,))
    made = make_plan([same], [CPU], request, ["int8"], measured)
    assert made.calibration is not None
    found = made.calibration["generation"]
    ((speed,),) = (each.speeds for each in made.predictions)
    assert found["predicted_tokens_per_s"] == pytest.approx(speed.tokens_per_s)
    assert found["error"] == pytest.approx(speed.tokens_per_s / 1000 - 1)
    other = replace(same, network=replace(same.network, tied_head=not same.network.tied_head))
    changed = replace(measured, generation=replace(measured.generation, changes={"cache": "none"}))
    for shape, known in ((other, measured), (same, changed)):
        elsewhere = make_plan([shape], [CPU], request, ["int8"], known).calibration
        assert elsewhere is not None
        assert elsewhere["generation"] is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"roofline": None}, "roofline.read_bytes_per_s"),
        ({"passes": []}, "contains no pass"),
        (
            {"passes": [{"tokens": 0, "cached": 0, "rows": 0, "ms": 1, "limit_ms": 1}]},
            "has no tokens",
        ),
        (
            {"passes": [{"tokens": 8, "cached": 0, "rows": 8, "ms": 1, "limit_ms": None}]},
            "passes.0.limit_ms",
        ),
        ({"passes": 3}, "passes is missing or"),
        ({"bundle": "somewhere"}, "bundle.precision"),
        ({"machine": {"memory_bytes": True}}, "machine.memory_bytes"),
    ],
)
def test_a_damaged_measurement_is_refused_by_name(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    path = tmp_path / "measured.json"
    path.write_text(json.dumps(measurement(**change)))
    with pytest.raises(MeasuredError, match=said):
        read_measured(path)


@settings(max_examples=20)
@given(
    value=st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(max_size=3), st.lists, max_leaves=5
    )
)
def test_no_measurement_crashes(tmp_path_factory: pytest.TempPathFactory, value: Any) -> None:
    path = tmp_path_factory.mktemp("measured") / "measured.json"
    for key in measurement():
        path.write_text(json.dumps(measurement(**{key: value})))
        with pytest.raises(MeasuredError):
            read_measured(path)


# ---- The command ----


def test_json_has_every_combination_and_no_number_that_is_none(measured_file: Path) -> None:
    sizes = ("--sizes", "1B,8B", "--targets", "h100,cpu")
    options = (*sizes, "--block-length", "16,32", "--tokens-per-pass", "1,2.5")
    result = invoke(
        "plan", *options, "--price-per-hour", "h100=2", "--measured", measured_file, "--json"
    )
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout, parse_constant=lambda text: pytest.fail(text))
    combinations = Counter(
        (each["denoiser"], each["target"], each["block_length"]) for each in told["predictions"]
    )
    assert combinations == {
        (size, target.name, block): len(precisions_of(scaled_shape(size), target)[0])
        for size in ("1B", "8B")
        for target in (H100, CPU)
        for block in (16, 32)
    }
    for each in told["predictions"]:
        assert [speed["tokens_per_pass"] for speed in each["speeds"]] == (
            [1, 2.5] if each["fits"] else []
        )
        costs = [speed["cost_per_million_tokens"] for speed in each["speeds"]]
        assert all((cost is None) == (each["target"] == "cpu") for cost in costs)
        assert each["full_pass"]["tokens"] == 256
    assert [each["axis"] for each in told["growth"]] == ["canvas", "batch", "size"]


def test_a_quantised_bundles_own_formats_are_planned() -> None:
    layers = {"blocks.0.mlp.down": "int8-static", "blocks.0.mlp.up": "high"}
    shape = replace(TINY, precision="mine", layers=layers)
    found, _ = precisions_of(shape, H100)
    assert found[0].name == "mine"
    assert found[0].layers == (("blocks.0.mlp.down", "int8-static"),)
    _, left_out = precisions_of(replace(shape, layers={"blocks.0.mlp.down": "int8-dynamic"}), H100)
    assert left_out["mine, as the bundle has it"] == "h100 does not run int8-dynamic"


def test_a_checkpoint_is_planned_by_its_configuration(
    dream_checkpoint: Path, dream_bundle: Path
) -> None:
    options = ("--targets", "l4", "--precisions", "int8", "--new-tokens", 16, "--json")
    ours, theirs = (
        json.loads(invoke("plan", path, *options).stdout)
        for path in (dream_checkpoint, dream_bundle)
    )
    for told in (ours, theirs):
        for each in told["predictions"]:
            del each["denoiser"]
    assert ours["predictions"] == theirs["predictions"]


def test_the_plot_is_written_and_kept_without_force(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra [report] is not installed")
    path = tmp_path / "growth.svg"
    targets = ("--targets", "h100,gb10,thor", "--precisions", "int8")
    options = ("plan", "--sizes", "1B", *targets, "--plot", path)
    result = invoke(*options)
    assert result.exit_code == 0, result.output
    assert str(path) in result.stderr
    content = path.read_bytes()
    assert content.startswith(b"<?xml")
    for word in (b"thor", b"h100", b"canvas", b"batch", b"size", b"Milliseconds a token"):
        assert word in content
    assert b"gb10" not in content  # gb10 has no prediction
    assert list(tmp_path.iterdir()) == [path]
    path.write_bytes(b"mine")
    assert invoke(*options).exit_code == 2
    assert path.read_bytes() == b"mine"
    assert invoke(*options, "--force", "--price-per-hour", "2").exit_code == 0
    assert b"Cost of a million tokens" in path.read_bytes()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--targets", "h100"), "or --sizes"),
        (("--sizes", "8B"), "--targets"),
        (("--sizes", "8B", "--targets", "h1000"), "unknown target"),
        (("--sizes", "big", "--targets", "h100"), "write parameters as"),
        (("--sizes", "nanB", "--targets", "h100"), "write parameters as"),
        (("--sizes", "8B", "--targets", "h100", "--precisions", "nvfp4"), "h100 does not run"),
        (("--sizes", "8B", "--targets", "cpu", "--precisions", "nvfp4"), "a CPU simulates it"),
        (("--sizes", "8B", "--targets", "h100", "--precisions", "int9"), "int9"),
        (("--sizes", "8B", "--targets", "h100", "--block-length", "8.5"), "--block-length"),
        (("--sizes", "8B", "--targets", "h100", "--tokens-per-pass", "0.5"), "--tokens-per-pass"),
        (("--sizes", "8B", "--targets", "h100", "--price-per-hour", "cheap"), "--price-per-hour"),
        (("--sizes", "8B", "--targets", "h100", "--price-per-hour", "l4=1"), "--price-per-hour"),
        (("--sizes", "8B", "--targets", "h100", "--price-per-hour", "-1"), "--price-per-hour"),
        (
            ("--sizes", "8B", "--targets", "gb10", "--plot", "no-such-folder/growth.png"),
            "nothing to draw",
        ),
        (("--sizes", "8B", "--targets", "h100", "--plot", "growth.gif"), ".png or .svg"),
        (("--sizes", "8B", "--targets", "h100", "--max-canvas-length", "8"), "is for checkpoints"),
        (("--sizes", "8B", "--targets", "h100", "--measured", "nowhere.json"), "does not exist"),
        (("--sizes", "8B", "--targets", "cpu", "--reused", "64"), "its attention is full"),
        (("--sizes", "8B", "--targets", "cpu", "--max-tokens", "64"), "its attention is full"),
        (("--sizes", "8B", "--targets", "cpu", "--preset", "sdar"), "preset 'sdar' is not one of"),
        (("--sizes", "8B", "--targets", "cpu", "--set", "cache=large"), "cache"),
    ],
)
def test_wrong_usage_exits_2_and_says_what(arguments: tuple[str, ...], said: str) -> None:
    result = invoke("plan", *arguments)
    assert result.exit_code == 2, result.output
    assert said in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--reused", 129), "--reused 129 is more than the 128 tokens of the prompt"),
        (("--reused", 15), "only whole pages of 16 tokens"),
        (("--reused", 16, "--prompt-tokens", 20, "--block-length", 32), "reuses nothing"),
        (("--reused", 64, "--preset", "llada"), "--reused needs a cache"),
        (("--reused", 64, "--targets", "cpu,h100"), "engines on GPUs (h100)"),
        (("--max-tokens", 64, "--targets", "h100"), "engines on GPUs (h100)"),
        (("--max-tokens", 64, "--batch", 2), "--max-tokens plans the passes of one request"),
        (("--block-length", 24), "set a multiple of 16"),
        (("--set", "cache=dual"), 'cache = "dual" needs full attention'),
    ],
)
def test_a_prompt_that_cannot_be_reused_is_wrong_usage(
    several_bundle: Path, arguments: tuple[object, ...], said: str
) -> None:
    result = invoke("plan", several_bundle, "--targets", "cpu", *arguments)
    assert result.exit_code == 2, result.output
    assert said in " ".join(result.stderr.split())


def test_the_passes_and_the_cache_are_printed_and_in_json(several_bundle: Path) -> None:
    options = ("--prompt-tokens", 200, "--reused", 100, "--max-tokens", 64, "--tokens-per-pass", 4)
    arguments = ("plan", several_bundle, "--targets", "cpu", *options)
    shown = invoke(*arguments).stdout
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert "200 prompt and 128 new tokens, batch 1, cache block." in lines
    assert "336 tokens in pages of 16, 96 of them shared: fp32 3.9 MiB" in shown
    # The prompt has 200 tokens. 192 of them fill whole blocks, and 96 of these are reused. The last
    # 8 tokens of the prompt share a block with 8 positions of the answer. The last block of the
    # canvas has 8 positions.
    at = lines.index("tokens cached tokens passes at 4")
    assert lines[at + 1 : at + 6] == [
        "64 96 1",
        "32 160 1",
        "16 192 to 304 38",
        "8 320 2",
        "all - 42",
    ]
    told = json.loads(invoke(*arguments, "--json").stdout)
    (passes,) = told["passes"]
    assert passes["nfe"] == sum(each["count"] for each in passes["passes"]) == 42
    assert passes["passes"][0] == {"tokens": 64, "cached": 96, "rows": 1, "count": 1}
    assert told["caches"][several_bundle.name]["reused_tokens"] == 96
    assert told["policies"][several_bundle.name]["cache"] == "block"


def test_a_preset_and_its_changes_choose_the_cache() -> None:
    def lengths(*changes: str) -> set[int]:
        asked = ("--sizes", "1B", "--targets", "h100", "--precisions", "fp16", "--json")
        result = invoke("plan", *asked, *changes)
        assert result.exit_code == 0, result.output
        return {each["tokens"] for each in json.loads(result.stdout)["passes"][0]["passes"]}

    assert lengths() == lengths("--preset", "fast-dllm") == {256, 32}
    assert lengths("--preset", "llada") == {256}
    assert lengths("--set", "cache=prefix") == {256, 128, 96, 64, 32}
    assert lengths("--set", "refresh=8") == {256, 64, 32}
    assert lengths("--set", "block_length=64") == lengths("--block-length", "64") == {256, 64}
