"""Draw docs/images/edge.svg from benchmarks/results/edge.json.

python docs/tools/edge_chart.py
"""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "edge.json"
IMAGE = ROOT / "docs" / "images" / "edge.svg"

SIZES = ("0.6B", "1.7B", "4B")
BARS = (  # precision, row of the results, label
    ("int4", "pass of 4", "dlm-export int4-rtn, 4 tokens"),
    ("int4", "llama.cpp token", "llama.cpp Q4_0, 1 token"),
    ("int8", "pass of 4", "dlm-export int8, 4 tokens"),
    ("int8", "llama.cpp token", "llama.cpp Q8_0, 1 token"),
)
# Sizes in pixels.
WIDTH, MARGIN, LEFT, RIGHT = 820, 18, 270, 70
BAR, GAP, BETWEEN, HEAD = 16, 4, 16, 62

STYLE = """
text { font-family: system-ui, sans-serif; font-size: 12px; fill: #1a1c2c; }
.title { font-size: 14px; font-weight: 600; }
.note { fill: #4a4f68; }
.page { fill: #ffffff; stroke: #d5d8e6; }
.ours { fill: #3f51b5; }
.theirs { fill: #a9afc9; }
"""


def draw(rows: dict[str, dict[str, dict[str, dict[str, float]]]]) -> str:
    """Return the chart as SVG. Each size has two bars per precision: one for each engine."""
    values = {
        (size, precision, row): rows[f"{size}, {precision}, 2 threads"]["passes"][row]["median_ms"]
        for size in SIZES
        for precision, row, _ in BARS
    }
    scale = (WIDTH - MARGIN - LEFT - RIGHT) / max(values.values())
    shapes = [
        f'<text class="title" x="{MARGIN}" y="28">A pass of four tokens takes less time than one '
        "autoregressive token</text>",
        f'<text class="note" x="{MARGIN}" y="47">milliseconds; two threads of an AMD EPYC with '
        "AVX-512; random weights in Qwen3's shapes</text>",
    ]
    y = HEAD
    for size in SIZES:
        middle = y + 2 * (BAR + GAP)
        shapes.append(f'<text class="title" x="{MARGIN}" y="{middle + 4}">{size[:-1]} B</text>')
        for precision, row, label in BARS:
            value = values[size, precision, row]
            kind = "ours" if row == "pass of 4" else "theirs"
            width = value * scale
            shapes += [
                f'<text class="note" x="{LEFT - 8}" y="{y + 12}" text-anchor="end">{label}</text>',
                f'<rect class="{kind}" x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR}" rx="2"/>',
                f'<text x="{LEFT + width + 6:.1f}" y="{y + 12}">{value:.0f}</text>',
            ]
            y += BAR + GAP
        y += BETWEEN
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" role="img" '
        f'width="{WIDTH}" height="{y}">'
    )
    title = "<title>Time of a pass of four tokens compared with one autoregressive token, by size</title>"
    page = f'<rect class="page" x="0.5" y="0.5" width="{WIDTH - 1}" height="{y - 1}" rx="8"/>'
    return "\n".join([head, title, f"<style>{STYLE}</style>", page, *shapes, "</svg>"]) + "\n"


def main() -> None:
    IMAGE.write_text(draw(json.loads(RESULTS.read_text())["rows"]))


if __name__ == "__main__":
    main()
