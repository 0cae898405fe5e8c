"""How many media processes a worker has."""

from __future__ import annotations

from typing import Final

MAX_AUTO_PROCESSES: Final = 8


def num_processes(asked: int, cores: int) -> int:
    """`asked`: the setting `media_processes`; 0 is one for every two of the `cores` that the worker may use."""
    return asked or max(1, min(MAX_AUTO_PROCESSES, cores // 2))
