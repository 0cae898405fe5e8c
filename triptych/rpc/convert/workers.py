"""What a worker says of itself."""

from __future__ import annotations

from triptych.core.kv_format import MAX_PAGE_TOKENS
from triptych.core.worker import Role, WorkerInfo, WorkerState
from triptych.rpc import check
from triptych.rpc.convert.limits import FINGERPRINT_BYTES, MAX_PAGES, MAX_TOKENS
from triptych.rpc.convert.names import kv_dtype_from_proto, kv_dtype_to_proto, worker_ref_from_proto
from triptych.wire.v1 import common_pb2 as pb
from triptych.wire.v1 import registry_pb2 as registry_pb

_ROLE: dict[registry_pb.Role, Role] = {
    registry_pb.ROLE_ENCODER: Role.ENCODER,
    registry_pb.ROLE_PREFILL: Role.PREFILL,
    registry_pb.ROLE_DECODE: Role.DECODE,
}
_STATE: dict[registry_pb.WorkerState, WorkerState] = {
    registry_pb.WORKER_STATE_STARTING: WorkerState.STARTING,
    registry_pb.WORKER_STATE_READY: WorkerState.READY,
    registry_pb.WORKER_STATE_DRAINING: WorkerState.DRAINING,
}
_ROLE_TO = {domain: wire for wire, domain in _ROLE.items()}
_STATE_TO = {domain: wire for wire, domain in _STATE.items()}


def worker_to_proto(worker: WorkerInfo) -> registry_pb.WorkerRecord:
    return registry_pb.WorkerRecord(
        worker_id=worker.worker_id,
        epoch=worker.epoch,
        roles=sorted(_ROLE_TO[role] for role in worker.roles),
        state=_STATE_TO[worker.state],
        grpc_address=worker.grpc_address,
        metrics_address=worker.metrics_address,
        model_name=worker.model_name,
        model_fingerprint=worker.model_fingerprint,
        host_id=worker.host_id,
        transports=worker.transports,
        pid=worker.pid,
        num_pages=worker.num_pages,
        page_tokens=worker.page_tokens,
        max_sequence_tokens=worker.max_sequence_tokens,
        parameter_counts=dict(worker.parameter_counts),
        kv_layout=worker.kv_layout,
        embedding_layout=worker.embedding_layout,
        kv_dtype=pb.KV_DTYPE_UNSPECIFIED if worker.kv_dtype is None else kv_dtype_to_proto(worker.kv_dtype),
        may_narrow_kv=worker.may_narrow_kv,
        speaks_tls=worker.speaks_tls,
    )


def worker_from_proto(message: registry_pb.WorkerRecord) -> WorkerInfo:
    """`metrics_address`, `model_name`, `host_id` and the fingerprint may be empty (a worker that is starting)."""
    ref = worker_ref_from_proto(message.worker_id, message.epoch)
    for field, limit in (("roles", 8), ("transports", 16), ("parameter_counts", 16)):
        check.at_most(field, getattr(message, field), limit)
    check.integer("number of roles", len(message.roles), 1, 8)
    if message.model_fingerprint:
        check.exact_bytes("model_fingerprint", message.model_fingerprint, FINGERPRINT_BYTES)
    return WorkerInfo(
        worker_id=ref.worker_id,
        epoch=ref.epoch,
        roles=frozenset(check.choice("roles", _ROLE, role) for role in message.roles),
        state=check.choice("state", _STATE, message.state),
        grpc_address=check.address("grpc_address", message.grpc_address),
        metrics_address=check.address("metrics_address", message.metrics_address) if message.metrics_address else "",
        model_name=check.text("model_name", message.model_name, 256),
        model_fingerprint=message.model_fingerprint,
        host_id=check.text("host_id", message.host_id, 128),
        transports=tuple(check.name("transports", transport) for transport in message.transports),
        pid=message.pid,
        num_pages=check.integer("num_pages", message.num_pages, 0, MAX_PAGES),
        page_tokens=check.integer("page_tokens", message.page_tokens, 0, MAX_PAGE_TOKENS),
        max_sequence_tokens=check.integer("max_sequence_tokens", message.max_sequence_tokens, 0, 2 * MAX_TOKENS),
        parameter_counts={check.name("parameter_counts", part): n for part, n in message.parameter_counts.items()},
        kv_layout=_layout_from_proto("kv_layout", message.kv_layout),
        embedding_layout=_layout_from_proto("embedding_layout", message.embedding_layout),
        kv_dtype=kv_dtype_from_proto(message.kv_dtype) if message.kv_dtype else None,
        may_narrow_kv=message.may_narrow_kv,
        speaks_tls=message.speaks_tls,
    )


def _layout_from_proto(field: str, value: bytes) -> bytes:
    return check.exact_bytes(field, value, FINGERPRINT_BYTES) if value else b""
