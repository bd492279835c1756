"""Train a small denoiser to find needles in prompts of 8,192 tokens, and check its bundles.

    python benchmarks/needle.py train --out FOLDER [--minutes 20] [--tokens 8192] [--rate 0.01]
        [--init FOLDER --length 256]
    python benchmarks/needle.py check FOLDER [--prompts 100] [--threads 1] [--json FILE]

A prompt consists of random words. It also contains four needles at random places. A needle is a
marker, followed by four random words. Each needle has a different marker. The prompt ends with one
of the four markers. The denoiser answers with the four words that follow this marker in its needle.
All mask tokens look the same, so the denoiser must use a mask token's position to find out which of
the four words to copy.

The denoiser is block-causal. `train` starts with canvases of 32 tokens. Whenever the mean loss is
low, it doubles the length of the canvases, up to 8,192 tokens. The network has two layers and
131,264 parameters.

`check` builds bundles in fp32 and in int8, and bundles with an INT8 cache. The prompts fill the
canvas, and the needles are at the start of the prompt. There are three ways to compute a prompt.
`whole` computes it in one pass. `parts` computes it in passes of 512 tokens. `reused` asks for all
four needles of a prompt in four requests, so that three of them reuse the keys and values of the
first request. The bundles `yarn` and `unscaled` have canvases of 32,768 tokens, with and without a
scaling of the rotary embedding.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from shapes import QUICKLY, build_command, machine
from tables import table
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples" / "demo"))
from checkpoint import load_checkpoint, save_checkpoint
from training import Training, draw_layers

import dlm_runtime
from dlm_export.network.denoiser import Denoiser, Turn, rotate
from dlm_export.network.spec import AttentionSpec, LayerSpec, MlpSpec, NetworkSpec, Rope
from dlm_runtime import Bundle

BLOCK_LENGTH, LONGEST = 8, 8192
SAMPLED = 160  # number of tokens far from needles to which layer 2 attends in training
AROUND = range(-4, 12)  # a token at one of these offsets from a marker is near the needle
NEEDLES, VALUES = 4, 4
WORDS = 244
MARKERS = range(WORDS, WORDS + 8)
EOS, MASK, VOCABULARY = 252, 253, 254


def shape() -> NetworkSpec:
    """Return the shape of the denoiser.

    The network has two layers, because the answer needs two steps. First, each word finds the
    marker before it. Then, each mask token finds the word at the same distance after the same
    marker.
    """
    attention = AttentionSpec(
        4, 2, 32, Rope(theta=1e6), qk_norm=True, visibility="block", block_length=BLOCK_LENGTH
    )
    return NetworkSpec(
        family="sdar",
        architecture="SDARForCausalLM",
        vocab_size=VOCABULARY,
        hidden_size=64,
        layers=(LayerSpec(attention, MlpSpec(128), norm_eps=1e-6),) * 2,
        max_canvas_length=LONGEST,
        norm_eps=1e-6,
        tied_head=False,
        shift=0,
        mask_token_id=MASK,
        eos_token_ids=(EOS,),
        pad_token_id=EOS,
    )


@dataclass(frozen=True)
class Haystack:
    """The tokens of a prompt without its last marker, and the words that follow each marker."""

    tokens: list[int]
    needles: dict[int, list[int]]


def draw(
    length: int, needles: int, generator: torch.Generator, within: int | None = None
) -> Haystack:
    """Return a haystack whose canvas has ``length`` tokens.

    All needles are in the first ``within`` tokens. If ``within`` is None, the needles are anywhere.
    """
    size = length - VALUES - 1
    tokens = torch.randint(WORDS, (size,), generator=generator)
    free = min(size, within or size) - needles * (VALUES + 1)
    gaps = torch.randint(free + 1, (needles,), generator=generator).sort().values
    starts = (gaps + (VALUES + 1) * torch.arange(needles)).tolist()
    markers = (MARKERS[0] + torch.randperm(len(MARKERS), generator=generator)[:needles]).tolist()
    tokens[starts] = torch.tensor(markers)
    found = {
        marker: tokens[start + 1 : start + 1 + VALUES].tolist()
        for marker, start in zip(markers, starts, strict=True)
    }
    return Haystack(tokens.tolist(), found)


# ---- Training ----


@dataclass(frozen=True)
class Batch:
    """B canvases ``[B, L]`` of L tokens, with their answers.

    ``near`` ``[B, N]`` contains the positions near needles, before the last block. If a canvas
    lists a position several times, ``is_repeated`` is True for all entries except the first.
    """

    canvases: Tensor
    near: Tensor
    is_repeated: Tensor


@torch.no_grad()
def initialise(denoiser: Denoiser) -> None:
    """Set random weights.

    The weights of the head start near zero. The norms of queries and keys start with the scale 1.5
    instead of 1.
    """
    draw_layers(denoiser)
    denoiser.embed.weight.normal_()
    assert denoiser.head is not None
    denoiser.head.weight.normal_(std=0.02)
    for block in denoiser.blocks:
        block.attention.q_norm.weight.fill_(1.5)
        block.attention.k_norm.weight.fill_(1.5)


def attend(
    block: Any, table: Any, x: Tensor, positions: Tensor, keys: Tensor, at: Tensor, bias: Tensor
) -> Tensor:
    """Compute a layer for tokens ``x`` ``[B, T, d]`` at ``positions`` ``[B, T]``.

    ``keys`` ``[B, K, d]`` are the hidden states of the tokens at the positions ``at``. The keys and
    values are computed from them. ``bias`` ``[B, K]`` is added to the scores of the keys. A token
    does not see keys of later blocks.
    """
    a = block.attention
    (B, T, _), K = x.shape, keys.shape[1]
    normed, heads = block.attention_norm(keys), (B, K, a.spec.kv_heads, a.spec.head_size)
    k = a.k_norm(a.k(normed).view(heads)).transpose(1, 2)
    v = a.v(normed).view(heads).transpose(1, 2)
    q = a.q_norm(a.q(block.attention_norm(x)).view(B, T, a.spec.heads, a.spec.head_size))
    q = rotate(q.transpose(1, 2), Turn(table.cos, table.sin, positions), False)
    k = rotate(k, Turn(table.cos, table.sin, at), False)
    is_later = at[:, None] // BLOCK_LENGTH > positions[:, :, None] // BLOCK_LENGTH
    scores = bias[:, None] + is_later * torch.finfo(x.dtype).min
    y = F.scaled_dot_product_attention(q, k, v, scores[:, None].to(q.dtype), enable_gqa=True)
    x = x + a.out(y.transpose(1, 2).reshape(B, T, -1))
    result: Tensor = x + block.mlp(block.mlp_norm(x))
    return result


def loss_of(denoiser: Denoiser, batch: Batch, generator: torch.Generator) -> Tensor:
    """Return the mean cross-entropy in nats of the masked words of the answers.

    In half of the canvases, all four words are masked.

    The second layer attends to all tokens near needles, and to ``SAMPLED`` other tokens. Each
    sampled token represents several tokens, so its weight in the softmax is multiplied by their
    number. Because of the sampling, the first layer does not compute all tokens of a long canvas,
    and a step is much cheaper.
    """
    canvases = batch.canvases
    B, L = canvases.shape
    answers = canvases[:, -VALUES:]
    is_hidden = torch.rand(B, VALUES, generator=generator) < torch.rand(B, 1, generator=generator)
    is_hidden[: (B + 1) // 2] = True
    is_hidden |= ~is_hidden.any(1, keepdim=True)
    ids = torch.cat((canvases[:, :-VALUES], answers.masked_fill(is_hidden, MASK)), 1)
    block = torch.arange(L - BLOCK_LENGTH, L).expand(B, -1)
    is_near = torch.zeros(B, L, dtype=torch.bool).scatter(1, batch.near, True)
    is_near[:, -BLOCK_LENGTH:] = True
    others = torch.randint(L, (B, SAMPLED), generator=generator)
    each = (
        (~is_near).sum(1, keepdim=True) / (~is_near.gather(1, others)).sum(1, keepdim=True)
    ).log()
    lowest = torch.finfo(torch.float32).min
    bias = torch.where(is_near.gather(1, others), lowest, each)
    chosen = torch.cat((batch.near, others, block), 1)
    # Some tokens are near two needles, or near a needle and in the last block. Such a token must
    # count only once.
    first = torch.zeros(B, batch.near.shape[1])
    first[batch.is_repeated] = lowest
    bias = torch.cat((first, bias, torch.zeros(B, BLOCK_LENGTH)), 1)
    table, (early, late) = denoiser.rotary[0], denoiser.blocks
    everywhere = torch.arange(L).expand(B, -1)
    x = denoiser.embed(ids, everywhere)
    wide = chosen[:, :, None].expand(-1, -1, x.shape[2])
    x = attend(early, table, x.gather(1, wide), chosen, x, everywhere, torch.zeros(B, L))
    x = attend(late, table, x[:, -BLOCK_LENGTH:], block, x, chosen, bias)
    features = denoiser.final_norm(x)[:, -VALUES:]
    return F.cross_entropy(denoiser.project(features[is_hidden]).float(), answers[is_hidden])


class Curriculum:
    """Makes canvases for training.

    The canvases become longer when the denoiser has learned the shorter canvases.
    """

    ENOUGH, PACE = 0.2, 0.05  # loss for longer canvases; weight of a new loss

    def __init__(self, length: int, tokens: int, seed: int) -> None:
        self.length, self.tokens, self.mean = length, tokens, 1.0
        self.generator = torch.Generator().manual_seed(seed)

    def losses(self, denoiser: Denoiser) -> Iterator[Callable[[], Tensor]]:
        """For each step of training, yield a function that computes the step's loss."""

        def loss() -> Tensor:
            found = loss_of(denoiser, self._batch(), self.generator)
            self.mean += self.PACE * (found.item() - self.mean)
            if self.mean < self.ENOUGH and self.length < LONGEST:
                self.length, self.mean = 2 * self.length, 1.0
                print(f"canvases of {self.length} tokens", file=sys.stderr, flush=True)
            return found

        while True:
            yield loss

    def _batch(self) -> Batch:
        """Return the batch of one step. In a quarter of the steps, the canvases are shorter."""
        share = torch.rand(2, generator=self.generator).tolist()
        length = self.length
        if share[0] > 0.75:
            length = max(32, int(length * share[1]) // BLOCK_LENGTH * BLOCK_LENGTH)
        rows, near = [], []
        for _ in range(max(1, self.tokens // length)):
            haystack = draw(length, min(NEEDLES, length // 16), self.generator)
            asked = int(torch.randint(len(haystack.needles), (), generator=self.generator))
            marker, words = list(haystack.needles.items())[asked]
            rows.append([*haystack.tokens, marker, *words])
            starts = [haystack.tokens.index(each) for each in haystack.needles]
            last = length - BLOCK_LENGTH - 1
            near.append([min(max(start + i, 0), last) for start in starts for i in AROUND])
        positions = torch.tensor(near).sort(1).values
        is_repeated = torch.zeros(positions.shape, dtype=torch.bool)
        is_repeated[:, 1:] = positions[:, 1:] == positions[:, :-1]
        return Batch(torch.tensor(rows), positions, is_repeated)


def train(wanted: argparse.Namespace) -> None:
    """Train on one thread. Every minute, save the running average of the weights."""
    torch.set_num_threads(1)
    torch.manual_seed(wanted.seed)
    wanted.out.mkdir(parents=True, exist_ok=True)
    network = shape()
    if wanted.init:
        denoiser = load_checkpoint(wanted.init).requires_grad_(True)
    else:
        denoiser = Denoiser(network)
        initialise(denoiser)
    training = Training(denoiser, wanted.rate)
    training.run(
        Curriculum(wanted.length, wanted.tokens, wanted.seed).losses(denoiser),
        steps=10**9,
        minutes=wanted.minutes,
        save_minutes=1.0,
        on_save=lambda: save_checkpoint(
            wanted.out, network, training.averaged, {"max_new_tokens": VALUES}
        ),
    )


# ---- Checking bundles ----

SCALED = 4 * LONGEST
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": LONGEST}
BUNDLES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "fp32": ({}, ("--precision", "fp32")),
    "int8": ({}, ("--precision", "int8")),
    "int8, INT8 cache": ({}, ("--precision", "int8", "--cache-dtype", "int8")),
    "yarn": (
        {"max_position_embeddings": SCALED, "rope_scaling": YARN},
        ("--precision", "fp32"),
    ),
    "unscaled": ({"max_position_embeddings": SCALED}, ("--precision", "fp32")),
}
"""For each bundle, the changes to config.json and the options of the build."""


def bundle_of(checkpoint: Path, name: str, folder: Path) -> Path:
    """Build the bundle ``name``, a key of ``BUNDLES``, in ``folder``."""
    changes, options = BUNDLES[name]
    source, output = folder / f"checkpoint {name}", folder / f"bundle {name}"
    shutil.copytree(checkpoint, source)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | changes))
    command = build_command(source, output, *options, *QUICKLY)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return output


def haystacks(length: int, count: int) -> list[Haystack]:
    """Return haystacks that training does not use. Their needles are in the first 128 tokens."""
    generator = torch.Generator().manual_seed(1_000_003)
    return [draw(length, NEEDLES, generator, within=128) for _ in range(count)]


def found(bundle: Bundle, way: str, stacks: Sequence[Haystack]) -> tuple[int, int, int]:
    """Ask a bundle for needles.

    ``way`` is "whole", "parts" or "reused", as in the docstring of this module. ``reused`` asks for
    all needles of a haystack, and the other ways ask for one needle. Returns the numbers of right
    answers, of questions, and of reused tokens.
    """
    asked = NEEDLES if way == "reused" else 1
    questions = [
        ([*stack.tokens, marker], words)
        for number, stack in enumerate(stacks)
        for marker, words in itertools.islice(
            itertools.cycle(stack.needles.items()), number, number + asked
        )
    ]
    request: dict[str, Any] = {"max_new_tokens": VALUES, "stop": "none"}
    if way == "whole":
        answers = [bundle.generate(tokens=prompt, **request) for prompt, _ in questions]
        reused = 0
    else:
        limit = None if way == "reused" else 0
        with bundle.scheduler(max_tokens=512, prefix_cache_bytes=limit) as scheduler:
            answers = [
                scheduler.submit(tokens=prompt, **request).result(600) for prompt, _ in questions
            ]
            reused = scheduler.stats.prefix_tokens
    right = sum(
        list(answer.tokens[-VALUES:]) == words
        for answer, (_, words) in zip(answers, questions, strict=True)
    )
    return right, len(questions), reused


def check(wanted: argparse.Namespace) -> None:
    """Build the bundles, ask for needles, and print a table."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, (changes, _) in BUNDLES.items():
            path = bundle_of(wanted.checkpoint, name, Path(folder))
            with dlm_runtime.open(path, threads=wanted.threads) as bundle:
                length = bundle.max_canvas_length
                count = wanted.long_prompts if changes else wanted.prompts
                for way in ("parts",) if changes else ("whole", "parts", "reused"):
                    some = count // NEEDLES if way == "reused" else count
                    right, asked, reused = found(bundle, way, haystacks(length, some))
                    rows.append(
                        {
                            "bundle": name,
                            "canvas": length,
                            "way": way,
                            "right": right,
                            "asked": asked,
                            "reused_tokens": reused,
                        }
                    )
                    print(f"{name}, {way}: {right} of {asked}", file=sys.stderr, flush=True)
    lines = [
        [
            str(row["bundle"]),
            f"{row['canvas']:,}",
            str(row["way"]),
            f"{row['right']} of {row['asked']}",
            f"{row['reused_tokens']:,}",
        ]
        for row in rows
    ]
    print(
        table(["bundle", "canvas, tokens", "prompt", "right answers", "reused tokens"], lines),
        end="",
    )
    if wanted.json:
        wanted.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    training = commands.add_parser("train")
    training.add_argument("--out", type=Path, required=True)
    training.add_argument("--init", type=Path, help="continue from this checkpoint")
    training.add_argument("--length", type=int, default=32, help="tokens of the first canvases")
    training.add_argument("--tokens", type=int, default=8192, help="tokens of a step")
    training.add_argument("--rate", type=float, default=0.01)
    training.add_argument("--minutes", type=float, default=20, help="processor time")
    training.add_argument("--seed", type=int, default=0)
    training.set_defaults(run=train)
    checking = commands.add_parser("check")
    checking.add_argument("checkpoint", type=Path)
    checking.add_argument("--prompts", type=int, default=100)
    checking.add_argument("--long-prompts", type=int, default=20, help="prompts of 32K tokens")
    checking.add_argument("--threads", type=int, default=1)
    checking.add_argument("--json", type=Path)
    checking.set_defaults(run=check)
    wanted = parser.parse_args()
    wanted.run(wanted)


if __name__ == "__main__":
    main()
