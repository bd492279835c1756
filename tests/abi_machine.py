"""Any calls of the C ABI in any order, as Hypothesis draws them, checked against a model of what
handles there are.

A program: ``abi_machine.py EXAMPLES STEPS``. It runs in a process of its own, over the library that
$DLM_RUNTIME_LIBRARY names, so that a crash is a failure and not the end of the tests. Handles are
NULL, or there: the header defines nothing else.
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

from dlm_runtime import _native
from dlm_runtime._native import (
    BeforePassFn,
    GenerateOptions,
    PassFn,
    Request,
    Result,
    SchedulerOptions,
    Stats,
    Step,
    StepFn,
)

OK, INVALID, NOT_FOUND, ENGINE_FAILED, CANCELLED, INTERNAL, BUSY = 0, 1, 2, 5, 7, 8, 10
VOCAB, MASK, END, CANVAS = 12, 0, 1, 48
lib = _native.library()


def usually(right: st.SearchStrategy[Any], wrong: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Most calls have to succeed for what comes behind them to be of interest."""
    return st.integers(0, 9).flatmap(lambda drawn: wrong if drawn == 9 else right)


WRONG_NUMBERS = st.sampled_from([-1, 0, 1, 3, CANVAS + 1, 1 << 24, (1 << 31) - 1, -(1 << 31)])
NUMBERS = usually(st.integers(0, 24), WRONG_NUMBERS)
NO_STATUS = (
    "dlm_automaton_shortest",
    "dlm_job_wait",
    "dlm_bundle_max_new_tokens",
)  # that return another number
IDS = st.integers(0, VOCAB - 1)
TOKENS = usually(
    st.lists(IDS, max_size=20), st.lists(IDS | st.sampled_from([-1, VOCAB, 1 << 30]), max_size=20)
)
REALS = st.sampled_from(
    [0.0, 0.5, 1.0, -1.0, 2.0, 1e-3, 1e300, float("nan"), float("inf"), float("-inf")]
)
SIZES = st.sampled_from([0, 1, 7, 8, 40, 10**6])
CAPACITIES = usually(st.just(CANVAS), st.integers(0, 9))
RARELY = st.integers(0, 9).map(lambda drawn: drawn == 0)


@st.composite
def policies(draw: st.DrawFn) -> _native.Policy:
    """A policy with a few fields changed, to what they may be or to what nothing may."""
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
    """One bundle with a session, a scheduler and its jobs. ``inside``: how deep in a call of the
    session, through callbacks.
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
        self.on_step = StepFn(self._step)
        self.before_pass = BeforePassFn(self._before_pass)

    # ---- Callbacks ----

    def _pass(self, _: Any, passed: Any) -> int:
        return self._noting(lambda: self._fill(passed.contents))

    def _fill(self, made: _native.Pass) -> int:
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
            length, step = C.c_size_t(), Step()
            lib.dlm_session_stats(self.session, C.byref(Stats()))
            lib.dlm_session_undecided(self.session, C.byref(length))
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
        """What a callback raises, ctypes would print and forget."""
        try:
            return work()
        except BaseException as err:
            self.raised.append(err)
            return 1

    @invariant()
    def no_callback_has_raised(self) -> None:
        assert not self.raised, self.raised

    # ---- What every call owes ----

    def _is_known(self, status: int) -> int:
        assert 0 <= status <= BUSY
        assert status != INTERNAL
        assert lib.dlm_status_name(status) != b"unknown status"
        return status

    def _said(self, status: int) -> int:
        """Of a call that was given the message's buffer."""
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

    def _options(self, draw: st.DataObject) -> GenerateOptions:
        options = _native.initialised(GenerateOptions)
        self.policy = draw.draw(policies(), "policy")
        if not draw.draw(RARELY):
            options.policy = C.pointer(self.policy)
        options.max_new_tokens = draw.draw(NUMBERS, "max_new_tokens")
        options.steps = draw.draw(usually(st.just(0), st.sampled_from([4, -1])))
        options.max_steps = draw.draw(usually(st.sampled_from([0, 3]), st.just(-1)))
        options.deadline_ms = draw.draw(
            usually(st.just(0.0), st.sampled_from([1e-6, 1e9, -1.0, float("nan")]))
        )
        if draw.draw(st.booleans()):
            options.on_step = self.on_step
        if draw.draw(RARELY):
            options.struct_size = draw.draw(SIZES)
        return options

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
        told.eos_token_ids, told.eos_count = C.cast(ends, _native.i32p), int(has_end)
        refused = [*self.refused(wrong)] if wrong else []
        if wrong:
            setattr(told, *wrong)
        report = (self.message, len(self.message), C.byref(self.bundle))
        status = self._said(lib.dlm_bundle_from_callback(C.byref(told), self.run, None, *report))
        if status != OK:
            assert not self.bundle
        elif refused:  # what is taken with other sizes: not what the callback fills
            lib.dlm_bundle_destroy(self.bundle)
            self.bundle = C.c_void_p()
        made = lib.dlm_session_create(
            self.bundle, self.message, len(self.message), C.byref(self.session)
        )
        assert (self._said(made) == OK) == bool(self.bundle) == bool(self.session)
        options = _native.initialised(SchedulerOptions)
        options.max_running, options.max_waiting = 2, 3
        made = lib.dlm_scheduler_create(
            self.bundle, C.byref(options), self.message, len(self.message), C.byref(self.scheduler)
        )
        assert (self._said(made) == OK) == bool(self.bundle)

    @staticmethod
    def refused(wrong: tuple[str, int]) -> list[str]:
        return [wrong[0]] if wrong[0] not in ("has_cache", "shift") else []

    @rule(
        draw=st.data(),
        tokens=TOKENS,
        capacity=CAPACITIES,
        lacks=usually(st.just(" "), st.sampled_from("tol")),
    )
    def generate(self, draw: st.DataObject, tokens: list[int], capacity: int, lacks: str) -> None:
        options, length = self._options(draw), C.c_size_t(99)
        canvas = (C.c_int32 * CANVAS)(*tokens)
        before = [*canvas]
        given = (
            None if lacks == "o" else C.byref(options),
            None if lacks == "t" else canvas,
            len(tokens),
            capacity,
            None,
            None if lacks == "l" else C.byref(length),
        )
        status = self._in_session(lambda: lib.dlm_session_generate(self.session, *given))
        if status != OK:
            assert [*canvas] == before
            assert lacks == "l" or length.value == 0
            return
        assert lacks == " "
        assert length.value == len(tokens) + options.max_new_tokens <= capacity
        assert all(0 <= token < VOCAB for token in canvas[: length.value])
        assert all(now == then for now, then in zip(canvas, tokens, strict=False) if then != MASK)

    @rule(
        draw=st.data(),
        each=st.lists(TOKENS, max_size=3),
        max_batch=usually(st.just(2), WRONG_NUMBERS),
        lacks=RARELY,
    )
    def generate_batch(
        self, draw: st.DataObject, each: list[list[int]], max_batch: int, lacks: bool
    ) -> None:
        options = self._options(draw)
        canvases = [(C.c_int32 * CANVAS)(*tokens) for tokens in each]
        requests = (Request * max(len(each), 1))()
        for request, canvas, tokens in zip(requests, canvases, each, strict=False):
            request.tokens, request.count, request.capacity = (
                C.cast(canvas, _native.i32p),
                len(tokens),
                CANVAS,
            )
        if lacks:
            requests[0].tokens = None
        status = self._in_session(
            lambda: lib.dlm_session_generate_batch(
                self.session, C.byref(options), requests, len(each), max_batch, None
            )
        )
        assert all((status == OK) == (request.length > 0) for request in requests[: len(each)])

    @rule(draw=st.data(), tokens=TOKENS)
    def start(self, draw: st.DataObject, tokens: list[int]) -> None:
        options = self._options(draw)
        given = (C.c_int32 * max(len(tokens), 1))(*tokens)
        self._of_session(lib.dlm_session_start(self.session, C.byref(options), given, len(tokens)))

    @rule(has_step=st.integers(0, 9))
    def step(self, has_step: int) -> None:
        step = Step()
        status = self._in_session(
            lambda: lib.dlm_session_step(self.session, C.byref(step) if has_step else None)
        )
        assert status != OK or all(0 <= step.canvas[i] < VOCAB for i in range(step.length))

    @rule(
        request=st.sampled_from([0, 1, 2, 2**64 - 1]),
        size=st.sampled_from([C.sizeof(Result), C.sizeof(Result) + 8, 8, 0, 20]),
    )
    def result(self, request: int, size: int) -> None:
        room = (C.c_uint8 * (C.sizeof(Result) + 16))(*([7] * (C.sizeof(Result) + 16)))
        found = C.cast(room, C.POINTER(Result))
        self._of_session(lib.dlm_session_result_sized(self.session, request, found, size))
        assert all(byte == 7 for byte in room[max(size, 8) :]), "written behind the end"

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
        """How the callbacks of later calls behave."""
        self.fails_at = self.passes + fails if fails else 0
        self.stops_at, self.reenters = stops_at, reenters
        callback = self.before_pass if before else C.cast(None, BeforePassFn)
        self._of_session(lib.dlm_session_before_pass(self.session, callback, None))

    @rule(draw=st.data(), tokens=TOKENS, lacks_job=RARELY, given=st.sampled_from([0, 0, 0, -1, 3]))
    def submit(self, draw: st.DataObject, tokens: list[int], lacks_job: bool, given: int) -> None:
        options, job = self._options(draw), C.c_void_p()
        call = (
            C.byref(options),
            None,
            given,
            (C.c_int32 * max(len(tokens), 1))(*tokens),
            len(tokens),
        )
        out = None if lacks_job else C.byref(job)
        status = self._said(
            lib.dlm_scheduler_submit(self.scheduler, *call, self.message, len(self.message), out)
        )
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
        job, length, result = self.jobs[which], C.c_size_t(), Result()
        is_done = lib.dlm_job_wait(job, 0) == 1
        tokens = lib.dlm_job_tokens(job, C.byref(length))
        assert bool(tokens) == is_done == (length.value > 0)
        status = self._is_known(lib.dlm_job_result_sized(job, C.byref(result), C.sizeof(result)))
        assert is_done or status == INVALID
        assert bool(lib.dlm_job_message(job)) == (is_done and status != OK)
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
        for call in (lib.dlm_bundle_preset, lib.dlm_bundle_effort):
            assert self._is_known(call(self.bundle, name, message, capacity, C.byref(policy))) in (
                INVALID,
                NOT_FOUND,
            )
            assert all(byte == 7 for byte in room[capacity:]), "written behind the end"

    @rule()
    def hand_in_nothing(self) -> None:
        """Every function that takes a handle, with NULL for all that it takes."""
        numbers = (C.c_int32, C.c_size_t, C.c_double, BeforePassFn, PassFn, _native.TextFn)
        for name, (result, arguments) in _native._SIGNATURES.items():
            if name.endswith(("field_at", "kernel_set_at", "status_name", "version")):
                continue
            status = getattr(lib, name)(
                *(kind() if kind in numbers else None for kind in arguments)
            )
            assert result is not C.c_int32 or name in NO_STATUS or status == INVALID, name

    def teardown(self) -> None:
        """In either order of jobs and their scheduler."""
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
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=checks,
        ),
    )
    print("done")
