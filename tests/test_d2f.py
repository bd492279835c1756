"""Tests of D2F (arXiv:2508.09192), LoRA adapters with which the attention of LLaDA and Dream becomes
block-causal, in blocks that start at the end of the prompt.

transformers' Llama and Qwen2 with an explicit attention mask compute the logits to compare. The
published loop was written again from ``_generate_block_single`` in the authors' code
(D2F-eval/eval_llada.py and eval_dream.py of github.com/zhijie-group/Discrete-Diffusion-Forcing,
commit 771f745).
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import adapter_config, dream_config, llada_config, write_checkpoint
from click.testing import CliRunner
from denoisers import under_native_loop
from hypothesis import given, settings
from hypothesis import strategies as st
from published import END as RANDOM_END
from published import MASK as RANDOM_MASK
from published import prompt_of, random_network
from safetensors.torch import load_file, save_file
from torch import Tensor

import dlm_runtime
from dlm_export import families
from dlm_export.build import build
from dlm_export.bundle.prompt_reuse import prompt_reuse_of
from dlm_export.checkpoints.folder import Checkpoint, CheckpointError
from dlm_export.cli import main
from dlm_export.families.base import Overrides
from dlm_export.judging.accuracy.rounded_cache import CachedPredictor
from dlm_export.judging.sides.layerwise import SweptPredictor
from dlm_export.judging.sides.side import View
from dlm_export.judging.tuning.effort_levels import variants
from dlm_export.network import reference
from dlm_export.network.denoiser import Denoiser
from dlm_export.network.loop_turns import Canvas
from dlm_export.network.pass_plan import Span
from dlm_export.network.states import features_of
from dlm_export.planning.predict import Request, loop_for
from dlm_export.planning.predicted_passes import list_passes
from dlm_export.sources import open_source
from dlm_runtime import Bundle, CallbackPass, DlmError, Policy
from dlm_runtime.presets import PRESETS

transformers = pytest.importorskip("transformers")

MASK, END, BLOCK = 150, 151, 4
D2F = Overrides(family="d2f", adapter="d2f", attention_block=BLOCK)
CONFIGS = {"LLaDA": llada_config(), "Dream": dream_config()}
ADAPTED = {
    "LLaDA": [f"model.transformer.blocks.{{}}.{name}" for name in ("q_proj", "v_proj", "attn_out")],
    "Dream": [f"model.layers.{{}}.self_attn.{name}_proj" for name in ("q", "k", "o")],
}
Logits = Callable[[list[int], int, int], Tensor]


def write_d2f(folder: Path, name: str) -> Path:
    """Write a base model and its adapter. Few tokens are likely, so that confidences differ widely."""
    write_checkpoint(folder, CONFIGS[name])
    tensors = load_file(folder / "model.safetensors")
    head = "lm_head.weight" if name == "Dream" else "model.transformer.ff_out.weight"
    tensors[head][8:] *= 0.2
    tensors[head][END] *= 4
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    generator, updates = torch.Generator().manual_seed(1), {}
    for module in (each.format(i) for each in ADAPTED[name] for i in (0, 1)):
        outputs, inputs = tensors[f"{module}.weight"].shape
        for kind, shape in (("A", (4, inputs)), ("B", (outputs, 4))):
            noise = torch.randn(shape, generator=generator) * shape[1] ** -0.5
            updates[f"base_model.model.{module}.lora_{kind}.weight"] = noise
    (folder / "d2f").mkdir()
    save_file(updates, folder / "d2f" / "adapter_model.safetensors")
    names = sorted({each.rpartition(".")[2] for each in ADAPTED[name]})
    said = adapter_config(target_modules=names)
    (folder / "d2f" / "adapter_config.json").write_text(json.dumps(said))
    return folder


def merged(folder: Path) -> dict[str, Tensor]:
    """Return the base model's tensors with the adapter added."""
    tensors, updates = (
        load_file(folder / file)
        for file in ("model.safetensors", Path("d2f") / "adapter_model.safetensors")
    )
    said = json.loads((folder / "d2f" / "adapter_config.json").read_text())
    for name in [name for name in updates if "lora_A" in name]:
        weight = name.removeprefix("base_model.model.").replace("lora_A.", "")
        product = updates[name.replace("lora_A", "lora_B")] @ updates[name]
        tensors[weight] = tensors[weight] + said["lora_alpha"] / said["r"] * product
    return tensors


LLAMA = {
    ".transformer.": ".",
    ".wte.": ".embed_tokens.",
    ".blocks.": ".layers.",
    ".ln_f.": ".norm.",
    ".attn_norm.": ".input_layernorm.",
    ".ff_norm.": ".post_attention_layernorm.",
    ".attn_out.": ".self_attn.o_proj.",
    ".ff_proj.": ".mlp.gate_proj.",
    ".up_proj.": ".mlp.up_proj.",
    ".ff_out.": ".mlp.down_proj.",
} | {f".{name}_proj.": f".self_attn.{name}_proj." for name in "qkv"}
"""Parts of LLaDA's tensor names, and of the names in transformers' Llama."""


def as_llama(name: str) -> str:
    if name == "model.transformer.ff_out.weight":
        return "lm_head.weight"
    for ours, theirs in LLAMA.items():
        name = name.replace(ours, theirs)
    return name


def authors_mask(prompt: int, length: int, block: int) -> Tensor:
    """Return which keys each query sees in the authors' code, bool ``[length, length]``."""
    is_seen = torch.zeros(length, length, dtype=torch.bool)
    is_seen[:, :prompt] = True
    for start in range(prompt, length, block):
        is_seen[start : start + block, prompt : start + block] = True
    return is_seen


def logits_of(folder: Path, name: str) -> Logits:
    """Return a function that computes the logits of a canvas with transformers, ``[L, V]``.

    Its arguments are the tokens, the length of the prompt, and the block length.
    """
    said = json.loads((folder / "config.json").read_text())
    if name == "Dream":
        settings = {key: said[key] for key in said if key not in ("architectures", "model_type")}
        config = transformers.Qwen2Config(**settings, attn_implementation="eager")
        model, tensors = transformers.Qwen2ForCausalLM(config), merged(folder)
    else:
        config = transformers.LlamaConfig(
            vocab_size=said["embedding_size"],
            hidden_size=said["d_model"],
            intermediate_size=said["mlp_hidden_size"],
            num_hidden_layers=said["n_layers"],
            num_attention_heads=said["n_heads"],
            num_key_value_heads=said["n_kv_heads"],
            rope_theta=said["rope_theta"],
            rms_norm_eps=said["rms_norm_eps"],
            max_position_embeddings=said["max_sequence_length"],
            attn_implementation="eager",
        )
        model = transformers.LlamaForCausalLM(config)
        tensors = {as_llama(key): value for key, value in merged(folder).items()}
    model.load_state_dict(tensors)
    model.eval()

    @torch.no_grad()
    def logits(tokens: list[int], prompt: int, block: int) -> Tensor:
        is_seen = authors_mask(prompt, len(tokens), block)
        hidden = torch.where(is_seen, 0.0, torch.finfo(torch.float32).min)[None, None]
        found: Tensor = model(
            torch.tensor([tokens]), attention_mask=hidden, use_cache=False
        ).logits[0]
        return found

    return logits


def published(
    logits: Logits, shift: int, prompt: list[int], new_tokens: int, policy: Policy
) -> list[list[int]]:
    """Run the published loop. Returns the tokens after every pass.

    There are two differences: the mask token is never predicted, and with ``stop`` "none", end tokens
    have no effect. Passes over the rows after a cache equal passes over all rows, because no row sees
    later blocks.
    """
    block, text, made = policy.block_length, list(prompt), list[list[int]]()
    left, sizes = [0], [len(prompt)]  # masks and tokens of the prompt and of every started block
    is_ended = False
    while True:
        if (
            len(left) - 1 < new_tokens // block
            and not is_ended
            and (sizes[-1] - left[-1]) / sizes[-1] >= policy.next_block
        ):
            text += [MASK] * block
            left.append(block)
            sizes.append(block)
        if not any(left):
            return made
        is_complete = [
            (sizes[i - 1] - left[i - 1]) / sizes[i - 1] >= policy.force_next
            for i in range(1, len(left))
        ]
        found = logits(text, len(prompt), block)
        found[:, MASK] = -torch.inf
        for number, complete in enumerate(is_complete, 1):
            start = len(prompt) + (number - 1) * block
            masks = [at for at in range(start, start + block) if text[at] == MASK]
            if not masks:
                continue
            confidence, tokens = found[[at - shift for at in masks]].double().softmax(-1).max(-1)
            chosen = (confidence > policy.threshold).nonzero()[:, 0].tolist()
            if complete and not chosen:
                chosen = [int(confidence.argmax())]
            for at in chosen:
                text[masks[at]] = int(tokens[at])
                is_ended |= int(tokens[at]) == END and policy.stop != "none"
            left[number] -= len(chosen)
        made.append(list(text))


def prompts(count: int) -> list[list[int]]:
    """Random prompts. Few of their lengths are multiples of the block length."""
    draw = random.Random(5)
    return [[draw.randrange(150) for _ in range(draw.randint(1, 21))] for _ in range(count)]


@pytest.fixture(scope="module", params=CONFIGS)
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def checkpoint(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_d2f(tmp_path_factory.mktemp("checkpoint"), name)


@pytest.fixture(scope="module")
def theirs(checkpoint: Path, name: str) -> Logits:
    return logits_of(checkpoint, name)


@pytest.fixture(scope="module")
def denoiser(checkpoint: Path) -> Denoiser:
    source = open_source(checkpoint, D2F)
    return families.load(source.parameters, source.network)


@pytest.fixture(scope="module")
def bundle(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bundle]:
    path = tmp_path_factory.mktemp("bundle") / "bundle"
    report = build(checkpoint, path, overrides=D2F)
    assert report.parity is not None
    assert report.parity.misses == []
    with dlm_runtime.open(path, threads=1) as opened:
        loop = opened.manifest["loop"]
        assert [*loop["presets"]] == ["d2f"]
        assert (loop["visible_block"], loop["blocks_after_prompt"]) == (BLOCK, True)
        yield opened


@torch.no_grad()
@pytest.mark.parametrize("prompt", [1, 3, 8, 14])
@pytest.mark.parametrize("cached", [0, 1, 2])
def test_logits_equal_those_under_the_authors_mask(
    denoiser: Denoiser, theirs: Logits, prompt: int, cached: int
) -> None:
    """A pass over whole canvases, and passes after ``cached`` blocks, of which the first is the
    prompt.
    """
    draw, length = random.Random(prompt), prompt + 18
    tokens = [
        MASK if at >= prompt and draw.random() < 0.4 else draw.randrange(150)
        for at in range(length)
    ]
    wanted = theirs(tokens, prompt, BLOCK)
    ids, past, first = torch.tensor(tokens)[None], None, 0
    if cached:
        first = prompt + (cached - 1) * BLOCK
        kept = torch.from_numpy(Span(0, first, "append", prompt=prompt).ids(denoiser.network))
        _, past = denoiser.hidden(ids[:, :first], kept[None])
    places = torch.from_numpy(Span(first, length, "drop", prompt=prompt).ids(denoiser.network))
    features, _ = denoiser.hidden(ids[:, first:], places[None], past)
    found = denoiser.project(features)[0]
    assert (found - wanted[first:]).abs().max() <= 2e-4 * (wanted.max() - wanted.min())
    everything, _ = denoiser.hidden(ids, torch.arange(length)[None])  # as in the base model
    full = denoiser.project(everything)[0]
    assert (full - wanted).abs().max() > 0.1 * (wanted.max() - wanted.min())


@torch.no_grad()
def test_passes_over_whole_canvases_see_the_prompt_before_the_first_mask(
    bundle: Bundle, denoiser: Denoiser, theirs: Logits, checkpoint: Path
) -> None:
    """The passes with which bundles are calibrated and compared, also after a cached prompt."""
    layered = families.layered(open_source(checkpoint, D2F).parameters, denoiser.network)
    for prompt in (1, 6, 8):
        tokens = [*range(40, 40 + prompt), MASK, 3, MASK, 9, 12, MASK, MASK, 8, 30, MASK, 2]
        canvas, ids = np.array(tokens), torch.tensor(tokens)[None]
        wanted = theirs(tokens, prompt, BLOCK)
        rows = torch.arange(len(tokens))
        positions = np.flatnonzero(canvas == MASK)
        view, predicting = View(canvas, positions), positions - denoiser.network.shift
        swept = SweptPredictor(layered, "torch")
        cached = CachedPredictor(layered, "float32", PRESETS["d2f"])
        found = [
            denoiser(ids)[0],
            torch.from_numpy(bundle.logits(tokens)),
            denoiser.project(features_of(denoiser, canvas, rows)),
        ]
        for side in (swept, cached):
            side.see([view])
            found.append(torch.from_numpy(side.logits(canvas, predicting)))
        for logits in found:
            expected = wanted if len(logits) == len(tokens) else wanted[predicting]
            assert (logits - expected).abs().max() <= 2e-4 * (wanted.max() - wanted.min())


SETTINGS = [
    (0.1, 0.95, 0.3),
    (0.5, 0.5, 0.2),
    (0.25, 0.75, 0.1),
    (0.1, 0.5, 0.9),
    (0.9, 0.95, 0.05),
]
NEW = 24


def test_both_loops_equal_the_published_loop(
    bundle: Bundle, denoiser: Denoiser, theirs: Logits
) -> None:
    """The canvas after every pass, and the number of passes.

    After the block of the first end token, the published loop finishes the blocks that it has started.
    """
    ended = several = 0
    for number, prompt in enumerate(prompts(15)):
        next_block, force_next, threshold = SETTINGS[number % len(SETTINGS)]
        fields = {"next_block": next_block, "force_next": force_next, "threshold": threshold}
        stop = "none" if number % 3 == 0 else "eos"
        policy = PRESETS["d2f"].with_fields(fields | {"block_length": BLOCK, "stop": stop})
        length = len(prompt) + NEW
        made = published(theirs, denoiser.network.shift, prompt, NEW, policy)
        wanted = [text + [MASK] * (length - len(text)) for text in made]
        seen: list[Canvas] = []
        ours = reference.generate(
            denoiser,
            prompt,
            policy,
            NEW,
            on_step=seen.append,
        )
        events = list(bundle.stream(tokens=prompt, max_new_tokens=NEW, **policy.as_dict()))
        result = events[-1].result
        assert result is not None
        assert (result.tokens, result.nfe) == (ours.tokens, ours.nfe)
        has_end = END in ours.tokens[len(prompt) :] and stop == "eos"
        assert ours.nfe == len(wanted) or (has_end and ours.nfe < len(wanted))
        canvases = [canvas.tokens.tolist() for canvas in seen]
        assert canvases == wanted[: ours.nfe]
        assert [event.canvas for event in events if event.nfe < ours.nfe] == canvases[:-1]
        end = ours.tokens.index(END, len(prompt)) + 1 if has_end else length
        assert ours.tokens[:end] == wanted[-1][:end]
        ended += has_end
        started = [(len(text) - len(prompt)) // BLOCK for text in made]
        several += any(
            MASK in text[: len(prompt) + BLOCK] and count > 1
            for text, count in zip(made, started, strict=True)
        )
    assert 0 < ended < 10
    assert several > 3


policies = st.builds(
    Policy,
    commit=st.sampled_from(("threshold", "entropy_threshold")),
    compare=st.sampled_from((">", ">=")),
    cache=st.just("block"),
    stop=st.sampled_from(("eos", "early-eos", "none")),
    block_length=st.sampled_from((0, BLOCK, 2 * BLOCK)),
    threshold=st.floats(0.2, 0.9),
    entropy_bound=st.floats(0.1, 4),
    next_block=st.floats(0, 1) | st.just(1.0),
    force_next=st.floats(0.2, 1),
)


@settings(max_examples=30)
@given(
    policy=policies,
    length=st.integers(1, 11),
    new=st.integers(0, 20),
    gaps=st.sets(st.integers(1, 10), max_size=4),
    shift=st.integers(0, 1),
    seed=st.integers(0, 20),
)
def test_the_native_loop_equals_the_reference(
    policy: Policy, length: int, new: int, gaps: set[int], shift: int, seed: int
) -> None:
    """The cache does not change the text. With ``next_block`` below 1, it does not change the number
    of passes either.
    """
    tokens = [RANDOM_MASK if at in gaps else t for at, t in enumerate(prompt_of(length, seed))]
    denoiser = random_network(BLOCK, shift, seed, visibility="after-prompt")
    texts = []
    with under_native_loop(denoiser) as native:
        for each in (policy, policy.with_fields({"cache": "none"})):
            wanted = reference.generate(denoiser, tokens, each, new)
            out = native.generate(tokens=tokens, max_new_tokens=new, **each.as_dict())
            assert (out.tokens, out.nfe) == (wanted.tokens, wanted.nfe)
            texts.append((out.tokens, out.nfe if policy.next_block < 1 else 0))
    assert texts[0] == texts[1]
    given_at = [at for at in range(length) if at not in gaps]
    assert [texts[0][0][at] for at in given_at] == [tokens[at] for at in given_at]
    assert RANDOM_MASK not in texts[0][0]


def test_a_pass_computes_the_started_blocks_only() -> None:
    """No block starts after an end token, and blocks after that of an end token are not decided."""
    ended = 0
    for seed in range(40):
        denoiser = random_network(BLOCK, seed % 2, seed, visibility="after-prompt")
        rows: list[tuple[int, int]] = []

        def note(p: CallbackPass, rows: list[tuple[int, int]] = rows) -> None:
            rows.append((len(p.input_ids), p.past[0][0].shape[1] if p.past else 0))

        policy = PRESETS["d2f"].with_fields({"threshold": 0.4, "next_block": 0.5})
        with under_native_loop(denoiser, note) as native:
            out = native.generate(tokens=prompt_of(5, seed), max_new_tokens=40, **policy.as_dict())
        ends = [tokens + cached for tokens, cached in rows]
        assert rows[0] == (5 + BLOCK, 0)
        assert ends == sorted(ends)
        assert {end % BLOCK for end in ends} == {1}
        text = out.tokens[5:]
        if RANDOM_END in text and ends[-1] < 45:
            ended += 1
            assert set(out.tokens[ends[-1] :]) == {RANDOM_END}
    assert ended > 2


def test_shared_passes_equal_single_runs(bundle: Bundle) -> None:
    """Requests in a scheduler and in a batch, some with equal prompts. No prompt is split or reused."""
    asked = [*prompts(6), *prompts(2), [*prompts(1)[0], 7, 9]]
    fields = {"max_new_tokens": NEW, "threshold": 0.2}
    alone = [bundle.generate(tokens=tokens, **fields) for tokens in asked]
    with bundle.scheduler(max_running=4, max_tokens=8) as scheduler:
        jobs = [scheduler.submit(tokens=tokens, **fields) for tokens in asked]
        found = [job.result() for job in jobs]
        assert scheduler.stats.prefix_hits == 0
    batch = bundle.generate_batch(tokens=asked, **fields)
    for results in (found, batch):
        assert [(out.tokens, out.nfe) for out in results] == [(o.tokens, o.nfe) for o in alone]


def test_planned_passes_equal_those_of_the_loop(denoiser: Denoiser) -> None:
    """With threshold 1, each pass decides one token of each forced block."""
    network = denoiser.network
    policy = PRESETS["d2f"].with_fields({"threshold": 1.0, "force_next": 1.0, "stop": "none"})
    made: list[tuple[int, int, int]] = []

    def note(p: CallbackPass) -> None:
        cached = p.past[0][0].shape[1] if p.past else 0
        made.append((len(p.input_ids), cached, len(p.score_rows)))

    with under_native_loop(denoiser, note) as native:
        for prompt in ([7], [3, 77, 12, 9, 5]):
            made.clear()
            native.generate(tokens=prompt, max_new_tokens=11, **policy.as_dict())
            loop = loop_for(policy, network, Request(len(prompt), 11))
            sizes = [each.size for each in list_passes(len(prompt), 11, 1, loop)]
            assert [(each.tokens, each.cached, each.rows) for each in sizes] == made


def test_effort_levels_change_the_threshold_only(denoiser: Denoiser) -> None:
    own, *others = variants(PRESETS["d2f"], denoiser.network)
    assert own == {}
    assert all([*changes] == ["threshold"] for changes in others[:-1])
    assert others[-1] == {"threshold": 1.0, "force_next": 1.0}  # one token per pass


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another rule": ({"commit": "static"}, 'needs commit = "threshold" or "entropy_threshold"'),
    "a store": ({"store": "reuse"}, 'cannot be combined with this store: use store = "pass"'),
    "sub-blocks": ({"sub_block_length": 2}, "sub-blocks: use sub_block_length = 0"),
    "edits": ({"remask": "edit"}, "cannot be combined with edits"),
    "an approximate cache": ({"cache": "prefix"}, 'cache = "prefix" needs full attention'),
    "another block length": ({"block_length": 6}, "block_length = 6 does not suit this denoiser"),
}


@pytest.mark.parametrize("changes", REFUSED)
def test_what_does_not_suit_the_loop_is_refused(bundle: Bundle, changes: str) -> None:
    fields, sentence = REFUSED[changes]
    with pytest.raises(DlmError) as caught:
        bundle.generate(tokens=[1, 2, 3], max_new_tokens=8, **fields)
    assert sentence in str(caught.value)


def test_prompts_are_neither_saved_nor_reused(bundle: Bundle, tmp_path: Path) -> None:
    with pytest.raises(DlmError, match="full attention inside the prompt"):
        bundle.save_prompt_cache(tmp_path / "prompt.cache", tokens=[*range(64)])
    reuse = prompt_reuse_of(bundle.manifest)
    assert reuse.refusal is not None
    assert "the tokens of its prompt see each other" in reuse.refusal


def test_the_family_must_be_named(tmp_path: Path) -> None:
    """Without it, the checkpoint is a LLaDA. The bundle remembers the family and the adapter."""
    path = write_d2f(tmp_path / "checkpoint", "LLaDA")
    plain = open_source(path, Overrides(adapter="d2f")).network
    network = open_source(path, Overrides(adapter="d2f", family="d2f")).network
    assert (plain.family, plain.visible_block) == ("llada", None)
    assert (network.family, network.visible_block) == ("d2f", 32)
    assert network.blocks_after_prompt
    assert [*network.presets()] == ["d2f"]
    changed = {"visibility": "full", "block_length": None}
    assert (
        replace(
            network,
            family="llada",
            layers=tuple(
                replace(layer, attention=replace(layer.attention, **changed))
                for layer in network.layers
            ),
        )
        == plain
    )


WRONG: dict[str, tuple[dict[str, Any], Overrides, str]] = {
    "another base": (
        {"architectures": ["SDARForCausalLM"]},
        Overrides(family="d2f"),
        "does not belong to --family d2f, which has LLaDAModelLM, DreamModel",
    ),
    "DreamOn": (
        {"expand_token_id": 3, "delete_token_id": 4},
        Overrides(family="d2f"),
        r"expand and delete tokens \(DreamOn\), which --family d2f does not support",
    ),
    "a long canvas": (
        {},
        Overrides(family="d2f", max_canvas_length=1 << 19),
        "canvases of 524288 tokens are too long for --family d2f with blocks of 32",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_other_checkpoints_are_refused(tmp_path: Path, name: str) -> None:
    changes, overrides, sentence = WRONG[name]
    base = llada_config() if name == "a long canvas" else dream_config()
    write_checkpoint(tmp_path, base)
    (tmp_path / "config.json").write_text(json.dumps(base | changes))
    with pytest.raises(CheckpointError, match=sentence):
        families.read_network(Checkpoint(tmp_path), overrides)


def test_a_quantised_bundle_is_built_judged_and_run(tmp_path: Path) -> None:
    """The commands that a user runs, from the checkpoint to a text."""

    def invoke(*arguments: object, code: int = 0) -> str:
        done = CliRunner().invoke(main, [str(argument) for argument in arguments])
        assert done.exit_code == code, done.output
        return done.output if code else done.stdout

    path, out = write_d2f(tmp_path / "checkpoint", "Dream"), tmp_path / "bundle"
    named = ("--family", "d2f", "--adapter", "d2f", "--attention-block", BLOCK)
    how = ("--precision", "int8", "--calib-samples", 8, "--judged", 4, "--cache-dtype", "int8")
    invoke("build", path, "-o", out, *named, *how)
    accuracy = json.loads((out / "accuracy.json").read_text())
    judged = accuracy["judgement"]
    assert judged["overall"]["top1"] > 0.8
    assert judged["frontier"]["committed"] > 0
    invoke("verify", out, "--checkpoint", path)
    assert "after-prompt of 4" in invoke("inspect", path, *named)
    invoke("plan", out, "--targets", "cpu", "--preset", "d2f")
    run = json.loads(invoke("run", out, "--tokens", "5,17,9", "--max-new-tokens", 12, "--json"))
    assert run["passes"]["denoise"] > 0
    golden = ("capture", path, "-o", tmp_path / "golden.npz", "--trust-remote-code", *named)
    assert "no released code computes the attention of this family" in invoke(*golden, code=2)
