"""Tests of the demos' training: the second demo is trained on canvases as they occur while
decoding, and an interrupted training run can be resumed.
"""

from __future__ import annotations

import json
import random
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

EXAMPLES = Path(__file__).parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES / "demo"))

import several  # noqa: E402
import train  # noqa: E402
import train_several  # noqa: E402
from checkpoint import load_checkpoint, save_checkpoint  # noqa: E402
from data import Side  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402
from train_several import BLOCK_LENGTH, Batch  # noqa: E402
from training import Training, orthogonal  # noqa: E402

from dlm_export.network.denoiser import Denoiser, Turn  # noqa: E402
from dlm_export.network.spec import AttentionSpec, MlpSpec, NetworkSpec, Rope  # noqa: E402


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(EXAMPLES / "demo-denoiser" / "tokenizer.json"))


@pytest.fixture
def first(tokenizer: Tokenizer) -> NetworkSpec:
    """A network like the first demo's, but narrower and with two layers."""
    network = train.describe(tokenizer)
    layer = replace(network.layers[0], attention=AttentionSpec(2, 2, 8, Rope(1e4)), mlp=MlpSpec(24))
    return replace(network, hidden_size=16, layers=(layer,) * 2)


def random_denoiser(network: NetworkSpec, seed: int = 0) -> Denoiser:
    denoiser, generator = Denoiser(network), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in denoiser.parameters():
            parameter.normal_(std=0.3, generator=generator).add_(parameter.ndim == 1)
    return denoiser


def batch_of(tokenizer: Tokenizer, calls: int = 4) -> Batch:
    request = several.make_request(random.Random(1), Side.TRAINING, False, calls)
    canvas, start = train_several.canvas_of(request, tokenizer)
    return Batch(torch.tensor([canvas]), torch.tensor([start]))


@torch.no_grad()
def test_a_noised_block_of_a_training_row_is_what_decoding_computes(
    first: NetworkSpec, tokenizer: Tokenizer
) -> None:
    denoiser, batch = random_denoiser(train_several.describe(first)), batch_of(tokenizer)
    torch.manual_seed(3)
    is_hidden = train_several.hide(batch, train.easy_tokens(first, tokenizer))
    trained = train_several.both_copies(denoiser, batch, is_hidden)
    blocks = range(batch.first, batch.canvases.shape[1], BLOCK_LENGTH)
    assert len(blocks) >= 4
    for begin in blocks:
        canvas = batch.canvases[:, : begin + BLOCK_LENGTH].clone()
        hidden = is_hidden[:, begin - batch.first : begin - batch.first + BLOCK_LENGTH]
        canvas[:, begin:].masked_fill_(hidden, first.mask_token_id)
        decoded = denoiser.hidden(canvas, torch.arange(canvas.shape[1])[None])[0][:, begin:]
        there = trained[:, begin - batch.first : begin - batch.first + BLOCK_LENGTH]
        # Training and decoding add over different numbers of keys, so they round differently. The
        # compared features have magnitudes of about 1.
        torch.testing.assert_close(there, decoded, rtol=1e-5, atol=1e-5)


def test_prompts_stay_as_they_are_and_every_block_is_noised_by_itself(
    first: NetworkSpec, tokenizer: Tokenizer
) -> None:
    one = batch_of(tokenizer, 6)
    batch = Batch(one.canvases.expand(400, -1), one.starts.expand(400))
    torch.manual_seed(4)
    is_hidden = train_several.hide(batch, train.easy_tokens(first, tokenizer))
    start = int(one.starts[0]) - batch.first
    assert not is_hidden[:, :start].any()
    whole = is_hidden.view(400, -1, BLOCK_LENGTH)[:, 1:].all(-1).float()
    assert ((whole.mean(0) > 0.3) & (whole.mean(0) < 0.55)).all()
    assert 0.1 < whole[:, 0][whole[:, 1] == 1].mean() < 0.7, "no block's noise follows another's"


@torch.no_grad()
def test_layers_put_between_start_as_the_identity(
    first: NetworkSpec, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_several, "NEW_LAYERS", (1,))
    origin = random_denoiser(first)
    grown = random_denoiser(train_several.describe(first), seed=1)
    canvases = batch_of(tokenizer).canvases
    train_several.initialise(grown, origin, canvases)
    x = torch.randn(1, 8, 16)
    turn = Turn(grown.rotary[0].cos, grown.rotary[0].sin, torch.arange(8)[None])
    assert torch.equal(grown.blocks[1](x, turn, None, None)[0], x)
    assert torch.equal(grown.blocks[2].mlp.up.weight, origin.blocks[1].mlp.up.weight)
    # The first layer gets the same input in both networks, so its queries must have the same length
    # on average.
    features = origin.blocks[0].attention_norm(
        origin.embed(canvases, torch.arange(canvases.shape[1]).expand_as(canvases))
    )
    length = origin.blocks[0].attention.q(features).square().mean().sqrt()
    torch.testing.assert_close(grown.blocks[0].attention.q_norm.weight, length.expand(8))


def test_a_run_resumes_where_it_was_saved(
    first: NetworkSpec, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    network, batch = train_several.describe(first), batch_of(tokenizer)
    is_easy = train.easy_tokens(first, tokenizer)

    def run(training: Training, steps: int, stopped_at: int | None = None) -> None:
        def losses() -> Iterator[Callable[[], torch.Tensor]]:
            while True:
                if training.step == stopped_at:
                    signal.raise_signal(signal.SIGTERM)
                yield lambda: train_several.loss_of(
                    training.denoiser, batch, train_several.hide(batch, is_easy)
                )

        training.run(losses(), steps, None, 1e9, lambda: training.save(tmp_path / f"{steps}.pt"))

    whole = Training(random_denoiser(network), 0.01)
    run(whole, 3)
    run(whole, 6)
    resumed = Training(random_denoiser(network, seed=9), 0.01)
    resumed.resume(tmp_path / "3.pt")
    assert resumed.step == 3
    run(resumed, 6, stopped_at=5)
    assert resumed.step == 5
    resumed.resume(tmp_path / "6.pt")
    run(resumed, 6)
    for name, parameter in resumed.denoiser.named_parameters():
        assert torch.equal(parameter, whole.denoiser.get_parameter(name)), name
        assert torch.equal(resumed.averaged[name], whole.averaged[name]), name


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (32, 32)])
def test_muons_steps_are_about_orthogonal(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonal(matrix))
    assert values.min() > 0.3
    assert values.max() < 1.4


def test_the_first_demo_is_saved_as_it_was_released(tmp_path: Path) -> None:
    released = EXAMPLES / "demo-denoiser"
    denoiser = load_checkpoint(released)
    save_checkpoint(
        tmp_path, denoiser.network, dict(denoiser.named_parameters()), train_several.GENERATION
    )
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / name).read_bytes() == (released / name).read_bytes()


def test_the_second_demo_is_saved_in_sdars_layout(first: NetworkSpec, tmp_path: Path) -> None:
    network = train_several.describe(first)
    denoiser = random_denoiser(network)
    save_checkpoint(tmp_path, network, dict(denoiser.named_parameters()), train_several.GENERATION)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["architectures"], config["model_type"]) == (["SDARForCausalLM"], "sdar")
    assert (config["block_size"], config["mask_token_id"]) == (BLOCK_LENGTH, first.mask_token_id)
    tensors = load_file(tmp_path / "model.safetensors")
    assert len(tensors) == 11 * len(network.layers) + 3
    assert tensors["model.layers.3.self_attn.q_norm.weight"].shape == (8,)
    read = load_checkpoint(tmp_path)
    assert read.network == network
    for name, parameter in read.named_parameters():
        assert torch.equal(parameter, denoiser.get_parameter(name).to(torch.bfloat16).float()), name
