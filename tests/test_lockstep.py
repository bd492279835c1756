"""Tests of requests that run in lockstep.

In lockstep, each layer is loaded once and processes all requests before the next layer is loaded.
The results must equal those of separate runs of the reference loop.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_judging_effort
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loops import loops

from dlm_calibration.samples import Sample
from dlm_export import families
from dlm_export.network import lockstep, reference
from dlm_export.network.layered import MemoryLimitError
from dlm_export.network.loop_turns import Canvas, start_canvas
from dlm_export.quantising.samples import TRAJECTORY_PASSES, trajectories
from dlm_export.sources import open_source
from dlm_runtime import Policy

LOOPS = test_judging_effort.LOOPS | loops("""
random order: commit=static score=random steps_per_block=3 block_length=6 cache=dual
""")


@pytest.mark.parametrize("family", ["llada_checkpoint", "dream_checkpoint"])
@pytest.mark.parametrize("name", LOOPS)
@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shapes=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 20)), min_size=1, max_size=6),
    tokens_together=st.sampled_from([1, 40, 2048]),
    is_held=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_each_course_is_the_references(
    family: str,
    name: str,
    shapes: list[tuple[int, int]],
    tokens_together: int,
    is_held: bool,
    seed: int,
    request: pytest.FixtureRequest,
) -> None:
    source = open_source(request.getfixturevalue(family))
    c, policy, rng = source.network, Policy(**LOOPS[name]), np.random.default_rng(seed)
    # The canvases contain given tokens. If all positions were masked, all scores would be nearly
    # equal, and rounding errors would decide which positions are committed.
    given_ids = np.delete(np.arange(c.vocab_size), c.mask_token_id)
    starts = [
        start_canvas(rng.choice(given_ids, given).tolist(), new, c.mask_token_id)
        for given, new in shapes
    ]
    whole, layered = families.load(source.parameters, c), families.layered(source.parameters, c)
    longest = max(len(start.tokens) for start in starts)
    memory_bytes = max(longest, 2 * tokens_together) * lockstep.cache_bytes(layered)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lockstep, "HELD", c.parameter_count() if is_held else 0)
        patch.setattr(lockstep, "BATCH_TOKENS", tokens_together)
        patch.setattr(lockstep, "SCORED_ROWS", 1 + seed % 30)
        found = list(lockstep.courses(layered, starts, policy, None if is_held else memory_bytes))
    assert len(found) == len(starts)
    for start, course in zip(starts, found, strict=True):
        expected = [start]
        reference.fill(whole, start, policy, on_step=expected.append)
        assert [(one.tokens.tolist(), one.undecided.tolist()) for one in course.canvases] == [
            (one.tokens.tolist(), one.undecided.tolist()) for one in expected
        ]


def test_only_what_has_room_goes_on_together(
    llada_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_source(llada_checkpoint)
    layered = families.layered(source.parameters, source.network)
    widths: list[int] = []
    make_passes = lockstep._make_passes

    def counted(*arguments: Any) -> None:
        widths.append(len(arguments[-1]))
        make_passes(*arguments)

    monkeypatch.setattr(lockstep, "_make_passes", counted)
    starts = [start_canvas([5, 6, 7], 7, source.network.mask_token_id) for _ in range(5)]
    policy = Policy(block_length=7, cache="dual")
    for tokens, most in ((5, 1), (9, 1), (20, 2), (1000, 5)):
        widths.clear()
        courses = list(
            lockstep.courses(layered, starts, policy, 2 * tokens * lockstep.cache_bytes(layered))
        )
        assert len(courses) == 5
        assert max(widths) == most
    with pytest.raises(
        MemoryLimitError,
        match=r"a canvas of 10 tokens need [\d,]+ bytes; .* Allow [\d,]+ more bytes",
    ):
        next(lockstep.courses(layered, starts, policy, 9 * lockstep.cache_bytes(layered)))


def test_a_denoiser_that_is_sure_of_nothing_takes_so_many_passes_a_block(
    llada_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_source(llada_checkpoint)
    layered = families.layered(source.parameters, source.network)
    done: list[int] = []
    policy = Policy(commit="threshold", threshold=1.0, block_length=64)
    steps: list[int] = []
    make_passes = lockstep._make_passes

    def counted(*arguments: Any) -> None:
        make_passes(*arguments)
        steps.append(len(done))

    monkeypatch.setattr(lockstep, "_make_passes", counted)
    run = trajectories(layered, policy, None, lambda: done.append(1))
    samples = [Sample(np.arange(10, 20), 4, "", ""), Sample(np.arange(10, 30), 0)]
    courses = list(run(samples))
    assert len(done) == len(courses) == 2
    assert steps == sorted(steps)
    assert 1 in steps  # one request is done before the other
    mask = source.network.mask_token_id
    for course, sample, prompt_length in zip(courses, samples, (4, 10), strict=True):
        assert len(course) == TRAJECTORY_PASSES + 1
        assert (course[0][prompt_length:] == mask).all()
        assert np.array_equal(course[0][:prompt_length], sample.tokens[:prompt_length])
        assert not (course[-1] == mask).any()


def test_a_canvas_without_masks_stays_as_it_is(llada_checkpoint: Path) -> None:
    source = open_source(llada_checkpoint)
    canvas = Canvas(np.array([5, 6, 7]), np.zeros(3, bool))
    found = list(
        lockstep.courses(
            families.layered(source.parameters, source.network), [canvas] * 3, Policy()
        )
    )
    assert [course.canvases for course in found] == [[canvas]] * 3
