from triptych.wire.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EncodeRequest(_message.Message):
    __slots__ = ("start", "chunk")
    START_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    start: EncodeStart
    chunk: MediaChunk
    def __init__(self, start: _Optional[_Union[EncodeStart, _Mapping]] = ..., chunk: _Optional[_Union[MediaChunk, _Mapping]] = ...) -> None: ...

class EncodeStart(_message.Message):
    __slots__ = ("ref", "prefill_worker_id", "prefill_epoch", "items", "timeout_ms", "model_fingerprint", "cache_salt")
    REF_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    PREFILL_EPOCH_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    ref: _common_pb2.AttemptRef
    prefill_worker_id: str
    prefill_epoch: int
    items: _containers.RepeatedCompositeFieldContainer[EncodeItem]
    timeout_ms: int
    model_fingerprint: bytes
    cache_salt: bytes
    def __init__(self, ref: _Optional[_Union[_common_pb2.AttemptRef, _Mapping]] = ..., prefill_worker_id: _Optional[str] = ..., prefill_epoch: _Optional[int] = ..., items: _Optional[_Iterable[_Union[EncodeItem, _Mapping]]] = ..., timeout_ms: _Optional[int] = ..., model_fingerprint: _Optional[bytes] = ..., cache_salt: _Optional[bytes] = ...) -> None: ...

class EncodeItem(_message.Message):
    __slots__ = ("item_index", "item")
    ITEM_INDEX_FIELD_NUMBER: _ClassVar[int]
    ITEM_FIELD_NUMBER: _ClassVar[int]
    item_index: int
    item: _common_pb2.Item
    def __init__(self, item_index: _Optional[int] = ..., item: _Optional[_Union[_common_pb2.Item, _Mapping]] = ...) -> None: ...

class MediaChunk(_message.Message):
    __slots__ = ("item_index", "offset", "data")
    ITEM_INDEX_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    item_index: int
    offset: int
    data: bytes
    def __init__(self, item_index: _Optional[int] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class EncodeResponse(_message.Message):
    __slots__ = ("need_bytes", "item_done", "encode_done")
    NEED_BYTES_FIELD_NUMBER: _ClassVar[int]
    ITEM_DONE_FIELD_NUMBER: _ClassVar[int]
    ENCODE_DONE_FIELD_NUMBER: _ClassVar[int]
    need_bytes: NeedBytes
    item_done: ItemDone
    encode_done: EncodeDone
    def __init__(self, need_bytes: _Optional[_Union[NeedBytes, _Mapping]] = ..., item_done: _Optional[_Union[ItemDone, _Mapping]] = ..., encode_done: _Optional[_Union[EncodeDone, _Mapping]] = ...) -> None: ...

class NeedBytes(_message.Message):
    __slots__ = ("item_index",)
    ITEM_INDEX_FIELD_NUMBER: _ClassVar[int]
    item_index: int
    def __init__(self, item_index: _Optional[int] = ...) -> None: ...

class ItemDone(_message.Message):
    __slots__ = ("item_index", "source", "num_bytes")
    ITEM_INDEX_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    item_index: int
    source: _common_pb2.EmbeddingSource
    num_bytes: int
    def __init__(self, item_index: _Optional[int] = ..., source: _Optional[_Union[_common_pb2.EmbeddingSource, str]] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class EncodeDone(_message.Message):
    __slots__ = ("timeline",)
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    timeline: _containers.RepeatedCompositeFieldContainer[_common_pb2.TimelineEvent]
    def __init__(self, timeline: _Optional[_Iterable[_Union[_common_pb2.TimelineEvent, _Mapping]]] = ...) -> None: ...
