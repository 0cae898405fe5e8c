"""HTTP/1.1 as uvicorn speaks it, but that headers beyond the limit are told from nonsense."""

from __future__ import annotations

import sys

import h11
import orjson
from uvicorn.protocols.http.h11_impl import H11Protocol

from services.router.responses import error_json
from triptych.core.errors import HeadersTooLarge, InvalidRequest, RequestError
from triptych.obs import metrics

MAX_HEADER_BYTES = 64 * 2**10
_TOO_LARGE = 431


class HttpProtocol(H11Protocol):
    def send_400_response(self, msg: str) -> None:
        """Called while h11's complaint is handled, which says whether the headers are too large."""
        complaint = sys.exception()
        is_too_large = isinstance(complaint, h11.RemoteProtocolError) and complaint.error_status_hint == _TOO_LARGE
        self._refuse(headers_too_large() if is_too_large else InvalidRequest("this is no HTTP/1.1 request"))

    def _refuse(self, error: RequestError) -> None:
        metrics.REQUEST_ERRORS.labels(error.code).inc()
        body = orjson.dumps(error_json(error))
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        headers.append((b"content-length", str(len(body)).encode()))
        for event in (
            h11.Response(status_code=error.http_status, headers=headers),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


def headers_too_large() -> HeadersTooLarge:
    return HeadersTooLarge(f"a request's headers may have at most {MAX_HEADER_BYTES} bytes")
