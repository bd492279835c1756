"""Compare the speed of small denoisers with the speed of autoregressive models in llama.cpp.

    python -m benchmarks.speed.edge [--sizes 0.6B,1.7B,4B] [--threads 1,2] [--rounds 5] [--json FILE]

The denoisers and the autoregressive models have the shapes of Qwen3 with a tied embedding, as in
SDAR. The weights are random. Each model runs in a separate process, and the processes take turns.
The script times:

- "pass of T": this runtime computes and scores T tokens, with 256 cached tokens.
- "prompt of T": this runtime computes T tokens with an empty cache and scores only the last one, as
  llama.cpp does for a prompt.
- "llama.cpp token": llama.cpp decodes one token after 256 earlier tokens.
- "plain read": the file with the weights is mapped into memory and read once, with as many threads
  as the models use.

Needs benchmarks/requirements.txt. If llama.cpp is missing, only this runtime is measured.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.shapes import TIED, bundle_of, machine
from benchmarks.timing import interleave, show

CACHED = 256
TOKENS = (1, 4, 8, 32, 256)
PROMPTS = (32, 256)
OURS = {"int4": "int4-rtn", "int8": "int8"}
THEIRS = {"int4": "Q4_0", "int8": "Q8_0"}


class Ours:
    """A bundle in this project's runtime.

    ``time`` returns the seconds of a pass that scores ``rows`` of its tokens.
    """

    def __init__(self, size: str, precision: str, threads: int) -> None:
        import dlm_runtime

        self.path = bundle_of(size, precision)
        self.weights_bytes = (self.path / "denoiser.onnx.data").stat().st_size
        began = time.perf_counter()
        self.bundle = dlm_runtime.open(self.path, threads=threads)
        self.open_s = time.perf_counter() - began

    def time(self, tokens: int, cached: int, rows: int) -> float:
        return statistics.median(
            self.bundle.time_passes(tokens, cached, rows, 3 if tokens < 32 else 1)
        )


class Theirs:
    """A GGUF file in llama.cpp.

    ``time`` returns the seconds to decode tokens after earlier tokens. llama.cpp computes logits
    only for the last token.
    """

    def __init__(self, path: Path, threads: int, context: int = 2 * CACHED) -> None:
        from benchmarks.llama import Llama

        self.path = path
        self.weights_bytes = self.path.stat().st_size
        began = time.perf_counter()
        self.model = Llama(self.path, threads, is_causal=True)
        self.open_s = time.perf_counter() - began
        self.model.prepare(1, context)
        self.filled = 0

    def time(self, tokens: int, cached: int, rows: int) -> float:
        assert rows == 1  # _decode computes only the last token's logits
        llama, context = self.model.llama, self.model.context
        memory = llama.llama_get_memory(context)
        if self.filled != cached:
            llama.llama_memory_clear(memory, True)
            self.filled = 0
            if cached:
                self._decode(0, cached)
            self.filled = cached
        began = time.perf_counter()
        self._decode(cached, tokens)
        seconds = time.perf_counter() - began
        llama.llama_memory_seq_rm(memory, 0, cached, -1)
        return seconds

    def _decode(self, first: int, count: int) -> None:
        batch = self.model.batch
        batch.n_tokens = count
        for i in range(count):
            batch.token[i], batch.pos[i], batch.logits[i] = (
                (first + i) * 7919 % self.model.vocab_size,
                first + i,
                i == count - 1,
            )
            batch.seq_id[i][0] = 0
        if self.model.llama.llama_decode(self.model.context, batch):
            raise SystemExit("llama.cpp failed in a pass")
        self.model.llama.llama_get_logits_ith(self.model.context, -1)


class Process:
    """A process in which one model was opened."""

    def __init__(self, *arguments: object) -> None:
        command = [sys.executable, "-m", __spec__.name, "--worker", *map(str, arguments)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.facts = self.ask("facts")

    def ask(self, *what: object) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(what), file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())

    def timed(self, tokens: int, cached: int, rows: int) -> Callable[[], float]:
        return lambda: float(self.ask(tokens, cached, rows))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def work(side: str, size: str, kind: str, threads: str) -> None:
    """Answer requests from stdin until stdin ends."""
    from dlm_export.memory import peak_rss_bytes

    if side == "ours":
        model: Any = Ours(size, kind, int(threads))
    else:
        from benchmarks.gguf_files import gguf_of

        model = Theirs(gguf_of(size, kind), int(threads))
    for line in sys.stdin:
        what = json.loads(line)
        if what == ["facts"]:
            found: Any = {
                "weights_bytes": model.weights_bytes,
                "open_s": model.open_s,
                "peak_rss_bytes": peak_rss_bytes(),
            }
        else:
            found = model.time(*what)
        print(json.dumps(found), flush=True)


class PlainRead:
    """A file that is mapped into memory.

    ``time`` returns the seconds to read the file once. Each thread reads a part of the file.
    """

    def __init__(self, path: Path, threads: int) -> None:
        from concurrent.futures import ThreadPoolExecutor

        data = np.memmap(path, np.int32, mode="r", shape=(path.stat().st_size // 4,))
        self.parts = np.array_split(data, threads)
        self.pool = ThreadPoolExecutor(threads)

    def time(self) -> float:
        began = time.perf_counter()
        list(self.pool.map(np.max, self.parts))
        return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sizes", default="0.6B,1.7B", help=f"sizes, with commas: {', '.join(TIED)}"
    )
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    has_llama = all(importlib.util.find_spec(module) for module in ("llama_cpp", "gguf"))
    if not has_llama:
        print("llama.cpp is not measured: pip install -r benchmarks/requirements.txt")
    result: dict[str, Any] = {"machine": machine(), "rounds": arguments.rounds, "rows": {}}
    for size in arguments.sizes.split(","):
        for threads in map(int, arguments.threads.split(",")):
            for bits, precision in OURS.items():
                ours = Process("ours", size, precision, threads)
                theirs = Process("theirs", size, THEIRS[bits], threads) if has_llama else None
                runs = {f"pass of {count}": ours.timed(count, CACHED, count) for count in TOKENS}
                runs |= {f"prompt of {count}": ours.timed(count, 0, 1) for count in PROMPTS}
                weights = bundle_of(size, precision) / "denoiser.onnx.data"
                runs["plain read"] = PlainRead(weights, threads).time
                if theirs is not None:
                    runs["llama.cpp token"] = theirs.timed(1, CACHED, 1)
                    runs |= {
                        f"llama.cpp prompt of {count}": theirs.timed(count, 0, 1)
                        for count in PROMPTS
                    }
                rows = interleave(runs, arguments.rounds)
                about = {
                    "ours": ours.facts | {"peak_rss_bytes": ours.ask("facts")["peak_rss_bytes"]}
                }
                if theirs is not None:
                    about["theirs"] = theirs.facts
                title = f"{size}, {bits}, {threads} thread{'s' * (threads > 1)}"
                show(title, rows, "pass of 4")
                print(f"  {json.dumps(about)}", flush=True)
                result["rows"][title] = {"passes": rows, "about": about}
                for process in filter(None, (ours, theirs)):
                    process.close()
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(*sys.argv[2:])
    else:
        main()
