"""Functions that mkdocs calls. They write the pages of the C header and of the commands, and add
linked files to the site.

Pages link to files of the repository by relative paths. These links also work in a web view of the
repository. The site has a copy of each such file: Markdown as a page in ``project/``, other files
as text in ``source/``.
"""

from __future__ import annotations

import inspect
import os
import re
from pathlib import Path
from typing import Any

import click
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
HEADER = ROOT / "runtime" / "native" / "include" / "dlm_runtime.h"
HEADER_MARK, COMMANDS_MARK = "<!-- dlm_runtime.h -->", "<!-- dlm-export --help -->"

FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<=\]\()([^)\s#]+)")


# ---- Files of the repository ----


def _in_site(path: Path) -> str | None:
    """Return the path in the site for a file of the repository, or None if the site does not
    contain the file.
    """
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    if path.is_dir():
        path /= "README.md"
    if not path.is_file() or not path.is_relative_to(ROOT):
        return None
    name = path.relative_to(ROOT).as_posix()
    return f"project/{name}" if path.suffix == ".md" else f"source/{name}.txt"


def _in_repository(uri: str) -> Path:
    """Return the file from which a page of the site was made."""
    return ROOT / uri.removeprefix("project/") if uri.startswith("project/") else DOCS / uri


def _links(text: str) -> list[str]:
    return [link for link in LINK.findall(FENCE.sub("", text)) if "://" not in link]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add every file of the repository to which a page links, directly or through other linked
    files.
    """
    waiting = [file.src_uri for file in files.documentation_pages()]
    while waiting:
        page = _in_repository(waiting.pop())
        for link in _links(page.read_text()):
            target = (page.parent / link).resolve()
            uri = _in_site(target)
            if uri is None or target.is_relative_to(DOCS) or files.get_file_from_path(uri):
                continue
            target = target / "README.md" if target.is_dir() else target
            files.append(File.generated(config, uri, content=target.read_text()))
            if uri.endswith(".md"):
                waiting.append(uri)
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    source = _in_repository(page.file.src_uri)
    here = os.path.dirname(page.file.src_uri)

    def moved(found: re.Match[str]) -> str:
        link = found[1]
        uri = None if "://" in link else _in_site((source.parent / link).resolve())
        return link if uri is None else os.path.relpath(uri, here or ".")

    pieces = re.split(r"(^```.*?^```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    markdown = "".join(
        piece if piece.startswith("```") else LINK.sub(moved, piece) for piece in pieces
    )
    if HEADER_MARK in markdown:
        markdown = markdown.replace(HEADER_MARK, header_as_markdown(HEADER.read_text()))
    if COMMANDS_MARK in markdown:
        markdown = markdown.replace(COMMANDS_MARK, commands_as_markdown())
    return markdown


# ---- The C header ----

SECTION = re.compile(r"^/\* ---- (.+?) -+ \*/$", re.MULTILINE)
COMMENT = re.compile(r"\A/\*(.*?)\*/\n?", re.DOTALL)
NAMES = re.compile(r"\b(dlm_\w+)\(|^typedef struct (dlm_\w+) \{|^typedef struct dlm_\w+ (dlm_\w+);")


def header_as_markdown(header: str) -> str:
    """Return Markdown with a heading, the comment as text, and the declaration, for each
    declaration of the header.
    """
    introduction, *rest = SECTION.split(header)
    parts = [_text(introduction[: introduction.index("*/")].removeprefix("/*"))]
    before = introduction[introduction.index("#define DLM_API ") :]
    sections = [("Version and statuses", before), *zip(rest[::2], rest[1::2], strict=True)]
    for title, body in sections:
        parts.append(f"## {title}")
        parts += [_declaration(block) for block in _blocks(body)]
    return "\n\n".join(part for part in parts if part)


def _blocks(body: str) -> list[str]:
    """Split the header at blank lines that are outside of braces."""
    body = re.sub(r"\n#ifdef __cplusplus\n}\n.*", "", body, flags=re.DOTALL)
    found, lines, depth = [], [], 0
    for line in body.splitlines():
        depth += line.count("{") - line.count("}")
        if line or depth:
            lines.append(line)
        elif lines:
            found.append("\n".join(lines))
            lines = []
    return [*found, "\n".join(lines)] if lines else found


def _declaration(block: str) -> str:
    comment = COMMENT.match(block)
    code = block[comment.end() :].strip() if comment else block
    text = _text(comment[1]) if comment else ""
    names: list[str] = []
    for line in code.splitlines():
        if line.startswith(("typedef struct", "DLM_API", "dlm_", "typedef dlm_status (*")):
            names += [next(filter(None, groups)) for groups in NAMES.findall(line)]
    heading = "### " + ", ".join(f"`{name}`" for name in dict.fromkeys(names)) if names else ""
    shown = f"```c\n{code}\n```" if code else ""
    return "\n\n".join(part for part in (heading, text, shown) if part)


def _text(comment: str) -> str:
    """Return a comment's text as Markdown.

    Indented lines become a code block, and other lines stay unchanged.
    """
    lines = [re.sub(r"^ \* ?", "", line).rstrip() for line in comment.strip("\n").splitlines()]
    text = "\n".join(line.strip() if line.startswith("     ") else line for line in lines)
    # In Markdown, a list needs a blank line before it.
    text = re.sub(r"(?m)^(?![- ])(.+)\n(?=- )", r"\1\n\n", text)
    return re.sub(r"(?<![\w`])(dlm_runtime\.h|dlm_\w+|DLM_\w+\b)", r"`\1`", _escape(text)).strip()


def _escape(text: str) -> str:
    return text.replace("<", "&lt;").replace("*", r"\*")


# ---- The command line ----


def commands_as_markdown() -> str:
    """Return the usage, help and options of each command."""
    from dlm_export.cli import main

    parts = []
    for name, command in sorted(main.commands.items()):
        context = click.Context(command, info_name=f"dlm-export {name}")
        usage = command.get_usage(context).removeprefix("Usage: ")
        parts += [f"## {name}", f"```\n{usage}\n```", _help(command.help or "")]
        records = [
            parameter.get_help_record(context)
            for parameter in command.get_params(context)
            if isinstance(parameter, click.Option)
        ]
        rows = [f"| `{names}` | {_cell(text)} |" for names, text in filter(None, records)]
        parts.append("\n".join(["| option | meaning |", "|---|---|", *rows]))
    return "\n\n".join(parts)


def _help(text: str) -> str:
    """Return a command's help as Markdown.

    Paragraphs that click must not wrap become code blocks.
    """
    paragraphs = inspect.cleandoc(text).split("\f")[0].split("\n\n")
    return "\n\n".join(
        "```\n" + paragraph.removeprefix("\b\n") + "\n```"
        if paragraph.startswith("\b\n")
        else _escape(paragraph)
        for paragraph in paragraphs
    )


def _cell(text: str) -> str:
    return _escape(text).replace("|", r"\|").replace("[", r"\[")


def on_post_page(output: str, **_: Any) -> str:
    """Fail if a page loads something from another host."""
    loaded = re.findall(
        r"<(?:script|img|iframe)[^>]*\bsrc=[\"']?(https?://[^\"'\s>]+)"
        r"|<link[^>]*\brel=[\"']?(?:stylesheet|preconnect)[^>]*\bhref=[\"']?(https?://[^\"'\s>]+)",
        output,
    )
    assert not loaded, f"a page loads {loaded}"
    return output
