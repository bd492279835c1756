"""Tests of the documentation site.

The site must build without warnings, contain every page, and not send requests to other hosts.
"""

from __future__ import annotations

import html
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dlm_runtime
from dlm_export.cli import main

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


def _text(page: Path) -> str:
    return html.unescape(re.sub(r"<[^>]+>", "", page.read_text()))


def test_no_page_loads_anything_from_another_host(site: Path) -> None:
    for page in site.rglob("*.html"):
        tags = re.findall(r"<(?:script|img|iframe|link|source)\b[^>]*>", page.read_text())
        assert tags
        remote = [tag for tag in tags if re.search(r"(src|href)=[\"']?(https?:)?//", tag)]
        assert not remote, f"{page.name}: {remote}"


def test_the_python_reference_has_every_name(site: Path) -> None:
    anchors = set(
        re.findall(r"id=\"(dlm_runtime[\w.]*)\"", (site / "reference/python.html").read_text())
    )
    shown = {anchor.rpartition(".")[2] for anchor in anchors}
    constants = {"LAYOUTS", "PRESETS"}
    assert not {*dlm_runtime.__all__} - shown - constants


def test_the_command_reference_has_every_option(site: Path) -> None:
    text = _text(site / "reference" / "cli.html")
    for name, command in main.commands.items():
        assert f"dlm-export {name} " in text
        for parameter in command.params:
            for option in parameter.opts if parameter.param_type_name == "option" else ():
                assert option in text, f"{name} {option}"
