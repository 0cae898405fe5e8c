"""Answers /health/ready."""

from __future__ import annotations

import http.server
import signal
import sys

from services.stub import flag


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()


signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
http.server.HTTPServer((flag("--host"), int(flag("--port"))), _Handler).serve_forever()
