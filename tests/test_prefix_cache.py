"""Tests of schedulers that reuse keys and values if prompts start with the same tokens.

The answers must not change.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import sdar_config, write_checkpoint
from click.testing import CliRunner
from engine_bundles import SMALL
from serving_process import serving

import dlm_runtime
from dlm_export.build import BuildOptions, build
from dlm_export.bundle.manifest import network_of
from dlm_export.bundle.prompt_reuse import page_tokens
from dlm_export.cli import main
from dlm_runtime import Bundle, RequestError

BLOCK = 16  # the block length of the second demo
SHARED = 8 * BLOCK


@pytest.fixture(scope="module")
def bundle(several_bundle: Path) -> Iterator[Bundle]:
    with dlm_runtime.open(several_bundle, threads=1) as opened:
        assert opened.visible_block == BLOCK
        yield opened


def prompts(count: int, own: int = 21) -> list[list[int]]:
    """Return prompts with the same first tokens. The last ``own`` tokens of each prompt differ."""
    rng = np.random.default_rng(5)
    shared = rng.integers(2, 150, SHARED).tolist()
    return [shared + rng.integers(2, 150, own).tolist() for _ in range(count)]


CHANGES: dict[str, Any] = {"preset": "sdar", "max_new_tokens": 32, "stop": "none"}


def test_requests_with_the_same_start_reuse_it(bundle: Bundle) -> None:
    wanted = prompts(12)
    alone = [bundle.generate(tokens=tokens, **CHANGES) for tokens in wanted]
    with bundle.scheduler(max_running=4) as scheduler:
        scheduler.submit(tokens=wanted[0][:SHARED], **CHANGES).result(60)
        jobs = [scheduler.submit(tokens=tokens, **CHANGES) for tokens in wanted]
        made = [job.result(60) for job in jobs]
        stats = scheduler.stats
    assert [each.tokens for each in made] == [each.tokens for each in alone]
    assert [each.cached_tokens for each in made] == [SHARED] * len(wanted)
    assert (stats.prefix_hits, stats.prefix_tokens) == (len(wanted), len(wanted) * SHARED)
    assert stats.prefix_bytes > 0
    assert all(each.cached_tokens == 0 for each in alone)


def test_a_conversation_computes_only_what_is_new(bundle: Bundle) -> None:
    rng = np.random.default_rng(6)
    history: list[int] = []
    with bundle.scheduler() as scheduler:
        for _ in range(8):
            history += rng.integers(2, 150, 19).tolist()
            made = scheduler.submit(tokens=history, **CHANGES).result(60)
            alone = bundle.generate(tokens=history, **CHANGES)
            assert made.tokens == alone.tokens
            # All blocks before the new message are reused, except possibly the last block of the
            # previous answer, which was never stored.
            before = len(history) - 19
            assert made.cached_tokens >= before // BLOCK * BLOCK - BLOCK
            history = list(made.tokens)


@pytest.mark.parametrize("cache", ["fp16", "int8"])
def test_a_rounded_cache_reuses_exactly(cache: str, tmp_path: Path) -> None:
    """Reused rows must be exact: with random weights, rounding errors would change tokens."""
    source = write_checkpoint(tmp_path / "checkpoint", sdar_config(block_size=BLOCK))
    build(
        source,
        tmp_path / "bundle",
        BuildOptions(precision="int8", cache_dtype=cache, check_parity=False, quantise=SMALL),
    )
    wanted = prompts(12)
    with dlm_runtime.open(tmp_path / "bundle", threads=1) as opened:
        alone = [opened.generate(tokens=tokens, **CHANGES) for tokens in wanted]
        with opened.scheduler(max_running=4) as scheduler:
            scheduler.submit(tokens=wanted[0][:SHARED], **CHANGES).result(60)
            jobs = [scheduler.submit(tokens=tokens, **CHANGES) for tokens in wanted]
            made = [job.result(60) for job in jobs]
    assert [each.tokens for each in made] == [each.tokens for each in alone]
    assert [each.cached_tokens for each in made] == [SHARED] * len(wanted)


def test_groups_of_requests_reuse_nothing_of_each_other(bundle: Bundle) -> None:
    tokens = prompts(1)[0]
    with bundle.scheduler() as scheduler:

        def cached(group: int) -> int:
            made = scheduler.submit(tokens=tokens, prefix_group=group, **CHANGES).result(60)
            return made.cached_tokens

        assert [cached(group) > 0 for group in (0, 1, 2, 1, 0, 2)] == [False] * 3 + [True] * 3
        # Requests that run at the same time wait for each other's pages, but only in a group.
        with bundle.scheduler() as both:
            jobs = [both.submit(tokens=tokens, prefix_group=each, **CHANGES) for each in (1, 2, 1)]
            assert [job.result(60).cached_tokens > 0 for job in jobs] == [False, False, True]
    with pytest.raises(RequestError, match="prefix_group = -1"):
        bundle.generate(tokens=tokens, prefix_group=-1)


def test_a_budget_keeps_the_start_of_a_prompt_that_is_too_long_for_it(bundle: Bundle) -> None:
    tokens = prompts(1)[0]
    with bundle.scheduler() as scheduler:
        scheduler.submit(tokens=tokens[:SHARED], **CHANGES).result(60)
        half = scheduler.stats.prefix_bytes // 2
    with bundle.scheduler(prefix_cache_bytes=half) as scheduler:
        made = [scheduler.submit(tokens=tokens, **CHANGES).result(60) for _ in range(2)]
        assert 0 < scheduler.stats.prefix_bytes <= half
    assert made[0].cached_tokens == 0
    assert SHARED // 4 < made[1].cached_tokens <= SHARED
    assert made[1].tokens == made[0].tokens


def test_a_budget_that_is_no_number_is_refused(bundle: Bundle) -> None:
    with pytest.raises(RequestError, match="prefix_cache_bytes = -1"):
        bundle.scheduler(prefix_cache_bytes=-1)


def test_inspect_says_whether_prompts_can_be_reused(
    several_bundle: Path, llada_bundle: Path
) -> None:
    def inspected(*arguments: object) -> str:
        done = CliRunner().invoke(main, ["inspect", *map(str, arguments)])
        assert done.exit_code == 0, done.output
        return done.output

    row = network_of(json.loads((several_bundle / "manifest.json").read_text())).cache_bytes(4)
    assert "prompts can be reused on a CPU, in pages of 16 tokens; 87,376" in inspected(
        several_bundle
    )
    assert json.loads(inspected(several_bundle, "--json"))["prompt_reuse"] == {
        "refusal": None,
        "page_tokens": 16,
        "bytes_per_token": row,
        "tokens_per_gib": (1 << 30) // (16 * row) * 16,
    }
    assert "prompts cannot be reused: its attention is full" in inspected(llada_bundle)


@pytest.mark.parametrize(("block", "page"), [(1, 16), (4, 16), (12, 24), (16, 16), (32, 32)])
def test_a_page_has_the_fewest_blocks_with_at_least_16_tokens(block: int, page: int) -> None:
    assert page_tokens(block) == page


@pytest.mark.parametrize("is_shared", [False, True])
def test_the_server_counts_cached_tokens_of_the_same_key(
    several_bundle: Path, tmp_path: Path, is_shared: bool
) -> None:
    prompt = "play jazz in the kitchen and " * 6
    (tmp_path / "keys").write_text("one\ntwo\n")
    options = ("--no-log", "--api-key-file", str(tmp_path / "keys"))
    with serving(several_bundle, *options, *["--share-prompts"][:is_shared]) as served:

        def cached(key: str) -> int:
            body = {"model": served.model, "prompt": prompt, "max_tokens": 16}
            headers = {"authorization": f"Bearer {key}"}
            answer = served.client.post("/v1/completions", json=body, headers=headers)
            assert answer.status_code == 200, answer.text
            usage = answer.json()["usage"]
            found: int = usage["prompt_tokens_details"]["cached_tokens"]
            assert found == 0 or usage["prompt_tokens"] - found < 2 * BLOCK
            return found

        found = [cached(key) > 0 for key in ("one", "one", "two", "two")]
        assert found == [False, True, is_shared, True]
