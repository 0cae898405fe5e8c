"""What `nixl` needs of NVIDIA's transfer library. Everything else about that transport is the same for it and for the
fake one.

Implemented by `nixl_driver.py`, and by `triptych/testing/fake_nixl.py` over a network within one process. What an
implementation raises is NixlError. None of its calls waits for a peer; those that take time all the same say so.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

# An agent of one device says a few hundred bytes of itself, one with eight network cards some thousands.
MAX_METADATA_BYTES: Final = 64 << 10

Runs = npt.NDArray[np.int64]
"""(runs, 2): where in the receiver's arena a run of bytes begins, and how long it is."""


class NixlError(Exception):
    """The library refused, or the way to the peer broke. The message is its word for it: no address, no key."""


@dataclass(frozen=True, slots=True)
class NixlAddress:
    """How a receiver's arena is reached: what a sender needs to write to it.

    Attributes:
        metadata: at most MAX_METADATA_BYTES that the library itself takes apart, without distrust: they may come only
            from a worker of this cluster, in a session that showed the cluster's token.
        base: where the arena begins in the receiver's process.
    """

    metadata: bytes = field(repr=False)
    base: int = field(repr=False)


class NixlTransfer(Protocol):
    """A write that was begun."""

    def is_done(self) -> bool:
        """Whether all its bytes are in the receiver's memory. Raises NixlError when they will not be."""
        ...


class NixlSource(Protocol):
    """The sending end of one link. Owner of its staging memory. One thread at a time uses it."""

    @property
    def staging(self) -> memoryview:
        """What is written comes from here: memory that the network may read."""
        ...

    def write(self, start: int, runs: Runs) -> NixlTransfer:
        """Begins to write what lies at `start` in the staging memory to the arena's `runs`, one behind the other.
        Nobody changes it before the transfer is done. Refuses what is outside of the arena."""
        ...

    def close(self) -> None:
        """Takes milliseconds. Nothing is written any more once it returns. Never raises, idempotent."""
        ...


class NixlTarget(Protocol):
    """One sender's way into an arena."""

    @property
    def address(self) -> NixlAddress: ...

    def revoke(self) -> None:
        """Takes milliseconds. Once it returns nothing that the sender has sent or will send can reach the arena,
        whatever the sender does. Idempotent. Raises NixlError: then it still can."""
        ...


class NixlDriver(Protocol):
    """Both take a tenth of a second or more: not for the event loop."""

    def expose(self, arena: memoryview) -> NixlTarget:
        """A way in for one sender, which nobody else can use."""
        ...

    def connect(self, address: NixlAddress, arena_bytes: int, staging_bytes: int) -> NixlSource:
        """To a peer that answers: one that cannot be reached is refused within seconds."""
        ...


def check_runs(runs: Runs, arena_bytes: int) -> None:
    """Raises NixlError unless there are some and all lie within the arena."""
    begins, lengths = runs[:, 0], runs[:, 1]
    if not len(runs) or (begins < 0).any() or (lengths < 1).any() or (lengths > arena_bytes - begins).any():
        raise NixlError("a write outside of the arena")
