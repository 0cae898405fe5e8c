"""Small things that several messages name: attempts, workers, sources, times, number formats."""

from __future__ import annotations

import math
from collections.abc import Sequence

from triptych.core.errors import InvalidRequest
from triptych.core.ids import AttemptRef, WorkerRef
from triptych.core.kv_format import KvDtype
from triptych.core.plan import (
    EmbeddingSource,
)
from triptych.rpc import check
from triptych.rpc.convert.limits import INT63, MAX_ATTEMPT, MAX_CHOICE, MAX_SALT_BYTES, MAX_TIMEOUT_MS, MAX_TOKEN_ID
from triptych.wire.v1 import common_pb2 as pb

_SOURCE: dict[pb.EmbeddingSource, EmbeddingSource] = {
    pb.EMBEDDING_SOURCE_REMOTE: EmbeddingSource.REMOTE,
    pb.EMBEDDING_SOURCE_CACHE: EmbeddingSource.CACHE,
    pb.EMBEDDING_SOURCE_RADIX: EmbeddingSource.RADIX,
    pb.EMBEDDING_SOURCE_LOCAL: EmbeddingSource.LOCAL,
}
_KV_DTYPE: dict[pb.KvDtype, KvDtype] = {
    pb.KV_DTYPE_FLOAT32: KvDtype.FLOAT32,
    pb.KV_DTYPE_BFLOAT16: KvDtype.BFLOAT16,
    pb.KV_DTYPE_FLOAT16: KvDtype.FLOAT16,
}
_SOURCE_TO = {domain: wire for wire, domain in _SOURCE.items()}
_KV_DTYPE_TO = {domain: wire for wire, domain in _KV_DTYPE.items()}


def ref_to_proto(ref: AttemptRef) -> pb.AttemptRef:
    return pb.AttemptRef(request_id=ref.request_id, choice=ref.choice, attempt=ref.attempt)


def ref_from_proto(message: pb.AttemptRef) -> AttemptRef:
    return AttemptRef(
        check.name("request_id", message.request_id),
        check.integer("choice", message.choice, 0, MAX_CHOICE),
        check.integer("attempt", message.attempt, 0, MAX_ATTEMPT),
    )


def worker_ref_from_proto(worker_id: str, epoch: int) -> WorkerRef:
    return WorkerRef(check.name("worker_id", worker_id), check.integer("epoch", epoch, 1, INT63))


def source_to_proto(source: EmbeddingSource) -> pb.EmbeddingSource:
    return _SOURCE_TO[source]


def source_from_proto(value: pb.EmbeddingSource) -> EmbeddingSource:
    return check.choice("source", _SOURCE, value)


def cache_salt_from_proto(value: bytes) -> bytes:
    check.integer("cache_salt length", len(value), 0, MAX_SALT_BYTES)
    return value


def timeout_to_ms(timeout_s: float) -> int:
    """Rounded up, at least 1: what is expired is not sent at all. A whole number of milliseconds stays what it is,
    though the product of two floats may be a little above it."""
    return max(1, math.ceil(round(timeout_s * 1000, 6)))


def timeout_from_ms(timeout_ms: int) -> float:
    return check.integer("timeout_ms", timeout_ms, 1, MAX_TIMEOUT_MS) / 1000


def kv_dtype_to_proto(dtype: KvDtype) -> pb.KvDtype:
    return _KV_DTYPE_TO[dtype]


def kv_dtype_from_proto(dtype: pb.KvDtype) -> KvDtype:
    return check.choice("kv_dtype", _KV_DTYPE, dtype)


def token_ids(field: str, values: Sequence[int]) -> list[int]:
    ids = list(values)
    if ids and max(ids) > MAX_TOKEN_ID:
        raise InvalidRequest(f"{field} holds a number that is no token", param=field)
    return ids
