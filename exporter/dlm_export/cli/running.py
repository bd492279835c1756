"""Using bundles: ``run``, ``bench``."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from dlm_export.cli.constraining import constraint_options, take_constraint
from dlm_export.cli.conversing import (
    conversation_options,
    take_conversation,
    take_tools,
    warn_of_length,
)
from dlm_export.cli.options import (
    CHECKPOINT,
    FILE,
    OPENING_OPTIONS,
    effort_option,
    json_option,
    options,
    preset_option,
    set_option,
)
from dlm_export.cli.printing import Bars, format_bytes, how_it_went, print_json, print_table, shown
from dlm_export.cli.values import opening, policy_changes
from dlm_export.planning.peer import verdict
from dlm_export.signals import cancelling
from dlm_runtime import Bundle, Generation


@click.command()
@click.argument("bundle", type=CHECKPOINT)
@click.option(
    "--prompt", help="Text in front of the canvas; - reads stdin, but for the newline at its end."
)
@conversation_options
@click.option("--tokens", help="Token ids, with commas; mask tokens among them are filled as well.")
@click.option(
    "--infill",
    help="Text with holes, each written <mask>, to fill; with --prompt or --chat it is the answer.",
)
@click.option(
    "--prefix",
    default="",
    metavar="TEXT",
    help="What the answer starts with, as part of a constrained text.",
)
@click.option(
    "--special-tokens",
    is_flag=True,
    help="Recognise special tokens such as <|eos|> in the given text; for trusted text only.",
)
@click.option(
    "--hole-tokens",
    help="With --infill: tokens of a hole, or several numbers with commas to try.  [default: 16]",
)
@click.option(
    "--max-new-tokens",
    type=click.IntRange(0),
    help="Mask tokens to fill.  [default: as the bundle says, or 128]",
)
@preset_option
@effort_option
@click.option(
    "--steps",
    type=click.IntRange(0),
    default=0,
    help="Passes planned for the whole generation; 0: the preset's.",
)
@click.option(
    "--block-length",
    type=click.IntRange(0),
    help="Tokens decided before the next block; 0: all in one.",
)
@click.option("--threshold", type=click.FloatRange(0, 1), help="Score from which a token commits.")
@click.option("--score", help="confidence, margin, entropy or random.")
@click.option(
    "--commit", help="static, threshold, dynamic, factor, entropy_bound, timestep or sequential."
)
@click.option("--cache", help="none, prefix, dual, block or block-dual.")
@click.option(
    "--temperature",
    type=click.FloatRange(0),
    help="Sampling temperature; 0 takes the most likely token.",
)
@click.option(
    "--top-p",
    type=click.FloatRange(0, 1),
    help="Draw from the best tokens that have this probability together.",
)
@click.option(
    "--top-k", type=click.IntRange(0), help="Draw from this many of the best tokens; 0: from all."
)
@click.option("--seed", type=click.IntRange(0), help="Of draws, and of score random.")
@set_option
@click.option(
    "--max-steps",
    type=click.IntRange(0),
    default=0,
    help="End after this many passes with what there is; 0: do not.",
)
@click.option(
    "--deadline-ms",
    type=click.FloatRange(0),
    default=0.0,
    help="End this many milliseconds after the start; 0: do not.",
)
@click.option(
    "--stop",
    "stop_strings",
    multiple=True,
    metavar="TEXT",
    help="End the text before this one; repeatable.",
)
@constraint_options
@click.option("--watch", is_flag=True, help="Show the canvas denoising in the terminal.")
@click.option(
    "--delay", type=click.FloatRange(0, 10), default=0.15, help="Seconds a step with --watch."
)
@options(OPENING_OPTIONS)
@json_option
def run(
    bundle: Path,
    prompt: str | None,
    tokens: str | None,
    infill: str | None,
    prefix: str,
    hole_tokens: str | None,
    max_new_tokens: int | None,
    preset: str | None,
    effort: str | None,
    steps: int,
    changes: tuple[str, ...],
    max_steps: int,
    deadline_ms: float,
    stop_strings: tuple[str, ...],
    watch: bool,
    delay: float,
    as_json: bool,
    **fields: Any,
) -> None:
    """Generate from a bundle. Ctrl-C ends it within a pass, and prints what there is.

    Example: dlm-export run build/demo --prompt "remind me to call the garage at seven" --preset
    fast-dllm

    \b
    Fill the holes of an answer:
      dlm-export run build/demo --prompt "remind me to call the garage at seven" --preset fast-dllm --hole-tokens 2,3,4,5 \\
        --infill '{"name":"add_reminder","arguments":{"text":"<mask>","time":"<mask>"}}'
    """
    conversation, tools = take_conversation(fields), take_tools(fields)
    given = sum(value is not None for value in (prompt, conversation, tokens))
    if given > 1 or (given == 0 and infill is None):
        raise click.UsageError("give one of --prompt, --chat, --messages and --tokens, or --infill")
    if infill is not None and tokens is not None:
        raise click.UsageError(
            "--infill is text: leave --tokens out, or put mask tokens among them and leave --infill out"
        )
    if hole_tokens is not None and infill is None:
        raise click.UsageError("--hole-tokens is of --infill")
    if max_new_tokens is not None and infill is not None:
        raise click.UsageError(
            "--max-new-tokens is of text behind a prompt: --hole-tokens says how long a hole is"
        )
    if prefix and (infill is not None or (prompt is None and conversation is None)):
        raise click.UsageError("--prefix is of --prompt, --chat and --messages, without --infill")
    if watch and infill is not None:
        raise click.UsageError(
            "--watch shows one canvas, and --infill may try several: leave one of them out"
        )
    cancel = threading.Event()
    request: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "preset": preset,
        "effort": effort,
        "steps": steps,
        "max_steps": max_steps,
        "deadline_ms": deadline_ms,
        "stop_strings": stop_strings,
        "cancel": cancel,
    }
    how, wanted = opening(fields), take_constraint(fields, infill is not None)
    policy = {name: value for name, value in fields.items() if value is not None}
    request |= policy | policy_changes(changes) | tools
    if prompt is not None:
        request["prompt"] = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
    elif conversation is not None:
        request["chat"] = conversation
    elif tokens is not None:
        request["tokens"] = _integers("--tokens", tokens)
    if infill is not None:
        del request["max_new_tokens"]
    elif prefix:
        request["prefix"] = prefix
    with how.open(bundle) as opened, cancelling(cancel):
        if infill is None:
            warn_of_length(opened, max_new_tokens)
        if wanted.get("constrain_from") is not None:
            request |= wanted
        elif wanted:
            request["constraint"] = opened.constraint(before=prefix, **wanted)
        if watch:
            from dlm_export.cli.watch import watch as show

            result = show(opened, request, delay)
        elif infill is not None:
            lengths = [_integers("--hole-tokens", hole_tokens or "16")]
            result = opened.infill(infill, lengths=lengths, **request).generation
        else:
            result = opened.generate(**request)
        if as_json:
            print_json(_as_dict(result, _preset_of(opened, preset, effort), effort))
            return
        click.echo(" ".join(map(str, result.tokens)) if result.text is None else result.text)
        click.echo(f"[{how_it_went(result, opened.engine)}]", err=True)


def _preset_of(bundle: Bundle, preset: str | None, effort: str | None) -> str | None:
    """The preset that a request runs: the given one, that of its level, or the bundle's default."""
    loop = bundle.manifest["loop"]
    chosen: str | None = preset or (loop["effort"]["preset"] if effort else loop["default_preset"])
    return chosen


def _as_dict(result: Generation, preset: str | None, effort: str | None) -> dict[str, Any]:
    """What ``run --json`` prints."""
    return {
        "text": result.text,
        "tool_calls": [asdict(call) for call in result.tool_calls],
        "finish": result.finish,
        "preset": preset,
        "effort": effort,
        "prompt_tokens": result.prompt_tokens,
        "completion_tokens": result.completion_tokens,
        "nfe": result.nfe,
        "passes": result.passes,
        "timings_s": result.timings,
        "cache_bytes": result.cache_bytes,
        "tokens": result.tokens,
        "undecided": [
            position for position, is_undecided in enumerate(result.undecided) if is_undecided
        ],
        "log_probs": result.log_probs,
    }


@click.command()
@click.argument("bundle", type=CHECKPOINT)
@click.option(
    "--passes",
    help="tokens,cached,rows of passes, with semicolons.  [default: 4,252,4;8,248,8;32,224,32;256,0,256, as far as it fits]",
)
@click.option(
    "--prompt-tokens",
    type=click.IntRange(0),
    help="Made-up tokens given to the generation.  [default: 128]",
)
@click.option(
    "--new-tokens", type=click.IntRange(1), help="Mask tokens that it fills.  [default: 128]"
)
@preset_option
@set_option
@click.option(
    "--rounds",
    type=click.IntRange(3, 1000),
    default=15,
    help="Of each pass; a fifth as many generations.",
)
@click.option(
    "--batch", help="Requests that share passes, with commas, such as 1,4,8.  [default: 1]"
)
@click.option(
    "--data",
    type=FILE,
    help="JSONL with prompt, or messages: send its prompts one by one, print p50, p95 and tokens a pass.",
)
@click.option("--samples", type=click.IntRange(1), default=64, help="Most prompts of --data.")
@click.option(
    "--peer-token-ms",
    type=click.FloatRange(0, min_open=True),
    help="Milliseconds that an autoregressive model takes for a token here: say whether diffusion is faster.",
)
@click.option(
    "--cost",
    is_flag=True,
    help="Fit what a pass, a token, a scored row and attention cost, for schedulers.",
)
@options(OPENING_OPTIONS)
@json_option
def bench(
    bundle: Path,
    passes: str | None,
    batch: str | None,
    changes: tuple[str, ...],
    as_json: bool,
    **values: Any,
) -> None:
    """Measure a bundle on this machine: passes, a generation and its parts, memory, and the
    distance from the machine's limit.

    Example: dlm-export bench build/demo --preset fast-dllm --data
    examples/demo-denoiser/calibration.jsonl --peer-token-ms 2.5
    """
    from dlm_export.planning import bench as bencher

    sizes = None if passes is None else bencher.parse_passes(passes)
    batches = (1,) if batch is None else bencher.parse_batches(batch)
    policy = policy_changes(changes)
    with Bars() as bars:
        options = bencher.BenchOptions(
            opening(values), passes=sizes, batches=batches, policy=policy, **values
        )
        result = bencher.bench(bundle, options, bars)
    if as_json:
        print_json(result)
    else:
        print_bench(result)


def _loop_of(made: Mapping[str, Any]) -> str:
    """The loop of a measured generation: its preset, and what was changed of it."""
    return ", ".join(
        [
            f"preset {made['preset']}",
            *(f"{name} {value}" for name, value in made["changes"].items()),
        ]
    )


def _integers(option: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError as err:
        raise click.UsageError(f"{option}: {text!r} is not a list of integers") from err


def print_bench(result: Mapping[str, Any]) -> None:
    """What ``bench`` measured: the machine, passes, a generation by part, memory."""
    bundle, machine, rates = result["bundle"], result["machine"], result["roofline"]
    peer = result["peer"]
    threads = f"{result['threads']} threads" if result["threads"] else "all cores"
    click.echo(
        f"{bundle['path']}: {bundle['precision']}, {bundle['parameters']:,} parameters, {bundle['engine']}, {threads}"
    )
    click.echo(
        f"Machine: {machine['processor']}, {machine['cores']} cores, {format_bytes(machine['memory_bytes'])}"
    )
    if rates is not None:
        click.echo(
            f"Its rates: {rates['read_bytes_per_s'] / 1e9:.1f} GB/s of reads; 10^9 multiply-adds/s: "
            f"int8 {rates['int8_macs_per_s'] / 1e9:.0f} ({rates['int8_macs_per_s_32_rows'] / 1e9:.0f} at 32 rows), "
            f"fp32 {rates['fp32_macs_per_s'] / 1e9:.0f}"
        )
    rows = [
        [
            *(str(row[key]) for key in ("batch", "tokens", "cached", "rows")),
            f"{row['ms']:.2f}",
            " .. ".join(f"{value:.2f}" for value in row["quartiles_ms"]),
            shown(row["limit_ms"], ".2f"),
            shown(row["ratio"], ".2f"),
            *([] if peer is None else [f"{row['break_even_tokens']:.2f}"]),
        ]
        for row in result["passes"]
    ]
    titles = ["batch", "tokens", "cached", "rows", "ms", "quartiles", "limit, ms", "of the limit"]
    print_table("Passes", titles + ([] if peer is None else ["peer's tokens"]), rows)
    if result["cost"] is not None:
        each = "{pass_ms:.3g} ms a pass, {token_ms:.3g} a token, {row_ms:.3g} a row, {pair_ms:.3g} a token and a position"
        error = "off by {median_error:.0%} in the median, {worst_error:.0%} at worst"
        click.echo(f"Cost: {each}; {error}".format(**result["cost"]))
    made, memory = result["generation"], result["memory"]
    click.echo(
        f"Generation: {made['prompt_tokens']} given, {made['new_tokens']} new tokens, {_loop_of(made)}: "
        f"{made['nfe']} passes, {made['seconds']:.3f} s, {made['tokens_per_s']:.1f} tokens/s"
    )
    rows = [
        [part, f"{seconds * 1e3:.2f}", f"{seconds / made['seconds']:.2%}"]
        for part, seconds in made["parts"].items()
    ]
    print_table("Where its time went", ["part", "ms", "share"], rows)
    if len(result["batches"]) > 1:
        rows = [
            [
                str(row["batch"]),
                f"{row['seconds']:.3f}",
                f"{row['tokens_per_s']:.1f}",
                f"{row['speedup']:.2f}",
            ]
            for row in result["batches"]
        ]
        print_table(
            "Requests at once, of that length each", ["batch", "s", "tokens/s", "times one's"], rows
        )
    if (sent := result["requests"]) is not None:
        click.echo(
            f"Requests: {sent['count']} prompts of {sent['data']}, at most {sent['max_new_tokens']} new tokens: "
            f"p50 {sent['p50_ms']:.1f} ms, p95 {sent['p95_ms']:.1f} ms, {sent['mean_nfe']:.2f} passes in the mean, "
            f"{sent['ms_per_pass']:.2f} ms and {sent['tokens_per_pass']:.2f} tokens a pass, {sent['tokens_per_s']:.1f} tokens/s"
        )
    if peer is not None:
        click.echo(verdict(peer))
    click.echo(
        f"Memory: {format_bytes(memory['peak_rss_bytes'])} at the generation's peak, weights "
        f"{format_bytes(memory['weights_bytes'])}, keys and values {format_bytes(memory['cache_bytes'])}"
        + ("" if memory["ratio"] is None else f": {memory['ratio']:.2f} times both")
    )
    for note in result["notes"]:
        click.echo(f"Note: {note}", err=True)
