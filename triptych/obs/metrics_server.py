"""The metrics port. Under TLS only those may read it who show a certificate of the authority, whatever that names: who
collects metrics should have one that opens nothing else.

The handshake happens on the call's own thread, and has a time limit: who connects and says nothing holds up nobody. Nor
can he take more than a few threads.
"""

from __future__ import annotations

import logging
import socket
import ssl
import threading
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

CALL_TIMEOUT_S: Final = 10.0
MAX_CALLS: Final = 32

_log = logging.getLogger(__name__)


class _Handler(WSGIRequestHandler):
    timeout = CALL_TIMEOUT_S

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name in the library
        """Nothing: others choose what would stand there."""


class _Server(ThreadingWSGIServer):
    request_queue_size = MAX_CALLS

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self._room = threading.BoundedSemaphore(MAX_CALLS)
        super().__init__(*arguments, **named)

    def process_request(self, request: Any, client_address: Any) -> None:
        """On a thread of its own; where as many are busy as there may be, it is hung up on."""
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A stranger's handshake ends here, in place of a traceback on standard error."""
        _log.debug("a call to the metrics port failed", exc_info=True)


class _ServerV6(_Server):
    address_family = socket.AF_INET6


def start_metrics_server(host: str, port: int, tls: ssl.SSLContext | None) -> WSGIServer:
    """Serves on a daemon thread until the process ends. Raises OSError when it cannot be bound."""
    kind = _ServerV6 if ":" in host else _Server
    server = make_server(host, port, make_wsgi_app(), kind, handler_class=_Handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return server
