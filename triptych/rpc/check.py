"""Bounds on what a peer may send. Each check answers its value or raises InvalidRequest naming the field."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from typing import Protocol, TypeVar

from triptych.core.errors import InvalidRequest

Key = TypeVar("Key")
Value = TypeVar("Value")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,127}")
_ADDRESS = re.compile(r"([A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]):([0-9]{1,5})")


class HasFields(Protocol):
    def HasField(self, field_name: str, /) -> bool: ...  # noqa: N802 - protobuf's name


def present(message: HasFields, field: str) -> None:
    if not message.HasField(field):
        raise InvalidRequest(f"{field} is missing", param=field)


def integer(field: str, value: int, low: int, high: int) -> int:
    if not low <= value <= high:
        raise InvalidRequest(f"{field} must be between {low} and {high}", param=field)
    return value


def number(field: str, value: float, low: float, high: float) -> float:
    """Finite, and within the bounds."""
    if not math.isfinite(value) or not low <= value <= high:
        raise InvalidRequest(f"{field} must be a number between {low:g} and {high:g}", param=field)
    return value


def exact_bytes(field: str, value: bytes, length: int) -> bytes:
    if len(value) != length:
        raise InvalidRequest(f"{field} must have {length} bytes, it has {len(value)}", param=field)
    return value


def at_most(field: str, values: Collection[object], limit: int) -> None:
    if len(values) > limit:
        raise InvalidRequest(f"{field} may have at most {limit} entries, it has {len(values)}", param=field)


def name(field: str, value: str) -> str:
    """An id: 1 to 128 letters, digits and `. _ : @ -`, beginning with a letter or digit."""
    if not _NAME.fullmatch(value):
        raise InvalidRequest(f"{field} is not a valid name", param=field)
    return value


def text(field: str, value: str, limit: int) -> str:
    """At most `limit` printable characters."""
    if len(value) > limit or not value.isprintable():
        raise InvalidRequest(f"{field} must be at most {limit} printable characters", param=field)
    return value


def address(field: str, value: str) -> str:
    """host:port, port at least 1."""
    match = _ADDRESS.fullmatch(value)
    if match is None or not 1 <= int(match.group(2)) <= 65535:
        raise InvalidRequest(f"{field} must be host:port", param=field)
    return value


def choice(field: str, known: Mapping[Key, Value], key: Key) -> Value:
    if key not in known:
        raise InvalidRequest(f"{field} is missing or unknown", param=field)
    return known[key]
