"""Defines the command ``serve``, an HTTP server for bundles."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click
import cloup

from dlm_export.cli.options import (
    CHECKPOINT,
    command,
    file,
    flag,
    group,
    number,
    opening_group,
    option,
    options,
    prompt_cache_option,
    text,
    to_bytes,
)
from dlm_export.cli.printing import warn
from dlm_export.cli.values import opening

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:-]{0,127}")


def _named(bundles: tuple[Path, ...], names: tuple[str, ...]) -> dict[str, Path]:
    """Map the name of each model to the folder of its bundle. Raises click.UsageError."""
    found = [(path.resolve().name, path) for path in bundles]
    for given in names:
        name, is_pair, folder = given.partition("=")
        if not is_pair or not Path(folder).is_dir():
            raise click.UsageError(
                f"--name {given}: write NAME=FOLDER, with the folder of a bundle"
            )
        found.append((name, Path(folder)))
    if not found:
        raise click.UsageError("give a bundle")
    for name, path in found:
        if not _NAME.fullmatch(name):
            raise click.UsageError(f"{name!r} cannot name a model: give --name NAME={path}")
        if [each for each, _ in found].count(name) > 1:
            raise click.UsageError(f"two bundles have the name {name}: give --name NAME={path}")
    return dict(found)


@command()
@cloup.argument("bundles", nargs=-1, type=CHECKPOINT, metavar="[BUNDLE]...")
@options(
    group(
        "Server",
        text(
            "--host",
            "Address to listen on; 0.0.0.0 means all addresses.",
            "HOST",
            default="127.0.0.1",
        ),
        number("--port", "TCP port; 0 chooses a free port.", 0, 65535, default=8000),
        option(
            "--name",
            "names",
            multiple=True,
            metavar="NAME=BUNDLE",
            help="Serve BUNDLE as the model NAME; repeatable.",
        ),
        file("--api-key-file", "File with one API key per line.  [default: no key]"),
        flag(
            "--share-prompts",
            "shares_prompts",
            help="Let requests with different API keys reuse each other's prompts.",
        ),
        option(
            "--allow-host",
            "hosts",
            multiple=True,
            metavar="NAME",
            help="Host name that clients may use; repeatable; * allows all.",
        ),
        option(
            "--cors-origin",
            "origins",
            multiple=True,
            metavar="ORIGIN",
            help="Origin of web pages that may use the server; repeatable; * allows all.",
        ),
        file("--tls-certificate", "Certificate chain in PEM, for HTTPS."),
        file("--tls-key", "Private key of the certificate, in PEM."),
        flag(
            "--log/--no-log", "has_log", default=True, help="Log each request to stderr, in JSON."
        ),
        prompt_cache_option,
    ),
    group(
        "Limits",
        number("--max-running", "Most requests that share a model's passes.", 1, 4096, default=16),
        number(
            "--max-waiting",
            "Most requests that wait for a model; more get 429.",
            1,
            1 << 20,
            default=256,
        ),
        text(
            "--prefix-cache",
            "Memory for prompts of ended requests.  [default: all that is free]",
            "SIZE",
            callback=to_bytes,
        ),
        number("--max-body", "Largest request body in KiB.", 1, 1 << 20, default=1024),
        number(
            "--max-connections",
            "Most connections; a new one closes the oldest idle one.",
            1,
            1 << 20,
            default=512,
        ),
        number(
            "--shutdown", "Seconds that running requests get after SIGTERM.", 1, 86400, default=60
        ),
    ),
    opening_group,
)
def serve(bundles: tuple[Path, ...], names: tuple[str, ...], **values: Any) -> None:
    """Serve bundles over HTTP, with OpenAI's API and Mercury's additions.

    Each bundle becomes a model, which is named after the bundle's folder. On SIGTERM, the server
    finishes running requests and exits. On SIGHUP, the server opens all bundles again.

    Example: dlm-export serve build/demo --port 8000
    """
    paths = _named(bundles, names)
    try:
        from dlm_serve import running
        from dlm_serve.app import Limits, Server
        from dlm_serve.connections import ConnectionLimits
        from dlm_serve.hosting import Models
        from dlm_serve.web import Web, is_loopback
    except ModuleNotFoundError as err:
        if err.name is None or err.name.startswith("dlm_"):
            raise
        raise click.ClickException(
            f"{err.name} is not installed; this command needs the serve extra: pip install 'dlm-export[serve]'"
        ) from err

    if values["prompt_caches"] and len(paths) > 1:
        raise click.UsageError("--prompt-cache belongs to one bundle: serve only one")
    how = opening(values)
    certificate, key = values["tls_certificate"], values["tls_key"]
    if (certificate is None) != (key is None):
        raise click.UsageError("--tls-certificate and --tls-key belong together: give both")
    key_file, host = values["api_key_file"], values["host"]
    keys = [] if key_file is None else running.read_keys(key_file)
    if not keys and not is_loopback(host):
        warn("anyone who reaches this address may use the server: give --api-key-file")

    def say(port: int) -> None:
        scheme = "http" if certificate is None else "https"
        click.echo(f"{', '.join(paths)} at {scheme}://{host}:{port}/v1", err=True)

    models = Models(
        paths, how.open, values["max_running"], values["max_waiting"], values["prefix_cache"]
    )
    server = Server(
        models,
        keys,
        Limits(body_bytes=values["max_body"] << 10),
        values["has_log"],
        Web(values["hosts"], values["origins"]),
        values["shares_prompts"],
    )
    running.serve(
        server,
        models,
        running.Address(host, values["port"], certificate, key),
        connections=ConnectionLimits(connections=values["max_connections"]),
        shutdown_s=values["shutdown"],
        on_start=say,
        warn=warn,
    )
