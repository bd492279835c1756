"""Tests of the HTML page that compares bundles of one checkpoint: which bundles it accepts, its
content and its data.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

pytest.importorskip("matplotlib", reason="the extra [report] is not installed")

from made_up_results import made_up_accuracy, right_answers
from test_report import Page

from dlm_export.bundle.folder import finish
from dlm_export.cli import main
from dlm_export.judging.report.comparison import ComparisonError, read_entries, write_comparison
from dlm_export.opening import Opening
from dlm_export.planning.bench import BenchOptions, side_by_side
from dlm_runtime import Bundle

MACHINE = {"processor": "AMD EPYC 7B13", "cores": 2}
Judged = Callable[..., Path]


@pytest.fixture
def judged(llada_bundle: Path, tmp_path: Path) -> Judged:
    """Make a bundle with made-up results.

    The manifest says that the bundle has the precision ``name``. ``changes`` replace single
    results.
    """

    def make(name: str, content: str | None = None, **changes: dict[str, Any]) -> Path:
        folder = Path(shutil.copytree(llada_bundle, tmp_path / name))
        judgement = made_up_accuracy()["judgement"]
        for section, values in changes.items():
            judgement[section] = values if section == "effort" else judgement[section] | values
        (folder / "accuracy.json").write_text(content or json.dumps({"judgement": judgement}))
        manifest = json.loads((folder / "manifest.json").read_text())
        del manifest["files"]
        manifest["precision"] = {"name": name}
        finish(folder, manifest)
        return folder

    return make


def _speed(ms: float) -> dict[str, Any]:
    made = {
        "prompt_tokens": 128,
        "new_tokens": 128,
        "preset": "llada",
        "nfe": 128,
        "tokens_per_s": 1e3 / ms,
    }
    return made | {
        "ms_per_pass": ms,
        "quartiles_ms_per_pass": [0.9 * ms, 1.1 * ms],
        "engine": "onnxruntime 1.31",
    }


def _run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["report", *map(str, arguments)])


def test_the_page_has_size_loss_answers_and_time_of_every_bundle(
    llada_bundle: Path, judged: Judged, tmp_path: Path
) -> None:
    worse = {"ce_increase": 0.05, "ce_increase_interval": [0.03, 0.08]}
    entries = read_entries([llada_bundle, judged("int8"), judged("int4", overall=worse)])
    write_comparison(
        tmp_path / "page.html", entries, [_speed(8.0), _speed(2.0), _speed(7.0)], MACHINE
    )
    text = (tmp_path / "page.html").read_text()
    page = Page(text)
    for words in (
        "LLaDAModelLM: fp32, int8, int4",
        "the reference",
        "+5.00% +3.00% to +8.00%",
        "What quantisation cost. Right answers to the same 64 prompts: checkpoints/of/one/long/path/LLaDA-8B-Instruct, fp32 51 "
        "(79.7%), int8 50 (78.1%), int4 50 (78.1%). These prompts cannot tell which bundle is better: the 95% interval of "
        "every difference includes zero (the widest is",
        "int4, int8 0 0 +0.0",
        "1.031 0.990 to 1.070",
        "2.00 1.80 to 2.20",
        "AMD EPYC 7B13, 2 cores",
        "Loss against size",
        "Loss against time",
        made_up_accuracy()["judgement"]["data"]["sha256"],
    ):
        assert words in page.text
    green = [attrs for tag, attrs in page.elements if tag == "td" and attrs.get("class") == "good"]
    assert len(green) == 2, "the smallest and the fastest"
    assert not {tag for tag, _ in page.elements} & {"script", "img", "link"}
    write_comparison(tmp_path / "untimed.html", entries)
    untimed = Page((tmp_path / "untimed.html").read_text()).text
    assert "ms a pass" not in untimed
    assert "Loss against time" not in untimed


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"data": {"sha256": "d4" * 32}}, r"not judged like .*int8 \(data: sha256 d4"),
        (
            {"data": {"samples": 50}},
            r"\(data: samples 50 here, 200 there\)\. Bundles .* cannot be compared",
        ),
        ({"policy": {"threshold": 0.5}}, r"\(policy: threshold 0.5 here, 0.9 there\)"),
        ({"effort": "default"}, "judged with --judge default, and .*int8 with --judge full"),
        (
            {"overall": {"reference_ce": 9.0}},
            "judged by another denoiser than .*int8: the reference's cross-entropy is 9 there",
        ),
    ],
)
def test_bundles_that_were_judged_otherwise_are_refused(
    judged: Judged, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(ComparisonError, match=says):
        read_entries([judged("int8"), judged("int4", **changes)])


def test_a_difference_is_found_prompt_by_prompt(judged: Judged, tmp_path: Path) -> None:
    """The intervals of both shares overlap, but the paired difference excludes zero."""
    ours, theirs = [1] * 44 + [0] * 20, [1] * 51 + [0] * 13
    worse = {"right_answers": right_answers(theirs, ours)}
    entries = read_entries([judged("int8"), judged("int4", free_running=worse)])
    write_comparison(tmp_path / "page.html", entries)
    text = Page((tmp_path / "page.html").read_text()).text
    assert "int4 gives fewer right answers than" in text
    assert "The other differences may be chance." in text
    rows = [entry.as_dict() for entry in entries]
    assert rows[1]["right_answers_interval"][1] > rows[0]["right_answers_interval"][0]


def test_the_command_times_bundles_and_replaces_no_page(
    llada_bundle: Path, judged: Judged, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    options = ("--speed", "--rounds", 3, "--threads", 1, "--preset", "fast-dllm", "-o", page)
    done = _run(llada_bundle, judged("int8"), *options, "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert [row["precision"] for row in told["bundles"]] == ["fp32", "int8"]
    assert all(
        row["speed"]["ms_per_pass"] > 0 and row["speed"]["preset"] == "fast-dllm"
        for row in told["bundles"]
    )
    assert told["machine"]["processor"] in Page(page.read_text()).text
    before = page.read_bytes()
    refused = _run(llada_bundle, llada_bundle, "-o", page)
    assert "exists. Pass --force to replace it" in refused.stderr
    assert page.read_bytes() == before


def test_bundles_take_turns_and_a_warm_up_does_not_count(
    llada_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Bundle] = []
    generate = Bundle.generate_batch

    def counted(self: Bundle, **request: Any) -> Any:
        asked.append(self)
        return generate(self, **request)

    monkeypatch.setattr(Bundle, "generate_batch", counted)
    options = BenchOptions(Opening(threads=1), prompt_tokens=4, new_tokens=4, rounds=3)
    found = side_by_side([llada_bundle, llada_bundle], options)
    assert len(asked) == 2 * (1 + 3)
    assert asked == [asked[0], asked[1]] * 4
    for each in found:
        low, high = each["quartiles_ms_per_pass"]
        assert 0 < low <= each["ms_per_pass"] <= high
        assert (each["nfe"], each["new_tokens"]) == (4, 4)
