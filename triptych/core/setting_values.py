"""One setting: its type, its limits, and how text or a TOML value becomes its value."""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Union, get_args, get_origin

from triptych.core.errors import StartupError

_WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


@dataclass(frozen=True, slots=True)
class Setting:
    """`kind` is str, int, float, bool, Path or tuple (of str)."""

    name: str
    kind: type
    optional: bool
    required: bool
    default: object
    metadata: Mapping[str, Any]

    @classmethod
    def of(cls, field: dataclasses.Field[Any], hint: object) -> Setting:
        """Raises TypeError for a type that no setting can have."""
        kind, optional = _kind_of(hint)
        if kind not in _PARSERS:
            raise TypeError(f"setting {field.name} has a type that settings cannot have: {hint}")
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        return cls(field.name, kind, optional, required, default, field.metadata)

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def is_secret(self) -> bool:
        return bool(self.metadata.get("secret"))

    @property
    def metavar(self) -> str:
        choices = self.metadata.get("choices")
        return "|".join(map(str, choices)) if choices else _METAVARS[self.kind]

    @property
    def help(self) -> str:
        text = str(self.metadata.get("help", ""))
        note = "required" if self.required else f"default: {_shown(self.default)}"
        shown = text if self.default is None else f"{text} ({note})".strip()  # without a value, the text says it
        return shown.replace("%", "%%")


def parse_text(setting: Setting, text: str, where: str) -> object:
    """The value of a flag or a variable. Raises StartupError that names `where`."""
    if setting.optional and text.strip().lower() in ("", "none"):
        return None
    try:
        value = _PARSERS[setting.kind](text)
    except ValueError:
        raise _refusal(setting, text, where, _EXPECTED[setting.kind]) from None
    return _within_limits(setting, value, where)


def parse_toml(setting: Setting, value: object, where: str) -> object:
    """The value of a TOML key, whose type must be right as it stands. Raises StartupError that names `where`."""
    if setting.kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if setting.kind is tuple and isinstance(value, list) and all(isinstance(part, str) for part in value):
        value = tuple(value)
    if setting.kind is Path and isinstance(value, str):
        value = Path(value)
    if type(value) is not setting.kind and not isinstance(value, Path):
        raise _refusal(setting, value, where, _EXPECTED[setting.kind])
    return _within_limits(setting, value, where)


def _within_limits(setting: Setting, value: Any, where: str) -> object:
    limits = setting.metadata
    if "choices" in limits and value not in limits["choices"]:
        raise _refusal(setting, value, where, f"one of {', '.join(map(str, limits['choices']))}")
    if isinstance(value, float) and not math.isfinite(value):
        raise _refusal(setting, value, where, "a finite number")
    if "min" in limits and value < limits["min"]:
        raise _refusal(setting, value, where, f"at least {limits['min']}")
    if "max" in limits and value > limits["max"]:
        raise _refusal(setting, value, where, f"at most {limits['max']}")
    return value


def _refusal(setting: Setting, value: object, where: str, expected: str) -> StartupError:
    given = "something else" if setting.is_secret else _shown(value)
    return StartupError(f"the setting {setting.name} must be {expected}, but {where} gives {given}")


def _kind_of(hint: object) -> tuple[Any, bool]:
    if get_origin(hint) in (Union, types.UnionType):
        arms = [arm for arm in get_args(hint) if arm is not types.NoneType]
        return (_kind_of(arms[0])[0] if len(arms) == 1 else None), True
    if get_origin(hint) is tuple:
        return (tuple if get_args(hint) == (str, ...) else None), False
    return hint, False


def _parse_bool(text: str) -> bool:
    if text.strip().lower() not in _WORDS:
        raise ValueError(text)
    return _WORDS[text.strip().lower()]


def _parse_list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _shown(value: object) -> str:
    return ",".join(value) or "none" if isinstance(value, tuple) else repr(value) if value == "" else str(value)


_PARSERS: dict[Any, Callable[[str], object]] = {
    str: str,
    int: int,
    float: float,
    bool: _parse_bool,
    Path: Path,
    tuple: _parse_list,
}
_EXPECTED = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    Path: "a path",
    tuple: "a list of names",
}
_METAVARS = {str: "TEXT", int: "N", float: "NUMBER", bool: "true|false", Path: "PATH", tuple: "A,B,..."}
