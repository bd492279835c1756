"""Trains the third demo, which completes sudoku grids, from random weights.

The checkpoint has the layout of LLaDA. The loss is the same as in the first demo (``masked_loss``).
Training uses random puzzles with 0 to 8 clues that are not held out.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import click
import torch
from checkpoint import save_checkpoint
from sudoku import puzzles
from tokenizer import EOS, save_tokenizer, train_tokenizer
from tokenizers import Tokenizer
from torch import Tensor
from train import describe, easy_tokens, masked_loss
from training import Training, draw_layers, out_option, rate_option

from dlm_export.network.denoiser import Denoiser
from dlm_export.network.spec import AttentionSpec, LayerSpec, MlpSpec, NetworkSpec, Rope

VOCAB_SIZE = 260  # 256 bytes and four special tokens
NEW_TOKENS = 20  # tokens of an answer: 16 digits, 3 line ends, and eos
CLUES = range(9)
GENERATION = {"max_new_tokens": NEW_TOKENS}
"""The content of ``generation_config.json``."""


def shape(tokenizer: Tokenizer) -> NetworkSpec:
    """Return the shape of the third demo, which has 0.25 million parameters."""
    layer = LayerSpec(AttentionSpec(4, 4, 16, Rope(theta=100.0)), MlpSpec(192), norm_eps=1e-5)
    return replace(describe(tokenizer), hidden_size=64, layers=(layer,) * 4, max_canvas_length=64)


def initialise(denoiser: Denoiser) -> None:
    """Set random weights. The weights of the head start near zero."""
    draw_layers(denoiser)
    assert denoiser.head is not None
    with torch.no_grad():
        denoiser.embed.weight.normal_()
        denoiser.head.weight.normal_(std=0.02)


def batches(tokenizer: Tokenizer, seed: int, rows: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield an endless sequence of batches of ``rows`` puzzles: prompts ``[rows, P]`` of P tokens,
    and responses ``[rows, NEW_TOKENS]`` that end with eos.
    """
    eos = tokenizer.token_to_id(EOS)
    drawn = puzzles(seed, CLUES, held_out=False)
    while True:
        prompts, completions = zip(*itertools.islice(drawn, rows), strict=True)
        encoded = tokenizer.encode_batch(prompts)
        answers = tokenizer.encode_batch(completions, add_special_tokens=False)
        yield (
            torch.tensor([each.ids for each in encoded]),
            torch.tensor([[*each.ids, eos] for each in answers]),
        )


@click.command()
@out_option
@click.option(
    "--steps", type=click.IntRange(1), default=1000, show_default=True, help="Optimiser steps."
)
@rate_option(0.01)
@click.option("--rows", type=click.IntRange(1), default=64, show_default=True, help="Grids a step.")
@click.option(
    "--seed",
    type=int,
    default=0,
    show_default=True,
    help="Seed of data, hidden positions and weights.",
)
def main(out: Path, steps: int, rate: float, rows: int, seed: int) -> None:
    """Train the denoiser on one thread, and save it with its tokenizer.

    Example: python train_sudoku.py --out ../demo-sudoku
    """
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer([], VOCAB_SIZE, 0)
    save_tokenizer(tokenizer, out)
    network = shape(tokenizer)
    denoiser = Denoiser(network)
    initialise(denoiser)
    training = Training(denoiser, rate)
    generator = torch.Generator().manual_seed(seed)
    is_easy = easy_tokens(network, tokenizer)
    loss_of = masked_loss(denoiser, is_easy, generator, is_compiled=False)
    training.run(
        (functools.partial(loss_of, *batch) for batch in batches(tokenizer, seed, rows)),
        steps,
        minutes=None,
        save_minutes=1.0,
        on_save=lambda: save_checkpoint(out, network, training.averaged, GENERATION),
    )
    click.echo(f"{training.minutes:.1f} minutes of processor time")
    for path in sorted(out.iterdir()):
        click.echo(f"{path} {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
