"""Defines the command ``triton``, which writes a model repository for Triton Inference Server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from dlm_export.cli.options import (
    CHECKPOINT,
    command,
    flag,
    force_option,
    group,
    json_option,
    number,
    opening_group,
    options,
    output_option,
    text,
)
from dlm_export.cli.printing import format_bytes, print_json, warn
from dlm_export.cli.values import opening


@command()
@click.argument("bundle", type=CHECKPOINT)
@options(
    group(
        "Common options",
        output_option("Folder of the model repository.", "REPOSITORY"),
        text("--name", "Name of the model.  [default: the name of the bundle's folder]"),
        number("--model-version", "Number of the model's version.", most=1 << 30, default=1),
        flag("--link", "links", help="Write a symbolic link to the bundle, instead of a copy."),
        flag(
            "--stream/--no-stream",
            "streams",
            default=True,
            help="Allow several responses per request (see the guide).",
        ),
        force_option,
        json_option,
    ),
    group(
        "Limits",
        number("--max-running", "Most requests that share passes.", 1, 4096, default=16),
        number("--max-waiting", "Most requests that wait.", 1, 1 << 20, default=1024),
    ),
    opening_group,
)
def triton(
    bundle: Path, output: Path, name: str | None, force: bool, as_json: bool, **values: Any
) -> None:
    """Write BUNDLE as a model for Triton Inference Server.

    The repository may already contain other models and other versions of the model. The model needs
    no Python.

    Example: dlm-export triton build/demo -o build/repository
    """
    from dlm_triton.repository import Model, write

    model = Model(
        name=bundle.resolve().name if name is None else name,
        version=values["model_version"],
        streams=values["streams"],
        links=values["links"],
        opening=opening(values),
        max_running=values["max_running"],
        max_waiting=values["max_waiting"],
    )
    written = write(bundle, output, model, force=force)
    if written.is_config_kept:
        warn(f"{written.config} existed and was kept; --force replaces it")
    if as_json:
        print_json(
            {
                "model": model.name,
                "version": model.version,
                "folder": str(written.version),
                "config": str(written.config),
                "is_config_kept": written.is_config_kept,
                "bytes": written.size,
            }
        )
    else:
        click.echo(f"{written.version}: {format_bytes(written.size)}")
        if not written.is_config_kept:
            click.echo(f"{written.config}: {format_bytes(written.config.stat().st_size)}")
