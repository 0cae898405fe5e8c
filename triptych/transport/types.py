"""What the two ends of the data plane say to each other, as domain values. `frames.py` puts them on the wire."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from triptych.core.grant import GroupRegions
from triptych.core.ids import AttemptRef, WorkerRef
from triptych.core.kv_format import KvTerms
from triptych.core.plan import EmbeddingSource, Token
from triptych.core.worker import WorkerInfo
from triptych.kv.pages import PageLayout
from triptych.transport.device_arena import DeviceArena
from triptych.transport.shm import SharedSegment


class ArenaKind(enum.Enum):
    EMBEDDING = "embedding"
    KV = "kv"


@dataclass(frozen=True, slots=True)
class Arena:
    """The memory that a receiver lets others write into.

    Attributes:
        kind: what lands there.
        layout_fingerprint: 32 bytes from `layout.py`; a sender with another one is refused.
        buffer: the whole arena, writable bytes of the host; empty when only `device` can be written.
        segment: the shared segment behind `buffer`; None when only this process can reach that.
        pages: of a KV pool: how its bytes lie in pages.
        may_narrow: of a KV pool: senders may round their numbers to its dtype.
        is_open: other processes may write here, by the segment or by data frames; else only `inproc` may.
        device: the same room in device memory. Who maps that writes there and not to `buffer`.
    """

    kind: ArenaKind
    layout_fingerprint: bytes
    buffer: memoryview = field(repr=False)
    segment: SharedSegment | None = None
    pages: PageLayout | None = None
    is_open: bool = False
    device: DeviceArena | None = None
    may_narrow: bool = False

    @property
    def kv_terms(self) -> KvTerms | None:
        """None when it is no KV pool."""
        return None if self.pages is None else KvTerms(self.pages.format, self.may_narrow)

    @property
    def num_bytes(self) -> int:
        return self.buffer.nbytes if self.device is None else self.device.num_bytes

    def is_mapped_as(self, mapping_id: int) -> bool:
        """Whether some process still has the arena mapped under that id, in whichever memory."""
        segments = (self.segment, None if self.device is None else self.device.lease)
        return any(segment is not None and segment.is_mapped_as(mapping_id) for segment in segments)

    def is_written_on_device_by(self, peer: WorkerRef) -> bool:
        """Whether what that peer commits lies in `device`; else it lies in `buffer`."""
        return self.device is not None and self.device.is_written_by(peer)

    @staticmethod
    def shared(
        kind: ArenaKind, layout_fingerprint: bytes, segment: SharedSegment, pages: PageLayout | None = None
    ) -> Arena:
        """Open to senders that map it and to those that send frames."""
        return Arena(kind, layout_fingerprint, segment.buffer, segment, pages, is_open=True)

    @staticmethod
    def unshared(
        kind: ArenaKind, layout_fingerprint: bytes, buffer: memoryview, pages: PageLayout | None = None
    ) -> Arena:
        """Open to senders that send frames. The worker must not offer `shm`."""
        return Arena(kind, layout_fingerprint, buffer, None, pages, is_open=True)


@dataclass(frozen=True, slots=True)
class SlotGrant:
    """Room for one item's embedding; `offset` and `num_bytes` are within the receiver's arena.

    `capability` (16 random bytes) and `generation` are shown again at commit. `ticket` is the sender's own: the
    sequence of its request, which data frames carry; 0 where there are none.
    """

    slot_id: int
    offset: int
    num_bytes: int
    generation: int
    capability: bytes = field(repr=False)
    ticket: int = 0


@dataclass(frozen=True, slots=True)
class HaveIt:
    """The receiver needs nothing for the item and keeps what it promises until the request's prefill ends."""

    source: EmbeddingSource


@dataclass(frozen=True, slots=True)
class SlotAsked:
    ref: AttemptRef
    item_index: int
    identity: bytes
    num_tokens: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class BindAsked:
    ref: AttemptRef
    grant_id: str
    capability: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class EmbeddingCommitted:
    ref: AttemptRef
    item_index: int
    slot_id: int
    generation: int
    capability: bytes = field(repr=False)
    num_bytes: int
    checksum: int
    source: EmbeddingSource


@dataclass(frozen=True, slots=True)
class KvCommitted:
    ref: AttemptRef
    grant_id: str
    generation: int
    capability: bytes = field(repr=False)
    num_tokens: int
    num_bytes: int
    first_token: Token
    position_delta: int
    checksum: int | None = None


@dataclass(frozen=True, slots=True)
class AbortAsked:
    ref: AttemptRef
    grant_id: str | None
    reason: str


Asked = SlotAsked | BindAsked | EmbeddingCommitted | KvCommitted | AbortAsked


@dataclass(frozen=True, slots=True)
class Bound:
    """What a grant's credit became: the pages, and the generation that the commit must show. The prompt's first
    `num_held_tokens` are not written: the receiver has their KV, and the pages begin behind it."""

    generation: int
    groups: tuple[GroupRegions, ...]
    num_held_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """A commit was taken, or an abort was carried out."""


Answer = SlotGrant | HaveIt | Bound | Acknowledged


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One end of a session. `transports` best first."""

    ref: WorkerRef
    host_id: str
    transports: tuple[str, ...]

    @staticmethod
    def of(worker: WorkerInfo) -> Endpoint:
        return Endpoint(worker.ref, worker.host_id, worker.transports)


@dataclass(frozen=True, slots=True)
class DataAddress:
    """Where a session's data frames go and what they must show. `socket_path` is empty when there is no such socket,
    `curve_key` (the port's public one) where TCP is not encrypted."""

    socket_path: str = ""
    port: int = 0
    session_key: bytes = field(default=b"", repr=False)
    curve_key: bytes = b""


@dataclass(frozen=True, slots=True)
class ControlAddress:
    """Where a session's control frames may go instead of the stream that it began by, and what the sender shows there;
    both empty where there is no such socket."""

    socket_path: str = ""
    key: bytes = field(default=b"", repr=False)
