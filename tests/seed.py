"""The seed of this run of the tests: `TRIPTYCH_TEST_SEED`, or a new one. And what it picks from what is too long for
every run: all of it with `TRIPTYCH_VERIFY=full`, which `make verify` sets."""

from __future__ import annotations

import os
import random
import secrets
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

SEED = int(os.environ.get("TRIPTYCH_TEST_SEED") or secrets.randbits(31))
os.environ["TRIPTYCH_TEST_SEED"] = str(SEED)  # the workers of pytest-xdist, started after this, take the same
IS_FULL = os.environ.get("TRIPTYCH_VERIFY") == "full"


def rotating(cases: Sequence[T], count: int = 1) -> list[T]:
    """A few of the cases, other ones with each seed."""
    return list(cases) if IS_FULL else random.Random(SEED).sample(list(cases), count)
