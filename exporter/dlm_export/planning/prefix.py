"""Measures how much time a scheduler saves if prompts with the same start share keys and values.

``dlm-export bench --prefix`` uses this module.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dlm_export.bundle.manifest import network_of
from dlm_export.bundle.prompt_reuse import prompt_reuse_of, reused_tokens
from dlm_export.progress import Progress
from dlm_runtime import Bundle, Policy, RequestError, Scheduler

# Number of requests that run one after another to measure the time to the first tokens.
FIRST_REQUESTS = 8
RUNNING = 16  # the largest number of requests that run at the same time


@dataclass(frozen=True)
class PrefixLoad:
    """Requests that start with the same tokens.

    - ``shared``: number of leading tokens that all prompts have in common.
    - ``own``: number of tokens in each prompt that follow the shared tokens.
    - ``new``: number of tokens that each request generates.
    - ``requests``: number of requests that are submitted at once.
    - ``preset``, ``changes``: the preset, and changes to the preset's fields.
    """

    shared: int
    own: int
    new: int
    requests: int
    preset: str
    changes: Mapping[str, Any]

    @property
    def asked(self) -> dict[str, Any]:
        """The arguments of ``submit`` that all requests have in common. No request ends early."""
        fields = {"new_tokens": self.new, "preset": self.preset, "stop": "none"}
        return {**self.changes, **fields}


@dataclass(frozen=True)
class Side:
    """The measurements of one scheduler.

    ``first_tokens_ms`` is measured with requests that run one after another. All other fields are
    measured with requests that are submitted at once.

    - ``first_tokens_ms``: the median time from submitting a request until its first tokens are
      committed.
    - ``tokens_per_s``: the number of generated tokens per second.
    - ``cached_tokens``: number of prompt tokens whose keys and values the requests reused.
    - ``cache_bytes``: the largest total size of the keys and values in memory.
    - ``canvases``: the finished canvases of the requests.
    """

    first_tokens_ms: float
    tokens_per_s: float
    cached_tokens: int
    cache_bytes: int
    canvases: list[Sequence[int]]


def random_prompts(bundle: Bundle, count: int, own: int, shared: int = 0) -> list[list[int]]:
    """Return ``count`` random prompts: ``shared`` equal tokens, then ``own`` different tokens.

    The prompts contain neither mask tokens nor end tokens.
    """
    special = {bundle.mask_token_id, *bundle.eos_token_ids}
    usual = [token for token in range(bundle.vocab_size) if token not in special]
    rng = random.Random(0)
    common = rng.choices(usual, k=shared)
    return [common + rng.choices(usual, k=own) for _ in range(count)]


def check_prefix(bundle: Bundle, load: PrefixLoad) -> None:
    """Raise RequestError if a scheduler cannot reuse the shared tokens of a load."""
    reuse, presets = prompt_reuse_of(bundle.manifest), bundle.manifest["loop"]["presets"]
    if reuse.refusal is not None:
        raise RequestError(
            f"prefix: requests of this bundle reuse nothing, because {reuse.refusal}; omit prefix"
        )
    if not bundle.is_on_cpu:
        raise RequestError(
            f"prefix: the engine {bundle.engine} reuses nothing; use ONNX Runtime on a CPU, or omit prefix"
        )
    canvas = load.shared + load.own + load.new
    if canvas > bundle.max_canvas_length:
        raise RequestError(
            f"prefix: {load.shared} shared, {load.own} own and {load.new} new tokens are more than the "
            f"{bundle.max_canvas_length} of the canvas: choose smaller numbers"
        )
    if load.preset not in presets:
        # The preset does not exist; the first generation will raise an error that lists the
        # presets.
        return
    policy = Policy(**presets[load.preset]).with_fields(dict(load.changes))
    if policy.cache == "none":
        raise RequestError(
            "prefix: the policy has cache=none, and so reuses nothing; choose another preset, or omit prefix"
        )
    network = network_of(bundle.manifest)
    if not reused_tokens(load.shared, load.shared + load.own, network, policy):
        raise RequestError(
            f"prefix: {load.shared} tokens are too few, because only whole pages of {reuse.page_tokens} "
            "tokens before the last block of the prompt are reused; choose more"
        )


def measure_prefix(
    bundle: Bundle, load: PrefixLoad, rounds: int, progress: Progress
) -> dict[str, Any]:
    """Run the requests of a load with and without the reuse of prompts.

    In each round, the requests run once with reuse and once without. The order changes after each
    round. Returns the values that ``bench --json`` prints as ``prefix``. ``reused`` and
    ``computed`` contain the results with and without reuse: medians over the rounds, and ranges
    from the smallest to the largest value. ``compared`` is the number of finished canvases that
    were compared, and ``differing`` is the number of canvases that differ with reuse. Raises
    RequestError if the requests reuse no keys and values.
    """
    prompts = random_prompts(bundle, max(load.requests, 1 + FIRST_REQUESTS), load.own, load.shared)
    sides: dict[str, list[Side]] = {"reused": [], "computed": []}
    progress.start("prefix", 2 * rounds)
    for number in range(rounds):
        for name in list(sides)[:: 1 if number % 2 == 0 else -1]:
            budget = None if name == "reused" else 0
            side = measure_side(bundle, prompts, load.requests, load.asked, budget)
            if name == "reused" and side.cached_tokens == 0:
                raise RequestError(
                    f"prefix: the engine {bundle.engine} reuses nothing, because requests cannot share passes; omit prefix"
                )
            sides[name].append(side)
            progress.advance()
    pairs = [
        pair
        for one, other in zip(sides["reused"], sides["computed"], strict=True)
        for pair in zip(one.canvases, other.canvases, strict=True)
    ]
    return {
        "shared_tokens": load.shared,
        "own_tokens": load.own,
        "new_tokens": load.new,
        "requests": load.requests,
        "preset": load.preset,
        "changes": dict(load.changes),
        "rounds": rounds,
        **{name: _summary(found) for name, found in sides.items()},
        "differing": sum(one != other for one, other in pairs),
        "compared": len(pairs),
    }


def _summary(rounds: Sequence[Side]) -> dict[str, Any]:
    first = [side.first_tokens_ms for side in rounds]
    rates = [side.tokens_per_s for side in rounds]
    return {
        "first_tokens_ms": statistics.median(first),
        "first_tokens_range_ms": [min(first), max(first)],
        "tokens_per_s": statistics.median(rates),
        "tokens_per_s_range": [min(rates), max(rates)],
        "cached_tokens": int(statistics.median(side.cached_tokens for side in rounds)),
        "cache_bytes": max(side.cache_bytes for side in rounds),
    }


def measure_side(
    bundle: Bundle,
    prompts: Sequence[list[int]],
    requests: int,
    asked: Mapping[str, Any],
    prefix_cache_bytes: int | None,
) -> Side:
    """Measure a scheduler with this ``prefix_cache_bytes``.

    First, the function runs requests one after another, to measure the time to the first tokens.
    The first of these requests only warms up, and is not measured. Then the function submits the
    first ``requests`` prompts to a new scheduler at once. ``asked`` contains the arguments of
    ``submit`` that all requests have in common.
    """

    def scheduler() -> Scheduler:
        return bundle.scheduler(
            prefix_cache_bytes=prefix_cache_bytes,
            max_running=RUNNING,
            max_waiting=max(requests, 1 + FIRST_REQUESTS),
        )

    with scheduler() as alone:
        first = [_first_tokens_ms(alone, prompt, asked) for prompt in prompts[: 1 + FIRST_REQUESTS]]
    with scheduler() as together:
        began = time.perf_counter()
        jobs = [together.submit(tokens=prompt, **asked) for prompt in prompts[:requests]]
        made = [job.result() for job in jobs]
        seconds = time.perf_counter() - began
        stats = together.stats
    return Side(
        statistics.median(first[1:]),
        sum(len(each.tokens) - each.prompt_tokens for each in made) / seconds,
        stats.prefix_tokens,
        stats.cache_bytes,
        [each.tokens for each in made],
    )


def _first_tokens_ms(scheduler: Scheduler, prompt: list[int], asked: Mapping[str, Any]) -> float:
    began, first = time.perf_counter(), None
    for event in scheduler.submit(tokens=prompt, events=True, **asked):
        if first is None and event.committed:
            first = time.perf_counter() - began
    assert first is not None
    return 1e3 * first
