"""What a check found, and what to do about it."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

from triptych.core.errors import TriptychError

GIB = 2**30
MIB = 2**20


class Status(enum.Enum):
    """`WARN`: it works, but not as well as it could. `FAIL`: a cluster will not start, or not serve."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `todo` is there unless the status is OK: a command, a setting, something to do."""

    name: str
    status: Status
    found: str
    todo: str | None = None

    def __post_init__(self) -> None:
        assert (self.status is Status.OK) == (self.todo is None), self


def ok(name: str, found: str) -> Finding:
    return Finding(name, Status.OK, found)


def warn(name: str, found: str, todo: str) -> Finding:
    return Finding(name, Status.WARN, found, todo)


def fail(name: str, found: str, todo: str) -> Finding:
    return Finding(name, Status.FAIL, found, todo)


def guarded(name: str, check: Callable[[], Finding]) -> Finding:
    """What the check found; a check that breaks has found a failure, and the others still run."""
    try:
        return check()
    except TriptychError as error:
        return fail(name, error.message, "do what the sentence says, then run triptych doctor again")
    except Exception as error:  # a broken machine breaks checks in ways that nobody listed
        return fail(
            name,
            f"the check itself broke: {type(error).__name__}: {error}",
            "mend what the other lines name, then run triptych doctor again; report it if this one stays",
        )


def size(num_bytes: float) -> str:
    """In the unit that leaves a number people can read."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (2**10, "KiB")):
        if abs(num_bytes) >= unit:
            return f"{num_bytes / unit:.1f} {name}"
    return f"{num_bytes:.0f} bytes"


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
