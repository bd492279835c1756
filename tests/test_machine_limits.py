"""Tests of unusual machines (cores, memory, /proc), newer library versions, and unusual numbers."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import tracemalloc
import warnings
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from constraints import one_class

import dlm_runtime
from dlm_export.cli import app, main
from dlm_runtime import BundleError, DlmWarning, EngineError, RequestError
from dlm_runtime.abi import native as _native
from dlm_runtime.files import read_bytes

PYTHON = sys.executable
CORES = len(os.sched_getaffinity(0))


def threads() -> int:
    """Return the number of threads of this process, including threads of native libraries."""
    return len(os.listdir("/proc/self/task"))


# ---- Numbers ----


def test_every_finish_of_the_header_has_a_name_and_a_newer_one_its_number() -> None:
    names = ["none", "stop", "length", "steps", "deadline", "cancelled", "constraint"]
    assert [_native.finish_name(number) for number in range(7)] == names
    assert _native.finish_name(7) == "unknown (7)"
    assert _native.finish_name(-1) == "unknown (-1)"


def test_a_status_that_only_a_newer_library_knows_is_an_error_with_its_sentence() -> None:
    assert type(_native.error(77, b"too hot")) is dlm_runtime.DlmError
    assert str(_native.error(77, b"")) == "unknown status"


def test_the_log_probability_of_a_token_that_is_forced_against_the_denoiser_is_finite() -> None:
    info = dlm_runtime.DenoiserInfo(
        vocab_size=6, mask_token_id=5, max_canvas_length=32, eos_token_ids=(0,)
    )

    def run(p: dlm_runtime.CallbackPass) -> None:
        p.top_tokens[:], p.top_probs[:] = (1, 2), (1, 0)
        if p.logits is not None:
            p.logits[:] = -1e30
            p.logits[:, 1] = 0

    forced = one_class(6, [3, 4], [(0, 1), (1, 1)], [1, 0])
    with dlm_runtime.from_callback(info, run) as bundle:
        found = bundle.generate(tokens=[2], max_new_tokens=3, constraint=forced).log_probs
    said = [value for value in found if value is not None]
    assert math.isclose(min(said), math.log(5e-324), rel_tol=1e-6)
    assert all(math.isfinite(value) for value in said)


# ---- Files and memory ----


def test_a_small_file_takes_no_memory_for_its_limit(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.write_bytes(bytes(14_000))
    tracemalloc.start()
    try:
        assert read_bytes(small, 1 << 30, RequestError) == bytes(14_000)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_file_that_does_not_say_its_size_is_read_up_to_the_limit() -> None:
    status = Path("/proc/self/status")
    assert status.stat().st_size == 0
    assert b"VmRSS" in read_bytes(status, 1 << 20, RequestError)
    with pytest.raises(RequestError, match="too large: the limit is 100 bytes"):
        read_bytes(status, 100, RequestError)


def test_a_file_without_memory_for_it_is_an_error_with_a_sentence(tmp_path: Path) -> None:
    large = tmp_path / "large"
    with large.open("wb") as file:
        file.truncate(1 << 30)
    script = (
        "import resource, sys; from pathlib import Path; from dlm_runtime import DlmError\n"
        "from dlm_runtime.files import read_bytes\n"
        "resource.setrlimit(resource.RLIMIT_AS, (600 << 20,) * 2)\n"
        "try: read_bytes(Path(sys.argv[1]), 2 << 30, DlmError)\n"
        "except DlmError as err: print(err)"
    )
    done = subprocess.run(
        [PYTHON, "-c", script, str(large)], capture_output=True, text=True, timeout=60, check=False
    )
    assert "large: not enough memory to read it: end other programs" in done.stdout, done.stderr


def test_a_command_that_runs_out_of_memory_says_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @click.command()
    def greedy() -> None:
        raise MemoryError("Unable to allocate 8.00 GiB\nfor an array")

    monkeypatch.setitem(main.commands, "greedy", greedy)
    result = CliRunner().invoke(main, ["greedy"])
    assert result.exit_code == 1
    assert result.stderr.startswith(
        "Error: out of memory (Unable to allocate 8.00 GiB for an array). End other programs"
    )
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja"])
def test_a_tokenizer_that_is_replaced_after_it_was_hashed_is_refused(
    demo_bundle: Path, tmp_path: Path, name: str
) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(demo_bundle, bundle)
    with (
        dlm_runtime.open(bundle, engine="none") as opened,
        dlm_runtime.open(bundle, engine="none", check_hashes=False) as trusted,
    ):
        with open(bundle / name, "a") as file:
            # Only the hash shows this change, because JSON allows a newline at the end.
            file.write("\n")
        with pytest.raises(
            BundleError, match=rf"{name}: its SHA-256 differs from the bundle's manifest"
        ):
            _ = opened.tokenizer
        assert trusted.tokenizer is not None


def test_a_text_file_that_is_replaced_after_it_was_hashed_is_refused(
    demo_bundle: Path, tmp_path: Path
) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(demo_bundle, bundle)
    with (
        dlm_runtime.open(bundle, engine="none") as checked,
        dlm_runtime.open(bundle, engine="none", check_hashes=False) as trusted,
    ):
        file = bundle / checked.manifest["text"]["file"]
        data = bytearray(file.read_bytes())
        # Only the hash shows this change, because the last byte belongs to the chat template.
        data[-1] ^= 1
        file.write_bytes(data)
        with pytest.raises(BundleError, match=r"text.bin: its SHA-256 differs from the manifest's"):
            checked.check_text()
        trusted.check_text()


# ---- Cores ----


def test_more_threads_than_cores_are_as_many_as_cores_with_a_warning(demo_bundle: Path) -> None:
    before = threads()
    with pytest.warns(
        DlmWarning, match=rf"threads = 4096 is more than the {CORES} cores .*: {CORES} threads run"
    ):
        bundle = dlm_runtime.open(demo_bundle, threads=4096)
    with bundle:
        assert threads() - before < CORES + 4
        assert bundle.generate(prompt="play jazz", max_new_tokens=16).nfe > 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dlm_runtime.open(demo_bundle, threads=CORES).close()
    with pytest.raises(RequestError, match=r"threads = 4097 is outside 0\.\.4096"):
        dlm_runtime.open(demo_bundle, threads=4097)


def test_the_command_prints_our_warnings_as_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    others: list[object] = []
    monkeypatch.setattr(app, "_show_any_warning", lambda *shown: others.append(shown[0]))
    app._show_warning(DlmWarning("threads = 9"), DlmWarning, "/some/file.py", 3)
    assert capsys.readouterr().err == "Warning: threads = 9\n"
    app._show_warning(UserWarning("not ours"), UserWarning, "file.py", 3)
    assert str(others[0]) == "not ours"


# ---- ONNX Runtime ----


@pytest.mark.parametrize("version", ["1.20.1", "1.22.3", "0.99.0"])
def test_an_onnxruntime_that_is_too_old_is_named_before_it_is_used(
    demo_bundle: Path, tmp_path: Path, version: str
) -> None:
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("gcc is not installed")
    source, fake = tmp_path / "fake.c", tmp_path / f"libonnxruntime-{version}.so"
    source.write_text(
        "#include <stdlib.h>\n"
        f'static const char *get_version(void) {{ return "{version}"; }}\n'
        "static const void *get_api(unsigned version) { (void)version; abort(); }\n"
        "static const struct { const void *(*api)(unsigned); const char *(*version)(void); } base = {get_api, get_version};\n"
        "const void *OrtGetApiBase(void) { return &base; }\n"
    )
    subprocess.run([compiler, "-shared", "-fPIC", str(source), "-o", str(fake)], check=True)
    with pytest.raises(
        EngineError, match=f"is ONNX Runtime {version}, and 1.23 or newer is needed, for opset 23"
    ):
        dlm_runtime.open(demo_bundle, library=fake)


def test_threads_of_a_new_process_open_bundles_at_once(demo_bundle: Path) -> None:
    """The first bundle that a process opens registers this project's operators in ONNX Runtime.

    If several threads open bundles at once, only one of the threads may register the operators.
    """
    script = (
        "import sys, threading, dlm_runtime\n"
        "barrier, opened = threading.Barrier(8), []\n"
        "def work():\n"
        "    barrier.wait()\n"
        "    opened.append(dlm_runtime.open(sys.argv[1], threads=1))\n"
        "threads = [threading.Thread(target=work) for _ in range(8)]\n"
        "for thread in threads: thread.start()\n"
        "for thread in threads: thread.join()\n"
        "print(len(opened))"
    )
    done = subprocess.run(
        [PYTHON, "-c", script, str(demo_bundle)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == "8\n", done.stderr


def test_without_proc_the_error_says_what_to_mount(demo_bundle: Path) -> None:
    unshare = shutil.which("unshare")
    hide = [unshare or "", "-m", "sh", "-c", 'mount -t tmpfs none /proc && exec "$@"', "sh"]
    if (
        unshare is None
        or subprocess.run([*hide, "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("/proc cannot be hidden here: unshare -m needs the right to mount")
    script = (
        "import sys, dlm_runtime as dlm\n"
        "try: print(dlm.open(sys.argv[1], threads=1).engine)\n"
        "except dlm.EngineError as err: print(err)"
    )
    done = subprocess.run(
        [*hide, PYTHON, "-c", script, str(demo_bundle)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    is_run = done.stdout.startswith("onnxruntime ")
    assert (
        is_run or "reads weights through /proc, which is not mounted here. Mount it" in done.stdout
    ), done.stderr
