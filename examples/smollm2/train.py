"""Train a LoRA with which SmolLM2-135M-Instruct drafts several tokens in one pass.

    python examples/smollm2/train.py sample build/smollm2 build/text.safetensors
    python examples/smollm2/train.py train build/smollm2 build/text.safetensors build/adapter

The method is Uno (arXiv:2609.04010). A draft pass has the last token, with the base weights,
and then rows of random tokens, with the LoRA. Row i is at the position i after the last token,
and predicts the token of the next position. Training text is text that the model wrote. Its keys
and values come from a pass without the LoRA, and many drafts are trained over them at once.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from llama import Adapted, Adapter, Llama
from safetensors.torch import load_file
from text import END, sample_text
from torch import Tensor, distributed
from torch.nn import functional as F

ROWS = 4  # random rows of a draft
FREQUENT = 8192  # ids below this one are in the loss, even if the text does not have them
HARD = 0.5  # share of the greedy token in the target; the rest is the model's distribution
FLOOR = 0.3  # weight of a row if a row before it is wrong, because its token is not used then
WARM_UP = 30  # steps


class Loss(torch.autograd.Function):
    """The cross-entropy of draft rows. The logits of few rows are in memory at a time."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, head: Tensor, teacher: Tensor, valid: Tensor) -> Any:
        """Return the mean loss of a row, and the rows ``[drafts, ROWS]`` that are right.

        ``states`` and ``teacher`` are ``[drafts, ROWS, hidden]``. ``teacher`` has the states of the
        clean text at the same positions. Rows count where ``valid`` ``[drafts, ROWS]`` is true.
        """
        gradient, right, total = torch.zeros_like(states), torch.zeros_like(valid), 0.0
        for part in torch.arange(len(states)).split(64):
            counts = valid[part]
            logits = F.linear(states[part][counts], head).float()
            target = F.linear(teacher[part][counts], head).float()
            greedy = target.argmax(-1, keepdim=True)
            hits = torch.zeros_like(counts)
            hits[counts] = logits.argmax(-1) == greedy[:, 0]
            right[part] = hits
            used = F.pad(hits.float().cumprod(1)[:, :-1], (1, 0), value=1.0)
            weight = ((FLOOR + (1 - FLOOR) * used)[counts] / valid.sum())[:, None]
            target = target.softmax(-1).mul_(1 - HARD)
            target.scatter_add_(1, greedy, torch.full(greedy.shape, HARD))
            logits = logits.log_softmax(-1)
            total -= float((target * logits * weight).sum())
            slopes = torch.zeros_like(states[part])
            slopes[counts] = logits.exp_().sub_(target).mul_(weight).bfloat16() @ head
            gradient[part] = slopes
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(right)
        return torch.tensor(total), right

    @staticmethod
    def backward(ctx: Any, slope: Tensor, _: Any) -> Any:
        return ctx.saved_tensors[0] * slope, None, None, None


def attention(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, mask: Tensor
) -> Tensor:
    """Attend to the cached ``keys`` and to the keys ``k`` of a row's own draft.

    ``q`` is ``[B, H, N, D]``, where N is drafts * ROWS, and ``keys`` is ``[B, KV, S, D]``. Separate
    products skip the keys of other drafts, and need no gradient of the cached keys.
    """
    kv, n, size = k.shape[1:]
    q = q.unflatten(1, (kv, -1)) * size**-0.5  # [B, KV, G, N, D]

    def regroup(x: Tensor) -> Tensor:  # [B, KV, G, N, X] to [B, KV, drafts, G * ROWS, X], or back
        return x.unflatten(3, (-1, ROWS)).transpose(2, 3).flatten(3, 4)

    k, v = k.unflatten(2, (-1, ROWS)), v.unflatten(2, (-1, ROWS))
    cached = (q.flatten(2, 3) @ keys.transpose(2, 3)).unflatten(2, (-1, n))
    own = regroup(regroup(q) @ k.transpose(3, 4))
    p = (torch.cat([cached, own], -1) + mask).softmax(-1)
    cached, own = p.split([keys.shape[2], ROWS], -1)
    found = (cached.flatten(2, 3) @ values).unflatten(2, (-1, n)) + regroup(regroup(own) @ v)
    return found.flatten(1, 2)


COMPILED = attention


def draft(
    llama: Llama,
    lora: Sequence[Adapted],
    vocabulary: Tensor,
    tokens: Tensor,
    answers: Tensor,
    drafts: int,
    generator: torch.Generator,
    *,
    whole: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draft ``drafts`` times in each row of ``tokens`` ``[B, T]``, after random positions.

    Returns the loss, the rows that are right and the rows that are valid, both
    ``[B * drafts, ROWS]``. A row is valid if the tokens after the last one, up to the row's
    position, are an answer and are the model's greedy choice. If ``whole`` is true, drafts follow
    only positions after which all rows are valid. ``vocabulary`` has the ids of the loss.
    """
    b, length = tokens.shape
    head = llama.embedding[vocabulary]
    cache: list[tuple[Tensor, Tensor]] = []

    def clean(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache.append((k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    with torch.no_grad():
        teacher = llama.states(tokens, torch.arange(length), clean)
        answered = answers.bool()
        chosen = torch.zeros_like(tokens)
        chosen[answered] = vocabulary[F.linear(teacher.roll(1, 1)[answered], head).argmax(-1)]
        follows = F.pad(answered & (tokens == chosen) & (tokens != END), (0, ROWS))
        valid = torch.stack([follows[:, i : i + length] for i in range(1, ROWS + 1)], -1)
        valid = valid.long().cumprod(-1).bool()  # [B, T, ROWS]
        picked = valid[..., -1 if whole else 0] + 1e-9
        last = picked.multinomial(drafts, replacement=True, generator=generator)  # [B, drafts]
    positions = (last[:, :, None] + torch.arange(1, ROWS + 1)).flatten(1)  # [B, drafts * ROWS]
    teacher = torch.stack([teacher[i, p.clamp(max=length - 1)] for i, p in enumerate(positions)])
    valid = torch.stack([valid[i, p] for i, p in enumerate(last)]).flatten(0, 1)
    seen = torch.arange(length) <= last.repeat_interleave(ROWS, 1)[:, :, None]
    own = torch.ones(ROWS, ROWS, dtype=torch.bool).tril().repeat(b, drafts, 1)
    hidden = ~torch.cat([seen, own], -1)[:, None, None]
    mask = torch.zeros(hidden.shape, dtype=torch.bfloat16).masked_fill_(hidden, -math.inf)

    def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        function = COMPILED if torch.is_grad_enabled() else attention
        return function(q, k, v, *cache[i], mask)

    ids = torch.randint(len(llama.embedding), positions.shape, generator=generator)
    states = llama.states(ids, positions, attend, lora)
    rows = (b * drafts, ROWS, -1)
    loss, right = Loss.apply(states.view(rows), head, teacher.view(rows), valid)
    return loss, right & valid, valid


@torch.no_grad()
def measure(
    llama: Llama, adapter: Adapter, tokens: Tensor, answers: Tensor, drafts: int = 48
) -> str:
    """Measure drafts in held-out greedy text. The processes divide the text.

    The report has the share of drafts whose rows 1..i are all right, for each i, and the sum of the
    shares, which is the expected number of accepted tokens.
    """
    rank, processes = distributed.get_rank(), distributed.get_world_size()
    generator = torch.Generator().manual_seed(rank)
    lora, counts = adapter.lora(), torch.zeros(ROWS + 1)
    everything = torch.arange(llama.config["vocab_size"])
    for part in torch.arange(len(tokens))[rank::processes].split(1):
        texts = tokens[part], answers[part]
        _, right, valid = draft(llama, lora, everything, *texts, drafts, generator, whole=True)
        right = right[valid.all(1)]
        counts += F.pad(right.long().cumprod(1).sum(0), (0, 1), value=len(right))
    distributed.all_reduce(counts)
    shares = counts[:-1] / counts[-1]
    rounded = " ".join(f"{share:.3f}" for share in shares.tolist())
    return f"rows right {rounded}, accepted {shares.sum():.3f}, of {int(counts[-1])} drafts"


def train(arguments: argparse.Namespace) -> None:
    """Train in processes of one thread each, which add their gradients after each step."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(
            _train, (arguments, f"file://{folder}/meeting"), nprocs=arguments.processes
        )


def _train(rank: int, arguments: argparse.Namespace, meeting: str) -> None:
    global COMPILED
    torch.set_num_threads(1)
    processes = arguments.processes
    distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=processes)

    def report(text: str) -> None:
        if rank == 0:
            print(text, flush=True)

    llama = Llama(arguments.checkpoint)
    if arguments.compile:
        llama.compile()
        COMPILED = torch.compile(attention, dynamic=False)
    text = load_file(arguments.text)
    order = torch.randperm(len(text["tokens"]), generator=torch.Generator().manual_seed(0))
    order = order[text["answers"][order].sum(1) >= 32]
    tokens, answers = text["tokens"].long()[order], text["answers"][order]
    vocabulary = torch.cat([torch.arange(FREQUENT), tokens.flatten()]).unique()
    held = len(order) // 20
    greedy = text["greedy"][order][:held]
    judged = tokens[:held][greedy], answers[:held][greedy]
    tokens, answers = tokens[held:], answers[held:]
    report(f"{len(tokens)} conversations, {int(answers.sum())} tokens of answers")

    shared = torch.Generator().manual_seed(arguments.seed)  # the same numbers in all processes
    own = torch.Generator().manual_seed(1000 * arguments.seed + rank + 1)
    adapter = Adapter(llama, shared)
    if arguments.resume:
        adapter.load(arguments.resume)
    parameters = list(adapter.tensors.values())
    rates = {"A": arguments.rate, "B": arguments.rate * arguments.ratio}
    groups = [{"params": parameters[i::2], "peak": rates["AB"[i]]} for i in range(2)]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0, betas=(0.9, 0.99))
    start, share, step, rows, saved = time.monotonic(), 0.0, 0, 0, 0.0
    epoch: list[Tensor] = []
    while True:
        minutes = share * arguments.minutes
        if minutes - saved > arguments.every or share >= 1:
            saved = minutes
            if rank == 0:
                adapter.save(arguments.adapter)
            found = measure(llama, adapter, *judged)
            report(f"{minutes:.1f} min, {step} steps, {rows} rows: held out, {found}")
        if share >= 1:
            return
        if not epoch:
            shuffled = torch.randperm(len(tokens), generator=shared)
            epoch = list(shuffled[: len(shuffled) // processes * processes].split(processes))
        part = epoch.pop()[rank : rank + 1]
        warm = min(1, (step + 1) / WARM_UP)
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * warm * (0.02 + 0.49 * (1 + math.cos(math.pi * share)))
        texts = tokens[part], answers[part]
        loss, right, valid = draft(llama, adapter.lora(), vocabulary, *texts, arguments.drafts, own)
        optimizer.zero_grad()
        loss.backward()
        used = (time.monotonic() - start) / (60 * arguments.minutes)
        facts = torch.tensor(
            [float(loss.detach()), used, float(right[:, 0].sum()), float(valid.sum())]
        )
        everything = torch.cat([*(p.grad.flatten() for p in parameters), facts])
        distributed.all_reduce(everything)
        *gradients, facts = everything.split([*(p.numel() for p in parameters), len(facts)])
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad.copy_(gradient.view_as(p) / processes)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        share = float(facts[1]) / processes
        step, rows = step + 1, rows + int(facts[3])
        if step % 20 == 0:
            report(f"  {minutes:.1f} min, step {step}: loss {float(facts[0]) / processes:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(required=True)

    def command(name: str, run: Any, text: str, minutes: float) -> Any:
        found = commands.add_parser(name, help=text, description=text)
        found.set_defaults(run=run)
        found.add_argument("checkpoint", type=Path, help="folder that checkpoint.py wrote")
        found.add_argument("text", type=Path, help="safetensors file of the training text")
        found.add_argument("--seed", type=int, default=0, help="[default: 0]")
        say = f"[default: {minutes:g}]"
        found.add_argument("--minutes", type=float, default=minutes, help=f"time to spend {say}")
        return found

    add = command("sample", sample_text, "Let the model write the training text.", 10).add_argument
    add("--batch", type=int, default=128, help="conversations at a time [default: 128]")
    add = command("train", train, "Train the adapter on the text.", 60).add_argument
    add("adapter", type=Path, help="folder to write the adapter to")
    add("--resume", type=Path, metavar="FOLDER",
        help="start from this saved adapter; the learning rate and the optimiser start anew, so "
        "pass the minutes that remain and another seed")  # fmt: skip
    add("--every", type=float, default=5, help="minutes between saved adapters [default: 5]")
    add("--rate", type=float, default=2e-3, help="learning rate of A [default: 0.002]")
    add("--ratio", type=float, default=4, help="learning rate of B, as a multiple [default: 4]")
    add("--drafts", type=int, default=128, help="drafts in each conversation [default: 128]")
    add("--processes", type=int, default=2, help="each uses one core [default: 2]")
    add("--compile", action="store_true", help="compile layers; 1.5 times as fast, needs g++")
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
