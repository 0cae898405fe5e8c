"""One error tree on both ends of a call.

The server sends the code and the message of a TriptychError in trailing metadata; the client rebuilds the same error.
Anything else that is raised while serving is a bug: the client learns only that, the log has the traceback.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, Final, cast

import grpc
from google.protobuf.message import DecodeError

from triptych.core.errors import (
    Aborted,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    PeerLost,
    RequestTooLarge,
    TransferRefused,
    TriptychError,
    Unauthenticated,
    error_from_code,
)
from triptych.obs import metrics
from triptych.wire.v1 import common_pb2 as pb

ERROR_METADATA_KEY: Final = "triptych-error-bin"
# Trailing metadata travels in HTTP/2 headers, which gRPC bounds at 8 KiB.
MAX_MESSAGE_CHARS: Final = 1024
INTERNAL_MESSAGE: Final = "an internal error: the worker's log has it"

_log = logging.getLogger(__name__)

_BY_STATUS: dict[grpc.StatusCode, type[TriptychError]] = {
    grpc.StatusCode.UNAVAILABLE: PeerLost,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: Aborted,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.NOT_FOUND: ModelNotFound,
    # Ours carry a detail, so this one is gRPC's own: a message above the limit.
    grpc.StatusCode.RESOURCE_EXHAUSTED: RequestTooLarge,
    grpc.StatusCode.FAILED_PRECONDITION: TransferRefused,
    grpc.StatusCode.ABORTED: PeerLost,
}
_BY_STATUS_MESSAGE: dict[grpc.StatusCode, str] = {
    grpc.StatusCode.UNAVAILABLE: "the connection to a worker was lost",
    grpc.StatusCode.DEADLINE_EXCEEDED: "a worker did not answer within the request's time",
    grpc.StatusCode.CANCELLED: "the call was cancelled",
    grpc.StatusCode.UNAUTHENTICATED: "a worker refused the cluster token",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "the request is too large to pass between workers: make it shorter",
}


def detail_from_error(error: TriptychError) -> pb.ErrorDetail:
    return pb.ErrorDetail(code=error.code, message=error.message[:MAX_MESSAGE_CHARS], param=error.param or "")


def error_from_detail(detail: pb.ErrorDetail) -> TriptychError:
    return error_from_code(detail.code, detail.message[:MAX_MESSAGE_CHARS], detail.param[:MAX_MESSAGE_CHARS] or None)


def error_from_rpc(error: grpc.aio.AioRpcError) -> TriptychError:
    """What the peer raised, or what the call's failure amounts to. Never repeats gRPC's text: it holds addresses."""
    detail = _detail_of(error)
    if detail is not None:
        return error_from_detail(detail)
    status = error.code()
    message = _BY_STATUS_MESSAGE.get(status, f"a call between workers failed ({status.name.lower()})")
    return _BY_STATUS.get(status, TriptychError)(message)


class AbortOnError:
    """`async with AbortOnError(context):` around a servicer method's body: an error ends the call with the status and
    the detail of the tree, and is counted. An exception group whose leaves are all TriptychErrors counts as its first.
    """

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any], stage: str = "rpc") -> None:
        self._context = context
        self._stage = stage

    async def __aenter__(self) -> None:
        return None

    async def __aexit__(self, _: object, error: BaseException | None, __: object) -> None:
        if not isinstance(error, Exception) or isinstance(error, grpc.aio.AbortError):
            return  # no error, a cancellation, or a call that is ended already
        known = _first_known(error)
        if known is None:
            _log.error("a call failed with an error that is no TriptychError", exc_info=error)
            known = TriptychError(INTERNAL_MESSAGE)
        metrics.ERRORS.labels(self._stage, known.code).inc()
        await abort_with(self._context, known)


async def abort_with(context: grpc.aio.ServicerContext[Any, Any], error: TriptychError) -> None:
    """Ends the call; never returns normally."""
    detail = detail_from_error(error)
    await context.abort(
        grpc.StatusCode[error.grpc_status], detail.message, ((ERROR_METADATA_KEY, detail.SerializeToString()),)
    )


def _first_known(error: Exception) -> TriptychError | None:
    if isinstance(error, TriptychError):
        return error
    if isinstance(error, ExceptionGroup):
        leaves = [_first_known(leaf) for leaf in error.exceptions]
        return None if None in leaves else leaves[0]
    return None


def _detail_of(error: grpc.aio.AioRpcError) -> pb.ErrorDetail | None:
    trailing = cast("Iterable[tuple[str, str | bytes]]", error.trailing_metadata() or ())
    for key, value in trailing:
        if key == ERROR_METADATA_KEY and isinstance(value, bytes):
            try:
                return pb.ErrorDetail.FromString(value)
            except DecodeError:
                return None
    return None
