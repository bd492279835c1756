"""Tests of the C ABI.

The library works with programs that were compiled with another version of the header, and all lists
of a policy's fields agree.
"""

from __future__ import annotations

import ctypes
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from test_native import HEADER, SOURCE, run, tool

import dlm_runtime
from dlm_runtime import Policy
from dlm_runtime.abi import native as _native
from dlm_runtime.manifest import schema

COMPILE = ["-std=c++17", '-DDLM_VERSION="9.9.9"', "-fsyntax-only"]
KINDS = {"str": (0,), "int": (1, 3), "float": (2,)}  # DLM_FIELD_...

# ---- Structs of another size ----


def _preset(bundle: dlm_runtime.Bundle, policy: Any) -> tuple[int, str]:
    message = ctypes.create_string_buffer(_native.MESSAGE_BYTES)
    status = _native.library().dlm_bundle_policy(
        bundle._handle.pointer, None, None, message, len(message), ctypes.byref(policy)
    )
    return status, message.value.decode()


@pytest.mark.parametrize("change", [-1, 1, -1000, 8, 64])
def test_a_struct_of_a_size_that_no_header_gave_is_refused_with_a_sentence(
    llada_bundle: Path, change: int
) -> None:
    native = _native.initialised(_native.Policy)
    size = native.struct_size
    native.struct_size = max(size + change, 0)
    with dlm_runtime.open(llada_bundle, engine="none") as bundle:
        status, said = _preset(bundle, native)
    assert status == 1
    wanted = "newer library" if change >= 8 else f"expected {size}: start from dlm_policy_init"
    assert said.startswith(f"dlm_policy: struct_size is {native.struct_size}, ")
    assert wanted in said


def test_a_struct_of_an_older_header_is_filled_up_to_its_end(llada_bundle: Path) -> None:
    size = _native.Policy.seed.offset + 8  # the struct's size when seed was its last field
    room = (ctypes.c_uint8 * ctypes.sizeof(_native.Policy))(*([7] * ctypes.sizeof(_native.Policy)))
    policy = ctypes.cast(room, ctypes.POINTER(_native.Policy))
    _native.library().dlm_policy_init(policy, size)
    with dlm_runtime.open(llada_bundle, engine="none") as bundle:
        assert _preset(bundle, policy.contents) == (0, "")
        assert policy.contents.cache.decode() == bundle.policy().cache
    assert policy.contents.struct_size == size
    assert all(byte == 7 for byte in room[size:]), "written behind the end"


def test_a_request_of_an_older_header_has_the_defaults_of_what_it_lacks() -> None:
    request = _native.initialised(_native.Request)
    request.struct_size = _native.Request.steps.offset  # the struct ends with the policy
    request.max_new_tokens, request.max_steps = 2, -1  # max_steps is beyond the end of the struct
    given = (ctypes.c_int32 * 1)(5)
    request.tokens, request.token_count = ctypes.cast(given, _native.i32p), 1
    result = ctypes.POINTER(_native.Result)()
    from test_loop import ArithmeticDenoiser

    bundle = ArithmeticDenoiser().bundle
    with bundle._handle.session() as session:
        status = _native.library().dlm_session_generate(
            session, ctypes.byref(request), ctypes.byref(result)
        )
        assert status == 0
        assert result.contents.length == 3


def _generate(**fields: Any) -> tuple[int, str]:
    """Return the status and message of a request on a denoiser without a tokenizer."""
    from test_loop import ArithmeticDenoiser

    request = _native.initialised(_native.Request)
    for name, value in fields.items():
        setattr(request, name, value)
    with ArithmeticDenoiser().bundle._handle.session() as session:
        library = _native.library()
        status = library.dlm_session_generate(session, ctypes.byref(request), None)
        return status, library.dlm_session_last_error(session).decode()


BYTES = ctypes.cast(ctypes.c_char_p(b"text"), ctypes.POINTER(ctypes.c_char))
IDS = ctypes.cast((ctypes.c_int32 * 1)(5), _native.i32p)
STRINGS = (ctypes.c_char_p * 1)(b"stop")
MESSAGES = (_native.Message * 1)(_native.Message(b"user", BYTES, 4))


@pytest.mark.parametrize(
    ("name", "count", "value"),
    [
        ("prompt", "prompt_size", BYTES),
        ("tokens", "token_count", IDS),
        ("messages", "message_count", MESSAGES),
        ("stop_strings", "stop_count", STRINGS),
    ],
)
def test_a_pointer_and_its_count_are_checked_together(name: str, count: str, value: Any) -> None:
    forgotten = f"{name} is set, but {count} is 0: set {count}, or leave {name} NULL"
    assert _generate(**{name: value, "max_new_tokens": 2}) == (1, forgotten)
    assert _generate(**{count: 1, "max_new_tokens": 2}) == (1, f"{name} is NULL")
    status, said = _generate(**{name: value, count: ctypes.c_size_t(-1).value})
    assert (status, said.split(":")[0]) == (1, name)


def test_an_empty_prompt_is_a_prompt(demo_bundle: Path) -> None:
    """The chat template or the tokenizer may add tokens to it."""
    with dlm_runtime.open(demo_bundle) as bundle, bundle._handle.session() as session:
        wanted = bundle.generate(prompt="", max_new_tokens=4).tokens
        request = _native.initialised(_native.Request)
        request.prompt = ctypes.cast(ctypes.c_char_p(b""), ctypes.POINTER(ctypes.c_char))
        request.max_new_tokens = 4
        result = ctypes.POINTER(_native.Result)()
        call = (session, ctypes.byref(request), ctypes.byref(result))
        assert _native.library().dlm_session_generate(*call) == 0
        assert result.contents.tokens[: result.contents.length] == wanted


@pytest.mark.parametrize("wanted", [None, ctypes.c_size_t(-1).value])
def test_a_decode_callback_that_never_has_enough_room_ends_the_request(wanted: int | None) -> None:
    calls = 0

    def decode(_: Any, ids: Any, count: int, text: Any, capacity: int, size: Any) -> int:
        nonlocal calls
        calls += 1
        size[0] = capacity + 1 if wanted is None else wanted
        return 0

    callback = _native.DecodeFn(decode)
    status, said = _generate(
        tokens=IDS, token_count=1, max_new_tokens=2, text=_native.TEXT_RESULT, decode=callback
    )
    assert status == 1
    assert "the decode callback set *size to " in said
    assert calls == (2 if wanted is None else 1)


def test_log_lines_reach_the_program_that_asks_for_them(demo_bundle: Path) -> None:
    lines: list[tuple[int, str]] = []

    def on_log(_: Any, severity: int, line: int) -> None:
        lines.append((severity, ctypes.string_at(line).decode()))

    options = _native.initialised(_native.HEADER.structs["dlm_open_options"])
    engine = _native.onnxruntime_library()
    options.engine_library = None if engine is None else str(engine).encode()
    options.on_log = _native.HEADER.callbacks["dlm_log_fn"](on_log)
    library, message = _native.library(), ctypes.create_string_buffer(_native.MESSAGE_BYTES)

    def opened(severity: int) -> int:
        bundle = ctypes.c_void_p()
        options.log_severity = severity
        status = library.dlm_bundle_open(
            str(demo_bundle).encode(),
            ctypes.byref(options),
            message,
            len(message),
            ctypes.byref(bundle),
        )
        library.dlm_bundle_destroy(bundle)
        return int(status)

    assert opened(_native.HEADER.constants["DLM_LOG_FATAL"]) == 0
    assert not lines
    assert opened(_native.HEADER.constants["DLM_LOG_INFO"]) == 0
    assert lines
    assert all(severity >= 1 and line.isprintable() for severity, line in lines)
    assert opened(5) == 1
    assert message.value == b"log_severity = 5 is outside 0..4"


# ---- The fields of a policy ----


def test_the_dataclass_has_the_fields_of_the_native_table() -> None:
    table = _native.policy_fields()
    assert [row.name.decode() for row in table] == [field.name for field in fields(Policy)]
    for row, field in zip(table, fields(Policy), strict=True):
        assert row.kind in KINDS[str(field.type)], field.name
        assert row.offset == getattr(_native.Policy, field.name).offset, field.name
        assert (row.choices[0].decode() if row.choices else row.initial) == field.default, (
            field.name
        )


def test_the_schema_has_the_fields_of_the_native_table() -> None:
    rules = schema()["$defs"]["preset"]["properties"]
    assert rules["commit"]["enum"][:2] == ["static", "threshold"]
    assert rules["threshold"] == {
        "description": "threshold of dlm_policy: see dlm_runtime.h.",
        "type": "number",
        "minimum": 0,
        "maximum": 1,
        "default": 0.9,
    }
    assert rules["seed"]["maximum"] == (1 << 63) - 1, "a reader of JSON takes 63 bits"
    for name, rule in rules.items():
        assert rule["default"] == getattr(Policy(), name), name


def test_a_field_of_the_header_that_the_table_lacks_does_not_compile(tmp_path: Path) -> None:
    include = Path(shutil.copytree(HEADER.parent, tmp_path / "include"))
    policy = SOURCE / "src" / "decode" / "policy.cc"
    flags = [*COMPILE, f"-I{include}", f"-I{SOURCE / 'src'}"]
    header = include / "dlm_runtime.h"
    text = header.read_text()
    assert text.count("} dlm_policy;") == 1
    header.write_text(text.replace("} dlm_policy;", "double novelty;\n} dlm_policy;"))
    done = run(tool("g++"), *flags, policy)
    assert done.returncode != 0
    assert "DLM_POLICY_FIELDS must list the fields of dlm_policy" in done.stderr
