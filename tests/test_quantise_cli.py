"""Tests of quantising on the command line: output, errors, and cleaning up after a failure."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from checkpoints import llada_config, write_checkpoint
from click.testing import CliRunner, Result
from referencing import Registry
from safetensors.torch import load_file, save_file

import dlm_runtime
from dlm_export.cli import main
from dlm_runtime.manifest import schema

ROOT = Path(__file__).parent.parent
DEMO = ROOT / "examples" / "demo-denoiser"
HELD_OUT = ROOT / "examples" / "demo" / "heldout.jsonl"
SCHEMA = schema()
CALIBRATED = ("--calib-samples", "6", "--calib-states", "4")
SMALL = (*CALIBRATED, "--judged", "3")


def _run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def _fails(out: Path, *arguments: object, code: int, says: tuple[str, ...]) -> None:
    result = _run(*arguments, "-o", out)
    assert result.exit_code == code, result.output
    for text in says:
        assert text in result.stderr, result.stderr
    assert "Traceback" not in result.output
    assert not out.parent.exists() or os.listdir(out.parent) == [], "something was left behind"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out" / "bundle"


@pytest.fixture(scope="session")
def int8(
    llada_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    """A tiny bundle in int8-static, and the JSON output of its build.

    The build calibrates and judges the bundle.
    """
    folder = tmp_path_factory.mktemp("quantised") / "int8"
    result = _run(
        "build", llada_checkpoint, "--precision", "int8-static", "-o", folder, *SMALL, "--json"
    )
    assert result.exit_code == 0, result.output
    return folder, json.loads(result.stdout)


def test_a_build_writes_accuracy_and_report_and_records_its_calibration(
    int8: tuple[Path, dict[str, Any]],
) -> None:
    folder, printed = int8
    manifest = json.loads((folder / "manifest.json").read_text())
    jsonschema.validate(manifest, SCHEMA, registry=Registry())
    precision = manifest["precision"]
    assert (precision["name"], manifest["loop"]["graph"]["simulated"]) == ("int8-static", False)
    assert precision["layers"]["blocks.1.mlp.down"] == "int8-static"
    assert precision["layers"]["head"] == "high"
    assert precision["calibration"]["states"] == 24
    assert len(precision["calibration"]["states_sha256"]) == 64
    assert (precision["threshold"], manifest.get("effort")) == (None, None), "of --judge full"
    assert (printed["threshold"], printed["effort"]) == (None, None)
    accuracy = json.loads((folder / "accuracy.json").read_text())
    assert {row["layer"] for row in accuracy["judgement"]["layers"]} == {
        layer for layer, name in precision["layers"].items() if name != "high"
    }
    assert 2 <= len(accuracy["judgement"]["buckets"]) <= 6, "two canvases of each of 3 samples"
    page = (folder / "report.html").read_text()
    assert "<svg" in page
    assert "Speed while judging" in page
    assert "speed" not in accuracy["judgement"], "it is of one run on one machine"
    assert "made-up samples (random ids)" in printed["warnings"][0]
    assert printed["parity"]["passed"]
    with dlm_runtime.open(folder, threads=1) as bundle:
        assert bundle.generate(tokens=[1, 2, 3], max_new_tokens=8, preset="fast-dllm").nfe > 0


def test_the_same_seed_gives_the_same_bundle(
    int8: tuple[Path, dict[str, Any]], llada_checkpoint: Path, out: Path
) -> None:
    folder, _ = int8
    assert (
        _run(
            "build",
            llada_checkpoint,
            "--precision",
            "int8-static",
            "-o",
            out,
            *CALIBRATED,
            "--no-verify",
        ).exit_code
        == 0
    )
    first, second = (json.loads((path / "manifest.json").read_text()) for path in (folder, out))
    for name in ("denoiser.onnx", "denoiser.onnx.data"):
        assert first["files"][name] == second["files"][name]
    assert first["precision"]["calibration"] == second["precision"]["calibration"]


def test_a_bundle_quantises_to_what_its_checkpoint_does(
    llada_bundle: Path, llada_checkpoint: Path, tmp_path: Path
) -> None:
    for number, source in enumerate((llada_bundle, llada_checkpoint)):
        result = _run(
            "quantize",
            source,
            "--precision",
            "int4-rtn",
            "-o",
            tmp_path / str(number),
            "--no-verify",
        )
        assert result.exit_code == 0, result.output
    first, second = ((tmp_path / name / "denoiser.onnx.data").read_bytes() for name in "01")
    assert first == second


def test_verify_judges_a_quantised_bundle_and_writes_a_report(
    int8: tuple[Path, dict[str, Any]], llada_checkpoint: Path, tmp_path: Path
) -> None:
    report = tmp_path / "report"
    judged = ("verify", int8[0], "--checkpoint", llada_checkpoint, "--judged", 2)
    limits = ("--min-top1", "1.0", "--max-ce-increase", "0")
    result = _run(*judged, *limits, "--report", report)
    assert result.exit_code == 3
    assert sorted(os.listdir(report)) == ["accuracy.json", "report.html"]
    for text in ("top-1 agreement", "worst layers: blocks."):
        assert text in result.stderr
    (report / "accuracy.json").write_text("mine")
    for arguments, says in (
        (("--report", report), "accuracy.json exists. Pass --force"),
        (("--report", int8[0], "--force"), "is a bundle, whose files must not change"),
        (("--min-right-answers", "0.5"), "no answers"),
    ):
        result = _run(*judged, *arguments)
        assert (result.exit_code, says in result.stderr) == (2, True), result.output
    assert (report / "accuracy.json").read_text() == "mine"
    result = _run(*judged, "--report", report, "--force", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["passed"]
    assert (report / "accuracy.json").read_text() != "mine"


def test_compare_judges_one_bundle_by_another(
    int8: tuple[Path, dict[str, Any]], llada_bundle: Path, dream_bundle: Path
) -> None:
    result = _run("compare", llada_bundle, int8[0], "--judged", 3)
    assert result.exit_code == 0, result.output
    assert "int8 (int8-static) against llada (fp32)" in result.stdout
    same = json.loads(_run("compare", llada_bundle, llada_bundle, "--judged", 2, "--json").stdout)
    assert (
        same["overall"]["kl_mean"],
        same["frontier"]["flips"],
        same["free_running"]["exact_match"],
    ) == (0.0, 0, 1.0)
    other = _run("compare", llada_bundle, dream_bundle, "--judged", 2)
    assert other.exit_code == 2
    assert "is a different denoiser from" in other.stderr
    assert "its family is dream, the other's llada" in other.stderr


def test_a_comparison_warns_of_another_configuration(llada_bundle: Path, tmp_path: Path) -> None:
    """The weights of both bundles have the same shapes, but their config.json files differ."""
    other = Path(shutil.copytree(llada_bundle, tmp_path / "other"))
    manifest = json.loads((other / "manifest.json").read_text())
    ours, manifest["source"]["config_sha256"] = manifest["source"]["config_sha256"], 64 * "0"
    (other / "manifest.json").write_text(json.dumps(manifest))
    result = _run("compare", llada_bundle, other, "--judged", 1)
    assert result.exit_code == 0, result.output
    assert f"different config.json files (SHA-256 {64 * '0'} and {ours})" in result.stderr
    manifest["network"]["layers"][1]["norm_eps"] = 0.5
    (other / "manifest.json").write_text(json.dumps(manifest))
    result = _run("compare", llada_bundle, other, "--judged", 1)
    assert result.exit_code == 2
    assert "its layer 1 norm_eps is 0.5, the other's 1e-05" in result.stderr


def test_a_budget_that_is_missed_leaves_no_bundle(llada_checkpoint: Path, out: Path) -> None:
    options = ("--precision", "int4-rtn", *SMALL, "--min-top1", "1.0")
    _fails(
        out,
        "build",
        llada_checkpoint,
        *options,
        code=3,
        says=("top-1 agreement", "worst layers"),
    )


def test_auto_keeps_its_budget_and_prints_its_curve(llada_checkpoint: Path, out: Path) -> None:
    options = ("--precision", "auto", *SMALL, "--max-ce-increase", "0.005", "--json")
    result = _run("build", llada_checkpoint, *options, "-o", out)
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    chosen = next(point for point in printed["curve"] if point["chosen"])
    assert chosen["ce_increase"] <= 0.005
    sizes = [point["weight_bytes"] for point in printed["curve"]]
    assert sizes == sorted(sizes, reverse=True)
    assert set(json.loads((out / "manifest.json").read_text())["precision"]["layers"].values()) <= {
        "high",
        "int4-g32-dynamic",
        "int8-dynamic",
    }


def test_bad_calibration_data_is_refused_by_its_line(tmp_path: Path, out: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "a", "completion": "b"}\n{"prompt": "a", \n')
    options = ("--precision", "fp8", "--calib", path, "--no-verify")
    _fails(out, "build", DEMO, *options, code=2, says=(str(path), "line 2"))


def _damaged(checkpoint: Path, folder: Path, tensor: str, change: Any) -> Path:
    copy = Path(shutil.copytree(checkpoint, folder))
    weights = load_file(copy / "model.safetensors")
    weights[tensor] = change(weights[tensor])
    save_file(weights, copy / "model.safetensors")
    return copy


def test_activations_that_are_not_finite_are_refused_by_layer(
    llada_checkpoint: Path, tmp_path: Path, out: Path
) -> None:
    name = "model.transformer.blocks.0.up_proj.weight"
    checkpoint = _damaged(
        llada_checkpoint, tmp_path / "checkpoint", name, lambda w: torch.full_like(w, 3e38)
    )
    options = ("--precision", "fp8", *CALIBRATED, "--no-verify")
    _fails(out, "build", checkpoint, *options, code=2, says=("blocks.0.mlp.down", "infinite"))


def test_channels_that_are_all_zero_quantise_and_nvfp4_is_marked_as_simulated(
    llada_checkpoint: Path, tmp_path: Path, out: Path
) -> None:
    def zero(w: torch.Tensor) -> torch.Tensor:
        w[:16] = 0.0
        w[:, :16] = 0.0
        return w

    name = "model.transformer.blocks.0.up_proj.weight"
    checkpoint = _damaged(llada_checkpoint, tmp_path / "checkpoint", name, zero)
    options = ("--precision", "nvfp4", "-o", out, *CALIBRATED, "--no-verify")
    result = _run("build", checkpoint, *options)
    assert result.exit_code == 0, result.output
    assert "Simulated" in result.stdout
    with dlm_runtime.open(out, threads=1) as bundle:
        assert bundle.manifest["loop"]["graph"]["simulated"] is True
        assert bool(torch.from_numpy(bundle.logits([1, 2, 150, 150])).isfinite().all())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--precision", "fp16", "--min-top1", "1"), "--min-top1 needs a quantised precision"),
        (
            ("--precision", "int8", "--auto-formats", "int4-g32"),
            "--auto-formats needs --precision auto",
        ),
        (("--precision", "int8", "--tune"), "--tune needs --precision auto"),
        (
            ("--precision", "int8", "--no-verify", "--min-right-answers", "0.5"),
            "--min-right-answers has no effect with --no-verify",
        ),
        (
            ("--precision", "int8", "--max-ce-increase", "nan"),
            "--max-ce-increase nan is not a limit",
        ),
        (
            ("--precision", "int8", "--no-verify", "--calib", str(HELD_OUT)),
            "--calib has no effect: int8 needs no data",
        ),
        (
            ("--precision", "int8", "--solver", "gptq", "--no-verify", "--calib", str(HELD_OUT)),
            "has no tokenizer to read text with",
        ),
    ],
)
def test_options_without_effect_are_wrong_usage(
    llada_checkpoint: Path, out: Path, options: tuple[str, ...], says: str
) -> None:
    _fails(out, "build", llada_checkpoint, *options, code=2, says=(says,))


def test_verify_refuses_budgets_that_it_would_not_judge(
    llada_bundle: Path, llada_checkpoint: Path, tmp_path: Path
) -> None:
    result = _run("verify", llada_bundle, "--checkpoint", llada_checkpoint, "--min-top1", "0.9")
    assert result.exit_code == 2
    assert "--min-top1 is for quantised bundles" in result.stderr
    (tmp_path / "report").write_text("")
    assert (
        _run(
            "verify",
            llada_bundle,
            "--checkpoint",
            llada_checkpoint,
            "--report",
            tmp_path / "report",
        ).exit_code
        == 2
    )


@pytest.mark.parametrize("linked", [False, True])
def test_nothing_is_written_into_a_folder_that_is_read(
    llada_bundle: Path, llada_checkpoint: Path, tmp_path: Path, linked: bool
) -> None:
    def place(folder: Path) -> Path:
        if not linked:
            return folder
        link = tmp_path / f"to-{folder.parent.name}"
        link.symlink_to(folder)
        return link

    inside = place(llada_checkpoint) / "deep" / "inner"
    for command, source, says in (
        (
            ("quantize", llada_bundle, "-o", place(llada_bundle) / "inner"),
            llada_bundle,
            "is inside",
        ),
        (("build", llada_checkpoint, "-o", inside, "--force"), llada_checkpoint, "is inside"),
        (
            ("capture", llada_checkpoint, "-o", llada_checkpoint / "golden.npz"),
            llada_checkpoint,
            "is inside",
        ),
        (
            ("report", llada_bundle, llada_bundle, "-o", llada_bundle / "page.html"),
            llada_bundle,
            "is inside",
        ),
        (
            ("quantize", llada_bundle, "--precision", "int8", "-o", llada_bundle, "--force"),
            llada_bundle,
            "is the source that is read",
        ),
    ):
        before = sorted(source.rglob("*"))
        result = _run(*command)
        assert result.exit_code == 2, result.output
        assert says in result.stderr
        assert sorted(source.rglob("*")) == before


def test_a_recipe_file_with_everything_in_it_builds(
    llada_checkpoint: Path, tmp_path: Path, out: Path
) -> None:
    """The recipe comes from docs/guides/quantising.md.

    The recipe combines a solver, smoothing, rotation and a format for the embedding. The built
    bundle must also pass the comparison with torch.
    """
    text = (ROOT / "docs" / "guides" / "quantising.md").read_text()
    start = text.index("```toml\n") + len("```toml\n")
    (tmp_path / "mine.toml").write_text(text[start : text.index("```", start)])
    result = _run(
        "build",
        llada_checkpoint,
        "--precision",
        tmp_path / "mine.toml",
        "-o",
        out,
        *SMALL,
        "--json",
    )
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["parity"]["passed"]


def test_a_denoiser_without_an_end_token_is_calibrated_and_judged(
    tmp_path: Path, out: Path
) -> None:
    """Without an end token, canvases have no padding, and texts have no end mark."""
    endless = llada_config(n_layers=1, eos_token_id=None, pad_token_id=None)
    checkpoint = write_checkpoint(tmp_path / "endless", endless, seed=3)
    result = _run("build", checkpoint, "--precision", "fp8", "-o", out, *SMALL, "--json")
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    assert printed["parity"]["passed"]
    assert printed["judgement"]["data"]["samples"] == 2
    assert _run("compare", out, out, "--judged", 2).exit_code == 0


def test_a_build_that_judges_nothing_still_proves_parity(llada_checkpoint: Path, out: Path) -> None:
    result = _run(
        "build", llada_checkpoint, "--precision", "int4-rtn", "-o", out, "--judge", "none", "--json"
    )
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    assert printed["parity"]["passed"]
    assert (printed["judgement"], printed["threshold"]) == (None, None)
    assert not {"make states", "judge", "fit threshold"} & set(printed["stages_s"])
    accuracy = json.loads((out / "accuracy.json").read_text())
    assert "parity" in accuracy
    assert "judgement" not in accuracy
