"""Tests of schedulers and requests that end early.

Every call that waits for such a scheduler or request must return. Other requests must continue.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from denoisers import ArithmeticDenoiser

import dlm_runtime
from dlm_runtime import Bundle, ClosedError, ForkError, Job

WAIT_S = 30  # limit for waiting in seconds; the tests need far less time


@pytest.fixture(scope="module")
def demo(demo_bundle: Path) -> Iterator[Bundle]:
    with dlm_runtime.open(demo_bundle, threads=1) as bundle:
        yield bundle


def wait_for(holds: Callable[[], bool]) -> None:
    """Wait until ``holds`` returns True. If this takes too long, the test fails."""
    end = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


def threads() -> int:
    """Return the number of threads of this process, including threads of native libraries."""
    return len(os.listdir("/proc/self/task"))


def in_fork(body: Callable[[], object]) -> int:
    """Run ``body`` in a forked process, and return the exit code of this process.

    The exit code is 0 if ``body`` returns. If the process hangs, a signal ends it, and the code is
    -14.
    """
    process = os.fork()
    if process == 0:
        code = 1
        with contextlib.suppress(BaseException):
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(WAIT_S)
            body()
            code = 0
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def run_script(script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a Python program in a new process."""
    environment = os.environ | variables
    command = [sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(script), *arguments]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=2 * WAIT_S, check=False
    )


# ---- The thread ends ----


TINY = """
    import ctypes, os, sys, threading, time
    import dlm_runtime
    from dlm_runtime import CallbackPass, ClosedError, DenoiserInfo, DlmError

    def run(p):  # a denoiser of 39 tokens and a mask; without torch, which takes seconds to import
        for i, row in enumerate(p.score_rows):
            token = (7 * int(p.position_ids[row]) + int(p.input_ids.sum())) % 38
            p.top_tokens[i], p.top_probs[i] = (token, token + 1), (0.5, 0.25)

    def tiny():
        return dlm_runtime.from_callback(DenoiserInfo(vocab_size=40, mask_token_id=39, max_canvas_length=512), run)
"""


def test_the_cause_reaches_jobs_submit_and_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mock of the native library makes the scheduler's thread fail.

    Later calls must raise the error of this thread.
    """

    class Library:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def dlm_scheduler_run(self, *arguments: Any) -> int:
            begin.wait(WAIT_S)
            arguments[4].value = b"the device fell off the bus"
            return 5

    real, begin = dlm_runtime.abi.native.library(), threading.Event()
    with ArithmeticDenoiser().bundle as bundle:
        library = Library()
        monkeypatch.setattr(dlm_runtime.abi.native, "library", lambda: library)
        scheduler = bundle.scheduler()
        job = scheduler.submit(tokens=[5], max_new_tokens=4)
        begin.set()
        job.result(WAIT_S)  # the native scheduler was destroyed, so the call returns
        wait_for(lambda: not scheduler._runner._thread.is_alive())
        for action in (lambda: scheduler.submit(tokens=[5]), scheduler.close):
            with pytest.raises(dlm_runtime.EngineError, match="the device fell off the bus"):
                action()
        assert scheduler.stats.submitted == 1


# ---- The interpreter, the garbage collector ----


def test_the_interpreter_exits_with_a_scheduler_open_and_a_job_that_tells_of_its_steps(
    demo_bundle: Path,
) -> None:
    script = (
        TINY
        + """
    schedulers = [bundle.scheduler() for bundle in (dlm_runtime.open(sys.argv[1], threads=2), tiny())]
    jobs = [each.submit(tokens=[5], new_tokens=200, events=True) for each in schedulers for _ in range(3)]
    for job in jobs[::3]:
        next(iter(job))
    print("exits")
    """
    )
    done = run_script(script, str(demo_bundle))
    assert (done.returncode, done.stdout) == (0, "exits\n"), done.stderr
    assert done.stderr == ""


def test_the_interpreter_exits_while_daemon_threads_generate() -> None:
    script = (
        TINY
        + """
    bundle = tiny()
    events = [None, threading.Event()]

    def generate(cancel):
        while True:
            bundle.generate(tokens=[5], new_tokens=500, cancel=cancel)

    for event in events:
        threading.Thread(target=generate, args=(event,), daemon=True).start()
    time.sleep(0.2)
    print("exits")
    """
    )
    done = run_script(script)
    assert (done.returncode, done.stdout, done.stderr) == (0, "exits\n", "")


def test_a_forgotten_scheduler_ends_its_thread_and_lets_go_of_its_bundle() -> None:
    denoiser = ArithmeticDenoiser()
    before = threading.active_count()
    scheduler = denoiser.bundle.scheduler()
    assert scheduler.submit(tokens=[5], max_new_tokens=4).result(WAIT_S).nfe > 0
    held = weakref.ref(scheduler)
    job: Job | None = scheduler.submit(tokens=[5], max_new_tokens=24, events=True)
    del scheduler
    gc.collect()
    assert held() is not None, "a job keeps it"
    assert job is not None
    assert job.result(WAIT_S).finish in ("stop", "length")
    del job
    gc.collect()
    assert held() is None
    wait_for(lambda: threading.active_count() == before)
    wait_for(lambda: denoiser.bundle._handle._busy == 0)


def test_a_scheduler_that_is_collected_by_its_own_thread_does_not_wait_for_itself() -> None:
    denoiser: Any = ArithmeticDenoiser()
    armed, predict = threading.Event(), denoiser.predict

    def predict_when_armed(*row: int) -> tuple[int, float]:
        assert armed.wait(WAIT_S)
        found: tuple[int, float] = predict(*row)
        return found

    denoiser.predict = predict_when_armed  # passes start only after the job's callback is set
    before = threading.active_count()
    scheduler: Any = denoiser.bundle.scheduler()
    job: Any = scheduler.submit(tokens=[5], max_new_tokens=24, events=True)
    kept = [scheduler, job]
    job._step = lambda _: kept.clear()
    armed.set()
    del scheduler, job
    # The number of threads may become lower than before, because threads of earlier tests may end.
    wait_for(lambda: gc.collect() >= 0 and threading.active_count() <= before)


def test_submit_and_stats_race_with_close() -> None:
    denoiser = ArithmeticDenoiser()
    wrong: list[BaseException] = []

    def use(scheduler: Any, is_ready: threading.Barrier) -> None:
        is_ready.wait(WAIT_S)
        try:
            while True:
                _ = scheduler.stats
                scheduler.submit(tokens=[5], max_new_tokens=1)
        except ClosedError:
            pass
        except BaseException as err:
            wrong.append(err)

    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(30):
            scheduler = denoiser.bundle.scheduler(max_waiting=100_000)
            is_ready = threading.Barrier(4)
            users = [threading.Thread(target=use, args=(scheduler, is_ready)) for _ in range(3)]
            for user in users:
                user.start()
            is_ready.wait(WAIT_S)
            time.sleep(0.002)
            closers = [threading.Thread(target=scheduler.close) for _ in range(2)]
            for closer in closers:
                closer.start()
            for each in (*users, *closers):
                each.join(WAIT_S)
                assert not each.is_alive()
    finally:
        sys.setswitchinterval(switch)
    assert wrong == []


# ---- Forks ----


def test_in_a_forked_process_every_method_raises_at_once_and_the_parent_goes_on(
    demo: Bundle,
) -> None:
    request: dict[str, Any] = {"prompt": "play jazz", "max_new_tokens": 16, "preset": "llada"}
    alone = demo.generate(**request)
    with demo.scheduler(max_running=2) as scheduler:
        jobs = [scheduler.submit(**request, events=True) for _ in range(4)]
        stream = demo.stream(**request)
        next(stream)

        def try_all() -> None:
            actions: list[Callable[[], object]] = [
                lambda: scheduler.submit(**request),
                lambda: scheduler.stats,
                scheduler.close,
                lambda: jobs[0].done,
                jobs[0].cancel,
                lambda: jobs[0].result(),
                lambda: next(iter(jobs[0])),
                lambda: demo.generate(**request),
                lambda: demo.generate_batch(prompts=["go"]),
                lambda: demo.logits([1, 2]),
                lambda: demo.time_passes(4, 0, 1, 1),
                lambda: next(stream),
                lambda: demo.stream(**request),
                lambda: demo.constraint(regex="a+"),
                lambda: demo.scheduler(),
                lambda: demo.infill("a <mask> b"),
                demo.close,
            ]
            for number, action in enumerate(actions):
                with pytest.raises(ForkError, match="Open the bundle in this process"):
                    action()
                assert number >= 0
            jobs.clear()
            gc.collect()
            with demo, scheduler:
                pass

        assert in_fork(try_all) == 0
        assert all(job.result(WAIT_S).tokens == alone.tokens for job in jobs)
        *_, last = stream
        assert last.canvas == alone.tokens
    assert demo.generate(**request).tokens == alone.tokens


def test_a_forked_process_that_exits_as_usual_does_not_hang(demo_bundle: Path) -> None:
    script = """
        import os, sys
        import dlm_runtime
        bundle = dlm_runtime.open(sys.argv[1], threads=2)
        scheduler = bundle.scheduler()
        jobs = [scheduler.submit(prompt="play jazz", max_new_tokens=16, events=True) for _ in range(4)]
        next(iter(jobs[0]))
        if child := os.fork():
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), {job.result(30).text for job in jobs})
        else:
            try:
                bundle.generate(prompt="play jazz")
            except dlm_runtime.ForkError:
                with dlm_runtime.open(sys.argv[1], threads=2) as own:
                    assert own.generate(prompt="play jazz", max_new_tokens=16).text
                sys.exit(7)
    """
    done = run_script(script, str(demo_bundle))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("7 {'")
    assert done.stderr == ""
