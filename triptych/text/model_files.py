"""The text files of a model's folder: one that is missing and one that is damaged are two things."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from triptych.core.errors import StartupError


def optional_text(path: Path) -> str | None:
    """UTF-8; None when there is no such file.

    Raises StartupError naming a file that is there and cannot be read: a link into a folder that was cleared, too.
    """
    if not os.path.lexists(path):
        return None
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise StartupError(f"{path.name} cannot be read ({error.strerror}); download the checkpoint again") from None
    except UnicodeDecodeError:
        raise StartupError(f"{path.name} is not UTF-8; download the checkpoint again") from None


def optional_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty when there is no such file. Raises StartupError naming a file that holds none."""
    text = optional_text(path)
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise StartupError(f"{path.name} is not valid JSON; download the checkpoint again") from None
    if not isinstance(value, dict):
        raise StartupError(f"{path.name} should hold a JSON object")
    return value


def read_tokenizer(path: Path) -> Tokenizer:
    """Raises StartupError naming the file when it is missing or holds no tokenizer."""
    text = optional_text(path)
    if text is None:
        raise StartupError(f"the model has no {path.name}")
    try:
        return Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing more telling, and its text says where
        reason = " ".join(str(error).split())
        raise StartupError(f"{path.name} holds no tokenizer ({reason}); download the checkpoint again") from None
