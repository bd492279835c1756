"""Measures how many held-out commands a demo answers correctly, and how many passes (NFE) it needs.

The script also measures the length of the answers, the effect of thresholds and effort levels, and
the loss. The demo runs in the native runtime or in torch.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from checkpoint import load_checkpoint
from tokenizers import Tokenizer

import dlm_runtime
import dlm_runtime.text.tokenizer
from dlm_export.cli.options import set_option
from dlm_export.cli.values import policy_changes
from dlm_export.judging.tuning.effort_levels import LEVELS
from dlm_export.network import reference
from dlm_export.network.denoiser import Denoiser
from dlm_runtime.presets import PRESETS

THRESHOLDS = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.99)
LOSS_RATIOS = (0.1, 0.25, 0.5, 0.75, 1.0)


@torch.no_grad()
def loss_at(
    denoiser: Denoiser,
    tokenizer: Tokenizer,
    pairs: Sequence[tuple[str, str]],
    ratio: float,
    seed: int = 0,
) -> float:
    """Return the mean cross-entropy in nats of masked tokens in calls.

    ``pairs`` are commands and their calls. The canvas of a call has two blocks. In the first block,
    a random share ``ratio`` of the tokens is masked. The second block is completely masked and does
    not contribute to the loss. With a ratio of 1, the canvas is the same as at the start of
    decoding.
    """
    c, eos = denoiser.network, denoiser.network.eos_token_ids[0]
    generator = torch.Generator().manual_seed(seed)
    total, count = 0.0, 0
    for prompt, completion in pairs:
        start = torch.tensor(tokenizer.encode(prompt).ids)
        call = tokenizer.encode(completion, add_special_tokens=False).ids[:31]
        block = torch.tensor(call + [eos] * (32 - len(call)))
        is_hidden = torch.rand(32, generator=generator) < ratio
        later = torch.full((32,), c.mask_token_id)
        canvas = torch.cat((start, block.masked_fill(is_hidden, c.mask_token_id), later))
        logits = denoiser(canvas[None])[0, len(start) : len(start) + 32]
        is_scored = is_hidden & (torch.arange(32) <= len(call))
        total += torch.nn.functional.cross_entropy(
            logits[is_scored], block[is_scored], reduction="sum"
        ).item()
        count += int(is_scored.sum())
    return total / max(count, 1)


def same_call(first: str | None, second: str) -> bool:
    """Return True if both texts are JSON and contain equal values.

    Lists must have the same order, and ``true`` does not equal 1.
    """
    try:
        one, other = (
            json.dumps(json.loads(text or ""), sort_keys=True) for text in (first, second)
        )
    except json.JSONDecodeError:
        return False
    return one == other


@dataclass(frozen=True)
class Answer:
    """The answer to a command: the calls as text, and the number of passes."""

    text: str
    nfe: int


class TorchBundle:
    """Replaces a bundle: it runs a checkpoint with the reference loop in torch.

    No build is needed, but passes are slow.
    """

    def __init__(self, checkpoint: Path) -> None:
        self.denoiser = load_checkpoint(checkpoint)
        self.tokenizer = dlm_runtime.text.tokenizer.Tokenizer.from_files(
            checkpoint / "tokenizer.json"
        )
        self.max_new_tokens = json.loads((checkpoint / "generation_config.json").read_text())[
            "max_new_tokens"
        ]

    def generate(self, *, prompt: str, max_new_tokens: int, preset: str, **policy: Any) -> Answer:
        """Like ``Bundle.generate``, but ``preset`` has no default."""
        tokens = self.tokenizer.encode(prompt)
        fields = PRESETS[preset].with_fields(policy)
        new = min(max_new_tokens, self.max_new_tokens)  # the length of answers in training
        out = reference.generate(self.denoiser, tokens, fields, new)
        ends = self.denoiser.network.eos_token_ids
        answer = itertools.takewhile(lambda token: token not in ends, out.tokens[len(tokens) :])
        return Answer(self.tokenizer.decode(list(answer)), out.nfe)


def evaluate(
    bundle: dlm_runtime.Bundle | TorchBundle,
    lines: Sequence[dict[str, str]],
    max_new_tokens: int | None = None,
    **policy: Any,
) -> dict[str, Any]:
    """Answer every command with at most ``max_new_tokens`` tokens.

    If ``max_new_tokens`` is None, the default of the bundle or checkpoint is used.

    Returns the numbers of right answers for each split, and for each function or number of calls.
    Also returns the NFE, tokens and seconds per command, and the commands that failed.
    """
    max_new_tokens = bundle.max_new_tokens if max_new_tokens is None else max_new_tokens
    right: defaultdict[str, list[bool]] = defaultdict(list)
    nfe, tokens, seconds, failures = [], [], [], []
    for line in lines:
        began = time.perf_counter()
        out = bundle.generate(prompt=line["prompt"], max_new_tokens=max_new_tokens, **policy)
        is_right = same_call(out.text, line["completion"])
        wanted = json.loads(line["completion"])
        kind = f"{len(wanted)} calls" if isinstance(wanted, list) else f"function {wanted['name']}"
        for group in ("all", f"unseen {line['unseen']}", kind):
            right[group].append(is_right)
        seconds.append(time.perf_counter() - began)
        nfe.append(out.nfe)
        # The tokenizer adds two tokens to every prompt, which do not belong to the answer. The
        # answer's eos is one more token.
        tokens.append(len(bundle.tokenizer.encode(line["completion"])) - 2 + 1)
        if not is_right:
            failures.append((line["prompt"], line["completion"], out.text))
    return {
        "right": dict(right),
        "nfe": nfe,
        "tokens": tokens,
        "seconds": seconds,
        "failures": failures,
    }


def frontier(
    bundle: dlm_runtime.Bundle | TorchBundle, lines: Sequence[dict[str, str]], **policy: Any
) -> None:
    """Print the share of right answers, NFE and speed for every threshold."""
    click.echo("threshold  exact match  NFE a command  tokens a pass  tokens/s")
    for threshold in THRESHOLDS:
        result = evaluate(bundle, lines, threshold=threshold, **policy)
        right, passes, tokens = (
            statistics.mean(result["right"]["all"]),
            sum(result["nfe"]),
            sum(result["tokens"]),
        )
        speed = tokens / sum(result["seconds"])
        click.echo(
            f"{threshold:9.2f}  {right:11.1%}  {passes / len(lines):13.2f}  {tokens / passes:13.2f}  {speed:8.0f}"
        )


def efforts(
    bundle: dlm_runtime.Bundle, lines: Sequence[dict[str, str]], max_new_tokens: int | None
) -> None:
    """Print the share of right answers and NFE for every effort level."""
    click.echo("effort   exact match  NFE a command")
    for level in LEVELS:
        result = evaluate(bundle, lines, max_new_tokens, effort=level)
        click.echo(
            f"{level:7}  {statistics.mean(result['right']['all']):11.1%}  {statistics.mean(result['nfe']):13.2f}"
        )


@click.command()
@click.option(
    "--bundle",
    type=click.Path(path_type=Path),
    help="Bundle of a demo.  [default: the checkpoint, in torch]",
)
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    required=True,
    help="Held-out .jsonl of data.py or several.py.",
)
@click.option(
    "--count", type=click.IntRange(1), help="Number of its commands to use.  [default: all]"
)
@click.option("--preset", default="fast-dllm", show_default=True, help="Loop of the bundle.")
@set_option
@click.option(
    "--max-new-tokens",
    type=click.IntRange(1),
    help="Maximum tokens of an answer.  [default: the bundle's number]",
)
@click.option("--checkpoint", type=click.Path(path_type=Path), help="Folder of the denoiser.")
@click.option("--loss", is_flag=True, help="Also measure the first demo's loss.")
@click.option(
    "--thresholds",
    is_flag=True,
    help="Measure right answers and NFE with thresholds from 0.5 to 0.99.",
)
@click.option(
    "--effort", is_flag=True, help="Measure right answers and NFE with each effort level."
)
@click.option("--failures", is_flag=True, help="Print every command answered wrongly.")
def main(
    bundle: Path | None,
    data: Path,
    count: int | None,
    preset: str,
    changes: tuple[str, ...],
    max_new_tokens: int | None,
    checkpoint: Path | None,
    loss: bool,
    thresholds: bool,
    effort: bool,
    failures: bool,
) -> None:
    """Measure the share of right answers and the passes per command (NFE).

    Example: python evaluate.py --bundle ../../build/demo --data heldout.jsonl --checkpoint
    ../demo-denoiser --loss
    """
    lines = [json.loads(line) for line in data.read_text().splitlines()][:count]
    if checkpoint is None and (loss or bundle is None):
        raise click.UsageError(
            "--loss needs --checkpoint" if loss else "give --bundle or --checkpoint"
        )
    if effort and bundle is None:
        raise click.UsageError("--effort is of bundles: give --bundle")
    policy = {"preset": preset, "max_new_tokens": max_new_tokens} | policy_changes(changes)
    with contextlib.ExitStack() as stack:
        opened = (
            TorchBundle(checkpoint)
            if bundle is None
            else stack.enter_context(dlm_runtime.open(bundle))
        )
        if effort:
            efforts(opened, lines, max_new_tokens)
            return
        if thresholds:
            frontier(opened, lines, **policy)
            return
        result = evaluate(opened, lines, **policy)
    if failures:
        for prompt, wanted, given in result["failures"]:
            click.echo(f"{prompt}\n  wanted {wanted}\n  got    {given}")
    for name, matches in sorted(result["right"].items()):
        click.echo(
            f"{name:28} {sum(matches):4d} of {len(matches):4d}  {sum(matches) / len(matches):7.2%}"
        )
    for name, values in (("NFE a command", result["nfe"]), ("tokens a command", result["tokens"])):
        click.echo(
            f"{name}: mean {statistics.mean(values):.2f}, median {statistics.median(values):g}, most {max(values)}"
        )
    if loss:
        tokenizer, denoiser = (
            Tokenizer.from_file(str(checkpoint / "tokenizer.json")),
            load_checkpoint(checkpoint),
        )
        pairs = [(line["prompt"], line["completion"]) for line in lines]
        for ratio in LOSS_RATIOS:
            click.echo(
                f"loss with {ratio:4.0%} hidden: {loss_at(denoiser, tokenizer, pairs, ratio):.4f} nats a token"
            )


if __name__ == "__main__":
    main()
