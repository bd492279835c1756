"""Defines the command ``embed``, which helps to compile C programs that use the runtime."""

from __future__ import annotations

import shlex
from typing import Any

import click

from dlm_export.cli.options import command, flag, group, json_option
from dlm_export.cli.printing import print_json, print_table


@command()
@group(
    "Options",
    flag("--cflags", help="Print flags for the C or C++ compiler."),
    flag("--libs", help="Print flags for the linker."),
    flag("--static", help="With --libs, print flags that link the static library."),
    flag("--prefix", help="Print the folder that contains include/ and lib/."),
    flag("--pkg-config-dir", help="Print the folder for PKG_CONFIG_PATH."),
    flag("--cmake-dir", help="Print the folder for dlm_runtime_DIR."),
    flag("--engine", help="Print the path of the ONNX Runtime library, for DLM_ONNXRUNTIME."),
    json_option,
)
def embed(static: bool, as_json: bool, **wanted: bool) -> None:
    """Print compiler flags and paths for C programs that use the runtime.

    The command works like pkg-config: it prints all requested values on one line. If you give no
    option, the command prints a table of all values.

    Example: cc app.c $(dlm-export embed --cflags --libs) -o app
    """
    from dlm_runtime import embedding
    from dlm_runtime.abi.native import onnxruntime_library
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
        "engine": onnxruntime_library(),
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
