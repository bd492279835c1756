"""Measure what a constraint adds to the loop of DiffusionGemma, for each pass.

    python -m benchmarks.constraints.loop_cost TOKENIZER.JSON [--tokens 256] [--passes 3]

A callback takes the denoiser's place. Its logits are normally distributed around 0, so no token is
unlikely enough to be left out. The time of the callback is not counted.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from pathlib import Path

import numpy as np

import dlm_runtime
from benchmarks.shapes import machine
from dlm_runtime import Bundle, CallbackPass, ConstraintWarning, DenoiserInfo
from dlm_runtime.presets import PRESETS
from dlm_runtime.text.tokenizer import Tokenizer

TEXT = {"type": "string"}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": TEXT | {"maxLength": 40},
        "n": {"type": "integer", "minimum": 0, "maximum": 999},
        "list": {"type": "array", "items": TEXT, "maxItems": 8},
        "free": TEXT,
    },
    "required": ["name", "n", "list", "free"],
}
DEVIATION = 3.0


class Random:
    """A denoiser with random logits. ``seconds`` is the time that its passes took."""

    def __init__(self, tokens: int, vocab_size: int) -> None:
        rng = np.random.default_rng(0)
        self.logits = DEVIATION * rng.standard_normal((tokens, vocab_size), dtype=np.float32)
        best = np.argpartition(-self.logits, 2, axis=1)[:, :2]
        order = np.argsort(-np.take_along_axis(self.logits, best, 1), 1)
        self.best = np.take_along_axis(best, order, 1)
        self.sums = np.array([np.logaddexp.reduce(row.astype(np.float64)) for row in self.logits])
        self.seconds = 0.0

    def run(self, given: CallbackPass) -> None:
        began, rows = time.perf_counter(), len(given.score_rows)
        best = self.best[:rows]
        given.top_tokens[:] = best
        behind = np.take_along_axis(self.logits[:rows], best, 1) - self.sums[:rows, None]
        given.top_probs[:] = np.exp(behind)
        if given.entropy is not None:
            given.entropy[:] = 5
        if given.logits is not None:
            given.logits[:] = self.logits[:rows]
        for keys, values in given.present or ():
            keys[...] = values[...] = 0
        self.seconds += time.perf_counter() - began


def measure(bundle: Bundle, denoiser: Random, how: dict[str, object], passes: int) -> float:
    """Return the seconds of the loop per pass."""
    denoiser.seconds = 0
    made = bundle.generate(
        tokens=[2],
        new_tokens=len(denoiser.logits),
        steps_per_block=passes,
        stable_entropy=0,
        **how,  # type: ignore[arg-type]
    )
    return (made.timings["total"] - denoiser.seconds) / made.passes["denoise"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tokenizer", type=Path, help="tokenizer.json")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of the canvas")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    warnings.simplefilter("ignore", ConstraintWarning)
    tokenizer = Tokenizer.from_files(options.tokenizer)
    denoiser = Random(options.tokens, tokenizer.size)
    info = DenoiserInfo(
        tokenizer.size,
        tokenizer.size,
        options.tokens + 8,
        eos_token_ids=(1,),
        draft_block=options.tokens,
        visible_block=1,
        has_cache=True,
    )
    with dlm_runtime.from_callback(info, denoiser.run, PRESETS["diffusion-gemma"]) as bundle:
        bundle._tokenizer = tokenizer
        kinds = {"free": {}, "constrained": {"constraint": bundle.constraint(schema=SCHEMA)}}
        found: dict[str, list[float]] = {name: [] for name in kinds}
        for _ in range(options.rounds):
            for name, how in kinds.items():
                found[name].append(measure(bundle, denoiser, how, options.passes))
    print(f"{machine()['processor']}, {tokenizer.size} tokens, canvas of {options.tokens}")
    for name, seconds in found.items():
        middle, least, most = statistics.median(seconds), min(seconds), max(seconds)
        print(f"{name}: {middle:.2f} s per pass ({least:.2f} to {most:.2f})")


if __name__ == "__main__":
    main()
