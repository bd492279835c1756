"""Tests of the process that runs a bundle's tokenizer and chat template.

The tests cover the results of the process, its limits and its end.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import hostile_files as hostile
import pytest
import tokenizers
from conftest import DEMO_CHECKPOINT

from dlm_runtime.errors import BundleError, DlmError, RequestError
from dlm_runtime.text import process as text_process
from dlm_runtime.text.tokenizer import Tokenizer

FILE = DEMO_CHECKPOINT / "tokenizer.json"
TEMPLATE = "{{ messages[0].content }}{% if messages | length > 1 %}{% for i in range(99999) %}" + (
    "{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}"
)
HELLO = [{"role": "user", "content": "lock the front door"}]
LONG = [*HELLO, *HELLO]  # the template exceeds its time limit for these messages


@pytest.fixture
def ours() -> Iterator[Tokenizer]:
    made = Tokenizer(FILE.read_bytes(), TEMPLATE, {})
    yield made
    made.close()


def _process(tokenizer: Tokenizer) -> subprocess.Popen[bytes]:
    process = tokenizer._process._short._process
    assert process is not None
    return process


def _is_over(pid: int) -> bool:
    """Return True if the process with this id has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"
    except FileNotFoundError:
        return True


def _wait(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_answers_are_those_of_the_library(ours: Tokenizer) -> None:
    library = tokenizers.Tokenizer.from_file(str(FILE))
    lines = (DEMO_CHECKPOINT.parent / "demo" / "heldout.jsonl").read_text().splitlines()[:50]
    for text in [
        *(json.loads(line)["prompt"] for line in lines),
        "",
        "Grüße 世界 🙂\0\x1b",
        " " * 999,
    ]:
        ids = library.encode(text).ids
        assert ours.encode(text) == ids
        assert ours.encode_plain(text) == library.encode(text, add_special_tokens=False).ids
        assert ours.decode(ids) == library.decode(ids)
    assert ours.encode_chat(HELLO) == ours.encode_plain("lock the front door")
    assert ours.size == max(library.get_vocab().values()) + 1
    assert [ours.token_text(token) for token in range(99)] == [
        library.decode([token], skip_special_tokens=False) for token in range(99)
    ]
    assert ours.names([0, 7, 10**6]) == [library.id_to_token(0), library.id_to_token(7), None]
    assert ours.as_json() == library.to_str()


def test_a_panic_of_the_library_is_an_error_and_writes_nothing(
    capfd: pytest.CaptureFixture[str],
) -> None:
    panics = [name for name, data in hostile.tokenizers().items() if _panics(data)]
    assert panics, "none left that the boundary is for"
    assert "panicked" in capfd.readouterr().err
    for name in panics:
        with pytest.raises(BundleError, match="somewhere: not a tokenizer"):
            Tokenizer(hostile.tokenizers()[name], None, {}, "somewhere")
    assert capfd.readouterr().err == ""


def _panics(data: bytes) -> bool:
    try:
        tokenizers.Tokenizer.from_buffer(data)
    except Exception:
        return False
    except BaseException:
        return True
    return False


@pytest.mark.parametrize(
    ("expression", "says"),
    [
        ("'x' * 10**10", "it needs more than 512 MiB of memory"),
        ("range(99999) | list | string * 10**9", "it needs more than 512 MiB of memory"),
        ("9 ** (9 ** (messages | length + 8))", "it takes more processor time than one second"),
    ],
)
def test_a_limit_is_named_and_the_next_request_is_answered(expression: str, says: str) -> None:
    made = Tokenizer(
        FILE.read_bytes(),
        f"{{% if messages[0].content == 'x' %}}{{{{ {expression} }}}}{{% endif %}}ok",
        {},
    )
    for _ in range(2):
        with pytest.raises(RequestError, match=says):
            made.encode_chat([{"role": "user", "content": "x"}])
        assert made.encode_chat(HELLO) == made.encode_plain("ok")
    made.close()


def test_an_answer_that_is_too_large_is_refused(
    ours: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_process, "REPLY_LIMIT_BYTES", 100)
    with pytest.raises(RequestError, match="rejects this text"):
        ours.encode("lock the front door " * 99)
    assert ours.encode("lock") != []


@pytest.mark.parametrize("content", [object(), {1, 2}, 1j, b"bytes"])
def test_a_chat_of_things_that_are_no_json_is_a_wrong_request(
    ours: Tokenizer, content: object
) -> None:
    process = _process(ours)
    with pytest.raises(RequestError, match=r"chat: the content of .* is not a text"):
        ours.encode_chat([{"role": "user", "content": content}])
    assert _process(ours) is process


def test_half_a_character_is_refused_as_before(ours: Tokenizer) -> None:
    with pytest.raises(RequestError, match="rejects this text"):
        ours.encode("\ud800")


def test_threads_get_their_own_answers(ours: Tokenizer) -> None:
    texts = [f"remind me at {number} to call amir" for number in range(64)]
    wanted, found = [ours.encode(text) for text in texts], {}

    def work(first: int) -> None:
        for i in range(first, len(texts), 8):
            found[i] = ours.encode(texts[i])

    threads = [threading.Thread(target=work, args=(first,)) for first in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(len(texts))] == wanted


def test_an_interrupted_request_leaves_nothing_for_the_next_one(ours: Tokenizer) -> None:
    before = signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        with pytest.raises(KeyboardInterrupt):
            ours.encode_chat(LONG)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert ours.encode_chat(HELLO) == ours.encode_plain("lock the front door")


def test_a_terminals_ctrl_c_does_not_reach_it(ours: Tokenizer) -> None:
    assert os.getsid(_process(ours).pid) != os.getsid(0)


def test_closing_ends_it_and_a_later_request_starts_it_again(ours: Tokenizer) -> None:
    ids, ended = ours.encode("lock"), _process(ours).pid
    ours.close()
    assert not Path(f"/proc/{ended}").exists(), "collected, too"
    assert ours.encode("lock") == ids
    killed = _process(ours).pid
    os.kill(killed, signal.SIGKILL)
    _wait(lambda: _is_over(killed))
    assert ours.encode("lock") == ids


def test_it_goes_with_what_it_belongs_to() -> None:
    made = Tokenizer(FILE.read_bytes(), None, {})
    pid = _process(made).pid
    del made
    assert not Path(f"/proc/{pid}").exists()
    script = "import sys, time; from dlm_runtime.text.tokenizer import Tokenizer; from pathlib import Path; "
    script += "made = Tokenizer(Path(sys.argv[1]).read_bytes(), None, {}); "
    script += "print(made._process._short._process.pid, flush=True); time.sleep(600)"
    with subprocess.Popen(
        [sys.executable, "-c", script, str(FILE)], stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        owner.kill()
    _wait(lambda: _is_over(pid))


def test_a_fork_starts_its_own_and_leaves_its_parents_alone(ours: Tokenizer) -> None:
    ids, process = ours.encode("lock"), _process(ours)
    child = os.fork()
    if child == 0:
        is_right = ours.encode("lock") == ids and _process(ours).pid != process.pid
        ours.close()
        os._exit(0 if is_right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert _process(ours) is process
    assert ours.encode("lock") == ids


def test_it_keeps_a_limit_that_is_lower_already() -> None:
    script = "import resource, sys; from dlm_runtime.text.tokenizer import Tokenizer; from pathlib import Path; "
    script += "resource.setrlimit(resource.RLIMIT_AS, (1 << 28, 1 << 28)); "
    script += "print(Tokenizer(Path(sys.argv[1]).read_bytes(), None, {}).encode('lock') != [])"
    done = subprocess.run(
        [sys.executable, "-c", script, str(FILE)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == "True\n", done.stderr


def test_without_a_python_to_run_it_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(DlmError, match="cannot start /nonexistent/python for the tokenizer"):
        Tokenizer(FILE.read_bytes(), None, {})


def test_a_short_text_does_not_wait_for_a_long_text(ours: Tokenizer) -> None:
    text = "lock the front door " * 2000
    ids = ours.encode(text)
    long = ours._process._long._process
    assert long is not None
    os.kill(long.pid, signal.SIGSTOP)
    found: list[list[int]] = []
    thread = threading.Thread(target=lambda: found.append(ours.encode(text)))
    thread.start()
    try:
        assert ours.encode_chat(HELLO) == ours.encode_plain(HELLO[0]["content"])
        assert ours.decode(ids).startswith("lock the front door")
        assert not found
    finally:
        os.kill(long.pid, signal.SIGCONT)
        thread.join(60)
    assert found == [ids]


def test_a_text_that_cannot_fit_the_canvas_is_rejected_by_its_length(ours: Tokenizer) -> None:
    ours.most_tokens = 4
    assert ours.encode("a" * 256)
    for reject in (ours.encode, ours.encode_plain):
        with pytest.raises(RequestError, match="257 characters are more than 256"):
            reject("a" * 257)
    with pytest.raises(RequestError, match="shorten it"):
        ours.encode_chat([{"role": "user", "content": "a" * 257}])
