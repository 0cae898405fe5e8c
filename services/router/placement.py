"""Which worker serves which stage: pure choices over the registry's view.

Roles of one process stay together: when the decode worker can prefill, it does, and when the prefill worker can encode,
it does; so `mono` and `e-pd` workers need no switch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import xxhash

from triptych.core.errors import Unavailable
from triptych.core.plan import Item
from triptych.core.worker import Role, WorkerInfo, WorkerState


@dataclass(frozen=True, slots=True)
class ClusterView:
    """The workers that may serve requests for one model. `avoided` are used only where there is no other."""

    workers: tuple[WorkerInfo, ...]
    avoided: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls, workers: Iterable[WorkerInfo], fingerprint: bytes, avoided: frozenset[str] = frozenset()
    ) -> ClusterView:
        """Only READY workers with these weights (an empty fingerprint on either side matches)."""
        matching = [w for w in workers if not fingerprint or w.model_fingerprint in (b"", fingerprint)]
        return cls(tuple(w for w in matching if w.state is WorkerState.READY), avoided)

    def with_role(self, role: Role) -> tuple[WorkerInfo, ...]:
        able = tuple(worker for worker in self.workers if role in worker.roles)
        return tuple(worker for worker in able if worker.worker_id not in self.avoided) or able

    def missing_roles(self) -> tuple[Role, ...]:
        return tuple(role for role in Role if not self.with_role(role))

    def context_tokens(self, model_tokens: int) -> int:
        """The longest sequence that every prefill and decode worker takes, and the model too."""
        limits = [worker.max_sequence_tokens for worker in self.workers if worker.max_sequence_tokens]
        return min([model_tokens, *limits])


def decode_candidates(view: ClusterView, turn: int) -> tuple[WorkerInfo, ...]:
    """All decode workers, beginning with the one whose turn it is. Raises Unavailable when there is none."""
    workers = _require(view, Role.DECODE)
    start = turn % len(workers)
    return workers[start:] + workers[:start]


def prefill_worker(view: ClusterView, decode: WorkerInfo, turn: int) -> WorkerInfo:
    """Raises Unavailable when there is none."""
    if Role.PREFILL in decode.roles:
        return decode
    workers = _require(view, Role.PREFILL)
    apart = [worker for worker in workers if Role.DECODE not in worker.roles] or workers
    return apart[turn % len(apart)]


def encoder_shares(
    view: ClusterView, prefill: WorkerInfo, items: Mapping[int, Item]
) -> list[tuple[WorkerInfo, dict[int, Item]]]:
    """The items (by index) that each encoder gets. The same identity always goes to the same encoder while the set of
    encoders is the same, and few move when it changes (rendezvous hashing), so that caches stay warm.

    Raises Unavailable when there is no encoder.
    """
    if not items:
        return []
    if Role.ENCODER in prefill.roles:
        return [(prefill, dict(items))]
    workers = _require(view, Role.ENCODER)
    shares: dict[str, dict[int, Item]] = defaultdict(dict)
    for index, item in items.items():
        shares[_rendezvous(item.identity, workers).worker_id][index] = item
    return [(worker, shares[worker.worker_id]) for worker in workers if worker.worker_id in shares]


def _rendezvous(identity: bytes, workers: Sequence[WorkerInfo]) -> WorkerInfo:
    return max(workers, key=lambda worker: xxhash.xxh3_64_intdigest(identity + worker.worker_id.encode()))


def _require(view: ClusterView, role: Role) -> tuple[WorkerInfo, ...]:
    workers = view.with_role(role)
    if not workers:
        raise Unavailable(f"no {role.value} worker is ready; try again later")
    return workers
