"""What a worker tells about itself."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from triptych.core.ids import WorkerRef
from triptych.core.kv_format import KvDtype, KvTerms, PageFormat


class Role(enum.Enum):
    ENCODER = "encoder"
    PREFILL = "prefill"
    DECODE = "decode"


class WorkerState(enum.Enum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """One process; the domain form of the wire's WorkerRecord.

    Attributes:
        roles: the stages that it serves; `core/topology.py` has the usual combinations.
        grpc_address: host:port of its gRPC server.
        host_id: equal on all workers that can share memory.
        transports: data-plane transports that it can do, best first.
        num_pages, page_tokens, max_sequence_tokens: KV capacity; 0 for encoders.
        kv_layout, embedding_layout: fingerprints of what it sends or lands (`transport/layout.py`): only workers with
            equal ones can send to each other. Empty for what it has nothing to do with.
        kv_dtype: what its KV pages hold; None for encoders.
        may_narrow_kv: KV may be rounded on its way from or to it.
        parameter_counts: parameters loaded by part ("vision", "language").
        speaks_tls: whether its ports do: only workers that are alike in it can talk to each other.
    """

    worker_id: str
    epoch: int
    roles: frozenset[Role]
    state: WorkerState
    grpc_address: str
    metrics_address: str = ""
    model_name: str = ""
    model_fingerprint: bytes = b""
    host_id: str = ""
    transports: tuple[str, ...] = ()
    pid: int = 0
    num_pages: int = 0
    page_tokens: int = 0
    max_sequence_tokens: int = 0
    parameter_counts: Mapping[str, int] = field(default_factory=dict)
    kv_layout: bytes = b""
    embedding_layout: bytes = b""
    kv_dtype: KvDtype | None = None
    may_narrow_kv: bool = False
    speaks_tls: bool = False

    @property
    def ref(self) -> WorkerRef:
        return WorkerRef(self.worker_id, self.epoch)

    @property
    def kv_terms(self) -> KvTerms | None:
        """None where the record does not say how its pages lie."""
        if self.kv_dtype is None or not self.page_tokens:
            return None
        return KvTerms(PageFormat(self.page_tokens, self.kv_dtype), self.may_narrow_kv)
