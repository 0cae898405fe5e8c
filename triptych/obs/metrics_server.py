"""The metrics port under TLS: only those who show a certificate of the cluster may read it.

The handshake happens on the call's own thread, and has a time limit: who connects and says nothing holds up nobody.
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

_log = logging.getLogger(__name__)


class _Handler(WSGIRequestHandler):
    timeout = CALL_TIMEOUT_S

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name in the library
        """Nothing: others choose what would stand there."""


class _Server(ThreadingWSGIServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """A stranger's handshake ends here, in place of a traceback on standard error."""
        _log.debug("a call to the metrics port failed", exc_info=True)


class _ServerV6(_Server):
    address_family = socket.AF_INET6


def start_tls_server(host: str, port: int, tls: ssl.SSLContext) -> WSGIServer:
    """Serves on a daemon thread until the process ends. Raises OSError when it cannot be bound."""
    kind = _ServerV6 if ":" in host else _Server
    server = make_server(host, port, make_wsgi_app(), kind, handler_class=_Handler)
    server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return server
