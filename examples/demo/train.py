"""Trains the demo's tokenizer and denoiser from random weights.

The commands are generated during training.

Training follows LLaDA (arXiv:2502.09992). Some tokens of the response are hidden: they are replaced
by mask tokens. The denoiser must predict the hidden tokens from the other tokens. The response is
padded with end tokens (eos), which belong to the response. Training differs from LLaDA as follows:

- All positions that contribute to the loss contribute equally. LLaDA multiplies the loss of a
  canvas by 1/t, where t is the share of hidden tokens. With this factor, canvases with few hidden
  tokens would cause most of the noise in the gradient.
- In most canvases, one block is partly hidden, earlier blocks are not hidden, and later blocks are
  completely hidden. In block-wise decoding, all canvases are of this kind.
- In half of the canvases, JSON syntax and eos are hidden less often than values, because decoding
  commits JSON syntax and eos first.
- The initial weights contain a pattern of attention that copies words (see ``initialise``).
"""

from __future__ import annotations

import functools
import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import torch
import torch.nn.functional as F
from checkpoint import load_checkpoint, save_checkpoint
from data import training_examples
from tokenizer import EOS, MASK, SPACE, save_tokenizer, train_tokenizer
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from training import Training, draw_layers, out_option, rate_option

from dlm_export.network.denoiser import Attention, Denoiser
from dlm_export.network.spec import AttentionSpec, LayerSpec, MlpSpec, NetworkSpec, Rope

BLOCK_LENGTH = 32
GENERATION = {"max_new_tokens": 64}
"""The content of ``generation_config.json``."""
ROPE = Rope(theta=500000.0)


def describe(tokenizer: Tokenizer) -> NetworkSpec:
    """Return the shape of the demo network.

    With a vocabulary of 3072 tokens, the network has 3.8 million parameters.
    """
    eos = tokenizer.token_to_id(EOS)
    return NetworkSpec(
        family="llada",
        architecture="LLaDAModelLM",
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=192,
        layers=(LayerSpec(AttentionSpec(6, 6, 32, ROPE), MlpSpec(512), norm_eps=1e-5),) * 6,
        max_canvas_length=512,
        norm_eps=1e-5,
        tied_head=False,
        shift=0,
        mask_token_id=tokenizer.token_to_id(MASK),
        eos_token_ids=(eos,),
        pad_token_id=eos,
    )


CODE, SPACED, CONSTANT = 96, 160, 191
"""The parts of the initial embedding of a token. Features 0..95 are a code that identifies the text
of the token without a leading space. Features 160..190 say whether the token begins with a space.
Feature 191 is the same for all tokens. The first layer writes the codes of the neighbouring tokens
into the features between 95 and 160.
"""
STEADY = 6
"""The number of RoPE rotations that are fast enough to distinguish neighbouring positions. These
are the first rotations. The other rotations are so slow that they can be ignored.
"""
NEIGHBOURS = (
    (-1, 0, CODE, 14),
    (-2, 32, CODE + 14, 10),
    (1, 0, CODE + 32, 14),
    (2, 32, CODE + 46, 10),
)
"""The attention heads of layer 0 with chosen initial weights. Each head copies features of the
token at a fixed offset. A tuple is (offset, first feature to read, first feature to write, number
of features).
"""


def initialise(denoiser: Denoiser, tokenizer: Tokenizer) -> None:
    """Set initial weights with which the denoiser can already copy words from the prompt.

    The code of a token is a part of its embedding. At each position, layer 0 writes parts of the
    codes of the four neighbours: the tokens one and two positions to the left and to the right.
    Layer 1 attends to positions with the same left or right neighbours, and copies the code of the
    token at these positions. The output head starts as the transposed embedding. This pattern is
    the induction circuit of arXiv:2209.11895, in both directions. With random initial weights,
    training had not found such a circuit after 600 steps. Every other matrix that writes to the
    residual stream starts at zero. All other weights are random.
    """
    c = denoiser.network
    with torch.no_grad():
        draw_layers(denoiser)
        embedding = denoiser.embed.weight.normal_()
        embedding[:, CODE:] = 0.0
        space = torch.randn(CONSTANT - SPACED)
        for token, index in tokenizer.get_vocab().items():
            bare = tokenizer.token_to_id(token.removeprefix(SPACE))
            if bare is not None and bare != index:
                embedding[index, :CODE] = embedding[bare, :CODE]
                embedding[index, SPACED:CONSTANT] = space
        # The code of the mask token is zero, so a hidden position that attends to itself copies
        # nothing.
        embedding[c.mask_token_id, :CODE] = 0.0
        embedding[c.mask_token_id, SPACED:CONSTANT] = torch.randn(CONSTANT - SPACED)
        # The embeddings of all tokens get the same length. Feature 191 therefore has the same value
        # for all tokens, also after the norm. Attention heads that only read this feature depend on
        # positions (through RoPE) and not on tokens.
        embedding.mul_(CODE**0.5 / embedding.norm(dim=1, keepdim=True))
        assert denoiser.head is not None
        denoiser.head.weight.copy_(embedding.T * 0.1)
        denoiser.head.weight[:, c.mask_token_id] = 0.0
        embedding[:, CONSTANT] = 4.0

        _plant_neighbours(denoiser.blocks[0].attention, ROPE.theta)
        _plant_copying(denoiser.blocks[1].attention)


def _plant_neighbours(attention: Attention, rope_theta: float) -> None:
    """Set the weights of attention heads that each attend to one fixed offset and write the code of
    the token at this offset. These heads only use the fast rotations of RoPE.
    """
    size = attention.spec.head_size
    half, quick = size // 2, torch.arange(STEADY)
    angle = rope_theta ** (-quick / half)
    for head, (offset, source, target, width) in enumerate(NEIGHBOURS):
        at = head * size
        for projection in (attention.q, attention.k, attention.v):
            projection.weight[:, at : at + size] = 0.0
        attention.q.weight[CONSTANT, at + quick] = 1.6
        attention.k.weight[CONSTANT, at + quick] = 1.6 * torch.cos(offset * angle)
        attention.k.weight[CONSTANT, at + half + quick] = -1.6 * torch.sin(offset * angle)
        name = torch.arange(width)
        attention.v.weight[source + name, at + name] = 1.0
        attention.out.weight[at + name, target + name] = 1.0


def _plant_copying(attention: Attention) -> None:
    """Set the weights of six attention heads that copy the code of a token.

    Three heads attend to positions with the same two neighbours on the left, and three to positions
    with the same two neighbours on the right. Each head copies a third of the code.

    The features with slow rotations compare the neighbours. Slow rotations hardly turn within a
    canvas, so the distance between the two positions does not matter.
    """
    size = attention.spec.head_size
    half, third = size // 2, torch.arange(size)
    steady = torch.cat((torch.arange(STEADY, half), torch.arange(half + STEADY, size)))
    for head in range(6):
        at, side, part = head * size, head // 3, head % 3
        for projection in (attention.q, attention.k, attention.v):
            projection.weight[:, at : at + size] = 0.0
        # The codes of both neighbours have 24 features, but there are only 20 slow rotations. So
        # the last four features of the far neighbour are left out.
        features = CODE + side * size + torch.arange(len(steady))
        attention.q.weight[features, at + steady] = 1.6
        attention.k.weight[features, at + steady] = 1.6
        attention.v.weight[part * size + third, at + third] = 1.0
        attention.out.weight[at + third, part * size + third] = 2.0


def batches(tokenizer: Tokenizer, seed: int, rows: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield an endless sequence of batches: prompts ``[B, P]`` of the same length, and responses
    ``[B, R]`` padded with eos.

    B is the number of commands, P the number of prompt tokens, and R the number of response tokens.
    R is 32 or 64, as in decoding. In one of ten batches, R is any number up to 96. There is no
    padding on the left.
    """
    eos = tokenizer.token_to_id(EOS)
    rng = random.Random(seed)
    waiting: defaultdict[tuple[int, bool], list[tuple[list[int], list[int]]]] = defaultdict(list)
    for example in training_examples(seed):
        prompt = tokenizer.encode(example.prompt).ids
        response = [*tokenizer.encode(example.completion, add_special_tokens=False).ids, eos]
        group = waiting[len(prompt), len(response) <= BLOCK_LENGTH]
        group.append((prompt, response))
        if len(group) == rows:
            longest = max(len(response) for _, response in group)
            shortest = BLOCK_LENGTH if longest <= BLOCK_LENGTH else 2 * BLOCK_LENGTH
            draw = rng.random()
            length = (
                shortest
                if draw < 0.7
                else 2 * BLOCK_LENGTH
                if draw < 0.92
                else rng.randint(longest, 96)
            )
            length = max(length, longest)
            yield (
                torch.tensor([prompt for prompt, _ in group]),
                torch.tensor(
                    [response + [eos] * (length - len(response)) for _, response in group]
                ),
            )
            group.clear()


def hide(
    response: Tensor, is_easy: Tensor, eos: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Choose the positions of responses ``[B, R]`` to hide.

    Returns two bool arrays ``[B, R]``: the hidden positions, and the hidden positions that
    contribute to the loss. The share t of hidden tokens is sampled for each response from a uniform
    distribution between 0 and 1.25, and limited to 1. One in five responses is therefore completely
    hidden, as at the start of decoding. Within a batch, the shares are spread evenly. ``is_easy``
    marks JSON syntax and eos.
    """
    rows, length = response.shape

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator)

    t = (
        (torch.randperm(rows, generator=generator) + uniform(rows))
        .div(rows)
        .mul(1.25)
        .clamp(max=1.0)[:, None]
    )
    ease = torch.where((uniform(rows, 1) < 0.5) & (t < 1), uniform(rows, 1), 1.0)
    is_hidden = uniform(rows, length) < torch.where(is_easy, t * ease, t)
    block = torch.arange(length) // BLOCK_LENGTH
    last = block[(response == eos).int().argmax(1)]
    current = (uniform(rows) * (last + 1)).long()[:, None]
    by_block = uniform(rows, 1) < 0.7
    is_scored = is_hidden & (~by_block | (block == current))
    is_hidden = torch.where(
        by_block, (is_hidden & (block == current)) | (block > current), is_hidden
    )
    return is_hidden, is_scored


def easy_tokens(network: NetworkSpec, tokenizer: Tokenizer) -> Tensor:
    """Return a bool array ``[V]`` that is True for eos and for the tokens that contain a quote.

    A token with a quote is JSON syntax.
    """
    eos = network.eos_token_ids[0]
    return torch.tensor(
        [index == eos or '"' in tokenizer.id_to_token(index) for index in range(network.vocab_size)]
    )


def masked_loss(
    denoiser: Denoiser, is_easy: Tensor, generator: torch.Generator, *, is_compiled: bool
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the function that computes the training loss of prompts ``[B, P]`` and responses
    ``[B, R]``.

    The function hides a part of the responses (see ``hide``). It returns the mean cross-entropy in
    nats of the hidden tokens that contribute to the loss.
    """
    network = denoiser.network
    hidden = torch.compile(denoiser.hidden, dynamic=True) if is_compiled else denoiser.hidden

    def loss_of(prompt: Tensor, response: Tensor) -> Tensor:
        is_hidden, is_scored = hide(
            response, is_easy[response], network.eos_token_ids[0], generator
        )
        canvas = torch.cat((prompt, response.masked_fill(is_hidden, network.mask_token_id)), 1)
        positions = torch.arange(canvas.shape[1]).expand_as(canvas)
        # On sequences as short as the demo's, the backward pass of the fused attention kernel is
        # four times slower than plain matrix products.
        with sdpa_kernel(SDPBackend.MATH):
            features = hidden(canvas, positions)[0][:, prompt.shape[1] :]
        return F.cross_entropy(denoiser.project(features[is_scored]).float(), response[is_scored])

    return loss_of


@click.command()
@out_option
@click.option(
    "--init",
    type=click.Path(path_type=Path),
    help="Continue from this checkpoint and its tokenizer.",
)
@click.option(
    "--steps", type=click.IntRange(1), default=8000, show_default=True, help="Optimiser steps."
)
@click.option(
    "--minutes",
    type=float,
    default=None,
    help="Processor time after which training ends at the latest.  [default: none]",
)
@rate_option(0.005)
@click.option(
    "--rows", type=click.IntRange(1), default=96, show_default=True, help="Commands a step."
)
@click.option(
    "--seed",
    type=int,
    default=0,
    show_default=True,
    help="Seed of data, hidden positions and weights.",
)
@click.option(
    "--vocab-size",
    type=click.IntRange(600),
    default=3072,
    show_default=True,
    help="Number of tokens in the vocabulary.",
)
@click.option(
    "--save-minutes",
    type=float,
    default=5.0,
    show_default=True,
    help="Minutes between checkpoints.",
)
@click.option(
    "--threads", type=click.IntRange(1), default=2, show_default=True, help="CPU threads."
)
def main(
    out: Path,
    init: Path | None,
    steps: int,
    minutes: float | None,
    rate: float,
    rows: int,
    seed: int,
    vocab_size: int,
    save_minutes: float,
    threads: int,
) -> None:
    """Train the tokenizer and the denoiser, and save both.

    Example: python train.py --out ../demo-denoiser
    """
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    out.mkdir(parents=True, exist_ok=True)
    # The text for the tokenizer and the commands for training come from different seeds of the same
    # generator.
    sample = list(itertools.islice(training_examples(seed + 1), 20000))
    if init is None:
        tokenizer = train_tokenizer(
            [t for e in sample for t in (e.prompt, e.completion)], vocab_size, vocab_size * 5 // 16
        )
    else:
        tokenizer = Tokenizer.from_file(str(init / "tokenizer.json"))
    save_tokenizer(tokenizer, out)
    network = describe(tokenizer)
    is_easy = easy_tokens(network, tokenizer)

    if init is None:
        denoiser = Denoiser(network)
        initialise(denoiser, tokenizer)
    else:
        denoiser = load_checkpoint(init).requires_grad_(True)
    training = Training(denoiser, rate)
    generator = torch.Generator().manual_seed(seed)
    loss_of = masked_loss(denoiser, is_easy, generator, is_compiled=True)
    losses = (functools.partial(loss_of, *batch) for batch in batches(tokenizer, seed, rows))
    training.run(
        losses,
        steps,
        minutes,
        save_minutes,
        lambda: save_checkpoint(out, network, training.averaged, GENERATION),
    )
    for path in sorted(out.iterdir()):
        click.echo(f"{path} {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
