"""Tests of the Dockerfiles, the compose file and the Kubernetes manifests in examples/serve."""

from __future__ import annotations

import functools
import shlex
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from dlm_export.cli import main

SERVE = Path(__file__).parents[1] / "examples" / "serve"
DOCKERFILES = sorted(SERVE.glob("*Dockerfile"))
SHUTDOWN_S = 60  # default of --shutdown


@functools.cache
def manifests() -> dict[str, Any]:
    found = yaml.safe_load_all((SERVE / "kubernetes.yaml").read_text())
    return {one["kind"]: one for one in found}


@functools.cache
def container() -> dict[str, Any]:
    (found,) = manifests()["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def instructions(path: Path) -> dict[str, list[str]]:
    """Map each kind of instruction in a Dockerfile to the arguments of all its instructions.

    If an instruction continues on further lines, these lines are joined.
    """
    found: dict[str, list[str]] = {}
    for line in path.read_text().replace("\\\n", " ").splitlines():
        name, _, rest = line.partition(" ")
        if name.isupper():
            found.setdefault(name, []).append(rest.strip())
    return found


def check_arguments(arguments: list[str]) -> dict[str, Any]:
    """Parse arguments of `dlm-export serve`, and return the values. The bundle need not exist."""
    arguments = [str(SERVE) if one.startswith("/bundles/") else one for one in arguments]
    arguments = [
        __file__ if one.startswith(("/keys", "/run/secrets/")) else one for one in arguments
    ]
    serve = main.get_command(click.Context(main), "serve")  # type: ignore[attr-defined]
    context = serve.make_context("serve", arguments)
    values: dict[str, Any] = context.params
    return values


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_images_start_a_server_without_root_rights(path: Path) -> None:
    made = instructions(path)
    entry, command = (yaml.safe_load(made[name][-1]) for name in ("ENTRYPOINT", "CMD"))
    assert entry[:2] == ["dlm-export", "serve"]
    values = check_arguments([*entry[2:], *command])
    assert values["host"] == "0.0.0.0"
    assert values["api_key_file"] is not None
    assert made["EXPOSE"] == [str(values["port"])]
    assert f":{values['port']}/ready" in made["HEALTHCHECK"][-1]
    assert made["USER"][-1] == "10001"


def test_pods_stop_after_the_server_has_answered() -> None:
    template = manifests()["Deployment"]["spec"]["template"]["spec"]
    values = check_arguments(container()["args"])
    wait_s = container()["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert template["terminationGracePeriodSeconds"] > wait_s + values["shutdown"]


def test_probes_ask_paths_that_need_no_key() -> None:
    from dlm_serve.app import OPEN_PATHS

    names = ("startupProbe", "readinessProbe", "livenessProbe")
    paths = [container()[name]["httpGet"]["path"] for name in names]
    assert paths == ["/ready", "/ready", "/health"]
    assert set(paths) <= set(OPEN_PATHS)


def test_compose_services_build_files_that_exist_and_stop_gracefully() -> None:
    services = yaml.safe_load((SERVE / "compose.yaml").read_text())["services"]
    for one in services.values():
        assert (SERVE / one["build"]["context"] / one["build"]["dockerfile"]).is_file()
        assert int(one["stop_grace_period"].removesuffix("s")) > SHUTDOWN_S
        _, target, mode = one["volumes"][0].split(":")
        assert one["command"][0] == target
        assert mode == "ro"
        assert shlex.split(one["ports"][0])[0].startswith("127.0.0.1:")
