"""Requests that share passes, and checks of their results. Programs under sanitizers import this file."""

from __future__ import annotations

import random
from typing import Any

import dlm_runtime


def wishes(count: int) -> list[dict[str, Any]]:
    """Return requests with different prompts, lengths and policies."""
    draw = random.Random(3)
    kinds: list[dict[str, Any]] = [
        {"cache": "dual", "block_length": 8},
        {"cache": "prefix", "block_length": 4, "commit": "threshold", "threshold": 0.5},
        {"cache": "dual", "block_length": 6, "refresh": 3},
        {"cache": "none", "block_length": 8},
        {"cache": "prefix", "block_length": 16, "cfg_scale": 0.5},
    ]
    return [
        {
            "tokens": [draw.randrange(2, 40) for _ in range(draw.randrange(1, 30))],
            "max_new_tokens": draw.randrange(1, 16),
            **draw.choice(kinds),
        }
        for _ in range(count)
    ]


def check_shared(bundle: dlm_runtime.Bundle, wanted: list[dict[str, Any]]) -> None:
    """Check that requests that share passes get what each request gets alone."""
    alone = [bundle.generate(**wish) for wish in wanted]
    with bundle.scheduler(max_running=16, max_tokens=512) as scheduler:
        jobs = [scheduler.submit(**wish) for wish in wanted]
        for job, one in zip(jobs, alone, strict=True):
            assert job.result().tokens == one.tokens
            assert job.result().nfe == one.nfe
        stats = scheduler.stats
    assert stats.shares == sum(one.nfe for one in alone)
    assert stats.shares > 8 * stats.passes


def check_prompts(bundle: dlm_runtime.Bundle, cache: str) -> None:
    """Check that requests reuse the prompts of other requests, and the prompts of files."""
    draw = random.Random(1)
    prompt = [draw.randrange(2, 40) for _ in range(64)]
    wanted = [
        {"tokens": [*prompt, *(draw.randrange(2, 40) for _ in range(draw.randrange(1, 9)))]}
        | {"max_new_tokens": 16, "cache": "block", "block_length": 8}
        for _ in range(40)
    ]
    alone = [bundle.generate(**wish).tokens for wish in wanted]
    with bundle.scheduler(prefix_cache_bytes=1 << 20) as scheduler:
        jobs = [scheduler.submit(**wish) for wish in wanted]
        assert [job.result().tokens for job in jobs] == alone
        assert scheduler.stats.prefix_hits == 39
    assert bundle.save_prompt_cache(cache, tokens=prompt) == 64
    bundle.load_prompt_cache(cache)
    found = [bundle.generate(**wish) for wish in wanted]
    assert [one.tokens for one in found] == alone
    assert {one.cached_tokens for one in found} == {64}
