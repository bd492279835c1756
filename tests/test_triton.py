"""Tests of ``dlm-export triton``, and of the backend in a real tritonserver.

The tests of the backend need nvidia-pytriton and tritonclient. tests/triton_process.py explains
how to install nvidia-pytriton.
"""

from __future__ import annotations

import contextlib
import json
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import triton_process
from click.testing import CliRunner
from triton_process import Triton, triton

import dlm_runtime
from dlm_export.cli import main
from dlm_runtime.errors import ExitCode

pytestmark = pytest.mark.xdist_group("triton")

HELD_OUT = Path(__file__).parent.parent / "examples" / "demo" / "heldout.jsonl"
PROMPTS = [json.loads(line)["prompt"] for line in HELD_OUT.read_text().splitlines()]
SOME = PROMPTS[::10]
PROMPT = "turn on the kitchen lights"
MANY_PASSES = {"commit": "sequential", "cache": "none"}  # one pass per token
CLIENTS = 4
WAIT_S = 30


def _write(bundle: Path, repository: Path, *arguments: str) -> Any:
    return CliRunner().invoke(main, ["triton", str(bundle), "-o", str(repository), *arguments])


# ---- The repository ----


def test_a_version_has_the_bundle_and_the_libraries(demo_bundle: Path, tmp_path: Path) -> None:
    done = _write(demo_bundle, tmp_path, "--name", "lights")
    assert done.exit_code == 0, done.output
    version = tmp_path / "lights" / "1"
    files = {each.name for each in version.iterdir()}
    assert files == {"bundle", "libtriton_dlm.so", "libonnxruntime.so"}
    wanted = {each.name: each.read_bytes() for each in demo_bundle.iterdir()}
    assert {each.name: each.read_bytes() for each in (version / "bundle").iterdir()} == wanted


def test_link_does_not_copy_the_bundle(demo_bundle: Path, tmp_path: Path) -> None:
    done = _write(demo_bundle, tmp_path, "--link", "--name", "demo")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "demo" / "1" / "bundle").readlink() == demo_bundle.resolve()


def test_a_new_version_keeps_the_configuration(demo_bundle: Path, tmp_path: Path) -> None:
    first = _write(demo_bundle, tmp_path, "--name", "demo")
    config = tmp_path / "demo" / "config.pbtxt"
    assert first.exit_code == 0, first.output
    changed = config.read_text().replace("count: 1", "count: 2")
    config.write_text(changed)
    second = [
        demo_bundle,
        tmp_path,
        "--name",
        "demo",
        "--model-version",
        "2",
    ]
    done = _write(*second)
    assert done.exit_code == 0, done.output
    assert "was kept" in done.output
    assert config.read_text() == changed
    done = _write(*second, "--force")
    assert done.exit_code == 0, done.output
    assert "count: 1" in config.read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "exists. Pass --force to replace it"),
        (["--name", "other"], 'has the backend "python", not "dlm"'),
        (["--name", "a/b"], "'a/b' cannot name a model"),
    ],
)
def test_wrong_arguments_write_nothing(
    demo_bundle: Path, tmp_path: Path, arguments: list[str], said: str
) -> None:
    _write(demo_bundle, tmp_path, "--link", "--name", "demo")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.pbtxt").write_text('backend: "python"\n')
    before = sorted(tmp_path.rglob("*"))
    done = _write(demo_bundle, tmp_path, "--name", "demo", *arguments)
    assert (done.exit_code, said in done.output) == (ExitCode.WRONG_INPUT, True), done.output
    assert sorted(tmp_path.rglob("*")) == before


def test_force_keeps_files_that_it_did_not_write(demo_bundle: Path, tmp_path: Path) -> None:
    _write(demo_bundle, tmp_path, "--link", "--name", "demo")
    (tmp_path / "demo" / "1" / "notes.txt").write_text("mine")
    done = _write(demo_bundle, tmp_path, "--name", "demo", "--force")
    assert done.exit_code == ExitCode.WRONG_INPUT
    assert "contains 'notes.txt'" in done.output


def test_a_link_never_replaces_the_bundle_that_it_points_to(
    demo_bundle: Path, tmp_path: Path
) -> None:
    _write(demo_bundle, tmp_path, "--name", "demo")
    own = tmp_path / "demo" / "1" / "bundle"
    done = _write(own, tmp_path, "--name", "demo", "--link", "--force")
    assert done.exit_code == ExitCode.WRONG_INPUT
    assert "which would be replaced" in done.output
    assert (own / "manifest.json").is_file()


def test_a_configuration_behind_a_broken_link_is_not_replaced(
    demo_bundle: Path, tmp_path: Path
) -> None:
    (tmp_path / "demo").mkdir()
    config = tmp_path / "demo" / "config.pbtxt"
    config.symlink_to(tmp_path / "missing")
    done = _write(demo_bundle, tmp_path, "--name", "demo", "--link")
    assert done.exit_code == ExitCode.WRONG_INPUT
    assert "is not a plain file" in done.output
    assert config.is_symlink()
    assert not (tmp_path / "demo" / "1").exists()


# ---- The backend ----


@pytest.fixture(scope="module")
def server(demo_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Triton]:
    """A tritonserver with the model ``demo``, and ``demo-single`` without streams, which is not loaded."""
    why = triton_process.missing()
    if why is not None:
        pytest.skip(why)
    pytest.importorskip("tritonclient.grpc")
    folder = tmp_path_factory.mktemp("triton")
    repository = folder / "repository"
    for name, *options in (("demo",), ("demo-single", "--no-stream")):
        done = _write(demo_bundle, repository, "--name", name, *options)
        assert done.exit_code == 0, done.output
    with triton(repository, folder, "demo") as started:
        yield started


@pytest.fixture(scope="module")
def bundle(demo_bundle: Path) -> Iterator[dlm_runtime.Bundle]:
    with dlm_runtime.open(demo_bundle) as opened:
        yield opened


def _values(made: dlm_runtime.Generation) -> tuple[str | None, list[int], int, str]:
    return made.text, made.tokens[made.prompt_tokens :], made.nfe, made.finish


def _ask(server: Triton, body: dict[str, Any]) -> Any:
    return server.client.post("/v2/models/demo/generate", json=body, timeout=WAIT_S)


def _over_http(server: Triton, prompt: str) -> tuple[str, list[int], int, str]:
    found = _ask(server, {"TEXT": prompt}).json()
    return found["TEXT"], found["OUTPUT_IDS"], found["NFE"], found["FINISH"]


class Grpc:
    """A gRPC stream that sends requests without waiting for earlier responses."""

    def __init__(self, server: Triton) -> None:
        import tritonclient.grpc as client

        self._client = client
        self.connection = client.InferenceServerClient(server.grpc)
        self.results: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        self.connection.start_stream(lambda result, error: self.results.put((result, error)))

    def ask(self, name: str, **parameters: Any) -> None:
        """Send a request. ``name`` is both the input text and the ID of the request."""
        tensor = self._client.InferInput("TEXT", [1], "BYTES")
        tensor.set_data_from_numpy(np.array([name.encode()], dtype=object))
        self.connection.async_stream_infer(
            "demo", [tensor], request_id=name, parameters=parameters or None
        )

    def next(self) -> Any:
        """Return the next response. Raises an error that Triton reports instead of a response."""
        result, error = self.results.get(timeout=WAIT_S)
        if error is not None:
            raise error
        return result

    def close(self, *, cancels: bool = False) -> None:
        self.connection.stop_stream(cancel_requests=cancels)
        self.connection.close()


def _of_grpc(result: Any) -> tuple[str, list[int], int, str]:
    return (
        result.as_numpy("TEXT")[0].decode(),
        result.as_numpy("OUTPUT_IDS").tolist(),
        int(result.as_numpy("NFE")[0]),
        result.as_numpy("FINISH")[0].decode(),
    )


def _over_grpc(server: Triton, prompts: list[str]) -> list[tuple[str, list[int], int, str]]:
    grpc = Grpc(server)
    try:
        for prompt in prompts:
            grpc.ask(prompt)
        found = {}
        for _ in prompts:
            result = grpc.next()
            found[result.get_response().id] = _of_grpc(result)
    finally:
        grpc.close()
    return [found[prompt] for prompt in prompts]


def _check_answers(server: Triton, bundle: dlm_runtime.Bundle, prompts: list[str]) -> None:
    wanted = [_values(bundle.generate(prompt=prompt)) for prompt in prompts]
    with ThreadPoolExecutor(CLIENTS) as pool:
        assert [*pool.map(lambda prompt: _over_http(server, prompt), prompts)] == wanted
    assert _over_grpc(server, prompts) == wanted


def test_answers_over_http_and_grpc_are_those_of_generate(
    server: Triton, bundle: dlm_runtime.Bundle
) -> None:
    _check_answers(server, bundle, SOME)


@pytest.mark.slow
def test_all_held_out_commands_are_answered_as_by_generate(
    server: Triton, bundle: dlm_runtime.Bundle
) -> None:
    _check_answers(server, bundle, PROMPTS)


OPTIONS: list[dict[str, Any]] = [
    {"max_new_tokens": 16},
    {"preset": "dream"},
    {"steps": 4},
    {"max_steps": 1, "prefix_group": 1},
    {"stop_strings": '["arguments"]'},
    {"regex": "[a-z ]{5,9}"},
    {"enum": '["yes", "no"]'},
    {"json_object": True, "max_new_tokens": 24},
    {"schema": '{"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}'},
    {"grammar": 'root ::= "on" | "off"'},
    {"select": "sample", "temperature": 1.5, "seed": 7, "block_length": 8},
    {"threshold": 0.5, "commit": "threshold"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: next(iter(options)))
def test_parameters_mean_what_they_mean_in_python(
    server: Triton, bundle: dlm_runtime.Bundle, options: dict[str, Any]
) -> None:
    given = {
        name: json.loads(value) if name in ("stop_strings", "enum") else value
        for name, value in options.items()
    }
    wanted = _values(bundle.generate(prompt=PROMPT, **given))
    response = _ask(server, {"TEXT": PROMPT, **options})
    assert response.status_code == 200, response.text
    found = response.json()
    assert (found["TEXT"], found["OUTPUT_IDS"], found["NFE"], found["FINISH"]) == wanted


def test_ids_and_messages_are_inputs_too(server: Triton, bundle: dlm_runtime.Bundle) -> None:
    chat = [{"role": "user", "content": PROMPT}]
    wanted = bundle.generate(chat=chat)
    found = _ask(server, {"MESSAGES": json.dumps(chat)}).json()
    assert (found["TEXT"], found["PROMPT_TOKENS"]) == (wanted.text, wanted.prompt_tokens)
    ids = wanted.tokens[: wanted.prompt_tokens]
    assert _ask(server, {"INPUT_IDS": ids}).json()["TEXT"] == wanted.text
    # If INPUT_IDS contains mask tokens, they are filled. With max_new_tokens 0, OUTPUT_IDS is the
    # whole canvas.
    masked = [*ids, *[bundle.mask_token_id] * 8]
    filled = bundle.generate(tokens=masked, max_new_tokens=0)
    found = _ask(server, {"INPUT_IDS": masked, "max_new_tokens": 0}).json()
    assert found["OUTPUT_IDS"] == filled.tokens


WRONG: list[tuple[dict[str, Any], str]] = [
    ({}, "give one of the inputs TEXT, MESSAGES, INPUT_IDS"),
    ({"TEXT": "a", "INPUT_IDS": [1]}, "give one of the inputs TEXT, MESSAGES, INPUT_IDS"),
    ({"TEXT": "a", "tempreature": 1}, "parameter tempreature is unknown; known parameters are"),
    ({"TEXT": "a", "max_new_tokens": "many"}, "parameter max_new_tokens: give a whole number"),
    ({"TEXT": "a", "max_new_tokens": True}, "parameter max_new_tokens: give a whole number"),
    ({"TEXT": "a", "max_new_tokens": -1}, "max_new_tokens"),
    ({"TEXT": "a", "stream": 1}, "parameter stream: give true or false"),
    ({"TEXT": "a", "stop_strings": "{"}, "parameter stop_strings"),
    ({"TEXT": "a", "stop_strings": "[1]"}, "parameter stop_strings"),
    ({"TEXT": "a", "regex": "("}, "regex: "),
    ({"TEXT": "a", "schema": "{"}, "schema"),
    ({"TEXT": "a", "regex": "a", "enum": '["a"]'}, "give one of"),
    ({"TEXT": "a", "preset": "warp"}, 'preset "warp" is not one of'),
    ({"TEXT": "a", "effort": "low"}, "effort"),
    ({"TEXT": "a", "select": "best"}, 'select = "best" is not one of'),
    ({"TEXT": "a", "threshold": 2}, "threshold = 2 is outside 0..1"),
    ({"TEXT": "a", "seed": -1}, "seed = -1"),
    ({"TEXT": "a", "block_length": 1.5}, "block_length"),
    ({"TEXT": "a", "new_tokens": 1 << 20}, "canvas"),
    ({"INPUT_IDS": [99999]}, "token id 99999 at position 0 is outside the vocabulary"),
    ({"MESSAGES": "{"}, "MESSAGES"),
    (
        {"MESSAGES": '[{"role": "user"}]'},
        "MESSAGES: give a JSON list of objects with role and content",
    ),
    ({"MESSAGES": "[" * 100000}, "MESSAGES"),
]


@pytest.mark.parametrize(("body", "said"), WRONG, ids=lambda value: str(value)[:40])
def test_wrong_requests_get_one_sentence(server: Triton, body: dict[str, Any], said: str) -> None:
    response = _ask(server, body)
    assert response.status_code == 400, response.text
    assert said in response.json()["error"]
    assert "\n" not in response.json()["error"]


def test_streams_have_the_events_of_a_job(server: Triton, bundle: dlm_runtime.Bundle) -> None:
    events = [*bundle.stream(prompt=PROMPT, **MANY_PASSES)]
    last = events[-1].result
    assert last is not None
    start = last.prompt_tokens
    wanted = [
        (
            event.delta,
            [
                -1 if is_undecided else token
                for token, is_undecided in zip(event.canvas, event.undecided, strict=True)
            ][start:],
            event.nfe,
        )
        for event in events[:-1]
    ]
    grpc = Grpc(server)
    try:
        grpc.ask(PROMPT, stream=True, **MANY_PASSES)
        found = [_of_grpc(grpc.next())]
        while not found[-1][3]:
            found.append(_of_grpc(grpc.next()))
    finally:
        grpc.close()
    assert [each[:3] for each in found[:-1]] == wanted
    assert "".join(each[0] for each in found) == last.text
    assert found[-1][1:] == _values(last)[1:]

    body = {"TEXT": PROMPT, "stream": True, **MANY_PASSES}
    path = "/v2/models/demo/generate_stream"
    lines = server.client.post(path, json=body, timeout=WAIT_S).text.split("\n")
    parts = [json.loads(line.removeprefix("data: ")) for line in lines if line]
    assert [(part["TEXT"], part["OUTPUT_IDS"], part["NFE"]) for part in parts[:-1]] == wanted
    assert "".join(part["TEXT"] for part in parts) == last.text


def _metric(server: Triton, name: str) -> float:
    text = server.client.get(f"http://{server.metrics}/metrics").text
    [line] = [
        line for line in text.splitlines() if line.startswith(f"{name}{{") and '"demo"' in line
    ]
    return float(line.split()[-1])


def _until(is_true: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_cancelled_request_makes_no_more_passes(server: Triton) -> None:
    # without cancelling, the request would take 480 passes
    options = MANY_PASSES | {"new_tokens": 480, "stop": "none", "stream": True}
    before = _metric(server, "dlm_passes_total")
    grpc = Grpc(server)
    try:
        grpc.ask(PROMPT, **options)
        grpc.next()
    finally:
        grpc.close(cancels=True)
    _until(lambda: _idle(server))
    assert _metric(server, "dlm_passes_total") - before < 400


def _idle(server: Triton) -> bool:
    """Return whether the model runs no requests.

    The function first sends a short request, because metrics are only updated when a request ends.
    """
    assert _ask(server, {"TEXT": PROMPT}).status_code == 200
    return _metric(server, "dlm_requests_running") == 0


class Load:
    """Clients that each send one request after another until the ``with`` block ends."""

    def __init__(self, server: Triton, model: str) -> None:
        self._server, self._model = server, model
        self._is_over = threading.Event()
        self.versions: list[str] = []
        self.wrong: list[str] = []
        self._threads = [threading.Thread(target=self._run) for _ in range(CLIENTS)]

    def _run(self) -> None:
        import httpx

        with httpx.Client(base_url=f"http://{self._server.http}", timeout=WAIT_S) as client:
            while not self._is_over.is_set():
                body = {"TEXT": PROMPT, "max_new_tokens": 16, **MANY_PASSES}
                response = client.post(f"/v2/models/{self._model}/generate", json=body)
                if response.status_code == 200:
                    self.versions.append(response.json()["model_version"])
                else:
                    self.wrong.append(response.text)

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()


def test_a_new_version_is_loaded_without_a_lost_request(server: Triton, demo_bundle: Path) -> None:
    repository = server.log.parent / "repository"
    with Load(server, "demo") as load:
        _until(lambda: len(load.versions) > CLIENTS)
        done = _write(demo_bundle, repository, "--name", "demo", "--model-version", "2")
        assert done.exit_code == 0, done.output
        server.load("demo")
        reached = len(load.versions)
        _until(lambda: len(load.versions) > reached + 2 * CLIENTS)
    assert load.wrong == []
    assert {*load.versions} == {"1", "2"}
    assert {*load.versions[-CLIENTS:]} == {"2"}


def test_unload_finishes_running_requests(server: Triton) -> None:
    server.load("demo-single")
    with Load(server, "demo-single") as load:
        _until(lambda: len(load.versions) > CLIENTS)
        server.unload("demo-single")
        _until(lambda: len(load.wrong) > CLIENTS)
    # Requests that started before the model was unloaded are answered. Triton itself refuses later
    # requests.
    refusal = "Request for unknown model: 'demo-single' has no available versions"
    assert {*load.wrong} == {json.dumps({"error": refusal}, separators=(",", ":"))}
    _until(lambda: "successfully unloaded 'demo-single'" in server.said())


def test_a_model_without_streams_answers_infer(server: Triton, bundle: dlm_runtime.Bundle) -> None:
    import tritonclient.http

    name = "demo-single"
    server.load(name)
    with contextlib.closing(tritonclient.http.InferenceServerClient(server.http)) as client:
        tensor = tritonclient.http.InferInput("TEXT", [1], "BYTES")
        tensor.set_data_from_numpy(np.array([PROMPT.encode()], dtype=object))
        wanted = [tritonclient.http.InferRequestedOutput("TEXT")]
        found = client.infer(name, [tensor], outputs=wanted)
    assert found.as_numpy("TEXT")[0].decode() == bundle.generate(prompt=PROMPT).text
    assert found.as_numpy("NFE") is None
    server.unload(name)
