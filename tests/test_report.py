"""Tests of report.html, made from made-up results.

The report must be complete, contain no script, and fit a width of 360 px in a real browser.
"""

from __future__ import annotations

import html
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("matplotlib", reason="the extra [report] is not installed")

from made_up_results import FILES, HOSTILE, ROLES, made_up_accuracy, made_up_manifest, right_answers

from dlm_export.charts import drawing, numbers
from dlm_export.judging.report import cost, figures, page
from dlm_export.judging.report.page import ReportError, write_report

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
FIGURES = ("Loss by mask ratio", "Range drift by layer", "Sensitivity by layer", "Passes a prompt")
FIGURES += ("Quality against passes", "Effort levels")


def rendered(
    folder: Path,
    manifest: dict[str, Any] | None = None,
    accuracy: dict[str, Any] | None = None,
    speed: dict[str, Any] | None = None,
) -> str:
    path = folder / "report.html"
    write_report(
        path,
        manifest or made_up_manifest(),
        made_up_accuracy() if accuracy is None else accuracy,
        FILES,
        speed,
    )
    return path.read_text(encoding="utf-8")


class Page(HTMLParser):
    """The elements, attributes and text of a page.

    Parsing fails if elements are not closed in order.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def page_text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return rendered(tmp_path_factory.mktemp("report"))


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make reports without charts, because drawing charts is slow."""
    monkeypatch.setattr(
        figures,
        "draw",
        lambda title, description, height, paint, **words: drawing.Figure(title, svg="", **words),
    )


def test_every_section_and_figure_is_on_the_page(page_text: str) -> None:
    page = Page(page_text)
    links = {attrs["href"] for tag, attrs in page.elements if tag == "a"}
    assert links == {f"#{attrs['id']}" for tag, attrs in page.elements if tag == "section"}
    assert len(links) == 12
    charts = [attrs for tag, attrs in page.elements if tag == "svg"]
    assert [chart["role"] for chart in charts] == ["img"] * len(FIGURES)
    assert all(len(chart["aria-label"] or "") > 60 for chart in charts)
    assert all(f"<title>{title}</title>" in page_text for title in FIGURES)
    identifiers = [attrs["id"] for _, attrs in page.elements if "id" in attrs]
    assert len(identifiers) == len(set(identifiers))
    used = {attrs["xlink:href"] for tag, attrs in page.elements if tag == "use"}
    used |= {f"#{name}" for name in re.findall(r"url\(#(\w+)\)", page_text)}
    assert used
    assert used <= {f"#{name}" for name in identifiers}


def test_verdict_figures_and_worst_places_are_in_words(page_text: str) -> None:
    text = Page(page_text).text
    for words in (
        "Failed. 1 of 2 stated budgets missed: increase of the masked cross-entropy, at most +1.00%, found +1.08%",
        "What quantisation cost. Cannot tell whether demo mixed or checkpoints/of/one/long/path/LLaDA-8B-Instruct, fp32 gives "
        "more right answers (\N{MINUS SIGN}1.6 points, 95% interval \N{MINUS SIGN}",
        ": 50 of 64 of its answers are right, and 51 of 64 of",
        "The masked cross-entropy rises significantly at 9 of 10 mask ratios, most at 0.95: +1.44%",
        "Costliest layer (estimated): blocks.0.attention.q",
        "Simulated.",
        "Kept in high precision: blocks.*.mlp.down , lm_head , embedding , blocks.*.norm_1",
        "87.74 MiB",
        "1.031 (0.990 to 1.070)",
        "+1.08% missed, but the 95% interval includes the limit",
        "The threshold of the preset fast-dllm was raised: 0.92 instead of 0.9. With it, the candidate's quality differs from "
        "the reference's by +0.0 points (95% interval \N{MINUS SIGN}2.0 to +2.0, 32 samples)",
        "Variants of the preset fast-dllm that commit tokens earlier or later, measured on 11 samples",
        "low 65.0% 36.5% to 85.7% 5.00 threshold = 0.6 medium 70.0% 40.9% to 88.7% 8.00",
        "e5" * 32,
        f"The other {12 * len(ROLES) - page.FIGURE_LAYERS} layers",
    ):
        assert words in text


@pytest.mark.usefixtures("undrawn")
def test_a_bucket_whose_loss_may_be_chance_is_not_called_the_worst(tmp_path: Path) -> None:
    accuracy = made_up_accuracy()
    first, *others = accuracy["judgement"]["buckets"]
    first |= {"positions": 26, "ce_increase": 0.4, "ce_increase_interval": [-0.3, 1.1]}
    text = Page(rendered(tmp_path, accuracy=accuracy)).text
    assert "most at 0.95: +1.44%" in text
    for row in others:
        row["ce_increase_interval"] = [-0.001, 0.02]
    for row in others[:4]:
        row["ce_increase_interval"] = [-0.03, -0.01]
    text = Page(rendered(tmp_path, accuracy=accuracy)).text
    # Four intervals exclude zero, because they are below zero.
    assert (
        "No mask ratio shows a significant increase of the loss. It falls significantly at 4 of 10."
        in text
    )
    assert "every 95% interval" not in text
    assert "rises significantly" not in text


@pytest.mark.parametrize(
    ("theirs", "ours", "says"),
    [
        (29, 29, "Cannot tell whether int8 or fp32 gives more right answers (+0.0 points"),
        (30, 20, "Int8 gives fewer right answers than fp32 (\N{MINUS SIGN}31.2 points"),
        (20, 30, "Int8 gives more right answers than fp32 (+31.2 points"),
        (
            None,
            None,
            "The data has no answers, so it cannot tell whether the other texts of int8 are worse.",
        ),
    ],
)
def test_the_first_sentence_claims_what_the_answers_show(
    theirs: int | None, ours: int | None, says: str
) -> None:
    judgement = made_up_accuracy()["judgement"] | {"candidate": "int8", "reference": "fp32"}
    right = None
    if theirs is not None and ours is not None:
        right = right_answers([1] * theirs + [0] * (32 - theirs), [1] * ours + [0] * (32 - ours))
    judgement["free_running"]["right_answers"] = right
    told = cost.sentence(judgement)
    assert says in told
    assert "52 of 64 texts are the same as those of fp32" in told
    judgement["free_running"] = None
    told = cost.sentence(judgement)
    assert "The predictions differ: the masked cross-entropy of int8 changes by +1.08%" in told
    judgement["overall"]["ce_increase_interval"] = [-0.01, 0.03]
    assert cost.sentence(judgement).startswith("Cannot tell whether the predictions are worse")


@pytest.mark.usefixtures("undrawn")
def test_speed_is_what_was_measured_with_the_processors_name(tmp_path: Path) -> None:
    speed = {
        "prompts": 32,
        "passes": 640,
        "ms_per_pass": 1.25,
        "ms_per_prompt": 25.0,
        "engine": "onnxruntime 1.31",
    }
    speed |= {"processor": "AMD EPYC 7B13", "cores": 2, "gpu_sm": None}
    text = Page(rendered(tmp_path, speed=speed)).text
    assert "Speed while judging 1.25 ms a pass; 25.0 ms a prompt" in text
    assert (
        "640 passes of 32 prompts while this was judged, by onnxruntime 1.31 on AMD EPYC 7B13, 2 cores."
        in text
    )
    assert "has no measurements of speed" not in text
    text = Page(rendered(tmp_path)).text
    assert "Speed while judging" not in text
    assert "This page has no measurements of speed" in text


def test_page_loads_nothing_runs_nothing_and_stays_small(tmp_path: Path) -> None:
    manifest, accuracy = made_up_manifest(), made_up_accuracy()
    names = [f"blocks.{i // 64}.mlp.experts.{i % 64}.down" for i in range(64 * 48)]
    manifest["precision"]["layers"] = dict.fromkeys(names, "nvfp4")
    row = accuracy["calibration"]["layers"][0]
    accuracy["calibration"]["layers"] = [{**row, "layer": name} for name in names]
    accuracy["judgement"]["layers"] = [
        {"layer": name, "format": "nvfp4", "kl": 0.0, "frontier_kl": 0.0} for name in names
    ]
    accuracy["judgement"]["free_running"]["samples"] = [
        {
            "prompt": "p " * 9000,
            "answer": None,
            "reference": "a b " * 9000,
            "candidate": "a c " * 9000,
            "reference_nfe": 1,
            "candidate_nfe": 1,
        }
    ] * 12
    text = rendered(tmp_path, manifest, accuracy)
    assert len(text.encode()) < 600_000
    assert "the rest is in accuracy.json" in text
    assert "24 more kinds of layer are in the manifest" in text
    page = Page(text)
    assert not {tag for tag, _ in page.elements} & {
        "script",
        "img",
        "link",
        "iframe",
        "object",
        "base",
        "image",
    }
    for _, attrs in page.elements:
        assert not [
            name for name in attrs if name.startswith("on") or name in ("src", "srcset", "data")
        ]
        assert all((attrs.get(name) or "#").startswith("#") for name in ("href", "xlink:href"))
    assert "@import" not in text
    assert re.findall(r"url\((?!#)", text) == []


def test_hostile_text_is_shown_as_text(tmp_path: Path) -> None:
    manifest, accuracy = made_up_manifest(), made_up_accuracy()
    manifest["network"]["architecture"] = manifest["targets"][0] = manifest["precision"]["recipe"][
        HOSTILE
    ] = HOSTILE
    manifest["precision"]["layers"][f"blocks.3.{HOSTILE}"] = HOSTILE
    manifest["precision"]["high_precision"].append(HOSTILE)
    manifest["effort"]["preset"] = manifest["effort"]["levels"]["low"]["changes"]["commit"] = (
        HOSTILE
    )
    judgement, calibration = accuracy["judgement"], accuracy["calibration"]
    judgement["reference"] = judgement["candidate"] = judgement["policy"][HOSTILE] = calibration[
        "data"
    ]["name"] = HOSTILE
    judgement["layers"][0]["layer"] = calibration["layers"][0]["layer"] = f"{HOSTILE}\n"
    judgement["budgets"][0]["name"] = judgement["threshold"]["preset"] = HOSTILE
    text = rendered(tmp_path, manifest, accuracy)
    page = Page(text)
    assert not {tag for tag, _ in page.elements} & {"script", "img"}
    assert "{{ 7 * 7 }}" in page.text
    assert not set(text) & {"\x00", "\u202e"}
    assert (
        "</pre><script>alert('x')</script><img src=x onerror=alert(1)>&\u2400\ufffd\ufffd"
        in page.text
    )


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    ("method", "sentence"),
    [
        ("fisher", "Estimated to second order for all layers at once"),
        ("exact", "Each layer was quantised alone in a run of the whole denoiser."),
    ],
)
def test_the_report_says_how_the_layers_losses_were_found(
    tmp_path: Path, method: str, sentence: str
) -> None:
    accuracy = made_up_accuracy()
    accuracy["judgement"]["layers_method"] = method
    assert sentence in Page(rendered(tmp_path, accuracy=accuracy)).text


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    "sections",
    [
        {"judgement": "Not judged.", "calibration": "No ranges were observed"},
        {
            "judgement.frontier": "The frontier was not compared.",
            "judgement.free_running": "No prompt was run to its end.",
            "judgement.threshold": "The threshold was not fitted again.",
            "judgement.layers": "The sensitivity of single layers was not measured.",
            "judgement.buckets": "The loss by mask ratio was not measured.",
            "judgement.budgets": "No budget was stated.",
        },
        {
            "judgement.free_running.right_answers": "the data has no answers",
            "judgement.free_running.samples": "No generations were kept.",
            "judgement.noise_floor": "Both denoisers saw the same masked canvases.",
        },
    ],
)
def test_a_section_without_results_says_so(tmp_path: Path, sections: dict[str, str]) -> None:
    accuracy = made_up_accuracy()
    for section in sections:
        *parents, name = section.split(".")
        owner = accuracy
        for parent in parents:
            owner = owner[parent]
        owner[name] = [] if isinstance(owner[name], list) else None
    text = Page(rendered(tmp_path, accuracy=accuracy)).text
    for sentence in sections.values():
        assert sentence in text


def test_values_that_are_not_finite_are_named(tmp_path: Path) -> None:
    accuracy = made_up_accuracy()
    row = accuracy["judgement"]["buckets"][4]
    row["candidate_ce"], row["ce_increase"], row["ce_increase_interval"] = (
        float("nan"),
        float("inf"),
        [float("nan"), float("inf")],
    )
    accuracy["judgement"]["noise_floor"] = accuracy["judgement"]["layers"][0]["frontier_kl"] = None
    accuracy["calibration"]["layers"][0]["by_bucket"] = [None] * 10
    accuracy["calibration"]["layers"][1]["drift"] = float("inf")
    text = Page(rendered(tmp_path, accuracy=accuracy)).text
    assert "most at 0.45: not finite" in text
    assert "not finite to not finite" in text


@pytest.mark.usefixtures("undrawn")
def test_missing_key_is_an_error_that_names_it_and_leaves_the_old_report(tmp_path: Path) -> None:
    for section, name in (
        ("overall", "top5"),
        ("noise_floor", "ce_increase"),
        ("free_running", "token_agreement"),
    ):
        accuracy = made_up_accuracy()
        del accuracy["judgement"][section][name]
        (tmp_path / "report.html").write_text("old", encoding="utf-8")
        with pytest.raises(ReportError, match=name):
            rendered(tmp_path, accuracy=accuracy)
        assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
        assert (tmp_path / "report.html").read_text(encoding="utf-8") == "old"


def test_without_matplotlib_the_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ReportError, match=r"dlm-export\[report\]"):
        rendered(tmp_path)


@given(st.floats(0, 1), st.integers(1, 3))
def test_percent_says_all_or_nothing_only_of_all_or_nothing(share: float, decimals: int) -> None:
    text = numbers.as_percent(share, decimals)
    assert (float(text.strip("<>%")) == 0) == (share == 0)
    assert (float(text.strip("<>%")) == 100) == (share == 1)


@given(st.floats(-1e300, 1e300), st.integers(2, 6))
def test_numbers_keep_their_significant_digits(value: float, digits: int) -> None:
    text = numbers.as_number(value, digits).replace(",", "").replace("\N{MINUS SIGN}", "-")
    assert float(text) == pytest.approx(value, rel=0.51 * 10 ** (1 - digits))


@given(st.text(), st.text())
def test_compared_pieces_make_up_the_text(ours: str, theirs: str) -> None:
    pieces = page.compared(ours, theirs)
    assert pieces is not None
    assert "".join(text for _, text in pieces) == ours
    assert any(differs for differs, _ in pieces) <= (ours != theirs)


@given(st.text(st.characters()))
def test_printable_text_can_be_written_and_read_back(text: str) -> None:
    shown = numbers.printable(text)
    assert len(shown) == len(text)
    assert numbers.printable(shown) == shown
    shown.encode("utf-8")


@given(
    st.dictionaries(
        st.from_regex(r"(blocks\.[0-9]{1,2}\.)?[a-z]{1,2}", fullmatch=True),
        st.sampled_from(["int8", "fp8", "nvfp4"]),
    )
)
def test_layer_map_shows_every_layer_once(layers: dict[str, str]) -> None:
    shown = page.layer_map(layers)
    assert sum(count for _, count in shown["formats"]) == len(layers)
    cells = [
        shown["formats"][k][0] for row in shown["rows"] for _, k in row["cells"] if k is not None
    ]
    assert sorted(cells) == sorted(layers.values())
    assert sum(count for _, count in page.grouped(layers)) == len(layers)


MEASURE = """
const page = frames[0].document, root = page.documentElement, style = page.defaultView.getComputedStyle.bind(page.defaultView);
const charts = [...page.querySelectorAll('svg.chart')].map(chart => {
  const box = chart.getBoundingClientRect(), text = chart.querySelector('text');
  return [chart.querySelector('title').textContent, box.left >= 0 && box.right <= 360, box.height > 100,
    text.getBoundingClientRect().height > 9, style(text).fill].join('|');
});
document.body.textContent = ['MEASURED', root.scrollWidth, page.defaultView.innerWidth, style(page.body).backgroundColor,
  style(page.body).color, ...charts].join('\\n') + '\\n';
"""


def luminance(colour: str) -> float:
    """Return the relative luminance of the colour ``rgb(r, g, b)``, as WCAG 2.2 defines it."""
    parts = [int(value) / 255 for value in re.findall(r"\d+", colour)[:3]]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def laid_out(page: str, width: int, measure: str, folder: Path, scheme: str = "light") -> list[str]:
    """Show a page in a frame of ``width`` pixels, and run the JavaScript ``measure``.

    Returns the lines that the script prints.
    """
    assert BROWSER is not None
    # Windows of Chromium are at least 500 pixels wide, but a frame in a window can be narrower.
    frame = f'<iframe style="width:{width}px;height:800px;border:0" srcdoc="{html.escape(page)}"></iframe>'
    wrapper = folder / "wrapper.html"
    wrapper.write_text(
        f"<!DOCTYPE html><body>{frame}<script>onload = () => {{{measure}}}</script>",
        encoding="utf-8",
    )
    command = [
        BROWSER,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--user-data-dir={folder / 'profile'}",
    ]
    command += [
        f"--blink-settings=preferredColorScheme={['dark', 'light'].index(scheme)}",
        "--dump-dom",
        wrapper.as_uri(),
    ]
    out = subprocess.run(command, capture_output=True, timeout=60, check=True).stdout.decode()
    return html.unescape(out[out.index("MEASURED\n") : out.index("</body>")]).split("\n")[1:-1]


needs_browser = pytest.mark.skipif(
    BROWSER is None, reason="no chromium, chromium-browser or google-chrome on PATH"
)


@needs_browser
@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_browser_lays_out_every_figure_at_360_pixels(
    page_text: str, tmp_path: Path, scheme: str
) -> None:
    width, inner, background, ink, *charts = laid_out(page_text, 360, MEASURE, tmp_path, scheme)
    assert (int(width), int(inner)) == (360, 360)
    assert [chart.split("|") for chart in charts] == [
        [title, "true", "true", "true", ink] for title in FIGURES
    ]
    assert (luminance(background) < luminance(ink)) == (scheme == "dark")
    low, high = sorted((luminance(background), luminance(ink)))
    assert (high + 0.05) / (low + 0.05) > 7


@pytest.mark.usefixtures("undrawn")
def test_engines_and_what_they_hold_otherwise_are_shown(tmp_path: Path) -> None:
    manifest = made_up_manifest()
    layers = {"blocks.0.mlp.up": "float16", "head": "float16"}
    fallbacks = {"blocks.0.mlp.up": {"asked": "fp8", "held": "float16"}}
    manifest["audits"] = {"h100": {"layers": layers, "fallbacks": fallbacks}}
    manifest["loop"]["engines"] = {"h100": {"builder": "tensorrt", "version": "10.14.1"}}
    page = rendered(tmp_path, manifest)
    assert "tensorrt 10.14.1" in page
    assert "<code>blocks.0.mlp.up</code> is float16, fp8 was asked for" in page
