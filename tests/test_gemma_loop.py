"""DiffusionGemma's loop: whole trajectories are equal to those of transformers' ``generate`` if both
use the same random numbers, in the reference loop and in the native loop.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import diffusion_gemma_config, write_checkpoint
from click.testing import CliRunner
from denoisers import load, under_native_loop

import dlm_runtime
from dlm_export.build import BuildOptions, build
from dlm_export.bundle.manifest import network_of
from dlm_export.cli import main
from dlm_export.network import reference
from dlm_export.network.denoiser import Denoiser
from dlm_export.network.loop_random import gumbels, random_tokens
from dlm_export.planning.plan import make_plan
from dlm_export.planning.predict import Request, loop_for
from dlm_export.planning.predicted_passes import PlannedPass, list_passes
from dlm_export.planning.shapes import read_shape
from dlm_export.targets import TARGETS
from dlm_runtime import Bundle, Policy
from dlm_runtime.errors import RequestError
from dlm_runtime.presets import PRESETS

transformers = pytest.importorskip("transformers")
gemma = pytest.importorskip(
    "transformers.models.diffusion_gemma", reason="needs a transformers with DiffusionGemma"
)

CANVAS, END = 8, 1
GEMMA = PRESETS["diffusion-gemma"].with_fields({"block_length": CANVAS, "steps_per_block": 12})


@pytest.fixture(scope="module")
def window(request: pytest.FixtureRequest) -> int:
    """The window of the sliding layers. One of the two windows is shorter than the canvases."""
    found: int = request.param
    return found


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, window: int) -> Path:
    """A checkpoint whose layers all have keys of the same shape. Denoisers in Python need this."""
    own = {"2": {"head_dim": 16, "num_key_value_heads": 2}}
    config = diffusion_gemma_config(per_layer_config=own, sliding_window=window)
    return write_checkpoint(tmp_path_factory.mktemp("gemma"), config)


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Any:
    """Transformers' model with the same weights. Its vision tower is random and is not used."""
    transformers.logging.set_verbosity_error()  # the checkpoint has no vision tower
    loaded = gemma.DiffusionGemmaForBlockDiffusion.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager"
    )
    return loaded.eval()


@dataclass
class Noise:
    """Gives transformers the random numbers of our loops, and records transformers' canvases."""

    policy: Policy
    vocab_size: int
    start: int
    step: int = 0
    is_renoising: bool = False
    canvases: list[list[int]] = field(default_factory=list)

    def initialize_canvas(self, batch_size: int, device: torch.device) -> torch.Tensor:
        if not self.is_renoising:  # the next canvas starts
            self.start += CANVAS
            self.step = 0
        positions = np.arange(self.start, self.start + CANVAS)
        found = random_tokens(
            self.policy.seed, self.step, positions, self.vocab_size, self.vocab_size
        )
        return torch.from_numpy(found)[None]

    def multinomial(self, probs: torch.Tensor, num_samples: int) -> torch.Tensor:
        noise = np.stack(
            [
                gumbels(self.policy.seed, self.step, self.start + i, self.vocab_size)
                for i in range(CANVAS)
            ]
        )
        self.step += 1
        return (probs.double().log() + torch.from_numpy(noise)).argmax(-1, keepdim=True)


def transformers_run(
    model: Any, tokens: list[int], new: int, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[int], list[list[int]]]:
    """Run transformers' ``generate``. Returns the text, and the canvas of each decoder pass."""
    code = gemma.generation_diffusion_gemma
    vocab = model.config.text_config.vocab_size
    noise = Noise(policy, vocab, len(tokens) - CANVAS)
    sampler = code.EntropyBoundSampler
    renoise, forward = sampler.renoise_canvas, type(model).forward

    def renoise_canvas(self: Any, accepted: torch.Tensor, cur_step: Any) -> torch.Tensor:
        noise.is_renoising = True
        found: torch.Tensor = renoise(self, accepted, cur_step)
        noise.is_renoising = False
        return found

    def record(self: Any, *args: Any, **given: Any) -> Any:
        noise.canvases.append(given["decoder_input_ids"][0].tolist())
        return forward(self, *args, **given)

    with monkeypatch.context() as patch:
        patch.setattr(
            sampler,
            "initialize_canvas",
            lambda _, batch_size, device: noise.initialize_canvas(batch_size, device),
        )
        patch.setattr(sampler, "renoise_canvas", renoise_canvas)
        patch.setattr(code.torch, "multinomial", noise.multinomial)
        patch.setattr(type(model), "forward", record)
        out = model.generate(
            torch.tensor([tokens]),
            max_new_tokens=new,
            max_denoising_steps=policy.steps_per_block,
            sampler_config=code.EntropyBoundSamplerConfig(policy.entropy_bound),
            t_min=policy.temperature - policy.temperature_drop,
            t_max=policy.temperature,
            stability_threshold=policy.stable_passes,
            confidence_threshold=policy.stable_entropy,
            eos_token_id=END,
            pad_token_id=END,
        )
    return out.sequences[0].tolist(), noise.canvases


TRAJECTORIES: list[tuple[int, int, dict[str, Any]]] = [
    (8, 19, {}),
    (8, 1, {"entropy_bound": 20.0, "stable_entropy": 3.0}),
    (8, 5, {"temperature": 0.05, "temperature_drop": 0.03, "stable_entropy": 1.0}),
    (64, 5, {"entropy_bound": 4.0}),
    (64, 19, {"stable_entropy": 5.5, "stable_passes": 0}),
    (
        64,
        1,
        {"temperature": 0.05, "temperature_drop": 0.03, "stable_entropy": 1.0, "stable_passes": 2},
    ),
]


@pytest.mark.parametrize(
    ("window", "prompt", "changes"), TRAJECTORIES, indirect=["window"], ids=str
)
def test_the_trajectory_is_that_of_transformers(
    checkpoint: Path,
    model: Any,
    prompt: int,
    changes: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    denoiser, policy = load(checkpoint), GEMMA.with_fields({"seed": prompt} | changes)
    tokens = np.random.default_rng(prompt).integers(2, 160, prompt).tolist()
    wanted, canvases = transformers_run(model, tokens, 3 * CANVAS, policy, monkeypatch)
    seen: list[list[int]] = []
    hidden = denoiser.hidden

    def record(ids: torch.Tensor, positions: torch.Tensor, *given: Any, **named: Any) -> Any:
        if positions[0, 0] >= denoiser.network.max_canvas_length:
            seen.append(ids[0].tolist())
        return hidden(ids, positions, *given, **named)

    monkeypatch.setattr(denoiser, "hidden", record)
    found = reference.generate(denoiser, tokens, policy, 3 * CANVAS)
    assert seen == canvases
    # Transformers replaces all tokens after an end token.
    ended = np.cumsum(np.array(found.tokens[prompt:]) == END) > 0
    text = np.where(ended, END, found.tokens[prompt:]).tolist()
    assert text == wanted[prompt:] + [END] * (prompt + 3 * CANVAS - len(wanted))
    with under_native_loop(denoiser) as native:
        out = native.generate(tokens=tokens, max_new_tokens=3 * CANVAS, **policy.as_dict())
    assert (out.tokens, out.nfe) == (found.tokens, found.nfe)
    blocks = (len(wanted) - prompt) // CANVAS
    assert out.passes == {"prefill": 1, "denoise": len(canvases), "store": blocks - 1}


# ---- A bundle ----


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose last layer has keys of another shape, as in the released one."""
    return write_checkpoint(tmp_path_factory.mktemp("released"), diffusion_gemma_config())


@pytest.fixture(scope="module")
def torch_denoiser(released: Path) -> Denoiser:
    return load(released)


@pytest.fixture(scope="module")
def bundle_path(released: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bundle") / "bundle"
    build(released, path, BuildOptions(check_parity=False))
    return path


@pytest.fixture(scope="module")
def bundle(bundle_path: Path) -> Iterator[Bundle]:
    with dlm_runtime.open(bundle_path, threads=1) as opened:
        yield opened


FIELDS: dict[str, Any] = {"steps_per_block": 5, "entropy_bound": 6.0, "stop": "none"}


def test_a_bundle_generates_the_texts_of_the_reference(
    torch_denoiser: Denoiser, bundle: Bundle
) -> None:
    """The test runs requests alone and in shared passes. Each prompt except the last starts with
    the previous prompt.
    """
    shared = np.random.default_rng(1).integers(2, 160, 40).tolist()
    prompts = [shared[: 3 + 9 * i] for i in range(5)] + [shared[::-1]]
    policy = bundle.policy().with_fields(FIELDS)
    assert policy.remask == "noise"
    wanted = [reference.generate(torch_denoiser, each, policy, 20) for each in prompts]
    for tokens, one in zip(prompts, wanted, strict=True):
        out = bundle.generate(tokens=tokens, max_new_tokens=20, **FIELDS)
        assert (out.tokens, out.nfe) == (one.tokens, one.nfe)
        assert out.passes == {"prefill": 1, "denoise": 15, "store": 2}
    asked = {"max_new_tokens": 20, **FIELDS}
    together = bundle.generate_batch(tokens=prompts, **asked)
    assert [out.tokens for out in together] == [one.tokens for one in wanted]
    with bundle.scheduler(max_running=3, max_tokens=16) as scheduler:
        jobs = [scheduler.submit(tokens=tokens, **asked) for tokens in [*prompts, *prompts]]
        made = [job.result().tokens for job in jobs]
    assert made == 2 * [one.tokens for one in wanted]


ALL_ROW, WINDOW_ROW = 2 * 32 * 4, 2 * 2 * 2 * 16 * 4
"""Bytes of a token's keys and values: in the last layer, and in the two layers with a window."""
KEPT = 7 + CANVAS
"""The number of tokens in the window and in one block."""


def test_a_scheduler_does_not_keep_more_of_a_long_canvas_in_layers_with_a_window(
    torch_denoiser: Denoiser, bundle: Bundle
) -> None:
    policy = bundle.policy().with_fields(FIELDS)
    ids = np.random.default_rng(2).integers(2, 160, 200).tolist()
    sizes = []
    size = 2 * 256 * ALL_ROW
    assert size < 200 * (ALL_ROW + WINDOW_ROW)  # too little to keep all tokens in all layers
    with bundle.scheduler(max_running=1, max_tokens=16, cache_bytes=size) as scheduler:
        for length in (24, 104, 200):
            job = scheduler.submit(tokens=ids[:length], max_new_tokens=2 * CANVAS, **FIELDS)
            made = job.result()
            wanted = reference.generate(torch_denoiser, ids[:length], policy, 2 * CANVAS)
            assert made.tokens == wanted.tokens
            sizes.append(made.cache_bytes - (length + CANVAS) * ALL_ROW)
    # The kept tokens may start anywhere in a page of 16 tokens.
    assert len(set(sizes)) == 1
    assert KEPT * WINDOW_ROW <= sizes[0] < (KEPT + 16) * WINDOW_ROW


def test_a_session_does_not_keep_more_of_a_long_canvas_in_layers_with_a_window(
    torch_denoiser: Denoiser, bundle: Bundle
) -> None:
    ids = np.random.default_rng(3).integers(2, 160, 1040).tolist()
    policy, asked = bundle.policy().with_fields(FIELDS), FIELDS | {"max_new_tokens": 2 * CANVAS}
    made = bundle.generate(tokens=ids, **asked)
    wanted = reference.generate(torch_denoiser, ids, policy, 2 * CANVAS)
    assert made.tokens == wanted.tokens
    # A pass over 512 tokens of the prompt reads the 7 tokens before them.
    assert made.cache_bytes - (len(ids) + CANVAS) * ALL_ROW == (7 + 512) * WINDOW_ROW
    assert made.nfe == len(planned_passes(bundle, policy, len(ids), None))
    assert made.nfe == wanted.nfe + made.passes["prefill"] - 1
    # The passes over the prompt do not count towards max_steps, except one.
    cut = bundle.generate(tokens=ids, max_steps=wanted.nfe - 1, **asked)
    assert cut.nfe == made.nfe - 1
    for max_tokens in (200, 600):
        with bundle.scheduler(max_tokens=max_tokens) as scheduler:
            result = scheduler.submit(tokens=ids, **asked).result()
            assert result.tokens == made.tokens
            assert result.nfe == len(planned_passes(bundle, policy, len(ids), max_tokens))


def planned_passes(
    bundle: Bundle, policy: Policy, length: int, max_tokens: int | None
) -> Sequence[PlannedPass]:
    request = Request(prompt_tokens=length, new_tokens=2 * CANVAS, max_tokens=max_tokens)
    loop = loop_for(policy, network_of(bundle.manifest), request)
    return list_passes(length, 2 * CANVAS, 1, loop)


@pytest.mark.parametrize(("length", "block_length"), [(3, 8), (200, 5), (60, 64)])
def test_a_scheduler_takes_a_request_with_the_planned_memory_and_not_with_less(
    bundle_path: Path, bundle: Bundle, length: int, block_length: int
) -> None:
    shape = read_shape(bundle_path, lambda path: pytest.fail("this is a bundle"))
    changes = FIELDS | {"block_length": block_length}
    request = Request(prompt_tokens=length, new_tokens=20, changes=changes)
    (cache,) = make_plan([shape], [TARGETS["cpu"]], request, ["fp32"]).caches.values()
    asked = {"tokens": [5] * length, "max_new_tokens": 20, **changes}
    wanted = bundle.generate(**asked)
    size = cache.bytes_by_type["fp32"]
    for prefix_cache_bytes in (0, None):
        asks = {} if prefix_cache_bytes is None else {"prefix_cache_bytes": prefix_cache_bytes}
        with bundle.scheduler(max_running=1, cache_bytes=size, **asks) as scheduler:
            assert scheduler.submit(**asked).result().tokens == wanted.tokens
        with (
            bundle.scheduler(max_running=1, cache_bytes=size - 1, **asks) as scheduler,
            pytest.raises(RequestError, match="cache_bytes"),
        ):
            scheduler.submit(**asked)
        # This is enough for all tokens of the longest canvas in all layers.
        most = 2048 * (ALL_ROW + WINDOW_ROW)
        with bundle.scheduler(max_running=1, cache_bytes=most, **asks) as scheduler:
            assert scheduler.submit(**asked).result().tokens == wanted.tokens


def test_a_bundle_that_does_not_say_which_layers_have_a_window(
    bundle_path: Path, bundle: Bundle, tmp_path: Path
) -> None:
    """Older bundles of DiffusionGemma have the same number of cached rows in all layers."""
    shutil.copytree(bundle_path, tmp_path / "old")
    manifest = json.loads((tmp_path / "old" / "manifest.json").read_text())
    ports = manifest["loop"]["graph"]["ports"]
    for layer in ports["layers"]:
        layer.pop("window", None)
    for port in ("segments", "window_segments"):
        ports.pop(port)
    (tmp_path / "old" / "manifest.json").write_text(json.dumps(manifest))
    ids = np.random.default_rng(5).integers(2, 160, 40).tolist()
    asked = {"tokens": ids, "max_new_tokens": 4 * CANVAS, **FIELDS}
    with dlm_runtime.open(tmp_path / "old", threads=1) as opened:
        assert opened.generate(**asked).tokens == bundle.generate(**asked).tokens


def test_prompts_are_reused_with_a_window(
    bundle_path: Path, bundle: Bundle, tmp_path: Path
) -> None:
    """From a prompt cache, and from earlier requests. A prompt may be only a part of the stored one."""
    ids = np.random.default_rng(4).integers(2, 160, 100).tolist()
    asked: list[dict[str, Any]] = [
        {"tokens": ids[:length], "max_new_tokens": CANVAS, **FIELDS} for length in (100, 83, 64, 40)
    ]
    alone = [bundle.generate(**each).tokens for each in asked]
    assert bundle.save_prompt_cache(tmp_path / "prompt.cache", tokens=ids) == 96
    files = [tmp_path / "prompt.cache"]
    with dlm_runtime.open(bundle_path, threads=1, prompt_caches=files) as opened:
        made = [opened.generate(**each) for each in asked]
    assert [each.tokens for each in made] == alone
    assert [each.cached_tokens for each in made] == [96, 80, 64, 32]
    with bundle.scheduler(max_running=1, max_tokens=16) as scheduler:
        made = [job.result() for job in [scheduler.submit(**each) for each in asked]]
    assert [each.tokens for each in made] == alone
    assert [each.cached_tokens for each in made] == [0, 80, 64, 32]


def test_commands_run_the_preset(bundle_path: Path) -> None:
    def invoke(*arguments: object) -> Any:
        done = CliRunner().invoke(main, [*map(str, arguments), "--json"])
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    made = invoke("run", bundle_path, "--tokens", "5,6,7", "--max-new-tokens", 16)
    assert made["passes"]["denoise"] == made["nfe"] - 1 - made["passes"]["store"]
    warm = ("--max-new-tokens", 8, "--temperature", 0.2, "--set", "steps_per_block=3")
    made = invoke("run", bundle_path, "--tokens", "5,6,7", *warm)
    assert made["passes"] == {"prefill": 1, "denoise": 3, "store": 0}
    invoke("bench", bundle_path, "--rounds", 3, "--prompt-tokens", 8, "--new-tokens", 8)
