"""Programs and libraries of different ages, and the fields of a policy wherever they are said.

A program of today's header runs with today's library, and with one whose structs have grown by a
field. That library's header and sources are today's with a few lines added, which is at the same
time the proof of how few lines a field takes.
"""

from __future__ import annotations

import ctypes
import json
import re
import shutil
from dataclasses import dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from test_native import HEADER, PRESENT, SOURCE, STRICT, run, succeed, tool

import dlm_runtime
from dlm_runtime import Policy, _native

PROGRAM = Path(__file__).parent / "abi_program.c"
PRESET: dict[str, Any] = json.loads(
    (resources.files(dlm_runtime) / "manifest.schema.json").read_text()
)["$defs"]["preset"]
GROWING = ("dlm_denoiser", "dlm_policy", "dlm_open_options", "dlm_generate_options")
# A library that runs callbacks and opens bundles without an engine: the quickest to compile.
ENGINES = ["callback_engine", "host_cache", "no_tensorrt"]
TEXT = [
    "c_api_text",
    "chat_template",
    "normalisation",
    "tokenizer_decode",
    "tokenizer_encode",
    "text_file",
]
LOOP = [
    "arena",
    "constrained",
    "guidance",
    "loop",
    "plan",
    "policy",
    "proposer",
    "sampling",
    "scheduler",
    "shared_pass",
]
UNITS = [
    *ENGINES,
    *LOOP,
    *TEXT,
    "automaton",
    "manifest",
    "c_api",
    "graph_contract",
    "json",
    "sha256",
    "marginals",
    "viterbi",
    "reachable_states",
]
COMPILE = ["-std=c++17", '-DDLM_VERSION="9.9.9"']
PRINTED_FIELDS = 16  # of a policy, which the program prints
KINDS = {"str": 0, "int": 1, "float": 2, "UInt64": 3}  # DLM_FIELD_...


def _grow(text: str, *changes: tuple[str, str]) -> str:
    for there, instead in changes:
        assert text.count(there) == 1, there
        text = text.replace(there, instead)
    return text


@dataclass(frozen=True)
class Grown:
    """A tree in which every struct that a caller fills ends with a field ``novelty``, and its
    library.
    """

    include: Path
    sources: Path
    library: Path


@pytest.fixture(scope="session")
def grown(tmp_path_factory: pytest.TempPathFactory) -> Grown:
    folder = tmp_path_factory.mktemp("grown")
    include, sources = (
        Path(shutil.copytree(SOURCE / name, folder / name)) for name in ("include", "src")
    )
    header = include / "dlm_runtime.h"
    header.write_text(
        _grow(
            header.read_text(),
            *((f"}} {name};", f"int32_t novelty;\n}} {name};") for name in GROWING),
        )
    )
    table = sources / "decode" / "policy.h"
    field = "  NUMBER(novelty, int32_t, 7, 0, 9)"
    table.write_text(
        _grow(
            table.read_text(),
            (last := "  NUMBER(cfg_scale, double, 0, 0, 1000)", f"{last} \\\n{field}"),
        )
    )
    sizes = sources / "api" / "sized.h"
    others = {
        "dlm_denoiser": "visible_block",
        "dlm_open_options": "allow_fallback",
        "dlm_generate_options": "max_steps",
    }
    sizes.write_text(
        _grow(
            sizes.read_text(),
            *(
                (
                    now := f"DLM_SIZE_UP_TO({name}, {last})",
                    f"{now}, DLM_SIZE_UP_TO({name}, novelty)",
                )
                for name, last in others.items()
            ),
        )
    )
    without = sources / "without_engine.cc"
    without.write_text(
        '#include "engines/engine.h"\n#include "base/error.h"\n'
        "std::unique_ptr<dlm::Engine> dlm::open_onnxruntime(const GraphSpec&, const std::string&, int,\n"
        "                                                    const ProviderChoice&) {\n"
        '  fail(DLM_UNSUPPORTED, "none");\n}\n'
    )
    library = folder / "libdlm_runtime.so"
    flags = ["-O0", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread"]
    units = [next(sources.rglob(f"{name}.cc")) for name in UNITS]
    succeed(
        tool("g++"),
        *COMPILE,
        *flags,
        f"-I{include}",
        f"-I{sources}",
        *units,
        without,
        "-o",
        library,
    )
    return Grown(include, sources, library)


def _program(folder: Path, header: Path, library: Path, *flags: str) -> Path:
    """The program of that header, linked with that library."""
    (folder / "include").mkdir()
    shutil.copy(header, folder / "include" / "dlm_runtime.h")
    out = folder / "program"
    link = [library, f"-Wl,-rpath,{library.parent}"]
    succeed(
        tool("gcc"), *STRICT, "-O0", *flags, "-I", folder / "include", PROGRAM, "-o", out, *link
    )
    return out


def _expected(bundle: Path, novelty: bool = False) -> list[str]:
    """What the program prints where nothing is refused, BUNDLE is not run, and its structs have the
    new field or not.
    """
    more = ["novelty 7"] if novelty else []

    def line(policy: Policy) -> list[str]:
        values = [getattr(policy, field.name) for field in fields(Policy)[:PRINTED_FIELDS]]
        return [
            " ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values),
            *more,
        ]

    with dlm_runtime.open(bundle, engine="none") as opened:
        preset = opened.policy("fast-dllm")
    filled = "3 1 2 3 4 5 6 0 1 2 committed 8 in 8"
    return ["ABI 3, header 3", *line(Policy()), "10 16", filled, filled, *line(preset)]


# ---- Ages ----


def test_a_program_of_this_header_runs_with_this_library(
    llada_bundle: Path, tmp_path: Path
) -> None:
    program = _program(tmp_path, HEADER, PRESENT)
    out = succeed(program, llada_bundle, "onnxruntime").splitlines()
    with dlm_runtime.open(llada_bundle) as bundle:
        done = bundle.generate(tokens=[3, 1], max_new_tokens=8, preset="fast-dllm")
    tokens = " ".join(map(str, done.tokens))
    assert out == [*_expected(llada_bundle), f"{tokens} committed 8 in {done.nfe}"]


def test_a_program_runs_with_a_library_whose_structs_have_grown(
    grown: Grown, llada_bundle: Path, tmp_path: Path
) -> None:
    program = _program(tmp_path, HEADER, grown.library)
    assert succeed(program, llada_bundle, "none").splitlines() == _expected(llada_bundle)


def test_a_program_of_the_grown_header_gets_the_new_fields(
    grown: Grown, llada_bundle: Path, tmp_path: Path
) -> None:
    program = _program(tmp_path, grown.include / "dlm_runtime.h", grown.library, "-DNOVELTY")
    assert succeed(program, llada_bundle, "none").splitlines() == _expected(
        llada_bundle, novelty=True
    )


def test_a_program_of_a_newer_header_is_refused_with_a_sentence(
    grown: Grown, llada_bundle: Path, tmp_path: Path
) -> None:
    program = _program(tmp_path, grown.include / "dlm_runtime.h", PRESENT)
    out = succeed(program, llada_bundle, "none").splitlines()
    refusals = [line for line in out if "struct_size" in line]
    assert (
        len(refusals) == 2
    )  # a denoiser and options for opening; there is nothing to generate from
    for line, name in zip(refusals, ("dlm_denoiser", "dlm_open_options"), strict=True):
        assert re.match(
            rf"{name}: struct_size is \d+, and this library \([0-9.]+\) knows \d+ bytes of it: ",
            line,
        )
        assert "a newer library" in line
    assert not any("was written" in line for line in out)


LEAST = _native.Policy.seed.offset - ctypes.sizeof(
    _native.Policy
)  # where the first header's last field begins


@pytest.mark.parametrize(
    "change", [-1, 1, LEAST, 8], ids=["less", "more", "a field less than any", "a field more"]
)
def test_policies_that_end_where_no_header_ended_are_refused(
    llada_bundle: Path, change: int
) -> None:
    native = _native.initialised(_native.Policy)
    size = native.struct_size
    native.struct_size += change
    message = ctypes.create_string_buffer(_native.MESSAGE_BYTES)
    with dlm_runtime.open(llada_bundle, engine="none") as bundle:
        status = _native.library().dlm_bundle_preset(
            bundle._handle, None, message, len(message), ctypes.byref(native)
        )
    assert status == 1
    wanted = "newer library" if change > 0 else f"expected {size}: start from dlm_policy_init"
    assert message.value.decode().startswith(f"dlm_policy: struct_size is {size + change}, ")
    assert wanted in message.value.decode()


# ---- The fields of a policy ----


def test_the_dataclass_has_the_fields_of_the_native_table() -> None:
    table = _native.policy_fields()
    assert [row.name.decode() for row in table] == [field.name for field in fields(Policy)]
    for row, field in zip(table, fields(Policy), strict=True):
        assert row.kind == KINDS[str(field.type)], field.name
        assert row.offset == getattr(_native.Policy, field.name).offset, field.name
        assert (row.choices[0].decode() if row.choices else row.initial) == field.default, (
            field.name
        )


def test_the_schema_says_of_a_preset_what_the_native_table_says() -> None:
    table = _native.policy_fields()
    rules = PRESET["properties"]
    assert list(rules) == [row.name.decode() for row in table]
    for row, rule in zip(table, rules.values(), strict=True):
        choices = []
        while row.choices and (choice := row.choices[len(choices)]) is not None:
            choices.append(choice.decode())
        if choices:
            said: dict[str, Any] = {"type": "string", "enum": choices, "default": choices[0]}
        else:
            is_real = row.kind == 2
            highest = (
                row.highest if is_real else min(row.highest, (1 << 63) - 1)
            )  # a reader of JSON takes 63 bits
            said = {"type": "number" if is_real else "integer", "default": row.initial}
            said |= {"minimum": row.lowest, "maximum": highest}
        assert {key: value for key, value in rule.items() if key != "description"} == said


def test_a_field_of_the_header_that_the_table_lacks_does_not_compile(
    grown: Grown, tmp_path: Path
) -> None:
    shutil.copytree(grown.sources, tmp_path / "src")
    shutil.copy(SOURCE / "src" / "decode" / "policy.h", tmp_path / "src" / "decode")
    flags = [*COMPILE, "-fsyntax-only", f"-I{grown.include}"]
    assert (
        run(
            tool("g++"), *flags, f"-I{grown.sources}", grown.sources / "decode" / "policy.cc"
        ).returncode
        == 0
    )
    done = run(tool("g++"), *flags, f"-I{tmp_path}/src", tmp_path / "src" / "decode" / "policy.cc")
    assert done.returncode != 0
    assert "dlm_policy has a field that DLM_POLICY_FIELDS lacks" in done.stderr
