"""The page at ``/``: static files of the folder ``page``, served with a strict content policy."""

from __future__ import annotations

from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

MEDIA_TYPES = {
    "css": "text/css",
    "html": "text/html",
    "js": "text/javascript",
    "svg": "image/svg+xml",
}
SOURCES = ("connect-src", "img-src", "script-src", "style-src")
HEADERS = {
    # Only files and addresses of this server, no inline code, and no way to parse text as HTML.
    "content-security-policy": "; ".join(
        [
            "default-src 'none'",
            *(f"{name} 'self'" for name in SOURCES),
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        ]
    ),
    "cache-control": "no-cache",
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def _files() -> dict[str, str]:
    """The name of each file of the page, by its path on the server."""
    names = sorted(each.name for each in (files("dlm_export.serving") / "page").iterdir())
    return {"/" if name == "index.html" else f"/page/{name}": name for name in names}


FILES = _files()
PATHS = tuple(FILES)
"""Paths of the page. They need no key, because the page asks the reader for it."""


def routes() -> list[Route]:
    """The routes of the page. Its files are read once."""
    return [_route(path, name) for path, name in FILES.items()]


def _route(path: str, name: str) -> Route:
    content = (files("dlm_export.serving") / "page" / name).read_bytes()
    media_type = MEDIA_TYPES[name.rpartition(".")[2]]

    async def show(_: Request) -> Response:
        return Response(content, headers=HEADERS, media_type=media_type)

    return Route(path, show, methods=["GET"])
