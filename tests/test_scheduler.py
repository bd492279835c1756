"""Tests of schedulers.

Requests of different kinds and from different threads share passes. The result of each request must
be the same as if it ran alone.
"""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from denoisers import ArithmeticDenoiser

import dlm_runtime
from dlm_runtime import (
    Bundle,
    BusyError,
    CancelledError,
    ClosedError,
    EngineError,
    Generation,
    Job,
    PassCost,
    RequestError,
)

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["a", "bc"]}, "n": {"type": "integer"}},
    "required": ["name", "n"],
}


@pytest.fixture(scope="module")
def demo(demo_bundle: Path) -> Iterator[Bundle]:
    with dlm_runtime.open(demo_bundle, threads=1) as bundle:
        yield bundle


def same(one: Generation, other: Generation) -> bool:
    names = ("tokens", "text", "nfe", "finish", "undecided", "prompt_tokens", "completion_tokens")
    return all(getattr(one, name) == getattr(other, name) for name in names)


def wishes(count: int) -> list[dict[str, Any]]:
    """Return ``count`` requests with different prompts, lengths, policies and constraints."""
    draw = random.Random(4)
    kinds: list[dict[str, Any]] = [
        {"preset": "fast-dllm"},
        {"preset": "llada", "steps": 8},
        {"preset": "fast-dllm", "cache": "prefix", "block_length": 8},
        {"preset": "fast-dllm", "cache": "none", "threshold": 0.7},
        {"temperature": 0.8, "top_p": 0.95},
        {"preset": "fast-dllm", "schema": SCHEMA},
        {"preset": "fast-dllm", "cfg_scale": 0.5},
        {"preset": "fast-dllm", "max_steps": 2},
        {"preset": "fast-dllm", "stop_strings": ["arguments"]},
    ]
    prompts = (
        "turn on the kitchen lights",
        "remind me to call the garage at seven",
        "play jazz",
        "go",
        "lock the front door please",
    )
    return [
        {
            "prompt": draw.choice(prompts),
            "max_new_tokens": draw.choice((24, 32, 48)),
            **draw.choice(kinds),
        }
        | ({"seed": draw.randrange(99)} if draw.random() < 0.5 else {})
        for _ in range(count)
    ]


def test_sixty_four_mixed_requests_come_to_what_each_comes_to_alone(demo: Bundle) -> None:
    wanted = wishes(64)
    alone = [demo.generate(**wish) for wish in wanted]
    draw = random.Random(5)
    jobs: list[Job | None] = [None] * len(wanted)
    with demo.scheduler(max_running=12, max_tokens=200) as scheduler:

        def submit(numbers: range) -> None:
            for number in numbers:
                time.sleep(draw.random() / 200)  # requests arrive at random times
                jobs[number] = scheduler.submit(**wanted[number])

        threads = [
            threading.Thread(target=submit, args=(range(first, 64, 4),)) for first in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for job, one in zip(jobs, alone, strict=True):
            assert job is not None
            assert same(job.result(60), one)
        stats = scheduler.stats
    assert (stats.submitted, stats.finished, stats.refused, stats.running, stats.waiting) == (
        64,
        64,
        0,
        0,
        0,
    )
    assert stats.shares > 2 * stats.passes, "they shared them"


def test_events_tell_of_every_pass_and_end_with_the_result(demo: Bundle) -> None:
    wish: dict[str, Any] = {
        "prompt": "remind me to call the garage at seven",
        "max_new_tokens": 32,
        "preset": "llada",
        "steps": 8,
    }
    alone = list(demo.stream(**wish))
    with demo.scheduler() as scheduler:
        events = list(scheduler.submit(**wish, events=True))
    assert [event.done for event in events] == [False] * (len(events) - 1) + [True]
    assert [event.canvas for event in events[:-1]] == [event.canvas for event in alone[:-1]]
    assert "".join(event.delta or "" for event in events) == alone[-1].text
    assert events[-1].result is not None
    assert events[-1].result.tokens == alone[-1].canvas


def test_a_time_for_passes_is_refused_where_requests_take_turns() -> None:
    with (
        ArithmeticDenoiser().bundle as bundle,
        pytest.raises(RequestError, match="requests take turns: leave it out"),
    ):
        bundle.scheduler(max_pass_ms=5, cost=PassCost(1, 1, 0, 0))


def test_the_last_step_wakes_who_waits_for_events(
    demo: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dlm_runtime.generation.scheduler.EVENT_WAIT_S", 600.0)
    with demo.scheduler() as scheduler:
        for _ in range(20):
            *_, last = scheduler.submit(
                prompt="play jazz", max_new_tokens=16, preset="fast-dllm", events=True
            )
            assert last.done


def test_what_fails_as_a_step_is_told_ends_its_request_and_is_its_cause(
    demo: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = {"prompt": "play jazz", "max_new_tokens": 16, "preset": "llada"}
    with demo.scheduler() as scheduler:
        job, other = scheduler.submit(**request, events=True), scheduler.submit(**request)
        monkeypatch.setattr(job, "_step", lambda _: 1 / 0)
        with pytest.raises(CancelledError, match="a callback asked to stop") as caught:
            job.result(30)
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        assert other.result(30).finish in ("stop", "length")


def test_a_bundle_of_a_callback_takes_turns() -> None:
    denoiser = ArithmeticDenoiser()
    with denoiser.bundle as bundle, bundle.scheduler(max_running=3) as scheduler:
        given = [[5, 6, 7][: 1 + i % 3] for i in range(9)]
        jobs = [scheduler.submit(tokens=tokens, max_new_tokens=7) for tokens in given]
        for tokens, job in zip(given, jobs, strict=True):
            assert job.result(30).tokens == bundle.generate(tokens=tokens, max_new_tokens=7).tokens
        assert scheduler.stats.shares == scheduler.stats.passes


def test_more_than_may_wait_are_refused_and_nothing_is_lost() -> None:
    denoiser, begun, go_on = ArithmeticDenoiser(), threading.Event(), threading.Event()

    def run(p: dlm_runtime.CallbackPass) -> None:
        begun.set()
        assert go_on.wait(30)
        denoiser._run(p)

    with (
        dlm_runtime.from_callback(denoiser.info, run) as bundle,
        bundle.scheduler(max_running=1, max_waiting=2) as scheduler,
    ):
        jobs = [scheduler.submit(tokens=[5], max_new_tokens=4)]
        assert begun.wait(30)
        jobs += [scheduler.submit(tokens=[5], max_new_tokens=4) for _ in range(2)]
        with pytest.raises(BusyError, match="2 requests are waiting, which is the limit"):
            scheduler.submit(tokens=[5], max_new_tokens=4)
        go_on.set()
        assert len({tuple(job.result(60).tokens) for job in jobs}) == 1
        assert scheduler.stats.refused == 1
        assert scheduler.stats.finished == len(jobs)


def test_a_waiting_request_ends_before_it_starts_if_it_is_cancelled_or_late() -> None:
    """It ends although one older request runs, and another one still waits."""
    denoiser, passes = ArithmeticDenoiser(), threading.Semaphore(0)

    def run(p: dlm_runtime.CallbackPass) -> None:
        assert passes.acquire(timeout=30)
        denoiser._run(p)

    request: dict[str, Any] = {"tokens": [5], "max_new_tokens": 8}
    with (
        dlm_runtime.from_callback(denoiser.info, run) as bundle,
        bundle.scheduler(max_running=1) as scheduler,
    ):
        older = [scheduler.submit(**request) for _ in range(2)]
        late = scheduler.submit(**request, deadline_ms=0.01)
        cancelled = scheduler.submit(**request)
        cancelled.cancel()
        passes.release(2)
        for job, finish in ((cancelled, "cancelled"), (late, "deadline")):
            result = job.result(10)
            assert (result.finish, result.nfe) == (finish, 0)
        assert not any(job.done for job in older)
        passes.release(100)


def test_a_prompt_that_is_no_text_is_refused(demo: Bundle) -> None:
    with (
        demo.scheduler() as scheduler,
        pytest.raises(RequestError, match="prompt = 5 is not a text: give a str, or tokens"),
    ):
        scheduler.submit(prompt=5)  # type: ignore[arg-type]


def test_cancelling_and_deadlines_end_within_a_pass(demo: Bundle) -> None:
    with demo.scheduler(max_running=4) as scheduler:
        long = {"prompt": "go", "new_tokens": 400, "preset": "llada", "stop": "none"}
        job = scheduler.submit(**long, events=True)
        nfe = next(iter(job)).nfe
        job.cancel()
        result = job.result(30)
        assert result.finish == "cancelled"
        assert nfe <= result.nfe < 400
        assert any(result.undecided)
        late = scheduler.submit(**long, deadline_ms=1).result(30)
        assert late.finish == "deadline"
        assert late.nfe < 400
        passes = scheduler.stats.passes
        with pytest.raises(TimeoutError):
            scheduler.submit(**long).result(0.001)  # the job is dropped at once, which cancels it
        while scheduler.stats.finished < 3:
            time.sleep(0.001)
        assert scheduler.stats.passes < passes + 400
        abandoned = scheduler.submit(**long)
    assert abandoned.result(0).finish == "cancelled"
    assert scheduler.stats.submitted == 4
    with pytest.raises(ClosedError, match="closed"):
        scheduler.submit(prompt="go")


def test_what_cannot_be_is_said(demo: Bundle) -> None:
    with pytest.raises(RequestError, match=r"max_running = 0 is outside 1\.\.4096"):
        demo.scheduler(max_running=0)
    with pytest.raises(
        RequestError,
        match=r"max_pass_ms = 50 needs this machine's cost .* `dlm-export bench BUNDLE --cost`",
    ):
        demo.scheduler(max_pass_ms=50)
    with pytest.raises(RequestError, match="max_pass_ms = nan is not a time"):
        demo.scheduler(max_pass_ms=float("nan"))
    with pytest.raises(RequestError, match="max_pass_ms = 'soon' is not a number"):
        demo.scheduler(max_pass_ms="soon")
    with demo.scheduler(cache_bytes=1 << 18) as scheduler:
        with pytest.raises(
            RequestError,
            match=r"has room for .*: give it more cache_bytes, or choose a shorter canvas",
        ):
            scheduler.submit(prompt="go", max_new_tokens=400, preset="fast-dllm")
        with pytest.raises(RequestError, match="outside the vocabulary"):
            scheduler.submit(tokens=[1 << 20])
        with pytest.raises(RequestError, match="call the method cancel of the job"):
            scheduler.submit(prompt="go", cancel=threading.Event())
        with pytest.raises(
            RequestError,
            match=r"constraint = 'x' is not a constraint: Bundle\.constraint makes one",
        ):
            scheduler.submit(prompt="go", constraint="x")
        assert (
            scheduler.submit(prompt="go", max_new_tokens=8, preset="fast-dllm").result(30).nfe > 0
        )
        with pytest.raises(RequestError, match=r"events=True"):
            next(iter(scheduler.submit(prompt="go", max_new_tokens=8)))


def test_passes_stay_within_the_time_that_they_are_expected_to_take(demo: Bundle) -> None:
    cost = PassCost(pass_ms=1.0, token_ms=0.5, row_ms=0.0, pair_ms=0.0)
    request = {
        "prompt": "turn on the kitchen lights",
        "max_new_tokens": 64,
        "preset": "fast-dllm",
        "threshold": 0.99,
        "stop": "none",
    }
    alone = demo.generate(**request)
    with demo.scheduler(max_pass_ms=1 + 0.5 * 32 * 2, cost=cost) as scheduler:
        jobs = [scheduler.submit(**request) for _ in range(6)]
        assert all(same(job.result(60), alone) for job in jobs)
        stats = scheduler.stats
    assert stats.shares <= 2 * stats.passes, "two blocks of 32 tokens fit"
    assert stats.expected_s > 0
    assert 0 < stats.passes_s <= stats.busy_s


def test_a_cost_is_what_bench_wrote(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    file.write_text(
        '{"cost": {"pass_ms": 1.5, "token_ms": 0, "row_ms": 0.25, "pair_ms": 1e-5, "worst_error": 0.2}}'
    )
    assert PassCost.read(file) == PassCost(1.5, 0, 0.25, 1e-5)
    file.write_text('{"cost": null}')
    with pytest.raises(
        RequestError, match=r"has no cost with pass_ms, .*bench BUNDLE --cost --json"
    ):
        PassCost.read(file)
    file.write_text('{"cost": {"pass_ms": -1, "token_ms": 0, "row_ms": 0, "pair_ms": "2"}}')
    with pytest.raises(RequestError, match=r"cost: pass_ms = -1 is not a time"):
        PassCost.read(file)
    with pytest.raises(RequestError, match="no such file"):
        PassCost.read(tmp_path / "none.json")


def test_an_engine_that_fails_fails_its_requests_alone() -> None:
    denoiser = ArithmeticDenoiser()
    calls = 0

    def fail_once(p: dlm_runtime.CallbackPass) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("made to fail")
        denoiser._run(p)

    with (
        dlm_runtime.from_callback(denoiser.info, fail_once) as bundle,
        bundle.scheduler(max_running=1) as scheduler,
    ):
        jobs = [scheduler.submit(tokens=[5], max_new_tokens=6) for _ in range(3)]
        failures = 0
        for job in jobs:
            try:
                assert job.result(30).finish in ("stop", "length")
            except (EngineError, RuntimeError, dlm_runtime.DlmError):
                failures += 1
        assert failures == 1


def test_what_a_denoiser_raised_is_nobody_elses_cause_and_is_not_kept() -> None:
    denoiser = ArithmeticDenoiser()
    kept: list[weakref.ref[BaseException]] = []

    class MadeToFailError(RuntimeError):
        pass

    def fail(p: dlm_runtime.CallbackPass) -> None:
        error = MadeToFailError()
        kept.append(weakref.ref(error))
        raise error

    with dlm_runtime.from_callback(denoiser.info, fail) as bundle:
        with bundle.scheduler(max_running=1) as scheduler:
            for job in [scheduler.submit(tokens=[5], max_new_tokens=6) for _ in range(20)]:
                with pytest.raises(EngineError):
                    job.result(30)
        with pytest.raises(RequestError) as refused:
            bundle.generate(tokens=[5], new_tokens=10**6)
        assert refused.value.__cause__ is None
        with pytest.raises(EngineError) as failed:
            bundle.generate(tokens=[5], max_new_tokens=6)
        assert failed.value.__cause__ is kept[-1]()
        del job, refused, failed
        gc.collect()
        assert len(kept) == 21
        assert not any(error() for error in kept)
