"""What all endpoints share: ids, counting, bodies of bounded size, and errors in OpenAI's shape."""

from __future__ import annotations

import logging
import math

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.router.byte_budget import ByteBudget, ByteLease
from services.router.responses import INTERNAL_MESSAGE, Json, error_json
from triptych.core.errors import (
    CapacityError,
    InvalidRequest,
    PayloadTooLarge,
    TriptychError,
    Unauthenticated,
)
from triptych.core.ids import new_request_id
from triptych.obs import metrics
from triptych.obs.log import for_request

CHAT_PATH = "/v1/chat/completions"
_ENDPOINTS = frozenset({CHAT_PATH, "/v1/models", "/health", "/health/ready", "/ready", "/metrics", "/openapi.json"})
# What JSON takes to decode, on the event loop, goes by its values, and they by their commas: 64 MiB of nothing else are
# seconds. No text that fits a model's context has nearly as many.
MAX_COMMAS = 500_000
_CLIENT_GONE = 499
_RETRY_AFTER_S = 1
_MOST_RETRY_AFTER_S = 3600

_log = logging.getLogger(__name__)


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: object) -> bytes:
        return orjson.dumps(content)


class RequestScope:
    """Outermost: mints the request id (`scope["state"]["request_id"]`, `x-request-id`), counts every request by its
    outcome, turns what nobody caught into a bare 500, and gives back the bytes that a request held
    (`scope["state"]["held_bytes"]`)."""

    def __init__(self, app: ASGIApp, budget: ByteBudget) -> None:
        self._app = app
        self._budget = budget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(send)
        lease = self._budget.lease()
        scope.setdefault("state", {}).update(request_id=exchange.request_id, held_bytes=lease)
        try:
            await self._run(scope, receive, exchange)
        finally:
            lease.release()
            metrics.REQUESTS.labels(_endpoint(scope["path"]), str(exchange.status)).inc()

    async def _run(self, scope: Scope, receive: Receive, exchange: _Exchange) -> None:
        try:
            await self._app(scope, receive, exchange.send)
        except ClientDisconnect:
            return
        except Exception:
            for_request(_log, exchange.request_id).exception("a request failed with a bug")
            if exchange.status == _CLIENT_GONE:
                await error_response(TriptychError(INTERNAL_MESSAGE))(scope, receive, exchange.send)


class _Exchange:
    """One request's id and the status that its answer began with; `_CLIENT_GONE` while there is none."""

    def __init__(self, send: Send) -> None:
        self.request_id = new_request_id()
        self.status = _CLIENT_GONE
        self._send = send

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = [*message.get("headers", []), (b"x-request-id", self.request_id.encode())]
            message = {**message, "headers": headers}
        await self._send(message)


def error_response(error: TriptychError) -> JsonResponse:
    metrics.REQUEST_ERRORS.labels(error.code).inc()
    headers: dict[str, str] = {}
    if isinstance(error, CapacityError):
        headers["retry-after"] = _retry_after(error)
    if isinstance(error, Unauthenticated):
        headers["www-authenticate"] = "Bearer"
    return JsonResponse(error_json(error), status_code=error.http_status, headers=headers)


def _retry_after(error: CapacityError) -> str:
    """Whole seconds, rounded up: who comes at that moment is let in."""
    return str(math.ceil(min(max(error.retry_after_s or 0, _RETRY_AFTER_S), _MOST_RETRY_AFTER_S)))


async def on_triptych_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, TriptychError)
    if error.http_status >= 500:
        log = for_request(_log, request.state.request_id)
        log.warning("a request failed", extra={"code": error.code, "reason": error.message})
    return error_response(error)


async def on_http_error(request: Request, error: Exception) -> Response:
    """404, 405 and the like, which the framework raises."""
    assert isinstance(error, HTTPException)
    messages = {404: "there is no such endpoint", 405: "this endpoint does not take this method"}
    codes = {404: "not_found", 405: "method_not_allowed"}
    code = codes.get(error.status_code, "http_error")
    metrics.REQUEST_ERRORS.labels(code).inc()
    message = messages.get(error.status_code, "the request cannot be served")
    body: Json = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}
    return JsonResponse(body, status_code=error.status_code, headers=error.headers)


async def read_json_body(request: Request, max_bytes: int) -> object:
    """Raises PayloadTooLarge without having read more than the limit, Overloaded when other requests hold too much, and
    InvalidRequest for what is no JSON."""
    held: ByteLease = request.state.held_bytes
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > max_bytes:
        raise _body_too_large(max_bytes)
    body = bytearray()
    async for piece in request.stream():
        body += piece
        held.take(len(piece))
        if len(body) > max_bytes:
            raise _body_too_large(max_bytes)
    if len(body) > MAX_COMMAS and body.count(b",") > MAX_COMMAS:
        raise InvalidRequest(f"a request's body may have at most {MAX_COMMAS} commas, in texts and between values")
    try:
        decoded: object = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON (line {error.lineno}, column {error.colno})") from None
    return decoded


def _body_too_large(max_bytes: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"a request's body may have at most {max_bytes} bytes")


def _endpoint(path: str) -> str:
    if path.startswith("/v1/models/"):
        return "/v1/models/{id}"
    return path if path in _ENDPOINTS else "other"
