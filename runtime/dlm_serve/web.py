"""Keeps web pages of others from using the server.

A browser sends requests of any web page to any address, also to servers that only listen on the
loopback address of the user's machine. Three checks stop such requests:

- **Host.** With DNS rebinding, a page reaches the server under its own name, and the browser
  lets the page read the answers. The name is then in the header ``Host``.
- **Origin.** Browsers name the page that sends a request in the header ``Origin``.
- **Content-Type.** Without asking the server first, browsers send bodies of other sites' pages only
  as forms or as plain text. A body must therefore be declared as JSON.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.types import Scope

from dlm_serve.errors import ApiError

ANY = "*"


def is_loopback(host: str) -> bool:
    """Return True if only programs on the same machine reach a server at this address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True)
class Web:
    """The host names and web pages that may be used with the server.

    Args:
        hosts: The names by which clients may address the server. IP addresses and ``localhost`` are
            always allowed, because DNS rebinding cannot use them. If ``hosts`` is empty, other names
            are allowed too, but not on connections to a loopback address. "*" allows all names.
        origins: The origins of pages that may use the server, such as "https://example.com", in
            addition to the server's own page. "*" allows all origins.
    """

    hosts: Collection[str] = ()
    origins: Collection[str] = ()

    def refusal(self, scope: Scope, headers: Mapping[bytes, bytes]) -> ApiError | None:
        """Return the error for a request that these checks reject, or None."""
        host = headers.get(b"host", b"").decode("latin-1").lower()
        origin = headers.get(b"origin", b"").decode("latin-1").lower()
        if not self._allows_host(host, scope.get("server")):
            said = f"the host name {host!r} is not allowed: start the server with --allow-host NAME"
            return ApiError(403, said, code="host_not_allowed")
        is_own = bool(host) and origin.partition("://")[2] == host
        if origin and not (is_own or {ANY, origin} & {*self.origins}):
            said = (
                f"pages of {origin!r} are not allowed: start the server with --cors-origin ORIGIN"
            )
            return ApiError(403, said, code="origin_not_allowed")
        kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        if scope["method"] == "POST" and kind != b"application/json":
            said = "the body must be JSON: send the header `Content-Type: application/json`"
            return ApiError(415, said, code="unsupported_media_type")
        return None

    def _allows_host(self, host: str, address: tuple[str, int | None] | None) -> bool:
        is_checked = self.hosts or (address is not None and is_loopback(address[0]))
        if not is_checked or ANY in self.hosts or not host:
            return True
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:  # invalid brackets
            return False
        if name == "localhost" or name in self.hosts:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True
