"""Defines the command ``cache-prompt``, which saves the keys and values of a prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from dlm_export.cli.options import (
    CHECKPOINT,
    command,
    file,
    force_option,
    group,
    json_option,
    opening_group,
    options,
    output_option,
    text,
)
from dlm_export.cli.printing import format_bytes, print_json
from dlm_export.cli.values import integers, opening, read_json_file, text_or_stdin


@command()
@click.argument("bundle", type=CHECKPOINT)
@options(
    group(
        "Common options",
        text("--prompt", "Text at the start of later prompts; - reads stdin.", "TEXT"),
        text("--system", "System message of later conversations.", "TEXT"),
        file("--messages", "Start of later conversations: JSON list of messages."),
        text("--tokens", "Token IDs at the start of later prompts, separated by commas.", "LIST"),
        output_option("File to write."),
        force_option,
        json_option,
    ),
    opening_group,
)
def cache_prompt(
    bundle: Path,
    prompt: str | None,
    system: str | None,
    messages: Path | None,
    tokens: str | None,
    output: Path,
    force: bool,
    as_json: bool,
    **values: Any,
) -> None:
    """Compute the keys and values of a prompt with BUNDLE, and save them to a file.

    With --prompt-cache, the commands run, chat and serve load the file. A prompt that starts with
    the saved tokens is then answered sooner, because these tokens are not computed again. The file
    can be used only with this bundle. The denoiser needs block-causal attention.

    Example: dlm-export cache-prompt build/several --prompt "$(cat system.txt)" -o system.cache
    """
    from dlm_export.outputs import claimed_file

    if sum(given is not None for given in (prompt, system, messages, tokens)) != 1:
        raise click.UsageError("give one of --prompt, --system, --messages and --tokens")
    given: dict[str, Any] = {}
    if prompt is not None:
        given["prompt"] = text_or_stdin(prompt)
    elif tokens is not None:
        given["tokens"] = integers("--tokens", tokens)
    elif system is not None:
        given["chat"] = [{"role": "system", "content": system}]
    elif messages is not None:
        given["chat"] = read_json_file(messages)
    with (
        opening(values).open(bundle) as opened,
        claimed_file(output, force=force) as new,
    ):
        saved = opened.save_prompt_cache(new, **given)
    size = output.stat().st_size
    if as_json:
        print_json({"file": str(output), "tokens": saved, "bytes": size})
    else:
        click.echo(f"{output}: {saved} tokens, {format_bytes(size)}")
