"""A local server that imitates the Hugging Face hub, for tests that load checkpoints by name.

The server offers one folder as the repository ``org/tiny``, and counts the bytes that it sends for
each file. Tests can make single files faulty. The sets ``cut``,
``forged``, ``hidden`` and ``endless`` contain names of faulty files. Downloads of files in ``cut``
end halfway, and those of files in ``endless`` never end. Files in ``forged`` are listed with a
wrong hash. Requests for files in ``hidden`` get the status 404, although the files are listed.
``headers`` are sent with all files, and ``listed`` replaces the answer about the repository.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import sys
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any

REPOSITORY = "org/tiny"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
CHUNK = 1 << 12


class QuietServer(ThreadingHTTPServer):
    """Prints no traceback if a client closes its connection early.

    Tests run commands in this process, and compare what the commands print.
    """

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class HubServer:
    """Serves ``folder`` at ``endpoint`` until the ``with`` block ends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sent: Counter[str] = Counter()
        self.requests: list[str] = []
        self.cut: set[str] = set()
        self.forged: set[str] = set()
        self.hidden: set[str] = set()
        self.endless: set[str] = set()
        self.headers: dict[str, str] = {}
        self.listed: bytes | None = None
        self.is_gated = False
        self.has_ranges = True
        self._server = QuietServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> HubServer:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def listing(self) -> dict[str, Any]:
        """Return the hub's description of the repository."""
        return {
            "id": REPOSITORY,
            "sha": COMMIT,
            "siblings": [
                self._entry(path) for path in sorted(self.folder.rglob("*")) if path.is_file()
            ],
        }

    def _entry(self, path: Path) -> dict[str, Any]:
        data, name = path.read_bytes(), path.relative_to(self.folder).as_posix()
        entry: dict[str, Any] = {
            "rfilename": name,
            "size": len(data),
            "blobId": hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest(),
        }
        if path.suffix == ".safetensors":
            entry["lfs"] = {"sha256": self.etag(name), "size": len(data), "pointerSize": 134}
        elif name in self.forged:
            entry["blobId"] = 40 * "0"
        return entry

    def etag(self, name: str) -> str:
        """Return the hash that the hub reports for a file."""
        data = (self.folder / name).read_bytes()
        if name in self.forged:
            return 64 * "0"
        if name.endswith(".safetensors"):
            return hashlib.sha256(data).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def do_HEAD(self) -> None:
                self._answer(with_body=False)

            def do_GET(self) -> None:
                self._answer(with_body=True)

            def _answer(self, *, with_body: bool) -> None:
                path = self.path.partition("?")[0]
                server.requests.append(f"{self.command} {path}")
                if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
                    self._list(found[1], found[2])
                elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
                    self._send_file(found[3], with_body=with_body)
                else:
                    self._refuse(404, "EntryNotFound")

            def _list(self, repository: str, revision: str | None) -> None:
                if repository != REPOSITORY:
                    self._refuse(401, "RepoNotFound")
                elif revision not in (None, "main", "v1", COMMIT):
                    self._refuse(404, "RevisionNotFound")
                else:
                    self._send(200, server.listed or json.dumps(server.listing()).encode(), {})

            def _send_file(self, name: str, *, with_body: bool) -> None:
                path = server.folder / name
                if server.is_gated:
                    return self._refuse(401, "GatedRepo")
                if name in server.hidden or not path.is_file():
                    return self._refuse(404, "EntryNotFound")
                data = path.read_bytes()
                first, end = 0, len(data)
                asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
                is_part = asked is not None and server.has_ranges
                if is_part:
                    assert asked is not None
                    first, end = int(asked[1]), int(asked[2]) + 1 if asked[2] else len(data)
                headers = {
                    "ETag": f'"{server.etag(name)}"',
                    "X-Repo-Commit": COMMIT,
                } | server.headers
                if is_part:
                    headers["Content-Range"] = f"bytes {first}-{end - 1}/{len(data)}"
                status = 206 if is_part else 200
                self._send(status, data[first:end], headers, name if with_body else None)

            def _send(
                self,
                status: int,
                body: bytes,
                headers: dict[str, str],
                name: str | None = "",
            ) -> None:
                self.send_response(status)
                for key, value in headers.items():
                    self.send_header(key, value)
                is_endless = name is not None and name in server.endless
                if not is_endless:
                    self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if name is None:
                    return
                if is_endless:
                    self.close_connection = True
                    return self._send_without_end(name)
                if name in server.cut:
                    body = body[: len(body) // 2]
                    self.close_connection = True
                try:
                    for start in range(0, len(body), CHUNK):
                        self.wfile.write(body[start : start + CHUNK])
                        server.sent[name] += len(body[start : start + CHUNK])
                except ConnectionError:
                    self.close_connection = True

            def _send_without_end(self, name: str) -> None:
                with contextlib.suppress(OSError):
                    while server.sent[name] < 1 << 28:
                        self.wfile.write(bytes(CHUNK))
                        server.sent[name] += CHUNK

            def _refuse(self, status: int, code: str) -> None:
                self._send(
                    status, b"{}", {"X-Error-Code": code, "X-Error-Message": code} | server.headers
                )

        return Handler
