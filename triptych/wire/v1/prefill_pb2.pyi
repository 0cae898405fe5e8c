from triptych.wire.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PrefillRequest(_message.Message):
    __slots__ = ("ref", "plan", "grant")
    REF_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    ref: _common_pb2.AttemptRef
    plan: _common_pb2.Plan
    grant: _common_pb2.Grant
    def __init__(self, ref: _Optional[_Union[_common_pb2.AttemptRef, _Mapping]] = ..., plan: _Optional[_Union[_common_pb2.Plan, _Mapping]] = ..., grant: _Optional[_Union[_common_pb2.Grant, _Mapping]] = ...) -> None: ...

class PrefillResponse(_message.Message):
    __slots__ = ("admitted", "need_items", "first_token", "prefill_done")
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    NEED_ITEMS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    PREFILL_DONE_FIELD_NUMBER: _ClassVar[int]
    admitted: PrefillAdmitted
    need_items: NeedItems
    first_token: _common_pb2.Token
    prefill_done: PrefillDone
    def __init__(self, admitted: _Optional[_Union[PrefillAdmitted, _Mapping]] = ..., need_items: _Optional[_Union[NeedItems, _Mapping]] = ..., first_token: _Optional[_Union[_common_pb2.Token, _Mapping]] = ..., prefill_done: _Optional[_Union[PrefillDone, _Mapping]] = ...) -> None: ...

class PrefillAdmitted(_message.Message):
    __slots__ = ("cached_tokens", "missing")
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    cached_tokens: int
    missing: NeedItems
    def __init__(self, cached_tokens: _Optional[int] = ..., missing: _Optional[_Union[NeedItems, _Mapping]] = ...) -> None: ...

class NeedItems(_message.Message):
    __slots__ = ("item_indices",)
    ITEM_INDICES_FIELD_NUMBER: _ClassVar[int]
    item_indices: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, item_indices: _Optional[_Iterable[int]] = ...) -> None: ...

class PrefillDone(_message.Message):
    __slots__ = ("finish_reason", "usage", "timeline")
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    finish_reason: _common_pb2.FinishReason
    usage: _common_pb2.Usage
    timeline: _containers.RepeatedCompositeFieldContainer[_common_pb2.TimelineEvent]
    def __init__(self, finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., usage: _Optional[_Union[_common_pb2.Usage, _Mapping]] = ..., timeline: _Optional[_Iterable[_Union[_common_pb2.TimelineEvent, _Mapping]]] = ...) -> None: ...
