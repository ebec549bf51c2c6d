"""An HTTP proxy that does to an object store's client what networks and busy servers do.

    with FaultyProxy("http://127.0.0.1:9000") as proxy:
        proxy.faults.append(Fault(FaultKind.SLOW_DOWN, method="PUT", path="shard-00002", times=2))
        client = boto3.client("s3", endpoint_url=proxy.url)

All that no fault matches goes to the server behind it, and its answer comes back as it is.
"""

from __future__ import annotations

import http.client
import re
import socket
import struct
import threading
from dataclasses import dataclass, field
from enum import Enum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

_SLOW_DOWN = (
    b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
)
_HOP_BY_HOP = {"connection", "expect", "keep-alive", "transfer-encoding", "content-length"}


class FaultKind(Enum):
    SLOW_DOWN = "503 with S3's error code SlowDown"
    BARE_503 = "503 without a body: no code and no message"
    ERROR_500 = "500 without a body"
    FORBIDDEN = "403 without a body"
    HANG = "no answer until the client gives up"
    RESET = "the connection is reset before an answer"
    CUT_UPLOAD = "the connection is reset when half of the request's body is there"
    CUT_ANSWER = "the connection is closed after half of the answer's body"


_STATUS = {
    FaultKind.SLOW_DOWN: (503, _SLOW_DOWN),
    FaultKind.BARE_503: (503, b""),
    FaultKind.ERROR_500: (500, b""),
    FaultKind.FORBIDDEN: (403, b""),
}


@dataclass(slots=True)
class Fault:
    kind: FaultKind
    method: str = ""
    """Only requests with this one; all if empty."""
    path: str = ""
    """Only requests in whose path with query this regular expression finds something."""
    times: int = 1_000_000
    """So many of them, the next ones."""

    def matches(self, method: str, path: str) -> bool:
        return self.times > 0 and self.method in ("", method) and re.search(self.path, path) is not None


@dataclass(slots=True)
class FaultyProxy:
    upstream: str
    faults: list[Fault] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)
    """`METHOD path` of each request that was let through whole, in order."""
    _server: ThreadingHTTPServer | None = field(init=False, default=None)
    _thread: threading.Thread | None = field(init=False, default=None)
    _lock: threading.Lock = field(init=False, default_factory=threading.Lock)
    _closing: threading.Event = field(init=False, default_factory=threading.Event)

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> FaultyProxy:
        proxy = self

        class Handler(_Handler):
            owner = proxy

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        assert self._server is not None
        assert self._thread is not None
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def take(self, method: str, path: str) -> Fault | None:
        """The first fault for a request, used up once."""
        with self._lock:
            fault = next((fault for fault in self.faults if fault.matches(method, path)), None)
            if fault is None:
                self.seen.append(f"{method} {path}")
            else:
                fault.times -= 1
            return fault


class _Handler(BaseHTTPRequestHandler):
    owner: FaultyProxy
    protocol_version = "HTTP/1.1"

    def do_any(self) -> None:
        fault = self.owner.take(self.command, self.path)
        length = int(self.headers.get("Content-Length") or 0)
        if fault is not None and fault.kind is FaultKind.CUT_UPLOAD:
            self.rfile.read(length // 2)
            self._reset()
            return
        body = self.rfile.read(length)
        if fault is None or fault.kind is FaultKind.CUT_ANSWER:
            self._forward(body, cut=fault is not None)
        elif fault.kind is FaultKind.HANG:
            # Until the client closes its side, which reads as end of file.
            while not self.owner._closing.is_set() and not self._client_left():
                pass
            self.close_connection = True
        elif fault.kind is FaultKind.RESET:
            self._reset()
        else:
            status, content = _STATUS[fault.kind]
            self._answer(status, [], content, len(content))

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = do_any  # the names http.server looks for

    def _forward(self, body: bytes, *, cut: bool) -> None:
        upstream = http.client.HTTPConnection(urlsplit(self.owner.upstream).netloc, timeout=60)
        try:
            headers = {name: value for name, value in self.headers.items() if name.lower() not in _HOP_BY_HOP}
            upstream.request(self.command, self.path, body, headers | {"Content-Length": str(len(body))})
            answer = upstream.getresponse()
            content = answer.read()
            kept = [(name, value) for name, value in answer.getheaders() if name.lower() not in _HOP_BY_HOP]
            length = int(answer.getheader("Content-Length") or len(content))
            self._answer(answer.status, kept, content[: len(content) // 2] if cut else content, length)
            self.close_connection = self.close_connection or cut
        finally:
            upstream.close()

    def _answer(self, status: int, headers: list[tuple[str, str]], content: bytes, length: int) -> None:
        self.send_response_only(status)
        for name, value in headers:
            self.send_header(name, value)
        if status != http.client.NO_CONTENT:
            self.send_header("Content-Length", str(length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _client_left(self) -> bool:
        self.connection.settimeout(0.05)
        try:
            return not self.connection.recv(1)
        except TimeoutError:
            return False
        except OSError:
            return True

    def _reset(self) -> None:
        """Close with RST in place of FIN."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True

    def log_message(self, format: str, *arguments: Any) -> None:
        """Silent."""
