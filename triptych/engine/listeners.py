"""Speaking to those who listen to a sequence: what they raise is their own trouble, never the engine's."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import ParamSpec

log = logging.getLogger(__name__)

P = ParamSpec("P")


def was_told(say: Callable[P, None], *news: P.args, **named: P.kwargs) -> bool:
    """False when the listener raised; the log has it."""
    try:
        say(*news, **named)
    except Exception:
        log.exception("a listener of a sequence failed")
        return False
    return True
