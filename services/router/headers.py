"""HTTP/1.1 as uvicorn speaks it over llhttp, but that headers beyond the limit are refused, and told from nonsense."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from services.router.responses import error_json
from triptych.core.errors import HeadersTooLarge, InvalidRequest, RequestError
from triptych.obs import metrics

MAX_HEADER_BYTES = 64 * 2**10


class HttpProtocol(HttpToolsProtocol):
    """The parser keeps what it cannot make anything of yet: a header without an end, an endless list of trailers or the
    extensions of a chunk. So the bytes are counted that came since it last made something of any."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._unread_bytes = 0

    def data_received(self, data: bytes) -> None:
        self._unread_bytes += len(data)
        super().data_received(data)
        if self._unread_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
            self._refuse(headers_too_large())

    def on_url(self, url: bytes) -> None:
        """HTTP/2's own greeting has no end that an HTTP/1.1 server would ever come to. What is raised is a 400."""
        if self.parser.get_method() == b"PRI":
            raise ValueError("HTTP/2 is not spoken here")
        super().on_url(url)

    def on_headers_complete(self) -> None:
        self._unread_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unread_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unread_bytes = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(InvalidRequest("this is no HTTP/1.1 request"))

    def _refuse(self, error: RequestError) -> None:
        metrics.REQUEST_ERRORS.labels(error.code).inc()
        body = orjson.dumps(error_json(error))
        status = HTTPStatus(error.http_status)
        head = f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\nconnection: close\r\n"
        self.transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        self.transport.close()


def headers_too_large() -> HeadersTooLarge:
    return HeadersTooLarge(f"a request's headers may have at most {MAX_HEADER_BYTES} bytes")
