"""Compare decoding with drafts with decoding one token at a time, here and in llama.cpp.

    pip install -r benchmarks/requirements.txt && make smollm2
    dlm-export build build/smollm2-checkpoint --target cpu --precision int4-rtn -o build/smollm2-int4
    dlm-export build build/smollm2-checkpoint --target cpu --precision fp32 -o build/smollm2-fp32
    python -m benchmarks.speed.drafts build/smollm2 build/smollm2-int4 build/smollm2-fp32 [--json FILE]

The model is SmolLM2-135M-Instruct with the adapter of examples/smollm2. Each contestant answers
three chat prompts of different kinds greedily, in turn, round after round. A time is that of all
tokens after the first, divided by their number: computing the prompt is not included.

Each bundle has one contestant for each block length B. With B = 1, there are no drafts. llama.cpp's
contestants are its formats. In fp32, all contestants should write the same tokens.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

import dlm_runtime
from benchmarks.accuracy.real_weights import smollm2_gguf
from benchmarks.llama import Llama, facts
from benchmarks.shapes import machine
from benchmarks.timing import interleave
from dlm_runtime import Bundle

PROMPTS = {
    "prose": "Explain how a rainbow forms.",
    "code": "Write a Python function that reverses a list.",
    "list": "Give me three tips for learning a new language.",
}


class Ours:
    """A bundle that decodes with blocks of ``block_length`` tokens. 1: without drafts."""

    def __init__(self, bundle: Bundle, block_length: int) -> None:
        self.bundle, self.block_length = bundle, block_length
        self.made: dict[str, Any] = {}

    def time(self, prompt: str, given: list[int], new_tokens: int) -> float:
        """Answer a prompt with the token ids ``given``.

        Returns the seconds per token after the first.
        """
        out = self.bundle.generate(
            tokens=given, max_new_tokens=new_tokens, block_length=self.block_length
        )
        made = out.completion_tokens + (out.finish == "stop")
        passes = out.passes["denoise"] + out.passes["verify"]
        self.made[prompt] = {
            "tokens": out.tokens[len(given) :][:made],
            "tokens_per_pass": (made - 1) / passes,
            "acceptance_length": out.acceptance_length,
        }
        return (out.timings["total"] - out.timings["prefill"]) / (made - 1)


class Theirs:
    """A GGUF file in llama.cpp, which decodes one token at a time."""

    def __init__(self, path: Path, threads: int, end: int) -> None:
        self.model, self.end = Llama(path, threads, is_causal=True), end
        self.made: dict[str, Any] = {}

    def next_token(self, tokens: list[int], first: int) -> int:
        batch, llama = self.model.batch, self.model.llama
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.logits[i] = token, first + i, i == len(tokens) - 1
            batch.seq_id[i][0] = 0
        if llama.llama_decode(self.model.context, batch):
            raise SystemExit("llama.cpp failed in a pass")
        logits = llama.llama_get_logits_ith(self.model.context, -1)
        return int(np.ctypeslib.as_array(logits, shape=(self.model.vocab_size,)).argmax())

    def time(self, prompt: str, given: list[int], new_tokens: int) -> float:
        """Like ``Ours.time``."""
        self.model.prepare(1, 512)
        memory = self.model.llama.llama_get_memory(self.model.context)
        self.model.llama.llama_memory_clear(memory, True)
        made = [self.next_token(given, 0)]
        began = time.perf_counter()
        while len(made) < new_tokens and made[-1] != self.end:
            made.append(self.next_token(made[-1:], len(given) + len(made) - 1))
        seconds = time.perf_counter() - began
        self.made[prompt] = {"tokens": made, "tokens_per_pass": 1.0}
        return seconds / (len(made) - 1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundles", nargs="+", type=Path)
    parser.add_argument("--file-types", default="Q8_0,Q4_0,F32", help="Formats of llama.cpp.")
    parser.add_argument("--block-lengths", default="1,3,4,5,6")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    contestants: dict[str, Ours | Theirs] = {}
    for path in options.bundles:
        bundle = dlm_runtime.open(path, threads=options.threads)
        for length in map(int, options.block_lengths.split(",")):
            contestants[f"{bundle.manifest['precision']['name']}, B = {length}"] = Ours(
                bundle, length
            )
    first = next(iter(contestants.values()))
    assert isinstance(first, Ours)
    (end,) = first.bundle.manifest["loop"]["eos_token_ids"]
    for file_type in options.file_types.split(","):
        contestants[f"llama.cpp {file_type}"] = Theirs(
            smollm2_gguf(file_type), options.threads, end
        )
    found: dict[str, dict[str, Any]] = {name: {} for name in contestants}
    for kind, prompt in PROMPTS.items():
        out = first.bundle.generate(chat=[{"role": "user", "content": prompt}], max_new_tokens=1)
        given = out.tokens[: out.prompt_tokens]
        runs = {
            name: functools.partial(each.time, prompt, given, options.new_tokens)
            for name, each in contestants.items()
        }
        for name, times in interleave(runs, options.rounds, warm_ups=1).items():
            found[name][kind] = times | contestants[name].made[prompt]
    exact = {name for name in found if name.startswith("fp32") or name.endswith("F32")}
    for kind in PROMPTS:
        texts = {tuple(found[name][kind]["tokens"]) for name in exact}
        print(f"{kind}: {len(texts)} different texts of {', '.join(sorted(exact))}")
    print(f"{'':24}" + "".join(f"{kind:>26}" for kind in PROMPTS) + f"{'tokens/s':>12}")
    for name, rows in found.items():
        cells = [
            f"{row['median_ms']:7.2f} ms ({row['tokens_per_pass']:.2f} a pass)"
            for row in rows.values()
        ]
        speed = statistics.mean(1000 / row["median_ms"] for row in rows.values())
        print(f"{name:24}" + "".join(f"{cell:>26}" for cell in cells) + f"{speed:12.1f}")
    if options.json:
        about = {"machine": machine(), "llama.cpp": facts(), "new_tokens": options.new_tokens}
        options.json.write_text(json.dumps(about | {"found": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
