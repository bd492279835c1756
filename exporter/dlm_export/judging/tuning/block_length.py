"""Chooses the block length of a preset that verifies drafts.

The text of such a preset is that of autoregressive decoding, whatever the block length is. So the
best block length is the fastest one. It depends on the device, and on how many drafted tokens are
right for the user's prompts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import dlm_runtime
from dlm_calibration.samples import Sample
from dlm_export.bundle.default_loop import PUBLISHED, published, published_of
from dlm_export.judging.sides.prompts import asked_of
from dlm_export.judging.sides.side import JudgeError
from dlm_export.judging.tuning.default_loop import with_record
from dlm_runtime import Policy, RequestError

LENGTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16)
SAMPLES, ROUNDS = 8, 3
LEAST_SAVING = 0.03
"""Another block length replaces the preset's own length only if it saves this share of the time."""


@dataclass(frozen=True)
class BlockTime:
    """The time and the number of passes of a block length.

    - ``ms``: milliseconds per token, with the prompt. Each text counts with the median of its times.
    - ``tokens_per_pass``: mean number of tokens that a pass decides.
    """

    block_length: int
    ms: float
    tokens_per_pass: float


@dataclass(frozen=True)
class BlockTimes:
    """The times of all block lengths of a preset, measured on ``samples`` texts.

    - ``own``: the block length of the preset.
    - ``threads``: the number of threads that computed the passes. 0 means one for each core.
    """

    preset: str
    own: int
    samples: int
    threads: int
    times: list[BlockTime]

    @property
    def chosen(self) -> BlockTime:
        """The fastest block length, or the preset's own if no other saves ``LEAST_SAVING``."""
        fastest = min(self.times, key=lambda time: time.ms)
        own = next(time for time in self.times if time.block_length == self.own)
        return fastest if fastest.ms <= (1 - LEAST_SAVING) * own.ms else own


def threads_words(threads: int) -> str:
    """Describe a number of threads, where 0 means one for each core."""
    return f"with {threads} threads" if threads else "with a thread for each core"


def lengths_of(policy: Policy) -> list[int]:
    """Return the block lengths to measure, in ascending order."""
    return sorted({*LENGTHS, policy.block_length})


def block_units(policy: Policy, samples: int) -> int:
    """Return the number of times that ``time_blocks`` calls ``on_done``."""
    return ROUNDS * min(samples, SAMPLES) * len(lengths_of(policy))


def time_blocks(
    bundle: dlm_runtime.Bundle,
    samples: Sequence[Sample],
    preset: str,
    max_new_tokens: int,
    on_done: Callable[[], None] = lambda: None,
) -> BlockTimes:
    """Measure all block lengths in turn on the first ``SAMPLES`` samples.

    ``max_new_tokens`` is the number of tokens after each prompt. Generation stops at end tokens.
    Raises JudgeError if there are no samples, and RequestError if the preset does not draft.
    """
    if not samples:
        raise JudgeError("no samples to measure block lengths on: give data")
    policy = bundle.policy(preset)
    if policy.block_length == 1:
        raise RequestError(
            f"the preset {preset} decides one token per pass: fit a preset that drafts, such as self-speculation"
        )
    lengths, chosen = lengths_of(policy), samples[:SAMPLES]
    seconds: dict[tuple[int, int], list[float]] = {}
    made = dict.fromkeys(lengths, (0, 0))
    for first in range(ROUNDS):
        for number, sample in enumerate(chosen):
            prompt, room = asked_of(sample, number, max_new_tokens, bundle.max_canvas_length)
            for length in lengths:
                start = time.perf_counter()
                out = bundle.generate(
                    tokens=prompt, max_new_tokens=room, preset=preset, block_length=length
                )
                taken = time.perf_counter() - start
                seconds.setdefault((length, number), []).append(taken)
                if first == 0:
                    tokens, passes = made[length]
                    made[length] = tokens + max(1, out.completion_tokens), passes + out.nfe
                on_done()
    times = []
    for length in lengths:
        total = sum(statistics.median(seconds[length, number]) for number in range(len(chosen)))
        tokens, passes = made[length]
        times.append(BlockTime(length, 1000 * total / tokens, tokens / passes))
    return BlockTimes(preset, policy.block_length, len(chosen), bundle.threads, times)


def with_block_length(manifest: Mapping[str, Any], found: BlockTimes) -> dict[str, Any]:
    """Return a copy of the manifest whose default loop has the chosen block length."""
    chosen, name = found.chosen, published_of(manifest)
    one = next(time for time in found.times if time.block_length == 1)
    why = (
        f"on {found.samples} samples {threads_words(found.threads)}, a token takes {chosen.ms:.2f} ms with blocks of "
        f"{chosen.block_length}, and {one.ms:.2f} ms with one token a pass"
    )
    record = published(name, f"{PUBLISHED}; {why}")
    if (found.preset, chosen.block_length) != (name, found.own):
        changes = {} if chosen.block_length == found.own else {"block_length": chosen.block_length}
        record |= {"preset": found.preset, "changes": changes, "reason": why}
    return with_record(manifest, record)
