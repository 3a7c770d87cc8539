"""`weightcached exporter`: /, /health and /metrics over HTTP, from page.py, health.py and metrics.py."""

from __future__ import annotations

import logging
import signal
import socket
import threading
import time
from collections.abc import Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType

import sdnotify

from weightcached.errors import ExporterError
from weightcached.exporter import page
from weightcached.exporter.health import Node

log = logging.getLogger(__name__)

# A client that sends no request within this time is dropped.
_REQUEST_TIMEOUT_S = 10.0
# Many who look at the page cost the daemons no more than one.
_PAGE_AGE_S = 1.0
_TEXT = "text/plain; charset=utf-8"


class _Handler(BaseHTTPRequestHandler):
    timeout = _REQUEST_TIMEOUT_S
    server: Server

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/":
            self._answer(HTTPStatus.OK, self.server.page(), page.CONTENT_TYPE, page.HEADERS)
        elif path == "/health":
            self._health()
        elif path == "/metrics":
            self._metrics()
        else:
            self._answer(HTTPStatus.NOT_FOUND, "unknown path: try /, /health or /metrics\n")

    def _health(self) -> None:
        health = self.server.node.health()
        if health.faults:
            self._answer(
                HTTPStatus.SERVICE_UNAVAILABLE, "".join(f"{line}\n" for line in health.faults)
            )
        else:
            self._answer(
                HTTPStatus.OK, f"ready: {health.ready} cache{'s' if health.ready != 1 else ''}\n"
            )

    def _metrics(self) -> None:
        try:
            from weightcached.exporter.metrics import CONTENT_TYPE, text_of
        except ImportError:
            self._answer(
                HTTPStatus.NOT_IMPLEMENTED,
                "install prometheus_client: pip install weightcached[exporter]\n",
            )
            return
        self._answer(HTTPStatus.OK, text_of(self.server.node), CONTENT_TYPE)

    def _answer(
        self,
        status: HTTPStatus,
        text: str,
        content_type: str = _TEXT,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        # A name may come from a file system, with bytes that are no UTF-8.
        body = text.encode(errors="replace")
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Do not log a probe that comes every few seconds."""
        log.debug(format, *args)


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, node: Node, host: str, port: int) -> None:
        self.node = node
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)
        self._lock = threading.Lock()
        self._page, self._asked_s = "", -_PAGE_AGE_S

    def page(self) -> str:
        """The page, as it was at most _PAGE_AGE_S ago."""
        with self._lock:
            if time.monotonic() - self._asked_s >= _PAGE_AGE_S:
                self._page, self._asked_s = page.page_of(self.node), time.monotonic()
            return self._page


def serve_http(node: Node, *, host: str, port: int) -> int:
    """Serve until SIGTERM or SIGINT, in the main thread. Returns the exit status.

    Raises ExporterError.
    """
    # Blocked before there is a thread that could take them.
    signals = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        server = Server(node, host, port)
    except OSError as e:
        raise ExporterError(
            f"cannot listen on {host} port {port}: {e.strerror or e}; choose another --port"
        ) from e
    with server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        log.info("exporter listens address=%s port=%d", *server.server_address[:2])
        sdnotify.SystemdNotifier().notify("READY=1")
        signal.sigwait(signals)
        server.shutdown()
        thread.join()
    return 0
