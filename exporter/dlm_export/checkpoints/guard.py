"""Checks every answer of the hub before huggingface_hub uses it.

``HF_ENDPOINT`` may name a server that nobody should trust. huggingface_hub makes paths from the
headers of its answers, and stores whatever the server sends. The guard runs in the HTTP client, so
it also sees redirects, retries and errors.
"""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

from dlm_runtime.errors import DlmError, ExitCode

LISTING_LIMIT_BYTES = 64 << 20
_ETAG = re.compile(r"[0-9A-Za-z_-][0-9A-Za-z._-]{0,127}")
COMMIT = re.compile(r"[0-9a-f]{40}")


class HubError(DlmError):
    """Raised if a checkpoint on the hub is missing, not accessible, or damaged by the download.

    ``is_input`` is true if the user must correct the name or request access.
    """

    def __init__(self, message: str, *, is_input: bool) -> None:
        super().__init__(message)
        self.exit_code = ExitCode.WRONG_INPUT if is_input else ExitCode.COULD_NOT


class Guard:
    """Limits for the answers of a hub.

    ``commit`` is the commit whose files are fetched, and ``None`` while it is unknown. ``where``
    is the start of error messages.
    """

    def __init__(self, where: str) -> None:
        self.where, self.commit = where, ""
        self._left = LISTING_LIMIT_BYTES

    def expect(self, where: str, size: int) -> None:
        """Allow the answers for one file of ``size`` bytes.

        The limit is twice the size, because an interrupted download may start again.
        """
        self.where, self._left = where, 2 * size + (1 << 20)

    def count(self, size: int) -> None:
        """Count received bytes. Raises HubError above the limit."""
        self._left -= size
        if self._left < 0:
            raise self.error("it sent more bytes than it listed")

    def check(self, response: Any) -> None:
        """Check the headers of an answer. Raises HubError."""
        headers = response.headers
        commit = headers.get("X-Repo-Commit")
        if commit is not None and (
            COMMIT.fullmatch(commit) is None or (self.commit and commit != self.commit)
        ):
            raise self.error(f"it sent a file of another commit ({commit[:80]!r})")
        etag = headers.get("X-Linked-Etag") or headers.get("ETag") or ""
        location = headers.get("Location")
        is_followed = location is not None and not urlsplit(location).netloc
        is_used = response.request.method == "HEAD" and response.status_code < 400
        # huggingface_hub removes the same characters, and makes a path of the rest.
        is_path = _ETAG.fullmatch(etag.lstrip("W/").strip('"')) is not None
        if etag and is_used and not is_followed and not is_path:
            raise self.error(f"it sent a malformed ETag ({etag[:80]!r})")
        if headers.get("Content-Encoding", "identity") != "identity":
            raise self.error("it sent compressed data, although none was requested")

    def error(self, reason: str) -> HubError:
        return HubError(f"{self.where}: the hub's answer is malformed: {reason}", is_input=False)


@contextlib.contextmanager
def guarded(where: str) -> Iterator[Guard]:
    """Use a guard for all requests of huggingface_hub until the ``with`` block ends."""
    from huggingface_hub import constants, set_client_factory
    from huggingface_hub.utils import _http

    guard, before = Guard(where), _http._GLOBAL_CLIENT_FACTORY
    # Transfers by Xet do not use this HTTP client, so only the official hub may start them.
    official = constants.HUGGINGFACE_CO_URL_HOME.rstrip("/")

    def make() -> Any:
        client = before()
        # The library is httpx, or httpx2 for later versions of huggingface_hub.
        limited = _limited(importlib.import_module(type(client).__module__.partition(".")[0]))

        def request(request: Any) -> None:
            request.headers["Accept-Encoding"] = (
                "identity"  # a small answer may expand to a huge one
            )

        def response(response: Any) -> None:
            guard.check(response)
            if official != constants.ENDPOINT:
                response.headers.pop("X-Xet-Hash", None)
            response.stream = limited(response.stream, guard.count)

        hooks = client.event_hooks
        client.event_hooks = {
            "request": [*hooks["request"], request],
            "response": [*hooks["response"], response],
        }
        return client

    set_client_factory(make)
    try:
        yield guard
    finally:
        set_client_factory(before)


def _limited(library: Any) -> Any:
    """Return a class for the body of an answer that counts its bytes."""

    class Limited(library.SyncByteStream):  # type: ignore[misc]
        def __init__(self, inner: Any, count: Callable[[int], None]) -> None:
            self._inner, self._count = inner, count

        def __iter__(self) -> Iterator[bytes]:
            for part in self._inner:
                self._count(len(part))
                yield part

        def close(self) -> None:
            self._inner.close()

    return Limited
