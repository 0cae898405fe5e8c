from triptych.wire.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GenerateRequest(_message.Message):
    __slots__ = ("ref", "plan")
    REF_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    ref: _common_pb2.AttemptRef
    plan: _common_pb2.Plan
    def __init__(self, ref: _Optional[_Union[_common_pb2.AttemptRef, _Mapping]] = ..., plan: _Optional[_Union[_common_pb2.Plan, _Mapping]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("granted", "tokens", "retracted", "generate_done")
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    RETRACTED_FIELD_NUMBER: _ClassVar[int]
    GENERATE_DONE_FIELD_NUMBER: _ClassVar[int]
    granted: _common_pb2.Grant
    tokens: TokenBatch
    retracted: Retracted
    generate_done: GenerateDone
    def __init__(self, granted: _Optional[_Union[_common_pb2.Grant, _Mapping]] = ..., tokens: _Optional[_Union[TokenBatch, _Mapping]] = ..., retracted: _Optional[_Union[Retracted, _Mapping]] = ..., generate_done: _Optional[_Union[GenerateDone, _Mapping]] = ...) -> None: ...

class TokenBatch(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[_common_pb2.Token]
    def __init__(self, tokens: _Optional[_Iterable[_Union[_common_pb2.Token, _Mapping]]] = ...) -> None: ...

class Retracted(_message.Message):
    __slots__ = ("num_tokens", "timeline")
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    timeline: _containers.RepeatedCompositeFieldContainer[_common_pb2.TimelineEvent]
    def __init__(self, num_tokens: _Optional[int] = ..., timeline: _Optional[_Iterable[_Union[_common_pb2.TimelineEvent, _Mapping]]] = ...) -> None: ...

class GenerateDone(_message.Message):
    __slots__ = ("finish_reason", "usage", "timeline")
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    finish_reason: _common_pb2.FinishReason
    usage: _common_pb2.Usage
    timeline: _containers.RepeatedCompositeFieldContainer[_common_pb2.TimelineEvent]
    def __init__(self, finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., usage: _Optional[_Union[_common_pb2.Usage, _Mapping]] = ..., timeline: _Optional[_Iterable[_Union[_common_pb2.TimelineEvent, _Mapping]]] = ...) -> None: ...
