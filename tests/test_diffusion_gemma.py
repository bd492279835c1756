"""DiffusionGemma: parity with transformers, the graph in ONNX Runtime, and damaged checkpoints."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import (
    diffusion_gemma_config,
    diffusion_gemma_shapes,
    write_checkpoint,
    write_headers,
)
from click.testing import CliRunner
from safetensors.torch import load_file

from dlm_export import families
from dlm_export.build import build
from dlm_export.checkpoints.folder import Checkpoint
from dlm_export.cli import main
from dlm_export.families.base import Overrides
from dlm_export.network.denoiser import Denoiser
from dlm_export.planning import roofline

transformers = pytest.importorskip("transformers")


def denoiser_of(folder: Path, config: dict[str, Any], seed: int = 0) -> Denoiser:
    """Write a random checkpoint and read it."""
    checkpoint = Checkpoint(write_checkpoint(folder, config, seed=seed))
    network = families.read_network(checkpoint, Overrides())
    return families.load(families.open_weights(checkpoint, network), network)


def released(folder: Path, config: dict[str, Any]) -> torch.nn.Module:
    """The model of transformers with the same weights. It also has a vision tower, which is not
    used.
    """
    text = transformers.DiffusionGemmaTextConfig(**config["text_config"])
    vision = transformers.Gemma4VisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=16,
    )
    model = transformers.DiffusionGemmaForBlockDiffusion(
        transformers.DiffusionGemmaConfig(
            text_config=text,
            vision_config=vision,
            canvas_length=config["canvas_length"],
            attn_implementation="eager",
        )
    )
    missing, unexpected = model.load_state_dict(
        load_file(folder / "model.safetensors"), strict=False
    )
    assert unexpected == []
    model.tie_weights()
    needed = ("layer_scalar", "self_conditioning")
    assert not [name for name in missing if any(part in name for part in needed)]
    return model.eval()


def random_config(seed: int) -> dict[str, Any]:
    """A random config. Some windows are shorter than the prompts of the tests, and some longer."""
    draw = random.Random(seed)
    layers = draw.choice((2, 3, 4))
    kinds = [draw.choice(("sliding_attention", "full_attention")) for _ in range(layers - 1)]
    kinds.append("full_attention")
    heads, size = draw.choice((2, 4)), draw.choice((16, 32))
    own = {"head_dim": size, "num_key_value_heads": draw.choice((1, 2))}
    rope = diffusion_gemma_config()["text_config"]["rope_parameters"]
    rope["full_attention"]["partial_rotary_factor"] = draw.choice((0.25, 0.5, 1.0))
    return diffusion_gemma_config(
        layer_types=kinds,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=draw.choice((1, 2)),
        per_layer_config={str(i): own for i, kind in enumerate(kinds) if kind == "full_attention"},
        rope_parameters=rope,
        sliding_window=draw.choice((2, 5, 8, 64)),
        top_k_experts=draw.choice((1, 3)),
        canvas_length=draw.choice((4, 8)),
    )


@pytest.mark.parametrize("seed", range(6))
def test_logits_of_the_encoder_and_the_decoder_equal_those_of_transformers(
    tmp_path: Path, seed: int
) -> None:
    """The test makes an encoder pass in two parts, then a canvas pass, and then a canvas pass with
    self-conditioning.
    """
    config = random_config(seed)
    ours, theirs = denoiser_of(tmp_path, config, seed), released(tmp_path, config)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 160, (2, 30), generator=generator)
    canvas = torch.randint(0, 160, (2, config["canvas_length"]), generator=generator)
    longest, end = ours.network.max_canvas_length, 30 + canvas.shape[1]
    positions = torch.arange(end).expand(2, -1)
    cache = transformers.DynamicCache(config=theirs.config.text_config)
    with torch.no_grad():
        first = theirs(input_ids=ids, decoder_input_ids=canvas, past_key_values=cache).logits
        second = theirs(
            decoder_input_ids=canvas.flip(1),
            past_key_values=cache,
            self_conditioning_logits=first / 0.7,
        ).logits
        _, past = ours.hidden(ids[:, :17], positions[:, :17])
        _, more = ours.hidden(ids[:, 17:], positions[:, 17:30], past)
        past = [
            (torch.cat((a, c), 2), torch.cat((b, d), 2))
            for (a, b), (c, d) in zip(past, more, strict=True)
        ]
        places = positions[:, 30:] + longest
        drafted = ours.project(ours.hidden(canvas, places, past)[0])
        soft = ours.soft_embedding(drafted, torch.full(canvas.shape, 0.7))
        features, _ = ours.hidden(canvas.flip(1), places, past, conditioning=soft)
        # The layers with a window need only the cached rows in the window.
        near = [
            (keys, values) if window is None else (keys[:, :, -window:], values[:, :, -window:])
            for (keys, values), window in zip(past, ours.network.cache_windows(), strict=True)
        ]
        same = ours.project(ours.hidden(canvas, places, near)[0])
    assert (same - drafted).abs().max() <= 1e-5 * (drafted.max() - drafted.min())
    for own, other in ((drafted, first), (ours.project(features), second)):
        assert (own - other).abs().max() <= 2e-4 * (other.max() - other.min())


def test_a_bundle_computes_the_same_as_torch(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", diffusion_gemma_config())
    report = build(checkpoint, tmp_path / "bundle")
    assert report.parity is not None
    assert report.parity.misses == []
    manifest = json.loads((tmp_path / "bundle" / "manifest.json").read_text())
    loop = manifest["loop"]
    assert (loop["noise"], loop["mask_token_id"], loop["conditioning_size"]) == ("uniform", 160, 64)
    shapes = [(layer["kv_heads"], layer["head_size"]) for layer in loop["graph"]["ports"]["layers"]]
    assert shapes == [(2, 16), (2, 16), (1, 32)]
    assert [layer.get("window") for layer in loop["graph"]["ports"]["layers"]] == [7, 7, None]
    assert {"segments", "window_segments"} <= loop["graph"]["ports"].keys()


def test_layers_with_a_window_limit_the_planned_memory(tmp_path: Path) -> None:
    network = denoiser_of(tmp_path, diffusion_gemma_config()).network
    assert network.cache_windows() == (7, 7, None)
    window_row, row = 2 * 2 * 2 * 16 * 4, 2 * 32 * 4
    assert network.cache_bytes(4) == window_row + row
    assert network.canvas_bytes(10, 4) == 10 * (window_row + row)
    assert network.canvas_bytes(1000, 4) == (7 + 512) * window_row + 1000 * row
    near, far = (roofline.Costs(network, {}).work(8, cached, 8) for cached in (7, 107))
    assert near.cache_bytes == 15 * (window_row + row)
    assert far.cache_bytes - near.cache_bytes == 100 * row
    # The last layer has 4 query heads of 32 features. Attention computes two products.
    assert far.macs["attention.full"] - near.macs["attention.full"] == 2 * 8 * 4 * 32 * 100
    said = _invoke("inspect", tmp_path)
    assert "2 of 3 layers have a window, and store at most 519 tokens" in said


def test_a_release_is_inspected_and_planned_from_its_headers(tmp_path: Path) -> None:
    """The weights are a hole in the file, so only the header can be read."""
    layers, every = 30, 6
    kinds = [
        "full_attention" if i % every == 0 else "sliding_attention" for i in range(1, layers + 1)
    ]
    full = {"head_dim": 512, "num_key_value_heads": 2}
    config = diffusion_gemma_config(
        hidden_size=2816,
        intermediate_size=2112,
        moe_intermediate_size=704,
        num_hidden_layers=layers,
        layer_types=kinds,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=256,
        per_layer_config={str(i): full for i in range(every - 1, layers, every)},
        num_experts=128,
        top_k_experts=8,
        sliding_window=1024,
        vocab_size=262144,
        canvas_length=256,
        max_position_embeddings=8192,
    )
    write_headers(tmp_path, config)
    told = json.loads(_invoke("inspect", tmp_path, "--json"))
    shapes = diffusion_gemma_shapes(config).values()
    assert told["parameters"] == sum(math.prod(shape) for shape in shapes)
    assert told["network"]["layers"][5]["attention"]["head_size"] == 512
    done = CliRunner().invoke(main, ["plan", str(tmp_path), "--targets", "h100", "--json"])
    assert done.exit_code == 0, done.output
    assert {row["target"] for row in json.loads(done.output)["predictions"]} == {"h100"}


def _invoke(*arguments: object) -> str:
    done = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output
    return done.stdout
