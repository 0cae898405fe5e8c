from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FeedKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FEED_KIND_UNSPECIFIED: _ClassVar[FeedKind]
    FEED_KIND_SNAPSHOT: _ClassVar[FeedKind]
    FEED_KIND_PART: _ClassVar[FeedKind]
    FEED_KIND_DELTA: _ClassVar[FeedKind]

class Holding(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    HOLDING_UNSPECIFIED: _ClassVar[Holding]
    HOLDING_PAGE: _ClassVar[Holding]
    HOLDING_LANDED: _ClassVar[Holding]
    HOLDING_ENCODED: _ClassVar[Holding]
FEED_KIND_UNSPECIFIED: FeedKind
FEED_KIND_SNAPSHOT: FeedKind
FEED_KIND_PART: FeedKind
FEED_KIND_DELTA: FeedKind
HOLDING_UNSPECIFIED: Holding
HOLDING_PAGE: Holding
HOLDING_LANDED: Holding
HOLDING_ENCODED: Holding

class WatchRequest(_message.Message):
    __slots__ = ("after_sequence",)
    AFTER_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    after_sequence: int
    def __init__(self, after_sequence: _Optional[int] = ...) -> None: ...

class WatchResponse(_message.Message):
    __slots__ = ("epoch", "sequence", "kind", "changes", "load")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    sequence: int
    kind: FeedKind
    changes: _containers.RepeatedCompositeFieldContainer[HoldingChange]
    load: WorkerLoad
    def __init__(self, epoch: _Optional[int] = ..., sequence: _Optional[int] = ..., kind: _Optional[_Union[FeedKind, str]] = ..., changes: _Optional[_Iterable[_Union[HoldingChange, _Mapping]]] = ..., load: _Optional[_Union[WorkerLoad, _Mapping]] = ...) -> None: ...

class HoldingChange(_message.Message):
    __slots__ = ("holding", "stored", "removed")
    HOLDING_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    holding: Holding
    stored: _containers.RepeatedScalarFieldContainer[int]
    removed: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, holding: _Optional[_Union[Holding, str]] = ..., stored: _Optional[_Iterable[int]] = ..., removed: _Optional[_Iterable[int]] = ...) -> None: ...

class WorkerLoad(_message.Message):
    __slots__ = ("waiting_tokens", "waiting_patches", "free_pages", "num_decoding", "tokens_per_s", "patches_per_s")
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WAITING_PATCHES_FIELD_NUMBER: _ClassVar[int]
    FREE_PAGES_FIELD_NUMBER: _ClassVar[int]
    NUM_DECODING_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    PATCHES_PER_S_FIELD_NUMBER: _ClassVar[int]
    waiting_tokens: int
    waiting_patches: int
    free_pages: int
    num_decoding: int
    tokens_per_s: float
    patches_per_s: float
    def __init__(self, waiting_tokens: _Optional[int] = ..., waiting_patches: _Optional[int] = ..., free_pages: _Optional[int] = ..., num_decoding: _Optional[int] = ..., tokens_per_s: _Optional[float] = ..., patches_per_s: _Optional[float] = ...) -> None: ...
