"""A worker's record as JSON: protobuf's mapping of `triptych.wire.v1.WorkerRecord`."""

from __future__ import annotations

from google.protobuf import json_format

from triptych.core.errors import RequestError
from triptych.core.worker import WorkerInfo
from triptych.rpc.convert import worker_from_proto, worker_to_proto
from triptych.wire.v1 import registry_pb2


def to_json(worker: WorkerInfo) -> str:
    return json_format.MessageToJson(worker_to_proto(worker), preserving_proto_field_name=True)


def from_json(text: str) -> WorkerInfo:
    """Raises ValueError when the text is no record, or one with values that no worker has."""
    try:
        return worker_from_proto(json_format.Parse(text, registry_pb2.WorkerRecord()))
    except (json_format.ParseError, RequestError) as error:
        raise ValueError(f"not a worker record: {error}") from error
