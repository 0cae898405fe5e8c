from triptych.wire.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_ENCODER: _ClassVar[Role]
    ROLE_PREFILL: _ClassVar[Role]
    ROLE_DECODE: _ClassVar[Role]

class WorkerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_STATE_UNSPECIFIED: _ClassVar[WorkerState]
    WORKER_STATE_STARTING: _ClassVar[WorkerState]
    WORKER_STATE_READY: _ClassVar[WorkerState]
    WORKER_STATE_DRAINING: _ClassVar[WorkerState]
ROLE_UNSPECIFIED: Role
ROLE_ENCODER: Role
ROLE_PREFILL: Role
ROLE_DECODE: Role
WORKER_STATE_UNSPECIFIED: WorkerState
WORKER_STATE_STARTING: WorkerState
WORKER_STATE_READY: WorkerState
WORKER_STATE_DRAINING: WorkerState

class WorkerRecord(_message.Message):
    __slots__ = ("worker_id", "epoch", "roles", "state", "grpc_address", "metrics_address", "model_name", "model_fingerprint", "host_id", "transports", "pid", "num_pages", "page_tokens", "max_sequence_tokens", "parameter_counts", "kv_layout", "embedding_layout", "kv_dtype", "may_narrow_kv", "speaks_tls")
    class ParameterCountsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    GRPC_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARAMETER_COUNTS_FIELD_NUMBER: _ClassVar[int]
    KV_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    MAY_NARROW_KV_FIELD_NUMBER: _ClassVar[int]
    SPEAKS_TLS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    epoch: int
    roles: _containers.RepeatedScalarFieldContainer[Role]
    state: WorkerState
    grpc_address: str
    metrics_address: str
    model_name: str
    model_fingerprint: bytes
    host_id: str
    transports: _containers.RepeatedScalarFieldContainer[str]
    pid: int
    num_pages: int
    page_tokens: int
    max_sequence_tokens: int
    parameter_counts: _containers.ScalarMap[str, int]
    kv_layout: bytes
    embedding_layout: bytes
    kv_dtype: _common_pb2.KvDtype
    may_narrow_kv: bool
    speaks_tls: bool
    def __init__(self, worker_id: _Optional[str] = ..., epoch: _Optional[int] = ..., roles: _Optional[_Iterable[_Union[Role, str]]] = ..., state: _Optional[_Union[WorkerState, str]] = ..., grpc_address: _Optional[str] = ..., metrics_address: _Optional[str] = ..., model_name: _Optional[str] = ..., model_fingerprint: _Optional[bytes] = ..., host_id: _Optional[str] = ..., transports: _Optional[_Iterable[str]] = ..., pid: _Optional[int] = ..., num_pages: _Optional[int] = ..., page_tokens: _Optional[int] = ..., max_sequence_tokens: _Optional[int] = ..., parameter_counts: _Optional[_Mapping[str, int]] = ..., kv_layout: _Optional[bytes] = ..., embedding_layout: _Optional[bytes] = ..., kv_dtype: _Optional[_Union[_common_pb2.KvDtype, str]] = ..., may_narrow_kv: _Optional[bool] = ..., speaks_tls: _Optional[bool] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("worker",)
    WORKER_FIELD_NUMBER: _ClassVar[int]
    worker: WorkerRecord
    def __init__(self, worker: _Optional[_Union[WorkerRecord, _Mapping]] = ...) -> None: ...
