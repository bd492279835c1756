"""Builds and runs every example program that embeds the runtime, with the commands of its page.

C and C++ programs run under sanitizers. The examples in Rust and Go and the service are built as
well. g++ is always present, because the project needs it. Tests that need cargo, go, libmicrohttpd
or jansson are skipped if a program or library is missing. The message of a skipped test names the
missing program or library.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

import pytest
import tokenizer_files
from checkpoints import bert_config, write_checkpoint
from jsonschema import Draft202012Validator
from test_gemma_constraints import SCHEMA, gemma_bundle
from test_native import (  # noqa: F401  (fixtures)
    BINDINGS,
    EXAMPLE,
    HEADER,
    NEW_TOKENS,
    PROMPT,
    SANITIZE,
    TOOLS,
    Request,
    compile_c,
    request_of_example,
    run,
    sanitized,
    succeed,
    tool,
)

import dlm_runtime
from dlm_export.build import BuildOptions, build
from dlm_runtime import embedding
from dlm_runtime.abi import native as _native

STRICT_CXX = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-pedantic", "-Wconversion"]
LEAKS = {"ASAN_OPTIONS": "detect_leaks=1"}
PROMPTS = ["turn on the kitchen lights", "play jazz", "lock the front door please"]
LIMITS = [
    "--max-tokens",
    "400",
    "--body-bytes",
    "4096",
    "--deadline-ms",
    "600000",
    "--drain-ms",
    "600000",
]
CHAT = {"messages": [{"role": "user", "content": PROMPTS[1]}], "max_tokens": NEW_TOKENS}


def found(name: str) -> str:
    """Return the path of a program. If the machine does not have the program, skip the test."""
    path = shutil.which(name, path=TOOLS)
    if path is None:
        pytest.skip(f"{name} is not installed")
    return path


def compile_cxx(output: Path, source: Path, library: Path) -> Path:
    link = ["-L", str(library), "-ldlm_runtime", f"-Wl,-rpath,{library}", "-pthread"]
    succeed(tool("g++"), *STRICT_CXX, *SANITIZE, "-I", HEADER.parent, source, "-o", output, *link)
    return output


@pytest.fixture(scope="session")
def answers(demo_bundle: Path) -> dict[str, str]:
    """The answers that Python generates for the prompts, to compare them with the programs'
    answers.

    The key is ``PROMPT`` for a prompt, and ``chat: PROMPT`` for a chat with the message PROMPT.
    """
    out = {}
    with dlm_runtime.open(demo_bundle) as bundle:
        for prompt in PROMPTS:
            out[prompt] = bundle.generate(prompt=prompt, max_new_tokens=NEW_TOKENS).text
            chat = [{"role": "user", "content": prompt}]
            out[f"chat: {prompt}"] = bundle.generate(chat=chat, max_new_tokens=NEW_TOKENS).text
    assert all(out.values())
    return out


# ---- C ----


@pytest.fixture(scope="session")
def fill(sanitized: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    return compile_c(
        tmp_path_factory.mktemp("embed") / "fill", EXAMPLE / "fill.c", sanitized, *SANITIZE
    )


@pytest.fixture(scope="session")
def protein_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A masked language model with random weights, whose tokens are the residues of a protein."""
    folder = tmp_path_factory.mktemp("protein")
    config = bert_config(vocab_size=25, mask_token_id=4)
    checkpoint = write_checkpoint(folder / "checkpoint", config)
    (checkpoint / "tokenizer.json").write_text(tokenizer_files.made("residues"))
    build(checkpoint, folder / "bundle", BuildOptions(check_parity=False))
    return folder / "bundle"


SEQUENCE = "QV[MASK]LVQ[MASK]GAEV[MASK][MASK]PG"


@pytest.mark.parametrize(("steps", "nfe"), [(1, 1), (2, 2), (0, 4)])
def test_masked_residues_are_filled_as_in_python(
    fill: Path, protein_bundle: Path, steps: int, nfe: int
) -> None:
    done = run(fill, protein_bundle, str(steps), SEQUENCE, **LEAKS)
    with dlm_runtime.open(protein_bundle) as bundle:
        wanted = bundle.infill(SEQUENCE, steps=steps, block_length=0)
    assert (done.returncode, done.stdout) == (0, wanted.text + "\n"), done.stderr
    assert re.fullmatch(rf"{nfe} passes, \d+\.\d+ s\n", done.stderr)
    assert wanted.generation.nfe == nfe


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        ([], 2, "usage: fill BUNDLE PASSES TEXT"),
        (["{bundle}", "-1", "Q"], 2, "usage: "),
        (["/no/such/bundle", "1", "Q"], 1, "fill: NOT_FOUND: /no/such/bundle"),
        (["{bundle}", "1", "Q" * 70], 1, "fill: INVALID_ARGUMENT: "),
    ],
)
def test_a_text_that_cannot_be_filled_says_why(
    fill: Path, protein_bundle: Path, arguments: list[str], code: int, sentence: str
) -> None:
    given = [argument.replace("{bundle}", str(protein_bundle)) for argument in arguments]
    done = run(fill, *given, **LEAKS)
    assert (done.returncode, done.stdout) == (code, "")
    assert sentence in done.stderr


@pytest.mark.filterwarnings("ignore::dlm_runtime.ConstraintWarning")
def test_a_c_program_gets_json_as_python_does(sanitized: Path, tmp_path: Path) -> None:  # noqa: F811
    bundle = gemma_bundle(tmp_path)
    program = compile_c(tmp_path / "generate", EXAMPLE / "generate.c", sanitized, *SANITIZE)
    text = succeed(program, bundle, "64", "the fox", json.dumps(SCHEMA))
    Draft202012Validator(SCHEMA).validate(json.loads(text))
    with dlm_runtime.open(bundle, threads=1) as opened:
        assert (
            text == f"{opened.generate(prompt='the fox', max_new_tokens=64, schema=SCHEMA).text}\n"
        )
    failed = run(program, bundle, "64", "the fox", '{"type": "word"}')
    assert failed.returncode == 1
    assert "INVALID_ARGUMENT: schema:" in failed.stderr


@pytest.fixture(scope="session")
def cancel(sanitized: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    return compile_c(
        tmp_path_factory.mktemp("embed") / "cancel", EXAMPLE / "cancel.c", sanitized, *SANITIZE
    )


def test_a_request_that_nobody_ends_comes_to_its_end(
    cancel: Path, demo_bundle: Path, answers: dict[str, str]
) -> None:
    done = run(cancel, demo_bundle, str(NEW_TOKENS), "1000", PROMPTS[0], **LEAKS)
    assert (done.returncode, done.stdout) == (0, answers[PROMPTS[0]] + "\n"), done.stderr
    assert re.fullmatch(r"(stop|length): \d+ passes, 0 positions undecided\n", done.stderr)


def test_a_request_whose_time_is_over_is_ended_by_another_thread(
    cancel: Path, demo_bundle: Path
) -> None:
    done = run(cancel, demo_bundle, "400", "0", PROMPTS[0], **LEAKS)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"cancelled: \d+ passes, [1-9]\d* positions undecided\n", done.stderr)


def test_ctrl_c_ends_a_request_with_what_it_has(cancel: Path, demo_bundle: Path) -> None:
    environment = os.environ | LEAKS | {"DLM_ONNXRUNTIME": _native.onnxruntime_library() or ""}
    command = [cancel, demo_bundle, "400", "1000", PROMPTS[0]]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        status = Path(f"/proc/{process.pid}/status")
        while (
            not int(re.findall(r"SigBlk:\s*(\w+)", status.read_text())[0], 16)
            & 1 << signal.SIGINT - 1
        ):
            time.sleep(0.001)
        process.send_signal(signal.SIGINT)  # the signal is pending until the program handles it
        _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert re.fullmatch(r"cancelled: \d+ passes, [1-9]\d* positions undecided\n", said)


def test_threads_come_to_what_one_session_comes_to(
    sanitized: Path,  # noqa: F811
    demo_bundle: Path,
    answers: dict[str, str],
    tmp_path: Path,
) -> None:
    threads = compile_c(tmp_path / "threads", EXAMPLE / "threads.c", sanitized, *SANITIZE)
    lines = succeed(threads, demo_bundle, str(NEW_TOKENS), "3", *PROMPTS, **LEAKS).splitlines()
    assert lines[:3] == [answers[prompt] for prompt in PROMPTS]
    assert re.fullmatch(r"sessions: 3 requests in .*, 0 not as alone", lines[4])
    assert re.fullmatch(r"scheduler: 3 requests in .*, 0 not as alone", lines[5])
    assert "usage: threads" in run(threads, demo_bundle, "0", "6", "x").stderr
    assert "NOT_FOUND: /no/such" in run(threads, "/no/such", "8", "6", "x", **LEAKS).stderr


# ---- C++ ----


def test_what_the_cpp_header_promises_holds(sanitized: Path, tmp_path: Path) -> None:  # noqa: F811
    driver = compile_cxx(
        tmp_path / "cpp_driver", Path(__file__).parent / "cpp_driver.cc", sanitized
    )
    out = succeed(driver, **LEAKS)
    assert re.search(r"^[1-9]\d* passed, 0 failed$", out, flags=re.MULTILINE), out


def test_cpp_example_answers_as_python_does(
    sanitized: Path,  # noqa: F811
    demo_bundle: Path,
    answers: dict[str, str],
    tmp_path: Path,
) -> None:
    converse = compile_cxx(tmp_path / "converse", EXAMPLE / "converse.cc", sanitized)
    lines = succeed(converse, demo_bundle, str(NEW_TOKENS), *PROMPTS, **LEAKS).splitlines()
    assert lines[0:6:2] == [answers[f"chat: {prompt}"] for prompt in PROMPTS]
    assert re.fullmatch(r"3 requests in \d+ shared passes, 0 not as alone", lines[6])
    done = run(converse, "/no/such/bundle", "8", "x", **LEAKS)
    assert (done.returncode, done.stderr.split(": ")[:3]) == (
        1,
        ["converse", "NOT_FOUND", "/no/such/bundle"],
    )


# ---- Rust and Go ----


@pytest.fixture(scope="session")
def wrapper_variables(
    demo_bundle: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """The environment variables that the tests of the wrappers read: a bundle, a copy of it with
    effort levels, and a constraint.
    """
    folder = tmp_path_factory.mktemp("wrappers")
    levels = Path(shutil.copytree(demo_bundle, folder / "levels"))
    manifest = json.loads((levels / "manifest.json").read_text())
    presets = manifest["loop"]["presets"]
    loops = {"instant": "fast-dllm", "low": "fast-dllm", "medium": "llada", "high": "llada"}
    manifest["loop"]["effort"] = {
        "preset": "llada",
        "levels": {level: presets[name] for level, name in loops.items()},
    }
    (levels / "manifest.json").write_text(json.dumps(manifest))
    with dlm_runtime.open(demo_bundle) as bundle:
        (folder / "yes-no.automaton").write_bytes(
            bundle.constraint(enum=["yes", "no"], cache_dir=None).data
        )
    return {
        "DLM_BUNDLE": str(demo_bundle),
        "DLM_EFFORT_BUNDLE": str(levels),
        "DLM_AUTOMATON": str(folder / "yes-no.automaton"),
        "PKG_CONFIG": found("pkg-config"),
        "PKG_CONFIG_PATH": str(embedding.prefix() / "lib" / "pkgconfig"),
    }


@pytest.fixture(scope="session")
def cargo(
    wrapper_variables: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., str]:
    """A function that runs cargo.

    ``cargo("where")`` returns the folder with the programs that cargo builds.
    """
    program, target = found("cargo"), tmp_path_factory.mktemp("rust")
    home = os.environ.get("CARGO_HOME", str(Path.home() / ".cargo"))
    variables = {
        "CARGO_TARGET_DIR": str(target),
        "CARGO_HOME": home,
        "RUSTFLAGS": "-Dwarnings",
        "RUSTDOCFLAGS": "-Dwarnings",
    }
    if run(program, "--version", **variables).returncode:
        pytest.skip("cargo has no toolchain here: rustup default stable")

    def run_cargo(
        command: str, *options: str, manifest: Path = BINDINGS / "rust" / "Cargo.toml"
    ) -> str:
        if command == "where":
            return str(target)
        given = [command, "--offline", "--manifest-path", str(manifest), *options]
        return succeed(program, *given, **variables, **wrapper_variables)

    return run_cargo


def check_schedule(
    program: Path, demo_bundle: Path, answers: dict[str, str], automaton: str
) -> None:
    """Check the example program that uses a scheduler, once with a preset and once with a
    constraint.
    """
    assert succeed(program, demo_bundle, "-", "-", *PROMPTS).splitlines() == [
        answers[prompt] for prompt in PROMPTS
    ]
    assert set(succeed(program, demo_bundle, "fast-dllm", automaton, *PROMPTS).split()) <= {
        "yes",
        "no",
    }
    wrong = run(program, demo_bundle, "slow", "-", "x")
    assert (wrong.returncode, wrong.stdout) == (1, "")
    assert wrong.stderr.startswith(
        'schedule: NOT_FOUND: preset "slow" is not one of this bundle\'s: llada, fast-dllm'
    )
    assert run(program, demo_bundle).returncode == 2


def test_rust_examples_answer_as_python_does(
    cargo: Callable[..., str],
    wrapper_variables: dict[str, str],
    demo_bundle: Path,
    request_of_example: Request,  # noqa: F811
    answers: dict[str, str],
) -> None:
    cargo("build", "--locked")
    programs = Path(cargo("where")) / "debug"
    done = run(programs / "generate", *request_of_example.arguments)
    assert (done.returncode, done.stdout) == (0, request_of_example.answer + "\n"), done.stderr
    check_schedule(programs / "schedule", demo_bundle, answers, wrapper_variables["DLM_AUTOMATON"])


def test_the_rust_wrapper_keeps_what_it_promises(cargo: Callable[..., str]) -> None:
    assert "ok. 10 passed; 0 failed" in cargo("test", "--locked", "--test", "session")


@pytest.mark.parametrize("kind", ["static", pytest.param("shared", marks=pytest.mark.slow)])
def test_a_crate_that_depends_on_the_rust_wrapper_starts(
    cargo: Callable[..., str],
    demo_bundle: Path,
    request_of_example: Request,  # noqa: F811
    tmp_path: Path,
    kind: str,
) -> None:
    """By default, the wrapper links the native library statically.

    With the feature ``shared``, the wrapper links the shared library. The crate then needs the
    build script that the wrapper's documentation shows.
    """
    is_shared = kind == "shared"
    features = ', features = ["shared"]' if is_shared else ""
    (tmp_path / "src").mkdir()
    (tmp_path / "Cargo.toml").write_text(
        f'[package]\nname = "dependent-{kind}"\nversion = "0.1.0"\nedition = "2021"\n\n[dependencies]\n'
        f'dlm-runtime = {{ path = "{BINDINGS / "rust"}"{features} }}\n'
    )
    (tmp_path / "src" / "main.rs").write_text(
        (BINDINGS / "rust" / "src" / "bin" / "generate.rs")
        .read_text()
        .replace("usage: generate", "usage: dependent")
    )
    if is_shared:
        documented = re.search(
            r"^//! (println!.*)$", (BINDINGS / "rust" / "build.rs").read_text(), flags=re.MULTILINE
        )
        assert documented is not None
        (tmp_path / "build.rs").write_text(f"fn main() {{ {documented[1]} }}\n")
    cargo("build", manifest=tmp_path / "Cargo.toml")
    program = Path(cargo("where")) / "debug" / f"dependent-{kind}"
    assert ("libdlm_runtime" in succeed("ldd", program)) == is_shared
    assert succeed(program, *request_of_example.arguments) == request_of_example.answer + "\n"


@pytest.fixture(scope="session")
def go(
    wrapper_variables: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., str]:
    """Return a function that runs the command ``go`` in the folder of the Go module."""
    program, cache = found("go"), tmp_path_factory.mktemp("go")
    variables = {
        "GOCACHE": str(cache),
        "GOFLAGS": "-mod=readonly",
        "GOPROXY": "off",
        "CGO_ENABLED": "1",
    }
    return lambda *words: succeed(
        "env", "-C", BINDINGS / "go", program, *words, **variables, **wrapper_variables
    )


def test_go_examples_answer_as_python_does(
    go: Callable[..., str],
    wrapper_variables: dict[str, str],
    demo_bundle: Path,
    request_of_example: Request,  # noqa: F811
    answers: dict[str, str],
    tmp_path: Path,
) -> None:
    """The programs find the native library through the rpath in the pkg-config file."""
    go("build", "-o", tmp_path, "./generate", "./schedule")
    done = run(tmp_path / "generate", *request_of_example.arguments)
    assert (done.returncode, done.stdout) == (0, request_of_example.answer + "\n"), done.stderr
    missing = run(tmp_path / "generate", "/no/such/bundle", "8", "x")
    assert (missing.returncode, missing.stdout) == (1, "")
    assert missing.stderr.startswith("generate: NOT_FOUND: /no/such/bundle")
    check_schedule(tmp_path / "schedule", demo_bundle, answers, wrapper_variables["DLM_AUTOMATON"])


@pytest.mark.slow
def test_the_go_wrapper_keeps_what_it_promises(go: Callable[..., str]) -> None:
    go("vet", ".")
    assert go("test", ".").startswith("ok ")


# ---- The service ----


@pytest.fixture(scope="session")
def serve(sanitized: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    pkg_config = found("pkg-config")
    libraries = ["libmicrohttpd", "jansson"]
    for name in libraries:
        if run(pkg_config, "--exists", name).returncode:
            pytest.skip(f"{name} is not installed (Debian: libmicrohttpd-dev, libjansson-dev)")
    flags = succeed(pkg_config, "--cflags", "--libs", *libraries).split()
    program = tmp_path_factory.mktemp("serve") / "serve"
    link = ["-L", str(sanitized), "-ldlm_runtime", f"-Wl,-rpath,{sanitized}", *flags, "-pthread"]
    strict = ["-std=c99", "-Wall", "-Wextra", "-Werror", "-pedantic", "-Wconversion"]
    sources = sorted((EXAMPLE / "serve").glob("*.c"))
    succeed(tool("gcc"), *strict, *SANITIZE, "-I", HEADER.parent, *sources, "-o", program, *link)
    return program


@dataclass
class Service:
    """A running example server. After the server has stopped, ``said`` contains its output."""

    process: subprocess.Popen[str]
    port: int
    said: str = ""

    def connect(self) -> HTTPConnection:
        return HTTPConnection("127.0.0.1", self.port, timeout=60)

    def ask(self, method: str, path: str, body: Any = None) -> tuple[HTTPResponse, bytes]:
        """Send a request. Returns the answer and its complete body."""
        connection = self.connect()
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(method, path, data)
        response = connection.getresponse()
        content = response.read()
        connection.close()
        return response, content

    def complete(self, **fields: Any) -> tuple[int, dict[str, Any]]:
        response, content = self.ask("POST", "/v1/completions", fields)
        return response.status, json.loads(content)

    def metrics(self) -> dict[str, float]:
        _, content = self.ask("GET", "/metrics")
        return {
            line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
            for line in content.decode().splitlines()
        }

    def wait_for(self, holds: Callable[[dict[str, float]], bool]) -> None:
        for _ in range(3000):
            if holds(self.metrics()):
                return
            time.sleep(0.01)
        raise AssertionError(self.metrics())

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.process.send_signal(number)
        self.said = self.process.communicate(timeout=60)[1]


@pytest.fixture(scope="session")
def started(serve: Path, demo_bundle: Path) -> Callable[..., Any]:
    """``with started(*options) as service`` runs the service on a free port.

    When the service stops, a sanitizer reports memory leaks.
    """

    @contextmanager
    def start(*options: str) -> Iterator[Service]:
        engine = _native.onnxruntime_library() or ""
        environment = os.environ | LEAKS | {"DLM_ONNXRUNTIME": engine}
        command = [serve, demo_bundle, "--port", "0", "--threads", "1", *LIMITS, *options]
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            listening = re.match(r"listening on http://127\.0\.0\.1:(\d+), onnxruntime ", line)
            assert listening is not None, process.communicate(timeout=60)
            service = Service(process, int(listening[1]))
            yield service
            if process.poll() is None:
                service.stop()
            assert process.returncode == 0, service.said
        finally:
            if process.poll() is None:
                process.kill()
                process.communicate()

    return start


@pytest.fixture(scope="module")
def service(started: Callable[..., Any]) -> Iterator[Service]:
    with started() as service:
        yield service


def test_the_service_completes_as_python_does(
    service: Service, answers: dict[str, str], demo_bundle: Path
) -> None:
    status, said = service.complete(prompt=PROMPTS[0], max_tokens=NEW_TOKENS)
    assert status == 200
    assert said["object"] == "text_completion"
    assert said["model"] == demo_bundle.name
    assert said["choices"] == [{"index": 0, "finish_reason": "stop", "text": answers[PROMPTS[0]]}]
    used = said["usage"]
    assert used["total_tokens"] == used["prompt_tokens"] + used["completion_tokens"]
    assert used["passes"] > 0
    response, content = service.ask("POST", "/v1/chat/completions", CHAT)
    chat = json.loads(content)
    assert (response.status, chat["object"]) == (200, "chat.completion")
    assert chat["choices"][0]["message"] == {
        "role": "assistant",
        "content": answers[f"chat: {PROMPTS[1]}"],
    }
    assert chat["id"] != said["id"]


@pytest.mark.parametrize("chat", [False, True])
def test_a_stream_tells_the_same_text_in_pieces(
    started: Callable[..., Any], demo_bundle: Path, chat: bool
) -> None:
    given: dict[str, Any] = {"chat": CHAT["messages"]} if chat else {"prompt": PROMPTS[0]}
    with dlm_runtime.open(demo_bundle) as bundle:
        expected = bundle.generate(max_new_tokens=NEW_TOKENS, preset="llada", **given).text
    wish = CHAT if chat else {"prompt": PROMPTS[0], "max_tokens": NEW_TOKENS}
    with started("--preset", "llada") as service:
        response, content = service.ask(
            "POST", "/v1/chat/completions" if chat else "/v1/completions", wish | {"stream": True}
        )
    assert (response.status, response.getheader("Content-Type")) == (200, "text/event-stream")
    *events, last = content.decode().removesuffix("\n\n").split("\n\n")
    assert last == "data: [DONE]"
    choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
    pieces = [choice["delta"]["content"] if chat else choice["text"] for choice in choices]
    assert "".join(pieces) == expected
    assert len([piece for piece in pieces if piece]) > 1
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert not chat or choices[0]["delta"]["role"] == "assistant"


TEXT, CHATS = "/v1/completions", "/v1/chat/completions"
WRONG: dict[str, tuple[str, str, Any, int, str]] = {
    "no JSON": ("POST", TEXT, b"{", 400, "the body is no JSON: "),
    "a key twice": ("POST", TEXT, b'{"prompt":"a","prompt":"b"}', 400, "duplicate object key"),
    "deep": ("POST", TEXT, b"[" * 4000, 400, "the body is no JSON: maximum parsing depth"),
    "no prompt": ("POST", TEXT, {}, 400, "prompt is no string"),
    "an unknown field": ("POST", TEXT, {"prompt": "x", "n": 2}, 400, 'unknown field "n": this service takes prompt'),
    "no token": ("POST", TEXT, {"prompt": "x", "max_tokens": 0}, 400, "max_tokens is no whole number"),
    "a hot draw": ("POST", TEXT, {"prompt": "x", "temperature": 2.1}, 400, "temperature is no number in 0..2"),
    "a long prompt": ("POST", TEXT, {"prompt": "go " * 600, "max_tokens": 9}, 400, "is longer than the denoiser's"),
    "no messages": ("POST", CHATS, {"messages": []}, 400, "messages is no list of messages"),
    "an unknown role": ("POST", CHATS, {"messages": [{"role": "x", "content": "y"}]}, 400, "role \"x\""),
    "a large body": ("POST", TEXT, {"prompt": "x" * 9000}, 413, "the body is larger than this service takes"),
    "another place": ("GET", "/", None, 404, "there are /v1/completions, "),
    "another method": ("GET", TEXT, None, 405, "asked for by POST"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_refused_with_a_sentence(service: Service, wrong: str) -> None:
    method, path, body, status, sentence = WRONG[wrong]
    response, content = service.ask(method, path, body)
    assert response.status == status, content
    assert sentence in json.loads(content)["error"]["message"]
    assert service.ask("GET", "/health")[0].status == 200


def test_more_than_may_wait_get_429_and_nothing_is_lost(started: Callable[..., Any]) -> None:
    with started("--max-running", "1", "--max-waiting", "2", "--preset", "llada") as service:
        gate = threading.Barrier(12)

        def ask(number: int) -> tuple[int, str | None]:
            gate.wait()
            response, content = service.ask(
                "POST", "/v1/completions", {"prompt": PROMPTS[number % 3], "max_tokens": 64}
            )
            assert json.loads(content)
            return response.status, response.getheader("Retry-After")

        with ThreadPoolExecutor(12) as pool:
            outcomes = list(pool.map(ask, range(12)))
        assert set(outcomes) == {(200, None), (429, "1")}
        assert service.complete(prompt=PROMPTS[0], max_tokens=8)[0] == 200, "it goes on"
        service.stop()
    counted = {
        int(status): int(count)
        for count, status in re.findall(r"(\d+) answered (\d+)", service.said)
    }
    assert counted == {200: outcomes.count((200, None)) + 1, 429: outcomes.count((429, "1"))}
    assert "13 requests taken" in service.said
    assert ", 0 given up by their client" in service.said


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_takes_its_request_along(
    started: Callable[..., Any], stream: bool
) -> None:
    with (
        started("--max-running", "1", "--preset", "llada") as service,
        ThreadPoolExecutor(4) as pool,
    ):
        others = [
            pool.submit(service.complete, prompt=prompt, max_tokens=64) for prompt in PROMPTS[:2]
        ]
        service.wait_for(lambda metrics: metrics["dlm_submitted_total"] == 2)
        body = json.dumps({"prompt": PROMPTS[2], "max_tokens": 400, "stream": stream}).encode()
        with socket.create_connection(("127.0.0.1", service.port)) as client:
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s"
                % (len(body), body)
            )
            service.wait_for(lambda metrics: metrics["dlm_submitted_total"] == 3)
        service.wait_for(lambda metrics: metrics["dlm_clients_gone_total"] == 1)
        assert [other.result()[0] for other in others] == [200] * 2
        service.stop()
    assert ", 1 given up by their client" in service.said


def test_what_is_under_way_is_finished_when_the_service_stops(started: Callable[..., Any]) -> None:
    with (
        started("--max-running", "2", "--preset", "llada") as service,
        ThreadPoolExecutor(6) as pool,
    ):
        asked = [
            pool.submit(service.complete, prompt=PROMPTS[i % 3], max_tokens=32) for i in range(5)
        ]
        service.wait_for(lambda metrics: metrics["dlm_submitted_total"] == 5)
        kept = service.connect()
        kept.request("GET", "/health")
        kept.getresponse().read()
        service.process.send_signal(signal.SIGTERM)
        time.sleep(0.05)
        try:
            kept.request("GET", "/health")
            response = kept.getresponse()
            assert (response.status, response.getheader("Connection")) == (503, "close")
        except (ConnectionError, OSError):
            pass  # the server had already finished all requests and closed the connection
        assert [each.result()[0] for each in asked] == [200] * 5
        service.said = service.process.communicate(timeout=60)[1]
        assert service.process.returncode == 0, service.said
    taken = int(re.findall(r"(\d+) requests taken", service.said)[0])
    answered = sum(map(int, re.findall(r"(\d+) answered", service.said)))
    assert taken == answered + int(re.findall(r"(\d+) given up", service.said)[0])


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        ([], 2, "usage: serve BUNDLE"),
        (["{bundle}", "--port", "70000"], 2, "serve: --port is no whole number in 0..65535"),
        (["/no/such/bundle"], 1, "serve: NOT_FOUND: /no/such/bundle"),
        (["{bundle}", "--preset", "x"], 1, 'serve: NOT_FOUND: preset "x"'),
        (["{bundle}", "--address", "x"], 1, "serve: cannot listen on x, port 8080"),
    ],
)
def test_a_service_that_cannot_start_says_why(
    serve: Path, demo_bundle: Path, arguments: list[str], code: int, sentence: str
) -> None:
    done = run(
        serve, *[argument.replace("{bundle}", str(demo_bundle)) for argument in arguments], **LEAKS
    )
    assert (done.returncode, done.stdout) == (code, "")
    assert sentence in done.stderr
