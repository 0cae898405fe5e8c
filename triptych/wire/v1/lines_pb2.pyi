from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class HoldRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HoldResponse(_message.Message):
    __slots__ = ("socket_path", "session", "key")
    SOCKET_PATH_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    socket_path: str
    session: int
    key: bytes
    def __init__(self, socket_path: _Optional[str] = ..., session: _Optional[int] = ..., key: _Optional[bytes] = ...) -> None: ...
