"""Serves the page at ``/``, whose static files are in the folder ``page``."""

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
    # These headers let the page load files and data only from this server. The headers also forbid
    # inline code, and keep scripts from parsing text as HTML.
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
    """Return a dict that maps each path on the server to a file's name in the folder ``page``."""
    names = sorted(each.name for each in (files("dlm_serve") / "page").iterdir())
    return {"/" if name == "index.html" else f"/page/{name}": name for name in names}


FILES = _files()
PATHS = tuple(FILES)
"""The paths of the page's files.

Requests to these paths need no key, because the page itself asks the user for the key.
"""


def routes() -> list[Route]:
    """Return the routes of the page. Each file is read only once."""
    return [_route(path, name) for path, name in FILES.items()]


def _route(path: str, name: str) -> Route:
    content = (files("dlm_serve") / "page" / name).read_bytes()
    media_type = MEDIA_TYPES[name.rpartition(".")[2]]

    async def show(_: Request) -> Response:
        return Response(content, headers=HEADERS, media_type=media_type)

    return Route(path, show, methods=["GET"])
