"""Exact match of the demo's calls on held-out commands, through the native runtime; NFE, tokens, and loss in torch."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import torch
from checkpoint import load_checkpoint
from tokenizers import Tokenizer

import dlm_runtime
from dlm_export.network.denoiser import Denoiser

LOSS_RATIOS = (0.1, 0.25, 0.5, 0.75, 1.0)


@torch.no_grad()
def loss_at(denoiser: Denoiser, tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]], ratio: float, seed: int = 0) -> float:
    """Mean cross-entropy in nats of the hidden tokens of calls, ``ratio`` of the first block hidden at random.

    ``pairs`` are commands and calls. The canvas has two blocks and the second is wholly hidden and not counted, so
    ratio 1 is where decoding starts.
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
        total += torch.nn.functional.cross_entropy(logits[is_scored], block[is_scored], reduction="sum").item()
        count += int(is_scored.sum())
    return total / max(count, 1)


def same_call(first: str | None, second: str) -> bool:
    """Whether both texts parse as JSON to equal values."""
    try:
        return bool(json.loads(first or "") == json.loads(second))
    except json.JSONDecodeError:
        return False


def evaluate(bundle: dlm_runtime.Bundle, lines: Sequence[dict[str, str]], **policy: Any) -> dict[str, Any]:
    """Answer every command. Returns shares of right calls by split and by function, NFE and tokens a command, failures."""
    right: defaultdict[str, list[bool]] = defaultdict(list)
    nfe, tokens, failures = [], [], []
    for line in lines:
        out = bundle.generate(prompt=line["prompt"], max_new_tokens=64, **policy)
        is_right = same_call(out.text, line["completion"])
        for group in ("all", f"unseen {line['unseen']}", f"function {json.loads(line['completion'])['name']}"):
            right[group].append(is_right)
        nfe.append(out.nfe)
        tokens.append(len(bundle.tokenizer.encode(line["completion"])) - 2 + 1)  # without the two prompt marks, with eos
        if not is_right:
            failures.append((line["prompt"], line["completion"], out.text))
    return {"right": dict(right), "nfe": nfe, "tokens": tokens, "failures": failures}


@click.command()
@click.option("--bundle", type=click.Path(path_type=Path), required=True, help="Bundle of the demo, as `make demo` builds it.")
@click.option("--data", type=click.Path(path_type=Path), required=True, help="Held-out .jsonl, as data.py writes it.")
@click.option("--preset", default="fast-dllm", show_default=True, help="Loop of the bundle.")
@click.option("--checkpoint", type=click.Path(path_type=Path), help="Folder of the denoiser: measures the loss as well.")
@click.option("--failures", is_flag=True, help="Print every command answered wrongly.")
def main(bundle: Path, data: Path, preset: str, checkpoint: Path | None, failures: bool) -> None:
    """Measure exact match, NFE and loss.

    Example: python evaluate.py --bundle ../../build/demo --data heldout.jsonl --checkpoint ../demo-denoiser
    """
    lines = [json.loads(line) for line in data.read_text().splitlines()]
    with dlm_runtime.open(bundle) as opened:
        result = evaluate(opened, lines, preset=preset)
    if failures:
        for prompt, wanted, given in result["failures"]:
            click.echo(f"{prompt}\n  wanted {wanted}\n  got    {given}")
    for name, matches in sorted(result["right"].items()):
        click.echo(f"{name:28} {sum(matches):4d} of {len(matches):4d}  {sum(matches) / len(matches):7.2%}")
    for name, values in (("NFE a command", result["nfe"]), ("tokens a call", result["tokens"])):
        click.echo(f"{name}: mean {statistics.mean(values):.2f}, median {statistics.median(values):g}, most {max(values)}")
    if checkpoint is not None:
        tokenizer, denoiser = Tokenizer.from_file(str(checkpoint / "tokenizer.json")), load_checkpoint(checkpoint)
        pairs = [(line["prompt"], line["completion"]) for line in lines]
        for ratio in LOSS_RATIOS:
            click.echo(f"loss with {ratio:4.0%} hidden: {loss_at(denoiser, tokenizer, pairs, ratio):.4f} nats a token")


if __name__ == "__main__":
    main()
