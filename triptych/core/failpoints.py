"""Failpoints: named places where a process can be told to be slow, to fail or to die, for tests and rehearsals.

    name=action(arguments)[*count][@probability]; ...

    encoder.encode_item=delay(300, item=5)             the sixth picture of every request, 300 ms late
    decode.before_step=kill(worker=decode-1)*1@0.01    that worker dies in one of its steps, once
    link.before_commit=error(peer_lost)*3              the first three commits fail
    link.before_frame=throttle(1000000)                data leave at a megabyte a second

Pure: what is parsed here fires in `triptych.faults.points`. docs/failpoints.md lists names and actions.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from triptych.core.errors import ERRORS_BY_CODE, StartupError

MAX_DELAY_MS: Final = 600_000.0
THROTTLED: Final = "link.before_frame"

# Each name with what may be asked of it besides the worker.
POINTS: Final = {
    "encoder.before_encode": frozenset[str](),
    "encoder.encode_item": frozenset({"item"}),
    "prefill.before_step": frozenset[str](),
    "decode.before_step": frozenset[str](),
    "link.before_commit": frozenset[str](),
    "link.before_frame": frozenset[str](),
    "media.before_decode": frozenset[str](),
}


@dataclass(frozen=True, slots=True)
class Delay:
    milliseconds: float


@dataclass(frozen=True, slots=True)
class Throttle:
    """Waits as long as a link of that speed needs for the bytes that pass."""

    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Fail:
    """Raises the error that goes by this code."""

    code: str


@dataclass(frozen=True, slots=True)
class Exit:
    """Ends the process at once with this status."""

    status: int


@dataclass(frozen=True, slots=True)
class Kill:
    """Ends the process by SIGKILL."""


Action = Delay | Throttle | Fail | Exit | Kill


@dataclass(frozen=True, slots=True)
class FailpointRule:
    """What happens where.

    Attributes:
        item: only at the item of this index, counted from 0; None: at each.
        worker: only in the worker of this name; None: in each.
        count: it fires at most so often; None: always.
        probability: of each passage.
    """

    name: str
    action: Action
    item: int | None = None
    worker: str | None = None
    count: int | None = None
    probability: float = 1.0

    def matches(self, name: str, item: int | None, worker: str) -> bool:
        is_item = self.item is None or self.item == item
        return self.name == name and is_item and self.worker in (None, worker)


_ENTRY = re.compile(
    r"(?P<name>[\w.]+)\s*=\s*(?P<action>\w+)(?:\((?P<arguments>[^()]*)\))?"
    r"(?:\*(?P<count>\d{1,9}))?(?:@(?P<probability>[\d.]+))?"
)
_NAMED = re.compile(r"(item|worker)\s*=\s*([\w.-]+)")


def parse_failpoints(text: str) -> tuple[FailpointRule, ...]:
    """The rules of TRIPTYCH_FAILPOINTS, in order; an empty text has none. Raises StartupError that names the entry."""
    return tuple(_rule(entry.strip()) for entry in text.split(";") if entry.strip())


def _rule(entry: str) -> FailpointRule:
    match = _ENTRY.fullmatch(entry)
    if match is None:
        raise _refusal(entry, "it should read name=action(arguments)[*count][@probability]")
    name, action = match["name"], match["action"]
    if name not in POINTS:
        raise _refusal(entry, f"there is no {name}; failpoints are {', '.join(sorted(POINTS))}")
    if action not in _ACTIONS:
        raise _refusal(entry, f"there is no action {action}; actions are {', '.join(sorted(_ACTIONS))}")
    if action == "throttle" and name != THROTTLED:
        raise _refusal(entry, f"only {THROTTLED} knows how many bytes pass")
    words = [word.strip() for word in (match["arguments"] or "").split(",") if word.strip()]
    plain = [word for word in words if "=" not in word]
    item, worker = _place(entry, name, [word for word in words if "=" in word])
    return FailpointRule(
        name, _ACTIONS[action](entry, plain), item, worker, _count(entry, match), _probability(entry, match)
    )


def _place(entry: str, name: str, words: list[str]) -> tuple[int | None, str | None]:
    found: dict[str, str] = {}
    for word in words:
        match = _NAMED.fullmatch(word)
        if match is None or match[1] in found or match[1] not in POINTS[name] | {"worker"}:
            known = ", ".join(f"{known}=..." for known in sorted(POINTS[name] | {"worker"}))
            raise _refusal(entry, f"{word!r} cannot be asked of {name}, but {known}")
        found[match[1]] = match[2]
    if "item" in found and not found["item"].isdecimal():
        raise _refusal(entry, "item= needs the number of an item, counted from 0")
    return (int(found["item"]) if "item" in found else None), found.get("worker")


def _count(entry: str, match: re.Match[str]) -> int | None:
    if match["count"] is not None and int(match["count"]) == 0:
        raise _refusal(entry, "a count is at least 1")
    return None if match["count"] is None else int(match["count"])


def _probability(entry: str, match: re.Match[str]) -> float:
    value = _number(match["probability"] or "1")
    if value is None or not 0 < value <= 1:
        raise _refusal(entry, "a probability is above 0 and at most 1")
    return value


def _delay(entry: str, words: list[str]) -> Delay:
    value = _number(words[0]) if len(words) == 1 else None
    if value is None or value > MAX_DELAY_MS:
        raise _refusal(entry, f"delay takes milliseconds, at most {MAX_DELAY_MS:.0f}")
    return Delay(value)


def _throttle(entry: str, words: list[str]) -> Throttle:
    value = _number(words[0]) if len(words) == 1 else None
    if value is None or value < 1:
        raise _refusal(entry, "throttle takes bytes a second, at least 1")
    return Throttle(value)


def _fail(entry: str, words: list[str]) -> Fail:
    if len(words) != 1 or words[0] not in ERRORS_BY_CODE:
        raise _refusal(entry, f"error takes one of {', '.join(sorted(ERRORS_BY_CODE))}")
    return Fail(words[0])


def _exit(entry: str, words: list[str]) -> Exit:
    if len(words) > 1 or not all(word.isdecimal() and int(word) < 256 for word in words):
        raise _refusal(entry, "exit takes a status between 0 and 255, or nothing")
    return Exit(int(words[0]) if words else 1)


def _kill(entry: str, words: list[str]) -> Kill:
    if words:
        raise _refusal(entry, "kill takes nothing but where")
    return Kill()


_ACTIONS: dict[str, Callable[[str, list[str]], Action]] = {
    "delay": _delay,
    "throttle": _throttle,
    "error": _fail,
    "exit": _exit,
    "kill": _kill,
}


def _number(text: str) -> float | None:
    return float(text) if re.fullmatch(r"\d{1,9}(\.\d{0,9})?|\.\d{1,9}", text) else None


def _refusal(entry: str, reason: str) -> StartupError:
    return StartupError(f"the failpoint {entry!r} is not understood: {reason}; correct TRIPTYCH_FAILPOINTS or unset it")
