"""Tests of ``dlm-export bench``: its output has the documented form, and the arithmetic operations
and bytes of a pass are counted correctly.

The tests do not check how fast anything is.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from denoisers import ArithmeticDenoiser
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import make_network
from test_imports import BLOCKED

import dlm_runtime
from dlm_calibration.precisions import FORMATS
from dlm_export import families, machine
from dlm_export.checkpoints.folder import Checkpoint
from dlm_export.cli import main
from dlm_export.cli.running import print_bench
from dlm_export.families.base import Overrides
from dlm_export.opening import Opening
from dlm_export.planning import bench, cost, peer, prefix, roofline
from dlm_export.planning.loads import ROUNDS
from dlm_export.planning.roofline import Costs, Machine, Rates, Work, limit_s
from dlm_export.progress import Silent
from dlm_runtime import Bundle, Generation, PassCost, RequestError

SIZES = "4,8,3; 12,0,12"
SMALL = ("--passes", SIZES, "--prompt-tokens", 6, "--new-tokens", 10, "--rounds", 3, "--threads", 1)
MACHINE = Machine(1e9, 4e9, 2e9, 1e9)
HAND: dict[str, Any] = {
    "hidden_size": 4,
    "layers": 1,
    "heads": 2,
    "kv_heads": 1,
    "head_size": 2,
    "mlp_size": 3,
    "vocab_size": 10,
}


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["bench", *map(str, arguments)])


@pytest.fixture(scope="module")
def told(llada_bundle: Path) -> dict[str, Any]:
    """The JSON output of a complete run of the command, including the measured speed of the
    machine.
    """
    result = invoke(llada_bundle, *SMALL, "--preset", "fast-dllm", "--batch", "1,3", "--json")
    assert result.exit_code == 0, result.output
    loaded: dict[str, Any] = json.loads(result.stdout)
    return loaded


@pytest.fixture
def known_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "measure", lambda threads: MACHINE)


# ---- The command ----


def test_figures_of_a_run_agree_with_each_other(told: dict[str, Any], llada_bundle: Path) -> None:
    made, memory = told["generation"], told["memory"]
    assert sum(made["parts"].values()) == pytest.approx(made["seconds"])
    assert all(seconds >= 0 for seconds in made["parts"].values())
    assert made["parts"]["cache"] > 0, "a dual cache moves keys and values"
    assert made["tokens_per_s"] * made["seconds"] == pytest.approx(10)
    assert (made["prompt_tokens"], made["new_tokens"], made["preset"]) == (6, 10, "fast-dllm")
    sizes = [(row["batch"], row["tokens"], row["cached"], row["rows"]) for row in told["passes"]]
    assert sizes == [(1, 4, 8, 3), (3, 4, 8, 3), (1, 12, 0, 12), (3, 12, 0, 12)]
    alone, three = told["batches"]
    assert (alone["batch"], alone["seconds"], alone["speedup"]) == (1, made["seconds"], 1)
    assert (three["batch"], three["cache_bytes"]) == (3, 3 * alone["cache_bytes"])
    assert three["tokens_per_s"] == pytest.approx(3 * 10 / three["seconds"])
    assert three["speedup"] == pytest.approx(three["tokens_per_s"] / alone["tokens_per_s"])
    for row in told["passes"]:
        low, high = row["quartiles_ms"]
        assert 0 < low <= row["ms"] <= high
        assert row["ratio"] == pytest.approx(row["ms"] / row["limit_ms"])
    files = [llada_bundle / name for name in ("denoiser.onnx", "denoiser.onnx.data")]
    assert memory["weights_bytes"] == sum(file.stat().st_size for file in files)
    # The factors: keys and values, 2 layers, 4 heads of size 16, 4 bytes per fp32 number, 16
    # positions.
    assert memory["cache_bytes"] == 2 * 2 * 4 * 16 * 4 * 16
    assert memory["ratio"] == pytest.approx(
        memory["peak_rss_bytes"] / (memory["weights_bytes"] + memory["cache_bytes"])
    )
    assert memory["peak_rss_bytes"] > 1 << 20


@pytest.mark.usefixtures("known_machine")
@pytest.mark.parametrize("preset", ["llada", "fast-dllm"])
def test_passes_are_counted_as_the_loop_counts_them(llada_bundle: Path, preset: str) -> None:
    made = json.loads(invoke(llada_bundle, *SMALL, "--preset", preset, "--json").stdout)[
        "generation"
    ]
    with dlm_runtime.open(llada_bundle, threads=1) as bundle:
        wanted = bundle.generate(
            tokens=[1, 2, 3, 4, 5, 6], max_new_tokens=10, preset=preset, stop="none"
        )
    assert made["nfe"] == wanted.nfe == 10, "random weights are never sure of more than one token"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("stop=eos", "bench computes every token"),
        ("sparkle=1", "unknown policy field 'sparkle'"),
        ("seed", "write FIELD=VALUE"),
    ],
)
def test_fields_that_bench_cannot_set_are_refused(
    llada_bundle: Path, change: str, said: str
) -> None:
    done = CliRunner().invoke(main, ["bench", str(llada_bundle), "--set", change])
    assert (done.exit_code, said in done.stderr) == (2, True), done.stderr


@pytest.mark.usefixtures("known_machine")
def test_medians_are_taken_and_warm_ups_left_out(
    llada_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    totals, asked = iter([9.0, 8.0, 10.0]), []

    def generate(self: Bundle, **request: Any) -> list[Generation]:
        asked.append(request)
        timings = {
            "prefill": 1.0,
            "passes": 4.0,
            "selection": 2.0,
            "cache": 0.5,
            "total": next(totals),
        }
        return [Generation([], None, 7, timings, 0, {}, "length", 0, 0, [], [], [])] * len(
            request["tokens"]
        )

    monkeypatch.setattr(Bundle, "generate_batch", generate)
    seconds = [9.0] * bench.WARM_UP + [0.004, 0.001, 0.003, 0.002, 0.005]
    monkeypatch.setattr(
        Bundle, "time_passes", lambda self, tokens, cached, rows, repeats, batch: seconds[:repeats]
    )
    options = bench.BenchOptions(
        Opening(threads=1),
        passes=(bench.PassSize(4, 0, 4),),
        prompt_tokens=3,
        new_tokens=18,
        rounds=5,
    )
    result = bench.bench(llada_bundle, options)
    assert result["generation"]["seconds"] == 9.0
    assert result["generation"]["tokens_per_s"] == 2.0
    assert result["generation"]["parts"] == {
        "engine": 5.0,
        "selection": 2.0,
        "cache": 0.5,
        "other": 1.5,
    }
    assert result["passes"][0]["ms"] == pytest.approx(3.0)
    assert result["passes"][0]["quartiles_ms"] == pytest.approx([1.5, 4.5])
    assert [
        (len(request["tokens"][0]), request["new_tokens"], request["stop"]) for request in asked
    ] == [(3, 18, "none")] * 3
    assert all(len(request["tokens"]) == request["max_batch"] == 1 for request in asked)


@pytest.mark.usefixtures("known_machine")
def test_without_being_asked_it_measures_what_fits_the_bundle(
    llada_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = Path(shutil.copytree(llada_bundle, tmp_path / "b"))
    manifest = json.loads((bundle / "manifest.json").read_text())
    manifest["loop"]["max_canvas_length"] = 40
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    monkeypatch.setattr(bench, "WARM_UP", 1)
    result = json.loads(invoke(bundle, "--rounds", 3, "--threads", 1, "--json").stdout)
    assert [(row["tokens"], row["cached"], row["rows"]) for row in result["passes"]] == [
        (4, 36, 4),
        (8, 32, 8),
        (20, 20, 20),
        (40, 0, 40),
    ]
    assert (result["generation"]["prompt_tokens"], result["generation"]["new_tokens"]) == (20, 20)
    assert result["generation"]["preset"] == "fast-dllm"
    assert result["memory"]["cache_bytes"] > 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--passes", "4,8"), "write tokens,cached,rows"),
        (("--passes", " ; "), "no pass is given"),
        (("--passes", "4,8,5"), "a pass of 4 tokens over 8 cached ones that scores 5 rows"),
        (("--passes", "4,8,0"), "scores 0 rows"),
        (("--passes", "4,253,4"), "at most 256"),
        (("--prompt-tokens", 250), "longer than the denoiser's 256"),
        (("--cost",), "these passes cannot separate the costs"),
        (("--batch", "4,"), "write numbers of requests with commas"),
        (("--batch", "9999"), "a pass of 9999 requests is outside 1..4096"),
        (("--peer-token-ms", -1), "--peer-token-ms"),
    ],
)
def test_what_cannot_be_measured_is_wrong_usage(
    llada_bundle: Path, arguments: tuple[object, ...], says: str
) -> None:
    result = invoke(llada_bundle, *SMALL, *arguments)
    assert result.exit_code == 2, result.output
    assert says in result.stderr
    assert result.stdout == ""


TELLING = [
    {"batch": batch, "tokens": tokens, "cached": cached, "rows": rows}
    for batch, tokens, cached, rows in (
        (1, 8, 0, 8),
        (1, 8, 0, 1),
        (1, 8, 120, 8),
        (1, 64, 0, 64),
        (2, 64, 64, 1),
        (1, 128, 0, 128),
    )
]


@given(
    st.tuples(*[st.floats(0, 1e3)] * 4),
    st.lists(st.floats(0.9, 1.1), min_size=len(TELLING), max_size=len(TELLING)),
)
def test_a_cost_is_the_nearest_to_what_was_measured_and_never_negative(
    planted: tuple[float, float, float, float], noise: list[float]
) -> None:
    exact = cost.loads(TELLING) @ np.array(planted) + 1e-3
    measured = [
        one | {"ms": float(ms * off)} for one, ms, off in zip(TELLING, exact, noise, strict=True)
    ]
    found, errors = cost.fit_cost(measured)
    assert min(astuple(found)) >= 0
    of_planted = (cost.loads(TELLING) @ np.array(planted) + 1e-3) / np.array(
        [one["ms"] for one in measured]
    ) - 1
    # The test computed the times from known costs and added some noise. The costs that bench found
    # must fit the times at least as well as the known costs. The number 1e-3 above is the fixed
    # cost of a pass.
    assert np.square(errors).sum() <= np.square(of_planted).sum() * (1 + 1e-6) + 1e-9


def shown(result: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the text that the command prints for a result."""
    print_bench(result)
    return capsys.readouterr().out


@pytest.mark.usefixtures("known_machine")
def test_bench_fits_a_cost_to_passes_that_tell(
    llada_bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "WARM_UP", 1)
    arguments = (llada_bundle, "--rounds", 3, "--new-tokens", 4, "--threads", 1, "--cost", "--json")
    told = json.loads(invoke(*arguments).stdout)
    assert len(told["passes"]) > len(astuple(PassCost(0, 0, 0, 0)))
    assert 0 <= told["cost"]["median_error"] <= told["cost"]["worst_error"]
    text = shown(told, capsys)
    assert re.search(r"Cost: \S+ ms a pass, .* off by \d+% in the median", text)


@pytest.mark.usefixtures("known_machine")
def test_prompts_are_requests_of_their_own_with_p50_and_p95(
    demo_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data.jsonl"
    prompts = ["turn on the kitchen lights", "stop", "remind me to call the garage at seven"]
    data.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    arguments = (
        demo_bundle,
        *SMALL[2:],
        "--passes",
        "4,8,3",
        "--preset",
        "fast-dllm",
        "--data",
        data,
    )
    result = json.loads(invoke(*arguments, "--samples", 2, "--json").stdout)
    told = result["requests"]
    assert (told["count"], told["max_new_tokens"], told["data"]) == (2, 10, str(data))
    assert 0 < told["p50_ms"] <= told["p95_ms"]
    with dlm_runtime.open(demo_bundle, threads=1) as bundle:
        passes = [
            bundle.generate(prompt=prompt, max_new_tokens=10, preset="fast-dllm").nfe
            for prompt in prompts[:2]
        ]
    assert told["nfe"] == passes
    assert told["mean_nfe"] == sum(passes) / 2
    assert told["overhead_ms"] >= 0
    (load,) = told["loads"]
    assert (load["running"], load["count"], load["shares"]) == (1, 2 * ROUNDS, 1)
    assert load["passes"] == ROUNDS * sum(passes)
    assert len(told["paces"]) == ROUNDS
    assert sum(told["paces"]) == pytest.approx(ROUNDS)
    assert re.search(
        r"Requests: 2 prompts of .*: p50 [\d.]+ ms, p95 [\d.]+ ms, p99 [\d.]+ ms, [\d.]+ passes",
        shown(result, capsys),
    )
    data.write_text('{"text": "no prompt"}\n')
    refused = invoke(*arguments)
    assert (refused.exit_code, "contains no prompt" in refused.stderr) == (2, True)


def test_latencies_are_of_the_prompts_and_not_of_the_first_run() -> None:
    class Timed:
        max_new_tokens = 8

        def __init__(self) -> None:
            self.seconds = iter([9.0, *(number / 1000 for number in range(1, 22))])

        def generate(self, **_: Any) -> Any:
            made = {"timings": {"total": next(self.seconds)}, "nfe": 2, "completion_tokens": 5}
            return type("Made", (), made)

    options = bench.BenchOptions(data=Path("data.jsonl"))
    told = bench._time_requests(Timed(), options, "llada", [[1]] * 21, Silent())  # type: ignore[arg-type]
    percentiles = [told[name] for name in ("p50_ms", "p95_ms", "p99_ms")]
    assert percentiles == pytest.approx([11, 20, 20.8])
    assert told["tokens_per_s"] == pytest.approx(21 * 5 / 0.231)
    assert told["tokens_per_pass"] == 2.5
    assert told["ms_per_pass"] == pytest.approx(231 / 42)


# ---- Beside an autoregressive model ----


GENERATION = {"ms_per_pass": 60.0}
REQUESTS = {"ms_per_pass": 50.0, "tokens_per_pass": 2.0, "tokens_per_s": 40.0, "data": "data.jsonl"}


def test_diffusion_pays_from_as_many_tokens_a_pass_as_the_peer_makes_in_its_time() -> None:
    found = peer.compare_with_peer(40.0, GENERATION, REQUESTS)
    assert found["break_even_tokens_per_pass"] == 1.25
    assert found["speedup"] == pytest.approx(1.6)
    assert peer.verdict(found) == (
        "Diffusion pays on this device: it is faster than an autoregressive model of 40 ms a token "
        "from 1.25 tokens a pass on, and data.jsonl gave 2.00, 1.60 times as fast."
    )
    found = peer.compare_with_peer(20.0, GENERATION, REQUESTS)
    assert peer.verdict(found) == (
        "Diffusion does not pay on this device: it is faster than an autoregressive model of 20 ms "
        "a token from 2.50 tokens a pass on, but data.jsonl gave 2.00, 0.80 times as fast."
    )


@pytest.mark.usefixtures("known_machine")
def test_bench_says_whether_diffusion_pays(
    demo_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"prompt": "stop"}) + "\n")
    arguments = (demo_bundle, *SMALL, "--preset", "fast-dllm", "--data", data)
    told = json.loads(invoke(*arguments, "--peer-token-ms", 1e6, "--json").stdout)
    found, sent = told["peer"], told["requests"]
    assert (found["token_ms"], found["data"]) == (1e6, str(data))
    assert found["ms_per_pass"] == sent["ms_per_pass"]
    assert found["tokens_per_pass"] == sent["tokens_per_pass"]
    assert found["speedup"] == pytest.approx(sent["tokens_per_s"] * 1e3)
    assert [row["break_even_tokens"] for row in told["passes"]] == [
        pytest.approx(row["ms"] / 1e6) for row in told["passes"]
    ]
    text = shown(told, capsys)
    assert "Diffusion pays on this device: it is faster than an autoregressive model" in text
    assert "peer's tokens" in text
    text = invoke(demo_bundle, *SMALL, "--peer-token-ms", 2).stdout
    assert "Give --data to measure how many tokens a pass your prompts give." in text
    assert "peer's tokens" not in shown(told | {"peer": None}, capsys)


PREFIXED = ("--prefix", 40, "--prompt-tokens", 6, "--new-tokens", 10, "--passes", "4,8,3")


@pytest.mark.usefixtures("known_machine")
def test_requests_with_the_same_start_are_measured_with_and_without_reuse(
    several_bundle: Path,
) -> None:
    arguments = (*PREFIXED, "--rounds", 3, "--threads", 1, "--set", "commit=static")
    done = invoke(several_bundle, *arguments, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)["prefix"]
    sides = {name: found.pop(name) for name in ("reused", "computed")}
    assert found == {
        "shared_tokens": 40,
        "own_tokens": 6,
        "new_tokens": 10,
        "requests": 16,
        "preset": "sdar",
        "changes": {"commit": "static"},
        "rounds": 3,
        "differing": 0,
        "compared": 48,
    }
    # With reuse, 15 of the 16 requests reuse two pages of 16 tokens. Without reuse, no tokens are
    # reused.
    assert [side["cached_tokens"] for side in sides.values()] == [15 * 32, 0]
    assert sides["reused"]["cache_bytes"] < sides["computed"]["cache_bytes"]
    for side in sides.values():
        assert side["cache_bytes"] > 0
        for name, spread in (
            ("first_tokens_ms", "first_tokens_range_ms"),
            ("tokens_per_s", "tokens_per_s_range"),
        ):
            least, most = side[spread]
            assert 0 < least <= side[name] <= most


@pytest.mark.usefixtures("known_machine")
def test_the_table_shows_what_reuse_saves(
    several_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int | None] = []

    def measure_side(*arguments: Any) -> prefix.Side:
        made.append(arguments[4])
        number = len(made)
        is_reused = arguments[4] is None
        return prefix.Side(number, 10.0 * number, 480 * is_reused, 1 << 20, [[number]])

    monkeypatch.setattr(prefix, "measure_side", measure_side)
    done = invoke(several_bundle, *PREFIXED, "--rounds", 15, "--threads", 1)
    assert done.exit_code == 0, done.output
    assert made == [None, 0, 0, None, None, 0], "the two schedulers take turns to be first"
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    at = lines.index("prompts are first tokens, ms range tokens/s range reused cache")
    assert lines[at - 2] == "Prompts of 40 shared and 6 own tokens, 10 new tokens, preset sdar"
    assert lines[at + 1] == "reused 4.0 1.0 .. 5.0 40.0 10.0 .. 50.0 480 1.0 MiB"
    assert lines[at + 2] == "computed 3.0 2.0 .. 6.0 30.0 20.0 .. 60.0 0 1.0 MiB"
    assert lines[at + 3] == "3 of 3 canvases differ"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--prefix", 0), "--prefix"),
        (("--prefix", 12), "only whole pages of 16 tokens"),
        (("--prefix", 500), "500 shared, 6 own and 10 new tokens are more than the 512"),
        (("--prefix", 40, "--preset", "llada"), "the policy has cache=none"),
        (("--prefix", 40, "--preset", "warp"), 'preset "warp"'),
    ],
)
def test_a_start_that_cannot_be_reused_is_wrong_usage(
    several_bundle: Path, arguments: tuple[object, ...], said: str
) -> None:
    done = invoke(several_bundle, "--prompt-tokens", 6, "--new-tokens", 10, *arguments)
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    assert said in done.stderr


@pytest.mark.usefixtures("known_machine")
def test_full_attention_and_engines_without_kernels_reuse_nothing(
    llada_bundle: Path, several_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = invoke(llada_bundle, *SMALL, "--prefix", 40)
    assert done.exit_code == 2
    assert "reuse nothing, because its attention is full" in done.stderr
    monkeypatch.setenv("DLM_KERNELS", "none")
    done = invoke(several_bundle, *PREFIXED, "--rounds", 3, "--threads", 1)
    assert done.exit_code == 2
    assert "requests cannot share passes" in done.stderr


def test_without_onnx_everything_but_the_roofline_is_measured(llada_bundle: Path) -> None:
    command = [
        sys.executable,
        "-c",
        BLOCKED,
        "bench",
        str(llada_bundle),
        *map(str, SMALL),
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["roofline"] is None
    assert "onnx is not installed" in result["notes"][0]
    assert all(
        row["ms"] > 0 and row["limit_ms"] is None and row["ratio"] is None
        for row in result["passes"]
    )
    assert result["generation"]["nfe"] == 10


def test_formats_that_a_cpu_only_simulates_count_as_full_precision(llada_bundle: Path) -> None:
    manifest = json.loads((llada_bundle / "manifest.json").read_text())
    size = bench.PassSize(4, 0, 4)
    full = bench._work(manifest, size)
    manifest["precision"]["layers"] = {"blocks.0.mlp.up": "nvfp4", "blocks.0.mlp.down": "fp8"}
    assert bench._work(manifest, size) == full
    manifest["precision"]["layers"]["blocks.0.mlp.gate"] = "int8-dynamic"
    assert bench._work(manifest, size).macs["layers.int8"] == 4 * 64 * 96
    manifest["loop"]["graph"]["cache_dtype"] = "float16"
    assert bench._work(manifest, size).cache_bytes == full.cache_bytes // 2


def test_timed_passes_are_made_and_wrong_ones_refused() -> None:
    denoiser = ArithmeticDenoiser()
    assert denoiser.bundle.time_passes(4, 8, 4, 0) == []
    assert denoiser.passes == 0
    seconds = denoiser.bundle.time_passes(4, 0, 2, 5)
    assert len(seconds) == 5
    assert all(second > 0 for second in seconds)
    assert denoiser.passes == 5
    assert len(denoiser.bundle.time_passes(4, 0, 2, 1, batch=3)) == 1
    assert denoiser.passes == 8, "a call for each of its requests"
    denoiser.passes = 5
    for sizes in ((0, 0, 1), (4, -1, 4), (4, 0, 5), (4, 512, 4), (1 << 40, 0, 1)):
        with pytest.raises(RequestError):
            denoiser.bundle.time_passes(*sizes, 1)
    assert denoiser.passes == 5


# ---- The work of a pass ----


def test_work_of_a_pass_counted_by_hand() -> None:
    # The matrices have 84 weights: q has 16, k and v have 8 each, out has 16, and gate, up and down
    # have 12 each. The output head has 40 weights. There are three norms of 4 weights each, and the
    # pass reads two rows of the embedding, all in fp32. In each layer, the key and the value of a
    # position together have 4 numbers.
    network = make_network(**HAND)
    work = Costs(network, {}).work(tokens=2, cached=3, rows=1)
    assert work == Work(
        4 * (84 + 40 + 12 + 8),
        5 * 4 * 4,
        {"layers.full": 168, "attention.full": 80, "head.full": 40},
    )
    # The quantised matrices of gate and up each have 12 codes and 3 scales. If a format only
    # quantises weights, multiplications are in full precision.
    layers = {"blocks.0.mlp.gate": "int8-static", "blocks.0.mlp.up": "int8-weight"}
    work = Costs(network, layers).work(2, 3, 1)
    assert work.weight_bytes == 4 * (60 + 40 + 12 + 8) + 2 * (12 + 4 * 3)
    assert work.macs == {
        "layers.full": 144,
        "layers.int8": 24,
        "attention.full": 80,
        "head.full": 40,
    }
    assert work.by_arithmetic() == {"full": 264, "int8": 24}
    biased = make_network(**HAND, qkv_bias=True)
    assert Costs(biased, {}, 2).work(2, 3, 1).weight_bytes == 2 * (144 + 4 + 2 + 2)


@pytest.mark.parametrize("family", ["llada", "dream"])
def test_counted_weights_are_those_that_the_denoiser_has(
    family: str, request: pytest.FixtureRequest
) -> None:
    checkpoint = Checkpoint(request.getfixturevalue(f"{family}_checkpoint"))
    network = families.read_network(checkpoint, Overrides())
    embedding = network.vocab_size * network.hidden_size
    costs = Costs(network, {})
    counted = costs.work(tokens=network.vocab_size, cached=0, rows=1)
    assert not network.tied_head
    assert counted.weight_bytes == 4 * network.parameter_count()
    one = costs.work(tokens=1, cached=0, rows=1)
    assert one.weight_bytes == counted.weight_bytes - 4 * (embedding - network.hidden_size)


sizes = st.tuples(st.integers(1, 600), st.integers(0, 5000), st.integers(0, 600), st.integers(1, 8))
LARGE_SIZES = HAND | {"hidden_size": 64, "mlp_size": 96, "heads": 4, "head_size": 16}
LARGE = make_network(**LARGE_SIZES)
formats = st.dictionaries(
    st.sampled_from(list(LARGE.quantisable())), st.sampled_from(list(FORMATS))
)
RATES = Rates(1e9, {"full": 1e9, "int8": 4e9, "fp8": 4e9, "nvfp4": 8e9})


@settings(max_examples=100)
@given(size=sizes, layers=formats)
def test_work_never_shrinks_as_a_pass_grows(
    size: tuple[int, int, int, int], layers: dict[str, str]
) -> None:
    costs = Costs(LARGE, layers)
    work = costs.work(*size)
    for grown in range(4):
        larger = costs.work(*(value + (i == grown) for i, value in enumerate(size)))
        assert larger.weight_bytes >= work.weight_bytes
        assert larger.cache_bytes >= work.cache_bytes
        assert all(larger.macs[kind] >= count for kind, count in work.macs.items())
        assert sum(larger.macs.values()) > sum(work.macs.values())
        assert limit_s(larger, RATES) >= limit_s(work, RATES)


@settings(max_examples=100)
@given(size=sizes, layers=formats)
def test_a_pass_that_scores_nothing_pays_for_no_head(
    size: tuple[int, int, int, int], layers: dict[str, str]
) -> None:
    tokens, cached, _, batch = size
    work = Costs(LARGE, layers).work(tokens, cached, 0, batch)
    assert not [kind for kind in work.macs if kind.startswith("head")]
    few = make_network(**LARGE_SIZES | {"vocab_size": 4})
    no_vocabulary = Costs(few, {}).work(tokens, cached, 0, batch)
    assert Costs(LARGE, {}).work(tokens, cached, 0, batch) == no_vocabulary


def test_the_limit_is_the_larger_of_reading_and_multiplying() -> None:
    rates = Rates(100.0, {"full": 10.0, "int8": 40.0})
    assert limit_s(Work(700, 300, {"layers.full": 20}), rates) == 10.0
    assert (
        limit_s(Work(700, 300, {"layers.full": 100, "head.full": 20, "layers.int8": 80}), rates)
        == 14.0
    )
    with pytest.raises(KeyError, match="fp8"):
        limit_s(Work(1, 1, {"layers.fp8": 1}), rates)


def test_caches_that_cores_share_count_once(tmp_path: Path) -> None:
    for core in range(4):
        for number, (level, size) in enumerate(((1, "32K"), (2, "1024K"), (3, "32768K"))):
            shared = f"{core}" if level < 3 else ("0-1" if core < 2 else "2-3")
            index = tmp_path / f"cpu{core}" / "cache" / f"index{number}"
            index.mkdir(parents=True)
            for name, text in (("level", level), ("shared_cpu_list", shared), ("size", size)):
                (index / name).write_text(f"{text}\n")
    assert machine.last_level_cache_bytes(tmp_path) == 2 * 32768 << 10
    assert machine.last_level_cache_bytes(tmp_path / "none") == 0
