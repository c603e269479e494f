"""An object store on loopback: moto's server, which also counts and fails requests."""

from __future__ import annotations

import contextlib
import functools
import html
import os
import re
import socket
import threading
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

__all__ = ["BUCKET", "ObjectStore", "object_store"]

BUCKET = "bucket"
_REFUSED = "AccessDenied", "403 Forbidden"


class ObjectStore:
    """A server. ``sent`` and ``received`` count the bytes of bodies; ``requests`` are methods,
    paths and queries; ``parallel`` is how many requests were served at a time, at most.

    ``before`` is called with a request's environment before it is served; if it raises
    ConnectionResetError, the connection is closed without a reply. ``refuse`` denies access,
    ``busy`` says which requests are answered with that the client is to slow down, and ``cut`` of
    which the connection is closed instead of replying, although they were carried out. ``trickle``
    says which replies are sent byte by byte, one each 10 ms.
    """

    def __init__(self) -> None:
        # They take half a second of a processor, which those who only collect these tests save.
        from moto import backends
        from moto.moto_server.werkzeug_app import (
            DomainDispatcherApplication,
            MotoRequestHandler,
            create_backend_app,
        )
        from werkzeug.serving import make_server

        self.sent = 0
        self.received = 0
        self.requests: list[str] = []
        self.ranges: list[str] = []
        self.parallel = 0
        self._active = 0
        self._met, self._never = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        # moto looks whether there is an object, and then stores: two may find that there is none.
        self._conditional = threading.Lock()
        self.refuse = False
        self.busy: Callable[[dict[str, Any]], bool] = lambda _: False
        self.cut: Callable[[dict[str, Any]], bool] = lambda _: False
        self.trickle: Callable[[dict[str, Any]], bool] = lambda _: False
        self.before: Callable[[dict[str, Any]], object] | None = None
        self._app = DomainDispatcherApplication(create_backend_app)
        # Which services there are is asked for each request, and does not change. Connections stay,
        # as those to all object stores do.
        services = tuple(backends.list_of_moto_modules())
        backends.list_of_moto_modules = lambda: services
        said = {"log": lambda *_: None, "protocol_version": "HTTP/1.1"}
        handler = type("Handler", (MotoRequestHandler,), said)
        self._server = make_server("127.0.0.1", 0, self._serve, True, request_handler=handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def reset(self) -> None:
        """Count from 0 again, and serve everything."""
        self.refuse = False
        self.sent = self.received = self.parallel = 0
        self.requests.clear()
        self.ranges.clear()
        self._met.clear()
        self.before = None
        self.busy = self.cut = self.trickle = lambda _: False

    def meet(self, environ: dict[str, Any]) -> None:
        """As ``before``: parts of files wait for another request, unless none comes. So who sends
        several at a time is seen to, however late they are.
        """
        if "partNumber" in environ.get("QUERY_STRING", "") or "HTTP_RANGE" in environ:
            self._met.wait(20)

    @property
    def active(self) -> int:
        """How many requests are being served."""
        return self._active

    def listed(self) -> list[str]:
        """The names of all objects, at most a thousand."""
        listed = self.call("GET", f"{BUCKET}?list-type=2").decode()
        return [html.unescape(key) for key in re.findall("<Key>(.*?)</Key>", listed)]

    def call(self, method: str, path: str, data: bytes | None = None) -> bytes:
        """Make a request; returns the reply. It counts like all others."""
        known = {
            "Authorization": "AWS4-HMAC-SHA256 Credential=testing/20260101/us-east-1/s3/any",
            "Content-Type": "application/octet-stream",
        }
        request = urllib.request.Request(f"{self.url}/{path}", data, known, method=method)
        with urllib.request.urlopen(request) as reply:
            return bytes(reply.read())

    def _serve(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterator[bytes]:
        with self._lock:
            query = environ.get("QUERY_STRING", "")
            self.requests.append(f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}?{query}")
            self.received += int(environ.get("CONTENT_LENGTH") or 0)
            if "HTTP_RANGE" in environ:
                self.ranges.append(environ["HTTP_RANGE"])
            self._active += 1
            self.parallel = max(self.parallel, self._active)
            if self._active > 1:
                self._met.set()
        try:
            if self.before is not None:
                try:
                    self.before(environ)
                except ConnectionResetError:
                    environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
                    raise
            busy = self.busy(environ)
            if self.refuse or busy:
                code, status = ("SlowDown", "503 Slow Down") if busy else _REFUSED
                environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
                body = f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode()
                kind, size = ("Content-Type", "application/xml"), ("Content-Length", str(len(body)))
                start(status, [kind, size])
                yield body if environ["REQUEST_METHOD"] != "HEAD" else b""
                return
            if self.cut(environ):
                b"".join(self._answer(environ, lambda *_: lambda _: None))
                environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
                raise ConnectionResetError
            trickles = self.trickle(environ)
            for chunk in self._answer(environ, start):
                for byte in chunk if trickles else b"":
                    yield bytes([byte])
                    self._never.wait(0.01)
                if trickles:
                    continue
                with self._lock:
                    self.sent += len(chunk)
                yield chunk
        finally:
            with self._lock:
                self._active -= 1

    def _answer(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        """What moto answers. Requests with a condition are carried out one at a time."""
        is_conditional = environ.keys() & {"HTTP_IF_MATCH", "HTTP_IF_NONE_MATCH"}
        with self._conditional if is_conditional else contextlib.nullcontext():
            answer: Iterable[bytes] = self._app(environ, start)
            return answer


# One for the process: a client of another address takes a fifth of a second of a processor.
_shared = functools.cache(ObjectStore)


@contextlib.contextmanager
def object_store() -> Iterator[ObjectStore]:
    """A server with an empty bucket, which the environment names to all S3 clients."""
    server = _shared()
    names = {
        "AWS_ENDPOINT_URL": server.url,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    }
    with mock.patch.dict(os.environ, names):
        server.reset()
        server.call("POST", "moto-api/reset")
        server.call("PUT", BUCKET)
        server.reset()
        yield server
