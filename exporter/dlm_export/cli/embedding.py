"""What a compiler needs to embed the runtime: ``embed``."""

from __future__ import annotations

import shlex
from typing import Any

import click

from dlm_export.cli.options import json_option
from dlm_export.cli.printing import print_json, print_table


@click.command()
@click.option("--cflags", is_flag=True, help="What a C or C++ compiler must be told.")
@click.option("--libs", is_flag=True, help="What the linker must be told.")
@click.option(
    "--static", is_flag=True, help="With --libs: the static library instead of the shared one."
)
@click.option("--prefix", is_flag=True, help="The folder of include/ and lib/.")
@click.option("--pkg-config-dir", is_flag=True, help="The folder for PKG_CONFIG_PATH.")
@click.option("--cmake-dir", is_flag=True, help="The folder for dlm_runtime_DIR.")
@click.option(
    "--engine", is_flag=True, help="The installed ONNX Runtime's library, for DLM_ONNXRUNTIME."
)
@json_option
def embed(static: bool, as_json: bool, **wanted: bool) -> None:
    """Print where a C program finds the runtime that this package brings, as pkg-config would.

    What is asked for comes on one line; without an option, a table of all.

    Example: cc app.c $(dlm-export embed --cflags --libs) -o app
    """
    from dlm_runtime import embedding
    from dlm_runtime.errors import EngineError

    if static and not (wanted["libs"] or as_json):
        raise click.UsageError("--static says how to link: give --libs with it")
    folder = embedding.prefix()
    there: dict[str, Any] = {
        "cflags": embedding.cflags(),
        "libs": embedding.libs(static=static),
        "prefix": str(folder),
        "pkg_config_dir": str(folder / "lib" / "pkgconfig"),
        "cmake_dir": str(folder / "lib" / "cmake" / "dlm_runtime"),
        "engine": embedding.engine_library(),
    }
    if wanted["engine"] and there["engine"] is None:
        raise EngineError("ONNX Runtime is not installed here: pip install onnxruntime")
    if as_json:
        print_json(there)
    elif asked := [name for name in there if wanted[name]]:
        quoted = {"cflags", "libs"}
        click.echo(
            " ".join(
                there[name] if name in quoted or len(asked) == 1 else shlex.quote(there[name])
                for name in asked
            )
        )
    else:
        print_table(
            "Embedding",
            ["", ""],
            [
                [name.replace("_", " "), str(value or "not installed")]
                for name, value in there.items()
            ],
        )
