"""The file by which a process says that it can serve. Whole or not at all: those who wait for it read it at once."""

from __future__ import annotations

import os
from pathlib import Path

from triptych.core.errors import StartupError


def check_ready_file(path: Path) -> None:
    """Raises StartupError when it could not be written: before a long start rather than after it."""
    if path.is_dir():
        raise StartupError(f"the ready file {path} is a folder; give --ready-file the name of a file")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise StartupError(
            f"the ready file {path} cannot be written: {path.parent} is no folder that this user may write to; "
            "give another --ready-file"
        )


def write_ready_file(path: Path, content: bytes) -> None:
    """Raises StartupError."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_bytes(content)
        draft.replace(path)
    except OSError as error:
        raise StartupError(f"the ready file {path} cannot be written: {error.strerror}") from error
