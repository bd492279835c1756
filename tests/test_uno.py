"""Tests of Uno: autoregressive networks whose drafts come from a LoRA adapter.

transformers' networks, with the adapter added to some rows only, compute the logits to compare. The
published loop was written again from SGLang 0.5.23 (speculative/uno_worker_v2.py, linear form), with
one change: as in I-DLM (arXiv:2604.11035), a verifying pass also drafts the next tokens.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import ADAPTED, uno_config, write_adapter, write_checkpoint
from click.testing import CliRunner
from denoisers import load
from safetensors.torch import load_file, save_file
from torch import Tensor

import dlm_runtime
from dlm_export.build import build
from dlm_export.bundle.manifest import read_manifest
from dlm_export.checkpoints.folder import CheckpointError
from dlm_export.cli import main
from dlm_export.families.base import Overrides
from dlm_export.judging.tuning.block_length import (
    LENGTHS,
    BlockTime,
    BlockTimes,
    with_block_length,
)
from dlm_export.network.loop_random import random_tokens
from dlm_export.sources import open_source, open_source_of
from dlm_runtime import PRESETS, Bundle, RequestError

transformers = pytest.importorskip("transformers")

ARCHITECTURES = (
    "LlamaForCausalLM",
    "K2HorizonForCausalLM",
    "Qwen3ForCausalLM",
    "SDARForCausalLM",
)
VOCABULARY, END = 160, 151


def checkpoint_of(folder: Path, architecture: str, **changes: Any) -> Path:
    """Write a random checkpoint with an adapter for draft passes.

    Only eight tokens are likely, so that many drafts are right by chance.
    """
    config = uno_config(architecture, **changes)
    write_checkpoint(folder, config)
    write_adapter(folder, config, name="adapter", r=4, lora_alpha=2, target_modules=list(ADAPTED))
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"][8:] *= 0.2
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def theirs(folder: Path, architecture: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function that computes transformers' logits ``[L, V]`` for a canvas ``[L]``.

    The second argument, bool ``[L]``, says which rows use the adapter.
    """
    config = uno_config(architecture)
    own = ("architectures", "model_type", "mask_token_id", "block_size", "fuse_cross_entropy")
    kind = "Llama" if architecture in ARCHITECTURES[:2] else "Qwen3"
    settings = {name: value for name, value in config.items() if name not in own}
    settings = getattr(transformers, f"{kind}Config")(**settings, attn_implementation="eager")
    model = getattr(transformers, f"{kind}ForCausalLM")(settings).eval()
    model.load_state_dict(load_file(folder / "model.safetensors"))
    path = folder / "adapter" / "adapter_model.safetensors"
    adapter = load_file(path) if path.is_file() else {}
    chosen: list[Tensor] = []

    def add(module: torch.nn.Module, given: tuple[Tensor], found: Tensor, name: str) -> Tensor:
        a, b = (adapter[f"base_model.model.{name}.lora_{kind}.weight"] for kind in "AB")
        update = given[0] @ a.T @ b.T * (2 / 4)
        return torch.where(chosen[0][:, None], found + update, found)

    for name, module in model.named_modules():
        if adapter and name.rpartition(".")[2] in ADAPTED:
            module.register_forward_hook(
                lambda module, given, found, name=name: add(module, given, found, name)
            )

    @torch.no_grad()
    def logits(ids: Tensor, is_updated: Tensor) -> Tensor:
        chosen[:] = [is_updated]
        found: Tensor = model(ids[None]).logits[0]
        return found

    return logits


def published(
    logits: Callable[[Tensor, Tensor], Tensor], prompt: list[int], new_tokens: int, width: int
) -> tuple[list[int], list[int]]:
    """Generate text with the published loop, greedily.

    Returns the canvas, and the number of tokens of each pass after the first. The base rows of a
    pass contain the last token and ``width`` - 1 drafted tokens, or only the last token if a drafted
    token of the pass before was wrong. They decide tokens. After them, ``width`` - 1 rows with
    random tokens draft the next tokens.
    """
    text, passes, drafts = list(prompt), [], list[int]()

    def predict(noise: int) -> list[int]:
        ids = [*text, *drafts]
        places = np.arange(len(ids), len(ids) + noise)
        ids += random_tokens(0, 0, places, VOCABULARY, VOCABULARY).tolist()
        found = logits(torch.tensor(ids), torch.arange(len(ids)) >= len(ids) - noise)
        return [int(token) for token in found[len(text) - 1 :].argmax(-1)]

    text += predict(0)
    while len(text) < len(prompt) + new_tokens and END not in text[len(prompt) :]:
        found, count = predict(width - 1), len(drafts) + 1
        target, ahead = found[:count], found[count:]
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == target[accepted]:
            accepted += 1
        made = target[: accepted + 1]
        if END in made:
            made = made[: made.index(END) + 1]
        drafts = ahead if accepted == len(drafts) else []
        text += made[: len(prompt) + new_tokens - len(text)]
        passes.append(len(made))
    return text + [END] * (len(prompt) + new_tokens - len(text)), passes


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_equal_those_of_transformers(tmp_path: Path, architecture: str) -> None:
    """Random tokens at the end of a canvas use the adapter, with and without a cache."""
    folder = checkpoint_of(tmp_path, architecture)
    ours, other = load(folder), theirs(folder, architecture)
    ids = torch.randint(0, 150, (130,), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(130)
    is_updated = positions >= 101
    wanted = other(ids, is_updated)
    moved = positions + is_updated * ours.network.max_canvas_length
    with torch.no_grad():
        whole, presents = ours.hidden(ids[None], moved[None])
        past = [(keys[:, :, :100], values[:, :, :100]) for keys, values in presents]
        parts, _ = ours.hidden(ids[None, 100:], moved[None, 100:], past)
    limit = 2e-4 * (wanted.max() - wanted.min())
    assert (ours.project(whole)[0] - wanted).abs().max() <= limit
    assert (ours.project(parts)[0] - wanted[100:]).abs().max() <= limit
    # The adapter changes the rows that use it, and only these.
    plain = other(ids, torch.zeros(130, dtype=torch.bool))
    assert torch.equal(plain[:101], wanted[:101])
    assert (plain[101:] - wanted[101:]).abs().max() > 10 * limit


def test_an_idlm_is_a_causal_qwen3_with_drafts_from_mask_tokens(tmp_path: Path) -> None:
    """The network of an SDAR whose config.json says that attention is causal (I-DLM)."""
    write_checkpoint(tmp_path, uno_config("SDARForCausalLM", use_regular_causal=True))
    ours, other = load(tmp_path), theirs(tmp_path, "SDARForCausalLM")
    c = ours.network
    assert (c.family, c.has_causal_drafts, c.draft_block, c.mask_token_id) == (
        "i-dlm",
        True,
        4,
        150,
    )
    ids = torch.randint(0, 150, (60,), generator=torch.Generator().manual_seed(2))
    wanted = other(ids, torch.zeros(60, dtype=torch.bool))
    with torch.no_grad():
        limit = 2e-4 * (wanted.max() - wanted.min())
        assert (ours(ids[None])[0] - wanted).abs().max() <= limit


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "SDARForCausalLM"])
def test_the_loop_equals_the_published_loop(tmp_path: Path, architecture: str) -> None:
    """Canvases, and the number of tokens that each pass decides."""
    folder, bundle = checkpoint_of(tmp_path / "checkpoint", architecture), tmp_path / "bundle"
    report = build(folder, bundle)
    assert report.parity is not None
    assert report.parity.misses == []
    logits, counts, whole = theirs(folder, architecture), set[int](), 0
    draw = random.Random(3)
    with dlm_runtime.open(bundle, threads=1) as opened:
        for number in range(12):
            width = (1, 2, 3, 7)[number % 4]
            prompt = [draw.randrange(150) for _ in range(draw.randint(1, 30))]
            wanted, passes = published(logits, prompt, 24, width)
            made, decided = passes_of(opened, prompt, 24, width)
            assert made == wanted
            # The last pass may be cut by the length of the canvas.
            assert decided[:-1] == passes[:-1]
            assert len(decided) == len(passes)
            counts |= set(passes)
            whole += passes.count(width) if width > 1 else 0
    assert counts >= {1, 2, 3}
    assert whole > 3  # passes whose drafts of the next block are used


def passes_of(
    bundle: Bundle, prompt: list[int], new_tokens: int, width: int
) -> tuple[list[int], list[int]]:
    """Generate text, and return the canvas and the number of tokens of each pass but the first."""
    events = list(
        bundle.stream(tokens=prompt, max_new_tokens=new_tokens, block_length=width, seed=0)
    )
    result = events[-1].result
    assert result is not None
    decided = [event.committed for event in events if event.committed]
    return result.tokens, decided[1:]


def test_the_adapter_for_drafts_cannot_be_merged(tmp_path: Path) -> None:
    folder = checkpoint_of(tmp_path, "LlamaForCausalLM")
    with pytest.raises(CheckpointError, match="--adapter adapter: only draft passes use"):
        open_source(folder, Overrides(adapter="adapter"))


def test_the_adapter_for_drafts_may_be_outside_the_checkpoint(tmp_path: Path) -> None:
    folder = checkpoint_of(tmp_path / "base", "LlamaForCausalLM")
    network = open_source(folder).network
    (folder / "adapter").rename(tmp_path / "trained")
    with pytest.raises(CheckpointError, match="Pass --adapter FOLDER, or put"):
        open_source(folder)
    assert open_source(folder, Overrides(adapter=str(tmp_path / "trained"))).network == network


def test_an_sdar_base_needs_its_family_if_the_adapter_is_elsewhere(tmp_path: Path) -> None:
    folder = checkpoint_of(tmp_path / "base", "SDARForCausalLM")
    network = open_source(folder).network
    (folder / "adapter").rename(tmp_path / "trained")
    elsewhere = str(tmp_path / "trained")
    assert open_source(folder, Overrides(adapter=elsewhere)).network.adapter == "trained"
    assert open_source(folder, Overrides(adapter=elsewhere, family="uno")).network == network
    build(folder, tmp_path / "bundle", overrides=Overrides(adapter=elsewhere, family="uno"))
    manifest = read_manifest(tmp_path / "bundle")
    assert open_source_of(tmp_path / "bundle", manifest, folder, elsewhere).network == network


def test_effort_stores_the_fastest_block_length(tmp_path: Path) -> None:
    """The block length becomes the default. Levels are refused, because there are none."""
    folder, bundle = checkpoint_of(tmp_path / "checkpoint", "LlamaForCausalLM"), tmp_path / "bundle"
    build(folder, bundle)
    found = CliRunner().invoke(
        main, ["effort", str(bundle), "--samples", "1", "--threads", "1", "--json"]
    )
    assert found.exit_code == 0, found.output
    told = json.loads(found.stdout)
    times = {each["block_length"]: each for each in told["times"]}
    assert (told["preset"], told["own"], list(times)) == ("self-speculation", 4, list(LENGTHS))
    assert times[1]["tokens_per_pass"] <= times[4]["tokens_per_pass"]
    with dlm_runtime.open(bundle, threads=1) as opened:
        chosen = opened.policy().block_length
        with pytest.raises(RequestError, match="no levels, because its text does not depend"):
            opened.policy(effort="low")
    refused = CliRunner().invoke(main, ["effort", str(bundle), "--preset", "autoregressive"])
    assert refused.exit_code == 2
    assert "decides one token per pass: fit a preset that drafts" in refused.stderr
    assert times[chosen]["ms"] == min(each["ms"] for each in told["times"]) or chosen == 4


@pytest.mark.parametrize(("ms", "chosen"), [((9, 8, 7), 3), ((9, 8, 7.9), 2), ((7, 8, 9), 1)])
def test_a_block_length_is_replaced_only_if_that_saves_time(
    ms: tuple[float, ...], chosen: int
) -> None:
    times = [BlockTime(length, each, 1.5) for length, each in enumerate(ms, 1)]
    found = BlockTimes("self-speculation", 2, 8, 1, times)
    presets = {"self-speculation": PRESETS["self-speculation"].with_fields({"block_length": 2})}
    loop = {
        "presets": {name: each.as_dict() for name, each in presets.items()},
        "default_preset": "self-speculation",
    }
    made = with_block_length({"loop": loop}, found)
    assert made["loop"]["presets"][made["loop"]["default_preset"]]["block_length"] == chosen
    assert (
        f"a token takes {ms[chosen - 1]:.2f} ms with blocks of {chosen}"
        in made["default_loop"]["reason"]
    )


def test_draws_have_the_distribution_of_direct_sampling(tmp_path: Path) -> None:
    """Draws of pairs of tokens: 20,000 with drafts, against the network's probabilities."""
    folder, bundle = checkpoint_of(tmp_path / "checkpoint", "LlamaForCausalLM"), tmp_path / "bundle"
    build(folder, bundle)
    logits, prompt, count = theirs(folder, "LlamaForCausalLM"), [3, 77, 12], 20_000
    first = (logits(torch.tensor(prompt), torch.zeros(3, dtype=torch.bool))[-1] / 0.25).softmax(-1)
    likely = int(first.argmax())
    longer = torch.tensor([*prompt, likely])
    second = (logits(longer, torch.zeros(4, dtype=torch.bool))[-1] / 0.25).softmax(-1)
    found = np.zeros((2, VOCABULARY))
    with dlm_runtime.open(bundle, threads=1) as opened:
        for start in range(0, count, 2000):
            made = opened.generate_batch(
                tokens=[prompt] * 2000,
                max_new_tokens=3,
                block_length=3,
                temperature=0.25,
                policies=[{"seed": seed} for seed in range(start, start + 2000)],
                stop="none",
            )
            for out in made:
                found[0, out.tokens[3]] += 1
                found[1, out.tokens[4]] += out.tokens[3] == likely
    for seen, probs in zip(found, (first, second), strict=True):
        expected = probs.double().numpy() * seen.sum()
        is_large = expected >= 5
        rest = expected[~is_large].sum()
        statistic = (((seen - expected)[is_large]) ** 2 / expected[is_large]).sum()
        statistic += (seen[~is_large].sum() - rest) ** 2 / max(rest, 1)
        degrees = is_large.sum()
        assert statistic < degrees + 5 * np.sqrt(2 * degrees)  # five deviations of chi-squared
