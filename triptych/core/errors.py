"""The one error tree and its one mapping to HTTP and gRPC.

    TriptychError
    ├── RequestError            the caller must change something      4xx
    │   ├── RequestRefused      workers were lost over it             422
    │   ├── InvalidRequest      a parameter is wrong                  400
    │   ├── MediaInvalid        the media cannot be read              400
    │   ├── MediaMismatch       the media is not what it said it was  400
    │   ├── MediaUnsupported    a format or modality we do not take   415 / 400
    │   ├── RequestTooLarge     would not fit an empty pool           400
    │   ├── PayloadTooLarge     more bytes than the limit             413
    │   ├── HeadersTooLarge     more bytes of headers than the limit  431
    │   ├── ModelNotFound                                             404
    │   ├── Unauthenticated     no API key, or one that is not known  401
    │   └── Forbidden           not for this tenant                   403
    ├── CapacityError           try again later                       429 / 503
    │   ├── NoRoom              a pool is full just now (retriable)
    │   ├── Saturated           the line for room is full             503
    │   ├── Overloaded          memory, fetches or places are taken   429
    │   │   └── RateLimited     the tenant has had its share          429
    │   └── Unavailable         no worker for a stage
    ├── AttemptError            this try is over, another may work
    │   ├── StaleAttempt        a newer attempt is known
    │   ├── PeerLost            a worker or its session went away
    │   │   └── ReceiverLost    the one that a worker was to send to
    │   ├── Retracted           the answer lost its pages to others
    │   ├── EmbeddingMissing    a dispatched embedding did not come
    │   └── TransferRefused     handle, generation, length or checksum is wrong
    ├── DeadlineExceeded                                              504
    ├── Aborted                 cancelled by its owner                499
    └── StartupError            settings, model or machine cannot work (exit status 1 with a sentence)

A message is written for the user: it says what to do, and never holds a path, an address, a key or media.
"""

from __future__ import annotations

from typing import ClassVar


class TriptychError(Exception):
    """Base. `code` is the stable name, `http_status` and `grpc_status` the mapping, `retriable` may help elsewhere."""

    code: ClassVar[str] = "internal"
    http_status: ClassVar[int] = 500
    grpc_status: ClassVar[str] = "INTERNAL"
    retriable: ClassVar[bool] = False

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class RequestError(TriptychError):
    code = "request_error"
    http_status = 400
    grpc_status = "INVALID_ARGUMENT"


class InvalidRequest(RequestError):
    code = "invalid_request"


class MediaInvalid(RequestError):
    code = "media_invalid"


class MediaMismatch(RequestError):
    code = "media_mismatch"


class MediaUnsupported(RequestError):
    code = "media_unsupported"
    http_status = 415


class ModalityUnsupported(RequestError):
    code = "modality_unsupported"


class RequestTooLarge(RequestError):
    code = "request_too_large"


class PayloadTooLarge(RequestError):
    code = "payload_too_large"
    http_status = 413


class HeadersTooLarge(RequestError):
    code = "headers_too_large"
    http_status = 431


class ModelNotFound(RequestError):
    code = "model_not_found"
    http_status = 404
    grpc_status = "NOT_FOUND"


class RequestRefused(RequestError):
    code = "request_refused"
    http_status = 422


class Unauthenticated(RequestError):
    code = "unauthenticated"
    http_status = 401
    grpc_status = "UNAUTHENTICATED"


class Forbidden(RequestError):
    code = "forbidden"
    http_status = 403
    grpc_status = "PERMISSION_DENIED"


class CapacityError(TriptychError):
    """`retry_after_s`: when the same may be asked again; None where nobody can tell."""

    code = "capacity"
    http_status = 503
    grpc_status = "RESOURCE_EXHAUSTED"
    retriable = True

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message, param=param)
        self.retry_after_s = retry_after_s


class NoRoom(CapacityError):
    code = "no_room"


class Overloaded(CapacityError):
    code = "overloaded"
    http_status = 429


class RateLimited(Overloaded):
    code = "rate_limited"


class Saturated(CapacityError):
    code = "saturated"


class Unavailable(CapacityError):
    code = "unavailable"
    grpc_status = "UNAVAILABLE"


class AttemptError(TriptychError):
    code = "attempt_failed"
    http_status = 503
    grpc_status = "ABORTED"
    retriable = True


class StaleAttempt(AttemptError):
    code = "stale_attempt"


class PeerLost(AttemptError):
    code = "peer_lost"
    grpc_status = "UNAVAILABLE"


class ReceiverLost(PeerLost):
    code = "receiver_lost"


class Retracted(AttemptError):
    code = "retracted"


class EmbeddingMissing(AttemptError):
    code = "embedding_missing"


class TransferRefused(AttemptError):
    code = "transfer_refused"
    grpc_status = "FAILED_PRECONDITION"


class DeadlineExceeded(TriptychError):
    code = "deadline_exceeded"
    http_status = 504
    grpc_status = "DEADLINE_EXCEEDED"


class Aborted(TriptychError):
    code = "aborted"
    http_status = 499
    grpc_status = "CANCELLED"


class StartupError(TriptychError):
    code = "startup"
    grpc_status = "FAILED_PRECONDITION"


def _tree(cls: type[TriptychError]) -> list[type[TriptychError]]:
    return [cls, *(leaf for sub in cls.__subclasses__() for leaf in _tree(sub))]


ERRORS_BY_CODE: dict[str, type[TriptychError]] = {cls.code: cls for cls in _tree(TriptychError)}


def error_from_code(code: str, message: str, param: str | None = None) -> TriptychError:
    """The error that a peer named. An unknown code becomes the base class."""
    return ERRORS_BY_CODE.get(code, TriptychError)(message, param=param)
