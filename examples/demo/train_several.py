"""Trains the second demo, a block diffusion network in the layout of SDAR, on commands that ask for
several calls.

Training follows block diffusion (BD3-LM, arXiv:2503.09573). A training example has two parts: the
complete canvas, and a copy of the answer's blocks. In the copy, some tokens are hidden, that is
replaced by mask tokens. A block of the copy sees itself and the complete blocks before it, so one
pass trains every block. The training differs from the first demo's training as follows:

- The initial weights are the weights of the first demo, which can already write most functions and
  copy words. Norms of queries and keys are added. Their initial weights keep the average lengths
  that queries and keys have in the first demo. Two layers are added in the middle. With their
  initial weights, the two layers do not change their input.
- In every block of the copy, tokens are hidden independently of the other blocks. The hidden
  positions are similar to the masked positions in decoding (see ``hide``).
- Training starts with commands that ask for few calls.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click
import torch
import torch.nn.functional as F
from checkpoint import load_checkpoint, save_checkpoint
from several import Request, held_out_requests, training_requests
from tokenizer import save_tokenizer
from tokenizers import Tokenizer
from torch import Tensor
from train import easy_tokens
from training import Training, out_option, rate_option

from dlm_export.network.denoiser import Denoiser, Turn
from dlm_export.network.spec import NetworkSpec

BLOCK_LENGTH = 16
GENERATION = {"max_new_tokens": 192, "json_layout": "lines", "call_format": "lines"}
"""The content of ``generation_config.json``."""
NEW_LAYERS = (3, 6)
"""The positions of the new layers, counted in the second network."""


def describe(first: NetworkSpec) -> NetworkSpec:
    """Return the shape of the second demo.

    Unlike the first demo, the second demo has norms of queries and keys, block-causal attention,
    and two more layers.
    """
    layer = first.layers[0]
    attention = replace(
        layer.attention, qk_norm=True, visibility="block", block_length=BLOCK_LENGTH
    )
    layers = (replace(layer, attention=attention),) * (len(first.layers) + len(NEW_LAYERS))
    return replace(first, family="sdar", architecture="SDARForCausalLM", layers=layers)


@torch.no_grad()
def initialise(denoiser: Denoiser, first: Denoiser, canvases: Tensor) -> None:
    """Set the weights from the weights of the first demo.

    The lengths of the query and key vectors of the first demo are measured on ``canvases`` ``[B,
    L]``: B canvases of L tokens.
    """
    old = iter(range(len(first.blocks)))
    origin = {new: None if new in NEW_LAYERS else next(old) for new in range(len(denoiser.blocks))}
    given = dict(first.named_parameters())
    for name, parameter in denoiser.named_parameters():
        part = name.split(".")
        if part[0] == "blocks":
            source = origin[int(part[1])]
            name = ".".join(("blocks", str(source), *part[2:]))
        if name in given:
            parameter.copy_(given[name])
        elif parameter.ndim == 1:
            parameter.fill_(1.0)
        elif name.endswith(("attention.out.weight", "mlp.down.weight")):
            parameter.zero_()
        else:
            parameter.normal_(std=parameter.shape[0] ** -0.5)
    # A norm gives all query vectors the same length. The weight of the norm is set so that this
    # length is the average length of query vectors in the first demo. All heads of a layer have the
    # same norm weight.
    hooks = []
    for new, source in origin.items():
        if source is None:
            continue
        ours, theirs = denoiser.blocks[new].attention, first.blocks[source].attention
        for norm, linear in ((ours.q_norm, theirs.q), (ours.k_norm, theirs.k)):

            def note(
                module: object, inputs: object, output: Tensor, norm: torch.nn.Module = norm
            ) -> None:
                norm.weight.fill_(output.square().mean().sqrt().item())

            hooks.append(linear.register_forward_hook(note))
    first.hidden(canvases, torch.arange(canvases.shape[1]).expand_as(canvases))
    for hook in hooks:
        hook.remove()


@dataclass(frozen=True)
class Batch:
    """B canvases ``[B, L]`` of L tokens.

    Each canvas consists of whole blocks, and contains a prompt, an answer, and eos up to the end.

    ``starts`` ``[B]`` has the number of prompt tokens of each canvas.

    All prompts of a batch end in the same block.
    """

    canvases: Tensor
    starts: Tensor

    @property
    def first(self) -> int:
        """The first position of the block in which the prompts end."""
        return int(self.starts[0]) // BLOCK_LENGTH * BLOCK_LENGTH


def canvas_of(request: Request, tokenizer: Tokenizer) -> tuple[list[int], int]:
    """Return the canvas of a request, padded with eos to whole blocks, and the number of its prompt
    tokens.
    """
    prompt = tokenizer.encode(request.prompt).ids
    eos = tokenizer.token_to_id("<|eos|>")
    canvas = [*prompt, *tokenizer.encode(request.completion, add_special_tokens=False).ids, eos]
    return canvas + [eos] * (-len(canvas) % BLOCK_LENGTH), len(prompt)


def batches(requests: Iterator[Request], tokenizer: Tokenizer, tokens: int) -> Iterator[Batch]:
    """Yield an endless sequence of batches.

    A batch has about ``tokens`` tokens, including the tokens of the copies.
    """
    waiting: defaultdict[tuple[int, int], list[tuple[list[int], int]]] = defaultdict(list)
    for request in requests:
        canvas, start = canvas_of(request, tokenizer)
        first = start // BLOCK_LENGTH * BLOCK_LENGTH
        group = waiting[len(canvas), first]
        group.append((canvas, start))
        if len(group) * (2 * len(canvas) - BLOCK_LENGTH - first) >= tokens:
            yield Batch(
                torch.tensor([canvas for canvas, _ in group]),
                torch.tensor([start for _, start in group]),
            )
            group.clear()


def hide(batch: Batch, is_easy: Tensor) -> Tensor:
    """Choose the positions to hide in the copies of the answers' blocks.

    Returns a bool array ``[B, L - first]``, where ``first`` is the position at which the copies
    begin.

    In each block, tokens are hidden in one of three ways. The ways have the same probability:

    - All positions, as at the start of decoding.
    - Scattered positions. In half of these blocks, JSON syntax and eos are hidden less often than
      values, because decoding commits them first.
    - Positions after a random position, as when decoding has committed the first tokens of the
      block. Either all of these positions are hidden, or some of them.

    ``is_easy`` ``[V]`` marks JSON syntax and eos.
    """
    answers = batch.canvases[:, batch.first :]
    rows, length = answers.shape
    shape = (rows, length // BLOCK_LENGTH)
    kind = torch.randint(3, shape)
    t = torch.where(
        kind == 0, 1.0, torch.where(kind == 1, torch.rand(shape), torch.rand(shape) + 0.5)
    )
    ease = torch.where((kind == 1) & (torch.rand(shape) < 0.5), torch.rand(shape), 1.0)
    place = torch.where(kind == 2, torch.randint(1, BLOCK_LENGTH, shape), 0)
    t, ease, place = (x.repeat_interleave(BLOCK_LENGTH, 1) for x in (t, ease, place))
    positions = torch.arange(length)
    is_hidden = torch.rand(rows, length) < torch.where(is_easy[answers], t * ease, t)
    return (
        is_hidden
        & (positions % BLOCK_LENGTH >= place)
        & (positions + batch.first >= batch.starts[:, None])
    )


def visible(positions: Tensor, is_noised: Tensor) -> Tensor:
    """Return the attention mask of block diffusion training: a bool array ``[T, T]`` that says
    which of the T tokens of a training example see which other tokens.
    """
    block = positions // BLOCK_LENGTH
    query, key = block[:, None], block[None, :]
    sees_clean = ~is_noised[None, :] & torch.where(is_noised[:, None], key < query, key <= query)
    return sees_clean | (is_noised[None, :] & is_noised[:, None] & (key == query))


def both_copies(denoiser: Denoiser, batch: Batch, is_hidden: Tensor) -> Tensor:
    """Run the denoiser on both parts of the examples.

    Return the outputs of the last layer for the copies, ``[B, L - first, hidden]``.
    """
    clean, noised = batch.canvases[:, :-BLOCK_LENGTH], batch.canvases[:, batch.first :]
    noised = noised.masked_fill(is_hidden, denoiser.network.mask_token_id)
    length, before = batch.canvases.shape[1], clean.shape[1]
    positions = torch.cat((torch.arange(before), torch.arange(batch.first, length)))
    is_visible = visible(positions, torch.arange(len(positions)) >= before)
    return _features(denoiser, torch.cat((clean, noised), 1), positions, is_visible)[:, before:]


def _features(denoiser: Denoiser, ids: Tensor, positions: Tensor, is_visible: Tensor) -> Tensor:
    x = denoiser.embed(ids, positions.expand_as(ids))
    table = denoiser.rotary[0]
    turn = Turn(table.cos, table.sin, positions.expand_as(ids))
    for block in denoiser.blocks:
        x, _ = block(x, turn, is_visible, None)
    return denoiser.final_norm(x)


def loss_of(denoiser: Denoiser, batch: Batch, is_hidden: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats of the hidden tokens."""
    logits = denoiser.project(both_copies(denoiser, batch, is_hidden)[is_hidden])
    return F.cross_entropy(logits.float(), batch.canvases[:, batch.first :][is_hidden])


@torch.no_grad()
def one_pass(
    denoiser: Denoiser, requests: Sequence[Request], tokenizer: Tokenizer
) -> tuple[float, float]:
    """Measure how good the answers are if every block is decoded in a single pass, which is the
    fastest possible decoding. Returns the share of right blocks and the share of right lists.
    """
    blocks, lists = [], []
    for request in requests:
        canvas, start = canvas_of(request, tokenizer)
        batch = Batch(torch.tensor([canvas]), torch.tensor([start]))
        answer = batch.canvases[:, batch.first :]
        is_hidden = (torch.arange(batch.first, len(canvas)) >= start)[None]
        is_right = (
            denoiser.project(both_copies(denoiser, batch, is_hidden)).argmax(-1) == answer
        ) | ~is_hidden
        found = is_right.view(-1, BLOCK_LENGTH).all(1)
        blocks += found.tolist()
        lists.append(bool(found.all()))
    return sum(blocks) / len(blocks), sum(lists) / len(lists)


EARLY, LATE = (4.0, 4.0, 2.0, 1.0, 0.5, 0.2), (1.0, 2.0, 3.0, 3.0, 3.0, 3.0)
EASY_STEPS = 600
"""How often commands with one call, two calls, and so on are chosen: at the start, and after this
number of steps.
"""


def lessons(training: Training, seed: int, easy_steps: int) -> Iterator[Request]:
    """Yield training commands.

    Over the first ``easy_steps`` steps of ``training``, commands with many calls become more
    frequent.
    """

    def weights() -> list[float]:
        share = min(1.0, training.step / easy_steps) if easy_steps else 1.0
        return [early + share * (late - early) for early, late in zip(EARLY, LATE, strict=True)]

    return training_requests(seed, weights)


@click.command()
@click.option(
    "--first", type=click.Path(path_type=Path), required=True, help="Folder of the first demo."
)
@click.option(
    "--init",
    type=click.Path(path_type=Path),
    help="Continue from these weights of the second demo.",
)
@out_option
@click.option(
    "--state",
    type=click.Path(path_type=Path),
    required=True,
    help="File for the state of training, to resume it later.",
)
@click.option(
    "--minutes",
    type=float,
    default=150.0,
    show_default=True,
    help="Total minutes of processor time.",
)
@rate_option(0.004)
@click.option(
    "--tokens",
    type=click.IntRange(1),
    default=2560,
    show_default=True,
    help="Tokens per step, including the copies with hidden tokens.",
)
@click.option(
    "--seed",
    type=int,
    default=0,
    show_default=True,
    help="Seed of data, hidden positions and new weights.",
)
@click.option(
    "--save-minutes", type=float, default=3.0, show_default=True, help="Minutes between saves."
)
@click.option(
    "--threads", type=click.IntRange(1), default=1, show_default=True, help="CPU threads."
)
def main(
    first: Path,
    init: Path | None,
    out: Path,
    state: Path,
    minutes: float,
    rate: float,
    tokens: int,
    seed: int,
    save_minutes: float,
    threads: int,
) -> None:
    """Train the second demo, starting with the weights of the first demo.

    You can stop the training at any time, and resume it with the same command.

    Example: python train_several.py --first ../demo-denoiser --out ../demo-several --state
    several.pt
    """
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(first / "tokenizer.json"))
    save_tokenizer(tokenizer, out)
    origin = load_checkpoint(first)
    network = describe(origin.network)
    denoiser = Denoiser(network) if init is None else load_checkpoint(init).requires_grad_(True)
    training = Training(denoiser, rate)
    if state.exists():
        training.resume(state)
    elif init is None:
        (sample,) = itertools.islice(batches(training_requests(seed + 1), tokenizer, 2000), 1)
        initialise(denoiser, origin, sample.canvases)
        training = Training(denoiser, rate)
    is_easy = easy_tokens(network, tokenizer)
    easy_steps = EASY_STEPS if init is None else 0
    judged = Denoiser(network)
    held_out = [request for _, request in held_out_requests(seed + 2, 48)]

    def losses() -> Iterator[Callable[[], Tensor]]:
        # A resumed run generates commands that the earlier part of the run did not generate.
        for batch in batches(
            lessons(training, seed + 1000 * training.step, easy_steps), tokenizer, tokens
        ):
            yield lambda batch=batch: loss_of(denoiser, batch, hide(batch, is_easy))

    def save() -> None:
        training.save(state)
        save_checkpoint(out, network, training.averaged, GENERATION)
        judged.load_state_dict(training.averaged, strict=False)
        blocks, lists = one_pass(judged, held_out, tokenizer)
        click.echo(
            f"minute {training.minutes:.1f} one pass a block: blocks {blocks:.1%}, lists {lists:.1%}",
            err=True,
        )

    training.run(losses(), 10**9, minutes, save_minutes, save)


if __name__ == "__main__":
    main()
