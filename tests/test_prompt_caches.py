"""Tests of prompt caches (files with keys and values), and of sessions that keep keys and values.

Reusing stored keys and values must not change any answer.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving_process import serving

import dlm_runtime
from dlm_export.cli import main
from dlm_runtime import Bundle, BundleError, RequestError
from dlm_runtime.generation.prompt_caches import common_start

BLOCK = 16  # the block length of the second demo
CHANGES: dict[str, Any] = {"preset": "sdar", "max_new_tokens": 16, "stop": "none"}


@pytest.fixture(scope="module")
def plain(several_bundle: Path) -> Iterator[Bundle]:
    """A bundle whose sessions store nothing between calls."""
    with dlm_runtime.open(several_bundle, threads=1) as opened:
        yield opened


def prompt(length: int, seed: int = 5) -> list[int]:
    return np.random.default_rng(seed).integers(2, 150, length).tolist()


@pytest.fixture(scope="module")
def cache(plain: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompt") / "system.cache"
    assert plain.save_prompt_cache(path, tokens=prompt(70)) == 64
    return path


def test_every_way_to_run_a_request_uses_a_prompt_cache(
    plain: Bundle, several_bundle: Path, cache: Path
) -> None:
    prompts = [prompt(70) + prompt(9, seed) for seed in range(3)]
    alone = [plain.generate(tokens=tokens, **CHANGES).tokens for tokens in prompts]
    with dlm_runtime.open(several_bundle, threads=1, prompt_caches=[cache]) as bundle:
        made = [bundle.generate(tokens=tokens, **CHANGES) for tokens in prompts]
        made += bundle.generate_batch(tokens=prompts, **CHANGES)
        *_, last = bundle.stream(tokens=prompts[0], **CHANGES)
        assert last.result is not None
        made.append(last.result)
        for kept in (0, None):
            with bundle.scheduler(prefix_cache_bytes=kept) as scheduler:
                jobs = [scheduler.submit(tokens=tokens, **CHANGES) for tokens in prompts]
                made += [job.result(60) for job in jobs]
        other = bundle.generate(tokens=prompt(70, 6), **CHANGES)
    assert [each.tokens for each in made] == [*alone, *alone, alone[0], *alone, *alone]
    assert [each.cached_tokens for each in made] == [64] * len(made)
    assert other.cached_tokens == 0


@settings(max_examples=20)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 90)), min_size=1, max_size=6), st.data()
)
def test_sessions_that_keep_prompts_give_the_same_tokens(
    plain: Bundle, several_bundle: Path, calls: list[tuple[int, int]], data: st.DataObject
) -> None:
    row = 1 << 12
    kept = data.draw(st.sampled_from([row, 64 * row, 1 << 30]))
    with dlm_runtime.open(several_bundle, threads=1, prefix_cache_bytes=kept) as bundle:
        for seed, length in calls:
            tokens = prompt(90, seed)[:length]
            made = bundle.generate(tokens=tokens, **CHANGES)
            assert made.tokens == plain.generate(tokens=tokens, **CHANGES).tokens
            assert made.cached_tokens <= length // BLOCK * BLOCK


def test_full_attention_reuses_a_prompt_only_if_asked(demo_bundle: Path) -> None:
    asked: dict[str, Any] = {
        "cache": "dual",
        "refresh": 8,
        "block_length": 16,
        "max_new_tokens": 32,
    }
    first, second = prompt(60), [*prompt(60)[:-1], 3]
    with dlm_runtime.open(demo_bundle, prefix_cache_bytes=1 << 28) as bundle:
        made = [bundle.generate(tokens=first, **asked) for _ in range(2)]
        made += [
            bundle.generate(tokens=tokens, reuse_prompt=1, **asked)
            for tokens in (first, first, second)
        ]
        with pytest.raises(RequestError, match="reuse_prompt = 1 needs cache"):
            bundle.generate(tokens=first, reuse_prompt=1, cache="dual", refresh=0)
    assert [each.cached_tokens for each in made] == [0, 0, 0, 48, 48]
    assert made[0].tokens == made[2].tokens == made[3].tokens


def test_a_chat_that_a_user_continues_is_saved_up_to_the_users_message(
    plain: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = plain.tokenizer
    assert tokenizer is not None

    def encode(messages: list[dict[str, Any]], **_: Any) -> list[int]:
        text = "".join(f"[{each['role']}] {each['content']} " for each in messages)
        return tokenizer.encode(text)

    monkeypatch.setattr(tokenizer, "encode_chat", encode)
    system = {"role": "system", "content": "answer with one call for the house, and be brief " * 2}
    whole = encode([system, {"role": "user", "content": "lights off"}])
    saved = plain.save_prompt_cache(tmp_path / "chat.cache", chat=[system])
    assert 0 < saved <= len(whole)
    ended = plain.save_prompt_cache(
        tmp_path / "ended.cache", chat=[system, {"role": "user", "content": "play jazz"}]
    )
    assert ended >= saved


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_the_common_start_is_the_longest(one: list[int], other: list[int]) -> None:
    found = common_start(one, other)
    size = len(found)
    assert one[:size] == other[:size] == found
    assert size == min(len(one), len(other)) or one[size] != other[size]


def flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (flipped, "damaged: the checksum is wrong"),
        (lambda content: content[:-64], "damaged: the file has"),
        (lambda content: b"", "the file is too short"),
        (lambda content: content[:8] + b"\x07" + content[9:], "version 7"),
    ],
)
def test_a_damaged_prompt_cache_is_refused(
    plain: Bundle, cache: Path, tmp_path: Path, damage: Any, reason: str
) -> None:
    path = tmp_path / "damaged.cache"
    path.write_bytes(damage(cache.read_bytes()))
    with pytest.raises(BundleError, match=reason) as raised:
        plain.load_prompt_cache(path)
    assert str(path) in str(raised.value)


def test_what_is_no_file_is_refused(plain: Bundle, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="nowhere: cannot read: No such file"):
        plain.load_prompt_cache(tmp_path / "nowhere")
    with pytest.raises(BundleError, match="not a plain file"):
        plain.load_prompt_cache(tmp_path)


def test_only_block_causal_bundles_on_a_cpu_save_prompts(
    demo_bundle: Path, several_bundle: Path, cache: Path, tmp_path: Path
) -> None:
    with dlm_runtime.open(demo_bundle) as full:
        for call in (
            lambda: full.save_prompt_cache(tmp_path / "x", tokens=prompt(70)),
            lambda: full.load_prompt_cache(cache),
        ):
            with pytest.raises(RequestError, match="full attention"):
                call()
    with (
        dlm_runtime.open(several_bundle, engine="none") as none,
        pytest.raises(RequestError, match="cannot use a prompt cache"),
    ):
        none.load_prompt_cache(cache)
    assert not list(tmp_path.iterdir())


def test_nothing_is_written_if_saving_fails(plain: Bundle, tmp_path: Path) -> None:
    (tmp_path / "old").write_text("mine")
    for asked, reason in (
        ({"tokens": prompt(BLOCK - 1)}, "15 tokens, but a prompt cache contains whole pages of 16"),
        ({"tokens": [1 << 20] * 40}, "token"),
        ({"tokens": prompt(40), "prompt": "x"}, "give one of"),
        ({}, "give one of"),
    ):
        with pytest.raises(RequestError, match=reason):
            plain.save_prompt_cache(tmp_path / "old", **asked)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="cannot write: No such file"):
        plain.save_prompt_cache(tmp_path / "none" / "file", tokens=prompt(40))
    assert (tmp_path / "old").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


def test_a_command_saves_a_prompt_for_run_and_serve(
    several_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, path = "turn the lights off in the kitchen and play jazz " * 4, tmp_path / "x.cache"
    main(
        ["cache-prompt", str(several_bundle), "--prompt", text, "-o", str(path), "--json"],
        standalone_mode=False,
    )
    saved = json.loads(capsys.readouterr().out)
    assert saved["tokens"] >= 32
    assert saved["bytes"] == path.stat().st_size
    command = [sys.executable, "-m", "dlm_export.cli", "run", str(several_bundle), "--json"]
    asked = ["--prompt", text + "now", "--max-new-tokens", "16", "--prompt-cache", str(path)]
    made = json.loads(subprocess.check_output([*command, *asked], text=True))
    assert made["cached_tokens"] in (saved["tokens"], saved["tokens"] - BLOCK)
    with serving(several_bundle, "--no-log", "--prompt-cache", str(path)) as served:
        body = {"model": served.model, "prompt": text + "now", "max_tokens": 16}
        usage = served.client.post("/v1/completions", json=body).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == made["cached_tokens"]
