"""The version of this installation."""

from __future__ import annotations

import importlib.metadata


def version() -> str:
    try:
        return importlib.metadata.version("triptych")
    except importlib.metadata.PackageNotFoundError:
        return "unknown (not installed: run pip install -e .)"
