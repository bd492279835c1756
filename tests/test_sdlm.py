"""Tests of SDLM (arXiv:2509.24007), whose draft passes decide the text.

transformers' Qwen2 with an explicit attention mask computes the logits to compare. The published loop
was written again from ``conf_generate_cached`` in the authors' code (sdlm_generator.py of
github.com/OpenGVLab/SDLM, commit 7e8a26e).
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import sdlm_config, write_checkpoint
from click.testing import CliRunner
from denoisers import load, under_native_loop
from safetensors.torch import load_file, save_file
from torch import Tensor

import dlm_runtime
from dlm_export import families
from dlm_export.build import build
from dlm_export.checkpoints.folder import Checkpoint, CheckpointError
from dlm_export.cli import main
from dlm_export.families.base import Overrides
from dlm_export.judging.tuning.effort_levels import variants
from dlm_export.network import reference
from dlm_export.network.commit_rules import choose, score_of
from dlm_export.network.denoiser import Denoiser
from dlm_export.network.loop_turns import Canvas, start_canvas
from dlm_export.network.pass_plan import Span
from dlm_export.planning.predict import Request, loop_for
from dlm_export.planning.predicted_passes import list_passes
from dlm_runtime import Bundle, CallbackPass, DlmError
from dlm_runtime.presets import PRESETS

transformers = pytest.importorskip("transformers")

MASK, END, NEW = 150, 151, 24
Logits = Callable[[list[int], int], Tensor]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint. Few tokens are likely, so that confidences differ widely."""
    folder = write_checkpoint(tmp_path_factory.mktemp("checkpoint"), sdlm_config())
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"][8:] *= 0.2
    tensors["lm_head.weight"][END] *= 4
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def denoiser(checkpoint: Path) -> Denoiser:
    return load(checkpoint)


@pytest.fixture(scope="module")
def theirs(checkpoint: Path) -> Logits:
    """Return a function that computes transformers' logits of the ``rows`` rows of a block.

    As in the authors' code, the canvas contains the last token twice. The first copy is a causal row,
    which the block does not see. The second copy is the first row of the block, at the same position.
    """
    said = json.loads((checkpoint / "config.json").read_text())
    own = ("architectures", "model_type", "auto_map", "attn_implementation", "block_size")
    settings = {name: value for name, value in said.items() if name not in own}
    settings = transformers.Qwen2Config(**settings, attn_implementation="eager")
    model = transformers.Qwen2ForCausalLM(settings).eval()
    model.load_state_dict(load_file(checkpoint / "model.safetensors"))

    @torch.no_grad()
    def logits(text: list[int], rows: int) -> Tensor:
        ids = torch.tensor([[*text, text[-1], *[MASK] * (rows - 1)]])
        places = torch.arange(ids.shape[1])
        places[-rows:] -= 1
        is_seen = torch.ones(ids.shape[1], ids.shape[1]).tril().bool()
        is_seen[-rows:, -rows:] = True
        is_seen[-rows:, -rows - 1] = False
        hidden = torch.where(is_seen, 0.0, torch.finfo(torch.float32).min)[None, None]
        found = model(ids, attention_mask=hidden, position_ids=places[None], use_cache=False).logits
        return found[0, -rows:]

    return logits


def published(
    logits: Logits, prompt: list[int], new_tokens: int, block: int, threshold: float
) -> tuple[list[int], list[int]]:
    """Generate text with the published loop. Returns the canvas, and the tokens of each pass.

    There are two differences. The published loop may generate more tokens than requested, but here
    the last block ends with the canvas. And the mask token is never predicted.
    """
    text, made = list(prompt), []
    while (room := len(prompt) + new_tokens - len(text)) > 0:
        found = logits(text, min(block, room))
        found[:, MASK] = -torch.inf
        confidence, tokens = found.softmax(-1).max(-1)
        is_sure = (confidence > threshold).tolist()
        count = max(1, is_sure.index(False) if False in is_sure else len(is_sure))
        new = tokens[:count].tolist()
        if END in new:
            made.append(new.index(END) + 1)
            text += new[: new.index(END)]
            break
        made.append(count)
        text += new
    return text + [END] * (len(prompt) + new_tokens - len(text)), made


def prompts(count: int) -> list[list[int]]:
    draw = random.Random(5)
    return [[draw.randrange(150) for _ in range(draw.randint(1, 40))] for _ in range(count)]


@pytest.mark.parametrize("cached", [0, 30])
@pytest.mark.parametrize("causal_rows", [0, 1, 17])
def test_logits_of_a_draft_pass_equal_those_of_qwen2(
    denoiser: Denoiser, theirs: Logits, cached: int, causal_rows: int
) -> None:
    """One pass computes causal rows, and then the last token and four mask tokens."""
    network, rows = denoiser.network, 5
    draw = random.Random(causal_rows)
    text = [draw.randrange(150) for _ in range(cached + causal_rows + 1)]
    span = Span(cached, len(text) + rows - 1, "append", True, draft_rows=cached + causal_rows)
    ids = torch.tensor([*text, *[MASK] * (rows - 1)])[None]
    with torch.no_grad():
        past = None
        if cached:
            _, past = denoiser.hidden(ids[:, :cached], torch.arange(cached)[None])
        places = torch.from_numpy(span.ids(network))[None]
        features, _ = denoiser.hidden(ids[:, cached:], places, past)
        found = denoiser.project(features)[0, -rows:]
    wanted = theirs(text, rows)
    assert (found - wanted).abs().max() <= 2e-4 * (wanted.max() - wanted.min())


@pytest.fixture(scope="module")
def bundle(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bundle]:
    path = tmp_path_factory.mktemp("bundle") / "bundle"
    report = build(checkpoint, path)
    assert report.parity is not None
    assert report.parity.misses == []
    with dlm_runtime.open(path, threads=1) as opened:
        assert [*opened.manifest["loop"]["presets"]] == ["sdlm"]
        yield opened


def test_both_loops_equal_the_published_loop(
    bundle: Bundle, denoiser: Denoiser, theirs: Logits
) -> None:
    """Canvases, and the number of tokens that each pass decides."""
    seen, ended = set[int](), 0
    settings = [(4, 0.05), (4, 0.3), (8, 0.1), (3, 0.0), (4, 0.9), (1, 0.5)]
    for number, prompt in enumerate(prompts(18)):
        block, threshold = settings[number % len(settings)]
        wanted, made = published(theirs, prompt, NEW, block, threshold)
        changes = {"block_length": block, "threshold": threshold}
        events = list(bundle.stream(tokens=prompt, max_new_tokens=NEW, **changes))
        assert events[-1].result is not None
        assert events[-1].result.tokens == wanted
        decided = [event.committed for event in events if event.committed]
        assert decided[:-1] == made[:-1]  # after an end token, the last pass decides all positions
        assert decided[-1] >= made[-1]
        stored = len(prompt) > 1  # one more pass stores the prompt
        policy = PRESETS["sdlm"].with_fields(changes)
        ours = reference.generate(denoiser, prompt, policy, NEW)
        assert (ours.tokens, ours.nfe) == (wanted, len(made) + stored)
        assert events[-1].nfe == ours.nfe
        seen |= set(made)
        ended += END in wanted
    assert seen >= {1, 2, 3, 4, 8}
    assert 0 < ended < 18


@pytest.mark.parametrize(
    "changes",
    [
        {"stop": "none", "threshold": 0.1},
        {"block_length": 7, "threshold": 0.2, "compare": ">="},
        {"temperature": 0.7, "seed": 3, "threshold": 0.3},
        {"temperature": 2.0, "top_k": 9, "threshold": 0.2},
    ],
    ids=str,
)
def test_the_native_loop_equals_the_reference(
    bundle: Bundle, denoiser: Denoiser, changes: dict[str, Any]
) -> None:
    policy = PRESETS["sdlm"].with_fields(changes)
    with under_native_loop(denoiser) as native:
        for tokens in prompts(6):
            seen: list[Canvas] = []
            wanted = reference.generate(denoiser, tokens, policy, NEW, on_step=seen.append)
            for loop in (bundle, native):
                events = list(loop.stream(tokens=tokens, max_new_tokens=NEW, **policy.as_dict()))
                assert events[-1].result is not None
                assert (events[-1].result.tokens, events[-1].nfe) == (wanted.tokens, wanted.nfe)
                for event, canvas in zip(events[:-1], seen, strict=False):
                    assert (event.canvas, event.undecided) == (
                        canvas.tokens.tolist(),
                        canvas.undecided.tolist(),
                    )


def test_shared_passes_equal_single_runs(bundle: Bundle) -> None:
    """Requests that share passes, whose prompts are split, and that reuse the same prompt."""
    shared = prompts(1)[0] * 3
    asked = [*prompts(6), shared, [*shared, 7, 9], shared]
    alone = [bundle.generate(tokens=tokens, max_new_tokens=NEW, threshold=0.1) for tokens in asked]
    with bundle.scheduler(max_running=4, max_tokens=16) as scheduler:
        jobs = [
            scheduler.submit(tokens=tokens, max_new_tokens=NEW, threshold=0.1) for tokens in asked
        ]
        found = [job.result() for job in jobs]
        assert scheduler.stats.prefix_hits > 0
    assert [out.tokens for out in found] == [out.tokens for out in alone]


def test_a_request_that_ends_early_is_filled_with_the_last_predictions(
    bundle: Bundle, denoiser: Denoiser
) -> None:
    policy, tokens = PRESETS["sdlm"].with_fields({"stop": "none"}), prompts(3)[2]
    for steps in (1, 2, 3):
        canvas = start_canvas(tokens, NEW, MASK)
        wanted = reference.fill(denoiser, canvas, policy, max_steps=steps)
        out = bundle.generate(tokens=tokens, max_new_tokens=NEW, max_steps=steps, stop="none")
        assert (out.tokens, out.nfe, out.finish) == (wanted.tokens, steps, "steps")


def test_planned_passes_equal_those_of_the_loop(denoiser: Denoiser) -> None:
    """Each pass decides one token, after the pass that stores the prompt."""
    network, policy = (
        denoiser.network,
        PRESETS["sdlm"].with_fields({"threshold": 1.0, "stop": "none"}),
    )
    made: list[tuple[int, int, int]] = []

    def note(p: CallbackPass) -> None:
        cached = p.past[0][0].shape[1] if p.past else 0
        made.append((len(p.input_ids), cached, len(p.score_rows)))

    with under_native_loop(denoiser, note) as native:
        for prompt in ([7], [3, 77, 12, 9]):
            made.clear()
            native.generate(tokens=prompt, max_new_tokens=11, **policy.as_dict())
            loop = loop_for(policy, network, Request(len(prompt), 11))
            sizes = [each.size for each in list_passes(len(prompt), 11, 1, loop)]
            assert [(each.tokens, each.cached, each.rows) for each in sizes] == made


def test_effort_levels_change_thresholds_only(denoiser: Denoiser) -> None:
    own, *others = variants(PRESETS["sdlm"], denoiser.network)
    assert own == {}
    assert all({*changes} <= {"threshold", "finish_threshold"} for changes in others)
    assert others[-1] == {"threshold": 1.0}  # one token per pass


def test_the_longest_prefix_commits() -> None:
    policy = PRESETS["sdlm"].with_fields({"threshold": 0.5})
    for confidences, count in (
        ([0.9, 0.8, 0.2, 0.9], 2),
        ([0.2, 0.9, 0.9], 1),
        ([0.6, 0.7], 2),
        ([0.5, 0.5], 1),
    ):
        chosen = choose(score_of(torch.tensor(confidences).double().numpy()), policy, 1)
        assert chosen.tolist() == [i < count for i in range(len(confidences))]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another rule": ({"commit": "threshold"}, 'use commit = "longest_prefix"'),
    "verification": ({"commit": "verify", "score_of": "prediction"}, '"longest_prefix"'),
    "a store": ({"store": "open"}, 'cannot be combined with this store: use store = "pass"'),
    "guidance": ({"cfg_scale": 1.0}, "cannot be combined with guidance: use cfg_scale = 0"),
    "sub-blocks": ({"sub_block_length": 2}, "sub-blocks: use sub_block_length = 0"),
    "planned passes": ({"steps_per_block": 2}, "a number of steps: use steps_per_block = 0"),
    "steps": ({"steps": 4}, 'steps = 4, but with commit = "longest_prefix"'),
    "no prompt": ({"tokens": []}, '"longest_prefix" needs a prompt of at least one token'),
    "infilling": ({"tokens": [3, MASK, 4]}, "position 1 is to be filled before tokens that are"),
    "no cache": ({"cache": "none"}, 'this cache: use cache = "block"'),
}


@pytest.mark.parametrize("changes", REFUSED)
def test_what_does_not_suit_the_loop_is_refused(bundle: Bundle, changes: str) -> None:
    fields, sentence = REFUSED[changes]
    with pytest.raises(DlmError) as caught:
        bundle.generate(**{"tokens": [1, 2, 3], "max_new_tokens": 8} | fields)
    assert sentence in str(caught.value)


def test_the_mask_token_is_read_from_the_authors_key_or_the_tokenizer(tmp_path: Path) -> None:
    def read(**changes: Any) -> families.NetworkSpec:
        (tmp_path / "config.json").write_text(json.dumps(sdlm_config(**changes)))
        return families.read_network(Checkpoint(tmp_path), Overrides())

    write_checkpoint(tmp_path, sdlm_config())
    network = read(text_mask_token_id=149)
    assert (network.family, network.mask_token_id) == ("sdlm", 149)
    assert (network.draft_block, network.has_shifted_drafts, network.is_verifying) == (
        4,
        True,
        False,
    )
    with pytest.raises(CheckpointError, match="nor <text_mask> among the added tokens"):
        read(text_mask_token_id=None)
    (tmp_path / "added_tokens.json").write_text('{"<text_mask>": 148}')
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert read(text_mask_token_id=None).mask_token_id == 148
    with pytest.raises(CheckpointError, match="causal_attn = true is not supported"):
        read(causal_attn=True)


def test_a_quantised_bundle_is_built_judged_and_run(checkpoint: Path, tmp_path: Path) -> None:
    """The commands that a user runs, from the checkpoint to a text."""

    def invoke(*arguments: object) -> str:
        done = CliRunner().invoke(main, [str(argument) for argument in arguments])
        assert done.exit_code == 0, done.output
        return done.stdout

    out = tmp_path / "bundle"
    how = ("--precision", "int8", "--calib-samples", 8, "--judged", 4)
    invoke("build", checkpoint, "-o", out, *how)
    accuracy = json.loads((out / "accuracy.json").read_text())
    # Each canvas compares the three masked positions of one block.
    judged = accuracy["judgement"]
    assert judged["overall"]["positions"] % 3 == 0
    assert judged["overall"]["top1"] > 0.8
    assert judged["frontier"]["committed"] > 0
    assert judged["speculation"] is None
    assert "draft of 4" in invoke("inspect", checkpoint)
    invoke("plan", out, "--targets", "cpu", "--preset", "sdlm")
    run = json.loads(invoke("run", out, "--tokens", "5,17,9", "--max-new-tokens", 12, "--json"))
    assert run["passes"]["denoise"] > 0
