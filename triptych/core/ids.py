"""Names of requests, attempts, workers and grants.

Ids are minted by the server and compared exactly. A caller's own id is never used as a key.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

CAPABILITY_BYTES = 16


@dataclass(frozen=True, slots=True, order=True)
class AttemptRef:
    """One try at one choice of one request. `attempt` counts from 0."""

    request_id: str
    choice: int = 0
    attempt: int = 0

    @property
    def sequence_key(self) -> tuple[str, int]:
        """What all attempts of the same choice share."""
        return (self.request_id, self.choice)

    def __str__(self) -> str:
        return f"{self.request_id}/{self.choice}.{self.attempt}"


@dataclass(frozen=True, slots=True)
class WorkerRef:
    """A worker process. `epoch` is random per process start, so a reborn worker is another worker."""

    worker_id: str
    epoch: int


def new_request_id() -> str:
    return f"req-{secrets.token_hex(12)}"


def new_grant_id() -> str:
    return f"grant-{secrets.token_hex(8)}"


def new_epoch() -> int:
    """A 63-bit random number, never zero."""
    return secrets.randbits(62) + 1


def new_capability() -> bytes:
    return secrets.token_bytes(CAPABILITY_BYTES)
