"""The JSON files of a checkpoint, read field by field: what is missing, ill-typed or contradicts another field stops
the start with the name of the field. Imports no torch.

transformers fills a missing field with its default in silence, which is right for one checkpoint and wrong for the
next; here a field that changes the result has to be there, but for those that a family leaves out when it is published
(`QwenVLAdapter.vision_defaults`), and these are logged.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from triptych.core.errors import StartupError

CONFIG_FILE = "config.json"
PROCESSOR_FILE = "preprocessor_config.json"
GENERATION_FILE = "generation_config.json"


@dataclass(frozen=True, slots=True)
class Table:
    """A JSON object of the file named `file`; `prefix` is its own place in there ("text_config.", or empty)."""

    values: Mapping[str, Any]
    file: str
    prefix: str = ""

    def __contains__(self, field: str) -> bool:
        """Present and not null."""
        return self.values.get(field) is not None

    def positive(self, field: str) -> int:
        value: Any = self.values.get(field)
        if not _is_whole(value) or value < 1:
            self._wanted("a positive whole number", field)
        return int(value)

    def token_id(self, field: str, vocab_size: int) -> int:
        value: Any = self.values.get(field)
        if not _is_whole(value) or not 0 <= value < vocab_size:
            self._wanted(f"a token id below the vocabulary's {vocab_size}", field)
        return int(value)

    def number(self, field: str) -> float:
        """A positive number."""
        value: Any = self.values.get(field)
        if not _is_finite(value) or value <= 0:
            self._wanted("a positive number", field)
        return float(value)

    def numbers(self, field: str, count: int) -> list[float]:
        value: Any = self.values.get(field)
        is_list = isinstance(value, list) and len(value) == count
        if not is_list or not all(_is_finite(v) for v in value):
            self._wanted(f"a list of {count} numbers", field)
        return [float(v) for v in value]

    def flag(self, field: str) -> bool:
        """true or false."""
        value: Any = self.values.get(field)
        if not isinstance(value, bool):
            self._wanted("true or false", field)
        return bool(value)

    def positives(self, field: str, count: int) -> list[int]:
        value: Any = self.values.get(field)
        if not isinstance(value, list) or len(value) != count or any(not _is_whole(v) or v < 1 for v in value):
            self._wanted(f"a list of {count} positive whole numbers", field)
        return list(value)

    def indexes(self, field: str, below: int) -> list[int]:
        """Distinct ones, in any order; the list may be empty."""
        value: Any = self.values.get(field)
        is_list = isinstance(value, list) and all(_is_whole(v) and 0 <= v < below for v in value)
        if not is_list or len(set(value)) != len(value):
            self._wanted(f"a list of different indexes below {below}", field)
        return list(value)

    def table(self, field: str) -> Table:
        value: Any = self.values.get(field)
        if not isinstance(value, dict):
            self._wanted("an object", field)
        return Table(value, self.file, f"{self.prefix}{field}.")

    def name(self, field: str) -> str:
        """The field as an error message shows it."""
        return f"{self.file}: {self.prefix}{field}"

    def refuse(self, field: str, reason: str) -> NoReturn:
        """Raises StartupError that names the field."""
        raise StartupError(f"{self.name(field)} is {_shown(self.values.get(field))}, {reason}")

    def _wanted(self, kind: str, field: str) -> NoReturn:
        found = _shown(self.values[field]) if field in self.values else "missing"
        raise StartupError(f"{self.name(field)} should be {kind}; it is {found}")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or StartupError naming the file."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise StartupError(f"{path.parent.name}/{path.name} is missing; is --model a checkpoint folder?") from None
    except OSError as error:
        raise StartupError(f"{path.parent.name}/{path.name} cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError):
        raise StartupError(f"{path.parent.name}/{path.name} is not valid JSON; download the checkpoint again") from None
    if not isinstance(value, dict):
        raise StartupError(f"{path.parent.name}/{path.name} should hold a JSON object")
    return value


def optional_json(path: Path) -> dict[str, Any]:
    """As `read_json`, but empty when there is no such file. A link that leads nowhere is one that cannot be read: what
    it was to say (when an answer ends) must not be left out in silence."""
    return read_json(path) if os.path.lexists(path) else {}


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
