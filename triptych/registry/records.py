"""A worker's record as JSON: protobuf's mapping of `triptych.wire.v1.WorkerRecord`."""

from __future__ import annotations

from google.protobuf import json_format

from triptych.core.worker import Role, WorkerInfo, WorkerState
from triptych.wire.v1 import registry_pb2 as wire

_ROLES = {
    Role.ENCODER: wire.ROLE_ENCODER,
    Role.PREFILL: wire.ROLE_PREFILL,
    Role.DECODE: wire.ROLE_DECODE,
}
_STATES = {
    WorkerState.STARTING: wire.WORKER_STATE_STARTING,
    WorkerState.READY: wire.WORKER_STATE_READY,
    WorkerState.DRAINING: wire.WORKER_STATE_DRAINING,
}
_ROLES_BACK = {number: role for role, number in _ROLES.items()}
_STATES_BACK = {number: state for state, number in _STATES.items()}


def to_json(worker: WorkerInfo) -> str:
    record = wire.WorkerRecord(
        worker_id=worker.worker_id,
        epoch=worker.epoch,
        roles=sorted(_ROLES[role] for role in worker.roles),
        state=_STATES[worker.state],
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
        parameter_counts=worker.parameter_counts,
    )
    return json_format.MessageToJson(record, preserving_proto_field_name=True)


def from_json(text: str) -> WorkerInfo:
    """Raises ValueError when the text is no record, or one with a role or state that we do not know."""
    try:
        record = json_format.Parse(text, wire.WorkerRecord())
        return WorkerInfo(
            worker_id=record.worker_id,
            epoch=record.epoch,
            roles=frozenset(_ROLES_BACK[role] for role in record.roles),
            state=_STATES_BACK[record.state],
            grpc_address=record.grpc_address,
            metrics_address=record.metrics_address,
            model_name=record.model_name,
            model_fingerprint=record.model_fingerprint,
            host_id=record.host_id,
            transports=tuple(record.transports),
            pid=record.pid,
            num_pages=record.num_pages,
            page_tokens=record.page_tokens,
            max_sequence_tokens=record.max_sequence_tokens,
            parameter_counts=dict(record.parameter_counts),
        )
    except (json_format.ParseError, KeyError) as error:
        raise ValueError(f"not a worker record: {error}") from error
