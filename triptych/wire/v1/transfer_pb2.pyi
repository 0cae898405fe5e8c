from triptych.wire.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ArenaKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ARENA_KIND_UNSPECIFIED: _ClassVar[ArenaKind]
    ARENA_KIND_EMBEDDING: _ClassVar[ArenaKind]
    ARENA_KIND_KV: _ClassVar[ArenaKind]
ARENA_KIND_UNSPECIFIED: ArenaKind
ARENA_KIND_EMBEDDING: ArenaKind
ARENA_KIND_KV: ArenaKind

class SessionRequest(_message.Message):
    __slots__ = ("sequence", "hello", "slot_request", "bind_request", "commit", "abort")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SLOT_REQUEST_FIELD_NUMBER: _ClassVar[int]
    BIND_REQUEST_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    hello: Hello
    slot_request: SlotRequest
    bind_request: BindRequest
    commit: Commit
    abort: Abort
    def __init__(self, sequence: _Optional[int] = ..., hello: _Optional[_Union[Hello, _Mapping]] = ..., slot_request: _Optional[_Union[SlotRequest, _Mapping]] = ..., bind_request: _Optional[_Union[BindRequest, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ...) -> None: ...

class SessionResponse(_message.Message):
    __slots__ = ("sequence", "hello_ack", "slot_grant", "have_it", "bound", "ack", "refused")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    HELLO_ACK_FIELD_NUMBER: _ClassVar[int]
    SLOT_GRANT_FIELD_NUMBER: _ClassVar[int]
    HAVE_IT_FIELD_NUMBER: _ClassVar[int]
    BOUND_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    hello_ack: HelloAck
    slot_grant: SlotGrant
    have_it: HaveIt
    bound: Bound
    ack: Ack
    refused: Refused
    def __init__(self, sequence: _Optional[int] = ..., hello_ack: _Optional[_Union[HelloAck, _Mapping]] = ..., slot_grant: _Optional[_Union[SlotGrant, _Mapping]] = ..., have_it: _Optional[_Union[HaveIt, _Mapping]] = ..., bound: _Optional[_Union[Bound, _Mapping]] = ..., ack: _Optional[_Union[Ack, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_version", "worker_id", "epoch", "host_id", "transports", "arena", "layout_fingerprint", "curve_key", "pages", "may_narrow")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    ARENA_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    CURVE_KEY_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    MAY_NARROW_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    worker_id: str
    epoch: int
    host_id: str
    transports: _containers.RepeatedScalarFieldContainer[str]
    arena: ArenaKind
    layout_fingerprint: bytes
    curve_key: bytes
    pages: PageFormat
    may_narrow: bool
    def __init__(self, protocol_version: _Optional[int] = ..., worker_id: _Optional[str] = ..., epoch: _Optional[int] = ..., host_id: _Optional[str] = ..., transports: _Optional[_Iterable[str]] = ..., arena: _Optional[_Union[ArenaKind, str]] = ..., layout_fingerprint: _Optional[bytes] = ..., curve_key: _Optional[bytes] = ..., pages: _Optional[_Union[PageFormat, _Mapping]] = ..., may_narrow: _Optional[bool] = ...) -> None: ...

class PageFormat(_message.Message):
    __slots__ = ("page_tokens", "dtype")
    PAGE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    page_tokens: int
    dtype: _common_pb2.KvDtype
    def __init__(self, page_tokens: _Optional[int] = ..., dtype: _Optional[_Union[_common_pb2.KvDtype, str]] = ...) -> None: ...

class HelloAck(_message.Message):
    __slots__ = ("worker_id", "epoch", "transport", "segment_name", "segment_bytes", "mapping_id", "socket_path", "data_port", "session_key", "device", "curve_key", "pages", "nixl", "control_path", "control_key")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_NAME_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAPPING_ID_FIELD_NUMBER: _ClassVar[int]
    SOCKET_PATH_FIELD_NUMBER: _ClassVar[int]
    DATA_PORT_FIELD_NUMBER: _ClassVar[int]
    SESSION_KEY_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    CURVE_KEY_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    NIXL_FIELD_NUMBER: _ClassVar[int]
    CONTROL_PATH_FIELD_NUMBER: _ClassVar[int]
    CONTROL_KEY_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    epoch: int
    transport: str
    segment_name: str
    segment_bytes: int
    mapping_id: int
    socket_path: str
    data_port: int
    session_key: bytes
    device: DeviceAddress
    curve_key: bytes
    pages: PageFormat
    nixl: NixlAddress
    control_path: str
    control_key: bytes
    def __init__(self, worker_id: _Optional[str] = ..., epoch: _Optional[int] = ..., transport: _Optional[str] = ..., segment_name: _Optional[str] = ..., segment_bytes: _Optional[int] = ..., mapping_id: _Optional[int] = ..., socket_path: _Optional[str] = ..., data_port: _Optional[int] = ..., session_key: _Optional[bytes] = ..., device: _Optional[_Union[DeviceAddress, _Mapping]] = ..., curve_key: _Optional[bytes] = ..., pages: _Optional[_Union[PageFormat, _Mapping]] = ..., nixl: _Optional[_Union[NixlAddress, _Mapping]] = ..., control_path: _Optional[str] = ..., control_key: _Optional[bytes] = ...) -> None: ...

class NixlAddress(_message.Message):
    __slots__ = ("metadata", "base")
    METADATA_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    metadata: bytes
    base: int
    def __init__(self, metadata: _Optional[bytes] = ..., base: _Optional[int] = ...) -> None: ...

class DeviceAddress(_message.Message):
    __slots__ = ("handle", "device_uuid", "lease_name")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_UUID_FIELD_NUMBER: _ClassVar[int]
    LEASE_NAME_FIELD_NUMBER: _ClassVar[int]
    handle: bytes
    device_uuid: bytes
    lease_name: str
    def __init__(self, handle: _Optional[bytes] = ..., device_uuid: _Optional[bytes] = ..., lease_name: _Optional[str] = ...) -> None: ...

class SlotRequest(_message.Message):
    __slots__ = ("ref", "item_index", "identity", "num_tokens", "num_bytes")
    REF_FIELD_NUMBER: _ClassVar[int]
    ITEM_INDEX_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    ref: _common_pb2.AttemptRef
    item_index: int
    identity: bytes
    num_tokens: int
    num_bytes: int
    def __init__(self, ref: _Optional[_Union[_common_pb2.AttemptRef, _Mapping]] = ..., item_index: _Optional[int] = ..., identity: _Optional[bytes] = ..., num_tokens: _Optional[int] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class SlotGrant(_message.Message):
    __slots__ = ("slot_id", "offset", "num_bytes", "generation", "capability")
    SLOT_ID_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    CAPABILITY_FIELD_NUMBER: _ClassVar[int]
    slot_id: int
    offset: int
    num_bytes: int
    generation: int
    capability: bytes
    def __init__(self, slot_id: _Optional[int] = ..., offset: _Optional[int] = ..., num_bytes: _Optional[int] = ..., generation: _Optional[int] = ..., capability: _Optional[bytes] = ...) -> None: ...

class HaveIt(_message.Message):
    __slots__ = ("source",)
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    source: _common_pb2.EmbeddingSource
    def __init__(self, source: _Optional[_Union[_common_pb2.EmbeddingSource, str]] = ...) -> None: ...

class BindRequest(_message.Message):
    __slots__ = ("ref", "grant_id", "capability")
    REF_FIELD_NUMBER: _ClassVar[int]
    GRANT_ID_FIELD_NUMBER: _ClassVar[int]
    CAPABILITY_FIELD_NUMBER: _ClassVar[int]
    ref: _common_pb2.AttemptRef
    grant_id: str
    capability: bytes
    def __init__(self, ref: _Optional[_Union[_common_pb2.AttemptRef, _Mapping]] = ..., grant_id: _Optional[str] = ..., capability: _Optional[bytes] = ...) -> None: ...

class Bound(_message.Message):
    __slots__ = ("generation", "groups", "num_held_tokens")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    NUM_HELD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    generation: int
    groups: _containers.RepeatedCompositeFieldContainer[_common_pb2.GroupRegions]
    num_held_tokens: int
    def __init__(self, generation: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[_common_pb2.GroupRegions, _Mapping]]] = ..., num_held_tokens: _Optional[int] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("ref", "generation", "capability", "embedding", "kv")
    REF_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    CAPABILITY_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    ref: _common_pb2.AttemptRef
    generation: int
    capability: bytes
    embedding: EmbeddingCommit
    kv: KvCommit
    def __init__(self, ref: _Optional[_Union[_common_pb2.AttemptRef, _Mapping]] = ..., generation: _Optional[int] = ..., capability: _Optional[bytes] = ..., embedding: _Optional[_Union[EmbeddingCommit, _Mapping]] = ..., kv: _Optional[_Union[KvCommit, _Mapping]] = ...) -> None: ...

class EmbeddingCommit(_message.Message):
    __slots__ = ("item_index", "slot_id", "num_bytes", "checksum", "source")
    ITEM_INDEX_FIELD_NUMBER: _ClassVar[int]
    SLOT_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    item_index: int
    slot_id: int
    num_bytes: int
    checksum: int
    source: _common_pb2.EmbeddingSource
    def __init__(self, item_index: _Optional[int] = ..., slot_id: _Optional[int] = ..., num_bytes: _Optional[int] = ..., checksum: _Optional[int] = ..., source: _Optional[_Union[_common_pb2.EmbeddingSource, str]] = ...) -> None: ...

class KvCommit(_message.Message):
    __slots__ = ("grant_id", "num_tokens", "num_bytes", "first_token", "position_delta", "checksum")
    GRANT_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    POSITION_DELTA_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    grant_id: str
    num_tokens: int
    num_bytes: int
    first_token: _common_pb2.Token
    position_delta: int
    checksum: int
    def __init__(self, grant_id: _Optional[str] = ..., num_tokens: _Optional[int] = ..., num_bytes: _Optional[int] = ..., first_token: _Optional[_Union[_common_pb2.Token, _Mapping]] = ..., position_delta: _Optional[int] = ..., checksum: _Optional[int] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("ref", "grant_id", "reason")
    REF_FIELD_NUMBER: _ClassVar[int]
    GRANT_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ref: _common_pb2.AttemptRef
    grant_id: str
    reason: str
    def __init__(self, ref: _Optional[_Union[_common_pb2.AttemptRef, _Mapping]] = ..., grant_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class Ack(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Refused(_message.Message):
    __slots__ = ("error",)
    ERROR_FIELD_NUMBER: _ClassVar[int]
    error: _common_pb2.ErrorDetail
    def __init__(self, error: _Optional[_Union[_common_pb2.ErrorDetail, _Mapping]] = ...) -> None: ...
