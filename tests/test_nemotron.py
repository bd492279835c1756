"""Tests of Nemotron-Labs-Diffusion, and of self-speculation in Uno and I-DLM too.

The tests cover parity with transformers' Ministral 3, draft passes, and self-speculation in the
reference loop and in the native loop.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import nemotron_config, sdar_config, write_checkpoint
from denoisers import load, under_native_loop
from safetensors.torch import load_file
from slow_cases import slow_except
from test_uno import checkpoint_of as uno_checkpoint

import dlm_runtime
from dlm_export import families
from dlm_export.build import build
from dlm_export.checkpoints.folder import Checkpoint
from dlm_export.families.base import Overrides
from dlm_export.network import reference
from dlm_export.network.denoiser import Denoiser
from dlm_export.network.loop_turns import Canvas, start_canvas
from dlm_runtime import Bundle, CallbackPass, DenoiserInfo, DlmError, Policy, from_callback
from dlm_runtime.presets import PRESETS

transformers = pytest.importorskip("transformers")


def denoiser_of(folder: Path, config: dict[str, Any], seed: int = 0, **overrides: int) -> Denoiser:
    """Write a random checkpoint and read it."""
    checkpoint = Checkpoint(write_checkpoint(folder, config, seed=seed))
    network = families.read_network(checkpoint, Overrides(**overrides))
    return families.load(families.open_weights(checkpoint, network), network)


def ministral(folder: Path, config: dict[str, Any]) -> torch.nn.Module:
    """Transformers' Ministral 3 with the same weights."""
    own = ("architectures", "model_type", "attn_implementation", "block_size", "mask_token_id")
    settings = {name: value for name, value in config.items() if name not in own}
    model = transformers.Ministral3ForCausalLM(
        transformers.Ministral3Config(**settings, attn_implementation="eager")
    )
    model.load_state_dict(
        {
            name.replace("encoder.", "model.").replace("diffusion_head.", "lm_head."): tensor
            for name, tensor in load_file(folder / "model.safetensors").items()
        },
        strict=not config["tie_word_embeddings"],
    )
    return model.eval()


def random_config(seed: int) -> dict[str, Any]:
    """Return a random config.

    ``original_max_position_embeddings`` is below the canvas lengths of the tests.
    """
    draw = random.Random(seed)
    kv_heads, tied = draw.choice((1, 2)), draw.random() < 0.3
    rope = nemotron_config()["rope_parameters"] | {
        "factor": draw.choice((0.25, 1.0, 4.0, 16.0)),
        "original_max_position_embeddings": draw.choice((8, 24, 100)),
        "llama_4_scaling_beta": draw.choice((0.1, 0.5)),
        "mscale": draw.choice((1.0, 0.7)),
        "rope_theta": draw.choice((1e4, 1e6)),
    }
    return nemotron_config(
        num_hidden_layers=draw.choice((1, 3)),
        num_key_value_heads=kv_heads,
        num_attention_heads=kv_heads * draw.choice((1, 2, 4)),
        head_dim=draw.choice((8, 16, 32)),
        hidden_size=draw.choice((32, 64)),
        tie_word_embeddings=tied,
        rope_parameters=rope,
    )


@pytest.mark.parametrize("seed", range(6))
def test_causal_and_draft_logits_equal_those_of_ministral_3(tmp_path: Path, seed: int) -> None:
    config = random_config(seed)
    ours, theirs = denoiser_of(tmp_path, config, seed), ministral(tmp_path, config)
    ids = torch.randint(0, 150, (2, 130), generator=torch.Generator().manual_seed(seed))
    longest = ours.network.max_canvas_length
    positions = torch.arange(130).expand_as(ids)
    with torch.no_grad():
        causal, presents = ours.hidden(ids, positions)
        found = [ours.project(causal)]
        wanted = [theirs(ids).logits]
        # Run a draft pass over the last 30 tokens. The first 100 tokens are cached.
        past = [(keys[:, :, :100], values[:, :, :100]) for keys, values in presents]
        drafted, _ = ours.hidden(ids[:, 100:], positions[:, 100:] + longest, past)
        found.append(ours.project(drafted))
        mask = torch.ones(130, 130).tril().bool()
        mask[100:, 100:] = True
        additive = torch.where(mask, 0.0, torch.finfo(torch.float32).min)[None, None]
        wanted.append(theirs(ids, attention_mask=additive.expand(2, 1, -1, -1)).logits[:, 100:])
    for own, other in zip(found, wanted, strict=True):
        assert (own - other).abs().max() <= 2e-4 * (other.max() - other.min())


def greedy(denoiser: Denoiser, tokens: list[int], new_tokens: int) -> list[int]:
    """Generate tokens one by one. Each token is the most likely one, from a full causal pass."""
    network, canvas = denoiser.network, list(tokens)
    for _ in range(new_tokens):
        with torch.no_grad():
            logits = denoiser(torch.tensor([canvas]))[0, -1]
        logits[network.mask_token_id :][:1] = -torch.inf
        canvas.append(int(logits.argmax()))
        if canvas[-1] in network.eos_token_ids:
            break
    return canvas + [network.eos_token_ids[0]] * (len(tokens) + new_tokens - len(canvas))


@pytest.fixture(scope="module", params=["nemotron", "uno", "i-dlm"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    if request.param == "i-dlm":
        return write_checkpoint(folder, sdar_config(use_regular_causal=True))
    if request.param == "uno":
        return uno_checkpoint(folder, "LlamaForCausalLM")
    return write_checkpoint(folder, nemotron_config())


of_nemotron = pytest.mark.parametrize("checkpoint", ["nemotron"], indirect=True)


@pytest.fixture(scope="module")
def denoiser(checkpoint: Path) -> Denoiser:
    return load(checkpoint)


def test_the_reference_loop_generates_the_greedy_text(denoiser: Denoiser) -> None:
    policy = PRESETS["self-speculation"]
    for number, block_length in enumerate((1, 2, 5, 0)):
        draw = random.Random(number)
        tokens = [draw.randrange(150) for _ in range(draw.randint(1, 40))]
        changed = policy.with_fields({"block_length": block_length})
        found = reference.generate(denoiser, tokens, changed, 30)
        assert found.tokens == greedy(denoiser, tokens, 30)


@pytest.fixture(scope="module")
def bundle(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bundle]:
    path = tmp_path_factory.mktemp("bundle") / "bundle"
    report = build(checkpoint, path)
    assert report.parity is not None
    assert report.parity.misses == []
    with dlm_runtime.open(path, threads=1) as opened:
        yield opened


def presets_of(bundle: Bundle) -> list[str]:
    """Return the bundle's presets that were made for networks with draft passes."""
    known = ("self-speculation", "autoregressive", "nemotron-diffusion")
    found = [preset for preset in known if preset in bundle.manifest["loop"]["presets"]]
    assert len(found) >= 2
    return found


def random_prompts(count: int) -> list[list[int]]:
    draw = random.Random(5)
    return [[draw.randrange(150) for _ in range(draw.randint(1, 40))] for _ in range(count)]


@pytest.mark.parametrize("count", slow_except([20], [20, 200]))
def test_self_speculation_equals_greedy_decoding(
    bundle: Bundle, denoiser: Denoiser, count: int
) -> None:
    """The test compares texts for ``count`` prompts, and checks the number of passes of each kind."""
    for number, tokens in enumerate(random_prompts(count)):
        wanted = greedy(denoiser, tokens, 24)
        block_length = (0, 1, 3, 8, 30)[number % 5]
        out = bundle.generate(tokens=tokens, max_new_tokens=24, block_length=block_length)
        assert out.tokens == wanted
        made, new = out.passes, out.completion_tokens + (out.finish == "stop")
        verified = made.get("verify", 0)
        assert (made["prefill"], made["store"]) == (1, 0)
        # A block of one position needs no draft pass. Causal drafts never need one.
        is_causal = denoiser.network.has_causal_drafts
        assert made["denoise"] <= verified
        assert (made["denoise"] == 0) == (is_causal or block_length == 1 or new <= 1)
        assert out.nfe == sum(made.values())
        if verified:  # the first token comes from the prefill pass
            assert out.acceptance_length == (new - 1) / verified
        else:
            assert out.acceptance_length is None


@pytest.mark.parametrize(
    "changes",
    [
        {"stop": "none"},
        {"block_length": 5},
        {"temperature": 0.7, "seed": 3},
        {"temperature": 2.0, "top_k": 9},
    ],
    ids=str,
)
def test_the_native_loop_equals_the_reference(
    bundle: Bundle, denoiser: Denoiser, changes: dict[str, Any]
) -> None:
    policies = [PRESETS[preset].with_fields(changes) for preset in presets_of(bundle)]
    for policy, tokens in itertools.product(policies, random_prompts(6)):
        seen: list[Canvas] = []
        wanted = reference.generate(denoiser, tokens, policy, 20, on_step=seen.append)
        events = list(bundle.stream(tokens=tokens, max_new_tokens=20, **policy.as_dict()))
        assert events[-1].result is not None
        assert (events[-1].result.tokens, events[-1].nfe) == (wanted.tokens, wanted.nfe)
        for event, canvas in zip(events[:-1], seen, strict=False):
            assert (event.canvas, event.undecided) == (
                canvas.tokens.tolist(),
                canvas.undecided.tolist(),
            )


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.5}, {"temperature": 1.5, "top_p": 0.8}], ids=str
)
def test_drawn_texts_do_not_depend_on_the_drafts(
    bundle: Bundle, sampling: dict[str, float]
) -> None:
    verified = 0
    for seed, tokens in enumerate(random_prompts(8)):
        asked: dict[str, Any] = {"tokens": tokens, "max_new_tokens": 24, "seed": seed, **sampling}
        wanted = bundle.generate(**asked, preset="autoregressive")
        assert wanted.tokens != bundle.generate(**asked | {"seed": 99}).tokens
        for block_length in (2, 5, 0):
            out = bundle.generate(**asked, block_length=block_length)
            assert out.tokens == wanted.tokens
            assert out.log_probs == pytest.approx(wanted.log_probs, abs=1e-4)
            verified += out.passes["verify"] < wanted.passes["verify"]
    assert verified


def test_requests_that_share_passes_get_the_same_texts(bundle: Bundle) -> None:
    """Requests with different presets share passes, and equal prompts share cached rows."""
    prompts = random_prompts(6)
    prompts += [prompts[0] * 3, prompts[0] * 3]
    for preset in presets_of(bundle):
        alone = [bundle.generate(tokens=p, preset=preset, max_new_tokens=20) for p in prompts]
        together = bundle.generate_batch(tokens=prompts, preset=preset, max_new_tokens=20)
        assert [out.tokens for out in together] == [out.tokens for out in alone]
    with bundle.scheduler(max_running=4) as scheduler:
        jobs = [
            scheduler.submit(tokens=p, preset=preset, max_new_tokens=20)
            for p in prompts
            for preset in ("self-speculation", "autoregressive")
        ]
        for job, tokens in zip(jobs, [p for p in prompts for _ in range(2)], strict=True):
            wanted = bundle.generate(tokens=tokens, preset="autoregressive", max_new_tokens=20)
            assert job.result().tokens == wanted.tokens


def test_engines_that_take_one_shape_a_pass_verify_too(denoiser: Denoiser) -> None:
    policy = PRESETS["self-speculation"]
    with under_native_loop(denoiser) as native:
        for tokens in random_prompts(4):
            out = native.generate(tokens=tokens, max_new_tokens=16, **policy.as_dict())
            assert out.tokens == greedy(denoiser, tokens, 16)


def test_a_request_that_ends_early_keeps_the_drafted_tokens(
    bundle: Bundle, denoiser: Denoiser
) -> None:
    policy, tokens = PRESETS["self-speculation"], random_prompts(3)[2]
    for steps in (1, 2, 3):
        canvas = start_canvas(tokens, 20, denoiser.network.mask_token_id)
        wanted = reference.fill(denoiser, canvas, policy, max_steps=steps)
        out = bundle.generate(tokens=tokens, max_new_tokens=20, max_steps=steps)
        assert (out.tokens, out.nfe, out.finish) == (wanted.tokens, steps, "steps")


def test_nothing_is_decided_behind_an_end_token_of_a_right_draft() -> None:
    """Draft passes and causal passes predict the same tokens, so all drafted tokens are right."""
    length, end = 64, 1

    def run(p: CallbackPass) -> None:
        for i, row in enumerate(p.score_rows):
            position = int(p.position_ids[row])
            at = position - length if position >= length else position + 1
            p.top_tokens[i] = end if at == 7 else 10 + at, 0
            p.top_probs[i] = 0.75, 0.25
        for rows in p.present or []:
            for each in rows:
                each[:] = 0

    info = DenoiserInfo(40, 39, length, (end,), has_cache=True, visible_block=1, draft_block=8)
    with from_callback(info, run) as native:
        policy = PRESETS["self-speculation"].as_dict()
        out = native.generate(tokens=[2, 3, 4], max_new_tokens=12, **policy)
    assert out.tokens == [2, 3, 4, 13, 14, 15, 16, *[end] * 8]
    assert (out.finish, out.completion_tokens) == ("stop", 4)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "edits": ({"remask": "edit"}, 'cannot be combined with edits: use remask = "none"'),
    "an open store": ({"store": "open"}, 'this store: use store = "pass"'),
    "planned passes": ({"steps_per_block": 2}, "a number of steps: use steps_per_block = 0"),
    "steps": ({"steps": 4}, "steps = 4, but with commit"),
}


@pytest.mark.parametrize("changes", REFUSED, ids=str)
def test_what_cannot_be_verified_is_refused(bundle: Bundle, changes: str) -> None:
    fields, sentence = REFUSED[changes]
    with pytest.raises(DlmError) as caught:
        bundle.generate(tokens=[1, 2, 3], max_new_tokens=8, **fields)
    assert sentence in str(caught.value)


@of_nemotron
def test_canvases_that_cannot_be_generated_from_left_to_right_are_refused(bundle: Bundle) -> None:
    with pytest.raises(DlmError, match="needs a prompt of at least one token"):
        bundle.generate(tokens=[], max_new_tokens=8)
    with pytest.raises(DlmError, match="position 1 is to be filled before tokens that are given"):
        bundle.generate(tokens=[3, 150, 4], max_new_tokens=8)
    with pytest.raises(DlmError, match="has draft passes and causal passes: use cache"):
        bundle.generate(tokens=[3], max_new_tokens=8, **Policy().as_dict())


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"visible_block": 4}, "draft_block needs visible_block 1 and has_cache 1"),
        ({"has_cache": False}, "draft_block needs visible_block 1 and has_cache 1"),
    ],
    ids=str,
)
def test_draft_passes_need_causal_attention_and_a_cache(
    changes: dict[str, Any], error: str
) -> None:
    fields = {"visible_block": 1, "has_cache": True, "draft_block": 8} | changes
    info = DenoiserInfo(vocab_size=8, mask_token_id=7, max_canvas_length=64, **fields)
    with pytest.raises(DlmError, match=error):
        from_callback(info, lambda _: None)


@of_nemotron
def test_attention_of_both_kinds_is_fused(bundle: Bundle) -> None:
    calls = bundle.manifest["kernels"]["calls"]
    assert calls["DraftCachedAttention"] == nemotron_config()["num_hidden_layers"]
