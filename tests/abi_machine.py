"""Makes random calls of the C ABI in any order, and checks them against a model of the handles.

Usage: ``abi_machine.py EXAMPLES STEPS``. Hypothesis chooses the calls. The program runs in a
separate process, so that a crash fails one test and does not end the test run. The variable
$DLM_RUNTIME_LIBRARY names the library to test. Every handle that is passed is either NULL or valid,
because the header allows no other handles.
"""

from __future__ import annotations

import ctypes as C
import sys
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from dlm_runtime.abi import native as _native
from dlm_runtime.abi.native import BeforePassFn, DecodeFn, PassFn, Request, Result, Step, StepFn

OK, INVALID, NOT_FOUND, ENGINE_FAILED, CANCELLED, INTERNAL, BUSY = 0, 1, 2, 5, 7, 8, 10
VOCAB, MASK, END, CANVAS = 12, 0, 1, 48
lib = _native.library()


def usually(right: st.SearchStrategy[Any], wrong: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Choose a valid value (``right``) with probability 0.9, otherwise an invalid value."""
    return st.integers(0, 9).flatmap(lambda drawn: wrong if drawn == 9 else right)


WRONG_NUMBERS = st.sampled_from([-1, 0, 1, 3, CANVAS + 1, 1 << 24, (1 << 31) - 1, -(1 << 31)])
NUMBERS = usually(st.integers(0, 24), WRONG_NUMBERS)
NO_STATUS = ("dlm_job_wait",)  # these functions return a number that is not a status
IDS = st.integers(0, VOCAB - 1)
TOKENS = usually(
    st.lists(IDS, max_size=20), st.lists(IDS | st.sampled_from([-1, VOCAB, 1 << 30]), max_size=20)
)
REALS = st.sampled_from(
    [0.0, 0.5, 1.0, -1.0, 2.0, 1e-3, 1e300, float("nan"), float("inf"), float("-inf")]
)
SIZES = st.sampled_from([0, 1, 7, 8, 40, 10**6])
RARELY = st.integers(0, 9).map(lambda drawn: drawn == 0)


@st.composite
def policies(draw: st.DrawFn) -> Any:
    """A policy in which a few fields are set to allowed or forbidden values."""
    policy = _native.initialised(_native.Policy)
    for field in draw(st.lists(st.sampled_from(_native.policy_fields()), max_size=2)):
        name = field.name.decode()
        if field.kind == 0:
            known, number = [], 0
            while (choice := field.choices[number]) is not None:
                known.append(choice)
                number += 1
            setattr(
                policy,
                name,
                draw(
                    usually(st.sampled_from(known), st.sampled_from([b"", b"no such \xff", None]))
                ),
            )
        elif field.kind == 2:
            setattr(policy, name, draw(REALS))
        elif field.kind == 1:
            setattr(policy, name, draw(NUMBERS))
    if draw(RARELY):
        policy.struct_size = draw(SIZES)
    return policy


class Calls(RuleBasedStateMachine):
    """Random calls on a bundle with one session, one scheduler and its jobs.

    ``inside`` is the number of session calls in progress. It can exceed 1, because a callback
    can call a session too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bundle, self.session, self.scheduler = C.c_void_p(), C.c_void_p(), C.c_void_p()
        self.jobs: list[C.c_void_p] = []
        self.fails_at = self.passes = 0
        self.stops_at = -1
        self.reenters = False
        self.raised: list[BaseException] = []
        self.message = C.create_string_buffer(300)
        self.run = PassFn(self._pass)
        self.on_step, self.decode = StepFn(self._step), DecodeFn(self._decode)
        self.before_pass = BeforePassFn(self._before_pass)

    # ---- Callbacks ----

    def _pass(self, _: Any, passed: Any) -> int:
        return self._noting(lambda: self._fill(passed.contents))

    def _fill(self, made: Any) -> int:
        self.passes += 1
        rows = made.batch * made.rows
        for row in range(rows):
            token = 2 + (self.passes + row) % (VOCAB - 3)
            made.top_tokens[2 * row], made.top_tokens[2 * row + 1] = token, token + 1
            made.top_probs[2 * row], made.top_probs[2 * row + 1] = 0.6, 0.2
            if made.entropy:
                made.entropy[row] = -0.5
            for other in range(VOCAB if made.logits else 0):
                made.logits[row * VOCAB + other] = 9.0 if other == token else 0.0
        for layer in range(made.layers if made.present_keys else 0):
            C.memset(made.present_keys[layer], 1, 4 * 2 * made.batch * made.tokens)
        return ENGINE_FAILED if self.passes == self.fails_at else OK

    def _from_inside(self) -> int:
        if self.reenters:
            step = C.POINTER(Step)()
            if self.is_in_session:
                assert lib.dlm_session_step(self.session, C.byref(step)) == INVALID
                assert b"callback" in lib.dlm_session_last_error(self.session)
            lib.dlm_session_cancel(self.session, 0)
        self.stops_at -= 1
        return int(self.stops_at == 0)

    def _step(self, _: Any, step: Any) -> int:
        return self._noting(
            lambda: self._from_inside() if 0 < step.contents.length <= CANVAS else 1 // 0
        )

    def _before_pass(self, _: Any) -> int:
        return self._noting(self._from_inside)

    def _noting(self, work: Callable[[], int]) -> int:
        """Run a callback and record its exception, because ctypes only prints exceptions."""
        try:
            return work()
        except BaseException as err:
            self.raised.append(err)
            return 1

    @invariant()
    def no_callback_has_raised(self) -> None:
        assert not self.raised, self.raised

    # ---- Checks after every call ----

    def _is_known(self, status: int) -> int:
        assert 0 <= status <= BUSY
        assert status != INTERNAL
        assert lib.dlm_status_name(status) != b"unknown status"
        return status

    def _said(self, status: int) -> int:
        """Check a call that received ``self.message`` as its buffer for the error message."""
        assert (self.message.value == b"") == (status == OK), (status, self.message.value)
        return self._is_known(status)

    def _of_session(self, status: int) -> int:
        assert (lib.dlm_session_last_error(self.session) == b"") == (status == OK)
        return self._is_known(status)

    def _in_session(self, call: Any) -> int:
        self.is_in_session = True
        try:
            status = call()
        finally:
            self.is_in_session = False
        return self._of_session(status)

    is_in_session = False

    def _decode(
        self, _: Any, tokens: Any, count: int, string: int, capacity: int, size: Any
    ) -> int:
        text = "".join("abé"[token % 3] for token in tokens[:count]).encode()
        size[0] = len(text)
        C.memmove(string, text, min(len(text), capacity))
        return OK

    def _request(self, draw: st.DataObject, tokens: list[int]) -> Any:
        request = _native.initialised(Request)
        policy = draw.draw(policies(), "policy")
        given = (C.c_int32 * len(tokens))(*tokens)
        stops = (C.c_char_p * 2)(b"ab", "é".encode())
        request.kept = policy, given, stops  # must live as long as the struct
        if tokens:
            request.tokens, request.token_count = C.cast(given, _native.i32p), len(tokens)
        if not draw.draw(RARELY):
            request.policy = C.pointer(policy)
        request.max_new_tokens = draw.draw(NUMBERS, "max_new_tokens")
        request.steps = draw.draw(usually(st.just(0), st.sampled_from([4, -1])))
        request.max_steps = draw.draw(usually(st.sampled_from([0, 3]), st.just(-1)))
        request.deadline_ms = draw.draw(
            usually(st.just(0.0), st.sampled_from([1e-6, 1e9, -1.0, float("nan")]))
        )
        request.text = draw.draw(usually(st.sampled_from([0, 1, 2]), st.sampled_from([3, -1])))
        if draw.draw(st.booleans()):
            request.decode = self.decode
        if draw.draw(RARELY):
            request.stop_strings, request.stop_count = stops, draw.draw(st.integers(0, 2))
        if draw.draw(st.booleans()):
            request.on_step = self.on_step
        if draw.draw(RARELY):
            request.struct_size = draw.draw(SIZES)
        return request

    # ---- Calls ----

    @initialize(
        wrong=usually(
            st.none(),
            st.tuples(
                st.sampled_from([f for f, _ in _native.Denoiser._fields_[1:10]]), WRONG_NUMBERS
            ),
        ),
        layers=st.integers(1, 2),
        has_cache=st.booleans(),
        has_end=st.booleans(),
        visible_block=usually(st.sampled_from([0, 0, 8]), st.just(-1)),
    )
    def open(
        self, wrong: Any, layers: int, has_cache: bool, has_end: bool, visible_block: int
    ) -> None:
        told = _native.initialised(_native.Denoiser)
        told.vocab_size, told.mask_token_id, told.max_canvas_length, told.layers = (
            VOCAB,
            MASK,
            CANVAS,
            layers,
        )
        told.kv_heads, told.head_size, told.has_cache, told.visible_block = (
            1,
            2,
            has_cache,
            visible_block,
        )
        ends = (C.c_int32 * 1)(END)
        if has_end:
            told.eos_token_ids, told.eos_count = C.cast(ends, _native.i32p), 1
        refused = [*self.refused(wrong)] if wrong else []
        if wrong:
            setattr(told, *wrong)
        report = (self.message, len(self.message), C.byref(self.bundle))
        status = self._said(lib.dlm_bundle_from_callback(C.byref(told), self.run, None, *report))
        if status != OK:
            assert not self.bundle
        elif refused:  # this class's callback writes arrays of fixed sizes
            lib.dlm_bundle_destroy(self.bundle)
            self.bundle = C.c_void_p()
        made = lib.dlm_session_create(
            self.bundle, self.message, len(self.message), C.byref(self.session)
        )
        assert (self._said(made) == OK) == bool(self.bundle) == bool(self.session)
        options = _native.initialised(_native.SchedulerOptions)
        options.max_running, options.max_waiting = 2, 3
        made = lib.dlm_scheduler_create(
            self.bundle, C.byref(options), self.message, len(self.message), C.byref(self.scheduler)
        )
        assert (self._said(made) == OK) == bool(self.bundle)

    @staticmethod
    def refused(wrong: tuple[str, int]) -> list[str]:
        return [wrong[0]] if wrong[0] not in ("has_cache", "shift") else []

    @rule(draw=st.data(), tokens=TOKENS, lacks=usually(st.just(" "), st.sampled_from("ro")))
    def generate(self, draw: st.DataObject, tokens: list[int], lacks: str) -> None:
        request, result = self._request(draw, tokens), C.POINTER(Result)()
        given = (
            None if lacks == "r" else C.byref(request),
            None if lacks == "o" else C.byref(result),
        )
        status = self._in_session(lambda: lib.dlm_session_generate(self.session, *given))
        if result:
            self._is_result(result.contents, status)
        if status != OK or not result or request.struct_size != C.sizeof(Request):
            return
        canvas = result.contents.tokens[: result.contents.length]
        assert len(canvas) == len(tokens) + request.max_new_tokens
        assert all(now == then for now, then in zip(canvas, tokens, strict=False) if then != MASK)

    def _is_result(self, result: Any, status: int) -> None:
        assert result.status == status
        assert (result.message == b"") == (status == OK)
        assert result.stats.contents.nfe >= 0
        assert all(0 <= token < VOCAB for token in result.tokens[: result.length])
        C.string_at(result.text, result.text_size).decode()

    @rule(
        draw=st.data(),
        each=st.lists(TOKENS, max_size=3),
        max_batch=usually(st.just(2), WRONG_NUMBERS),
        lacks=RARELY,
    )
    def generate_batch(
        self, draw: st.DataObject, each: list[list[int]], max_batch: int, lacks: bool
    ) -> None:
        requests = [self._request(draw, tokens) for tokens in each]
        given = (C.POINTER(Request) * max(len(each), 1))(*map(C.pointer, requests))
        if lacks:
            given[0] = C.POINTER(Request)()
        status = self._in_session(
            lambda: lib.dlm_session_generate_batch(self.session, given, len(each), max_batch)
        )
        result = C.POINTER(Result)()
        for number in range(len(each)):
            if lib.dlm_session_result(self.session, number, C.byref(result)) == OK:
                self._is_result(result.contents, result.contents.status)
                assert status != OK or result.contents.status == OK

    @rule(draw=st.data(), tokens=TOKENS)
    def start(self, draw: st.DataObject, tokens: list[int]) -> None:
        request = self._request(draw, tokens)
        self._of_session(lib.dlm_session_start(self.session, C.byref(request)))

    @rule(has_step=st.integers(0, 9))
    def step(self, has_step: int) -> None:
        step = C.POINTER(Step)()
        status = self._in_session(
            lambda: lib.dlm_session_step(self.session, C.byref(step) if has_step else None)
        )
        assert (status == OK) == bool(step)
        if step:
            assert all(0 <= token < VOCAB for token in step[0].canvas[: step[0].length])

    @rule(request=st.sampled_from([0, 1, 2, 2**64 - 1]))
    def result(self, request: int) -> None:
        result = C.POINTER(Result)()
        status = self._of_session(lib.dlm_session_result(self.session, request, C.byref(result)))
        assert (status == OK) == bool(result)

    @rule(request=st.sampled_from([0, 1, 2**64 - 1]))
    def cancel(self, request: int) -> None:
        lib.dlm_session_cancel(self.session, request)

    @rule(tokens=TOKENS, rows=st.lists(NUMBERS, max_size=3), capacity=st.integers(0, 3 * VOCAB))
    def logits(self, tokens: list[int], rows: list[int], capacity: int) -> None:
        room = (C.c_float * max(capacity, 1))()
        given = (
            (C.c_int32 * max(len(tokens), 1))(*tokens),
            len(tokens),
            (C.c_int32 * max(len(rows), 1))(*rows),
            len(rows),
        )
        self._in_session(lambda: lib.dlm_session_logits(self.session, *given, room, capacity))

    @rule(
        fails=st.integers(0, 3),
        stops_at=st.integers(-1, 4),
        reenters=st.booleans(),
        before=st.booleans(),
    )
    def arrange(self, fails: int, stops_at: int, reenters: bool, before: bool) -> None:
        """Set how the callbacks of later calls behave."""
        self.fails_at = self.passes + fails if fails else 0
        self.stops_at, self.reenters = stops_at, reenters
        callback = self.before_pass if before else C.cast(None, BeforePassFn)
        self._of_session(lib.dlm_session_before_pass(self.session, callback, None))

    @rule(draw=st.data(), tokens=TOKENS, lacks_job=RARELY)
    def submit(self, draw: st.DataObject, tokens: list[int], lacks_job: bool) -> None:
        request, job = self._request(draw, tokens), C.c_void_p()
        out = None if lacks_job else C.byref(job)
        report = (self.message, len(self.message), out)
        status = self._said(lib.dlm_scheduler_submit(self.scheduler, C.byref(request), *report))
        assert (status == OK) == bool(job)
        if job:
            self.jobs.append(job)

    @rule(before=st.booleans())
    def make_passes(self, before: bool) -> None:
        callback = self.before_pass if before else C.cast(None, BeforePassFn)
        status = self._said(
            lib.dlm_scheduler_run(
                self.scheduler, 1, callback, None, self.message, len(self.message)
            )
        )
        assert (
            status != OK
            or self.is_stopped
            or all(lib.dlm_job_wait(job, 0) == 1 for job in self.jobs)
        )
        self.is_stopped = False

    is_stopped = False

    @rule()
    def stop(self) -> None:
        lib.dlm_scheduler_stop(self.scheduler)
        self.is_stopped = True

    @precondition(lambda self: self.jobs)
    @rule(which=st.integers(0, 20), what=st.sampled_from(["ask", "ask", "cancel", "destroy"]))
    def ask_job(self, which: int, what: str) -> None:
        which %= len(self.jobs)
        job, result = self.jobs[which], C.POINTER(Result)()
        is_done = lib.dlm_job_wait(job, 0) == 1
        status = self._is_known(lib.dlm_job_result(job, C.byref(result)))
        assert bool(result) == is_done
        if is_done:
            self._is_result(result.contents, status)
        else:
            assert status == INVALID
        if what == "cancel":
            lib.dlm_job_cancel(job)
        if what == "destroy":
            lib.dlm_job_destroy(self.jobs.pop(which))

    @rule()
    def renew_session(self) -> None:
        lib.dlm_session_destroy(self.session)
        self.session = C.c_void_p()
        lib.dlm_session_create(self.bundle, None, 0, C.byref(self.session))

    @rule(
        draw=st.data(),
        capacity=st.integers(0, 20),
        name=st.sampled_from([None, b"", b"fast", b"x" * 500]),
    )
    def ask_for_a_preset(self, draw: st.DataObject, capacity: int, name: bytes | None) -> None:
        policy, room = draw.draw(policies()), (C.c_uint8 * 24)(*([7] * 24))
        message = C.cast(room, C.c_char_p)
        for names in ((name, None), (None, name)):
            asked = (*names, message, capacity, C.byref(policy))
            status = self._is_known(lib.dlm_bundle_policy(self.bundle, *asked))
            assert status in (INVALID, NOT_FOUND)
            assert all(byte == 7 for byte in room[capacity:]), "written behind the end"

    @rule()
    def hand_in_nothing(self) -> None:
        """Call every function that takes a handle, with NULL for all pointers."""
        numbers = (C.c_int32, C.c_size_t, C.c_double, BeforePassFn, PassFn)
        for name, (result, arguments) in _native.HEADER.functions.items():
            if name.endswith(("field_at", "kernel_set_at", "status_name", "version")):
                continue
            status = getattr(lib, name)(
                *(kind() if kind in numbers else None for kind in arguments)
            )
            assert result is not C.c_int32 or name in NO_STATUS or status == INVALID, name

    def teardown(self) -> None:
        """Destroy the jobs and their scheduler in either order."""
        if self.passes % 2:
            lib.dlm_scheduler_destroy(self.scheduler)
        for job in self.jobs:
            lib.dlm_job_destroy(job)
        if self.passes % 2 == 0:
            lib.dlm_scheduler_destroy(self.scheduler)
        lib.dlm_session_destroy(self.session)
        lib.dlm_bundle_destroy(self.bundle)


if __name__ == "__main__":
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
    run_state_machine_as_test(
        Calls,
        settings=settings(
            max_examples=int(sys.argv[1]),
            stateful_step_count=int(sys.argv[2]),
            derandomize=True,
            database=None,
            suppress_health_check=checks,
        ),
    )
    print("done")
