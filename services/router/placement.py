"""Which workers serve a request: pure choices over the registry's view.

A path is complete when each stage has a worker that can do its part:

    decode    any worker that decodes. One that also prefills decodes only what it prefilled itself.
    prefill   the decode worker itself, if it can; else any worker that prefills, which hands the KV over.
    encoders  the prefill worker itself, if it can; else any worker that encodes. None for text alone.

Whoever sends to another process must be able to: the two share a transport and lay the data out alike. Of KV the sender
converts page sizes, and number formats where it may (`core/kv_format.py`). Those who compute in unlike formats are
joined only where nobody computes in the same: answers must not depend on whose turn it is.

So roles of one process stay together once it is chosen, and `mono`, `e-pd` and `p-d` need no switch. Across processes a
worker that is there for the one stage is taken before one that would do it beside its own work (`borrowed`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import xxhash

from services.router.homes import Home
from triptych.core.errors import Unavailable
from triptych.core.kv_format import why_not
from triptych.core.plan import Item
from triptych.core.worker import Role, WorkerInfo, WorkerState
from triptych.transport.names import shared_transports

T = TypeVar("T")

_CANNOT_SEND = (
    "the workers that are ready cannot send to each other; they need the same --dtype (KV also goes from bfloat16 to"
    " float32, and with --allow-kv-narrowing on both sides back), and a transport in common"
)


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

    def missing_roles(self) -> tuple[Role, ...]:
        """The stages without a worker. When there is none such, a request with pictures has a complete path, provided
        that these workers can send to each other."""
        return tuple(role for role in Role if not any(role in worker.roles for worker in self.workers))

    def context_tokens(self, model_tokens: int) -> int:
        """The longest sequence that every prefill and decode worker takes, and the model too."""
        limits = [worker.max_sequence_tokens for worker in self.workers if worker.max_sequence_tokens]
        return min([model_tokens, *limits])


@dataclass(frozen=True, slots=True)
class Path:
    """Workers that can serve a request from end to end. `encoders` is empty when it has no pictures."""

    decode: WorkerInfo
    prefill: WorkerInfo
    encoders: tuple[WorkerInfo, ...] = ()


def paths(view: ClusterView, items: Mapping[int, Item], turn: int, home: Home | None = None) -> tuple[Path, ...]:
    """A complete path for each decode worker that has one, in the order in which to ask for room.

    Those over avoided workers are left out while there are others; those on which KV changes its number format come
    last, and before them those that borrow a worker; among equals the one at `home` comes first, and the rest take
    turns. Raises Unavailable when there is none.
    """
    decodes = _required(view, items)[Role.DECODE]
    options = [equals for decode in decodes if (equals := _best_paths(view, decode, items))]
    if not options:
        raise Unavailable(_CANNOT_SEND)
    least_avoided = min(_num_avoided(view, equals[0]) for equals in options)
    kept = [equals for equals in options if _num_avoided(view, equals[0]) == least_avoided]
    ordered: list[Path] = []
    for rank in sorted({_strangeness(equals[0]) for equals in kept}):
        group = [equals for equals in kept if _strangeness(equals[0]) == rank]
        # Prefill workers take turns at a slower pace, so that every pair of workers comes up.
        ones = [_at_home(equals, home) or equals[turn // len(group) % len(equals)] for equals in _rotated(group, turn)]
        ordered += sorted(ones, key=lambda path: home is None or path.decode.ref != home.decode)
    return tuple(ordered)


def _at_home(equals: Sequence[Path], home: Home | None) -> Path | None:
    """The path over the very workers that hold the conversation."""
    return next((path for path in equals if Home(path.decode.ref, path.prefill.ref) == home), None)


def renewed(path: Path, view: ClusterView, items: Mapping[int, Item]) -> Path:
    """The same decode and prefill workers, with the encoders that are there now. Raises Unavailable when none is."""
    _required(view, items)
    again = _path(view, path.decode, path.prefill, items)
    if again is None:
        raise Unavailable(_CANNOT_SEND)
    return again


def encoder_shares(path: Path, items: Mapping[int, Item]) -> list[tuple[WorkerInfo, dict[int, Item]]]:
    """The items (by index) that each encoder gets. The same identity always goes to the same encoder while the set of
    encoders is the same, and few move when it changes (rendezvous hashing), so that caches stay warm."""
    shares: dict[str, dict[int, Item]] = defaultdict(dict)
    for index, item in items.items():
        shares[_rendezvous(item.identity, path.encoders).worker_id][index] = item
    return [(worker, shares[worker.worker_id]) for worker in path.encoders if worker.worker_id in shares]


def _best_paths(view: ClusterView, decode: WorkerInfo, items: Mapping[int, Item]) -> list[Path]:
    """The complete paths that end at `decode` with the fewest avoided, then with the least that is out of the way."""
    prefills = [decode] if Role.PREFILL in decode.roles else _with_role(view, Role.PREFILL)
    found = [_path(view, decode, prefill, items) for prefill in prefills]
    possible = [path for path in found if path is not None]
    ranks = [(_num_avoided(view, path), _strangeness(path)) for path in possible]
    return [path for path, rank in zip(possible, ranks, strict=True) if rank == min(ranks)]


def _path(view: ClusterView, decode: WorkerInfo, prefill: WorkerInfo, items: Mapping[int, Item]) -> Path | None:
    """None when the two cannot be joined, or no encoder can send to the prefill worker."""
    if not _can_send(prefill, decode, prefill.kv_layout, decode.kv_layout) or not _can_convert(prefill, decode):
        return None
    encoders = _encoders_for(view, prefill) if items else ()
    return Path(decode, prefill, encoders) if encoders or not items else None


def _encoders_for(view: ClusterView, prefill: WorkerInfo) -> tuple[WorkerInfo, ...]:
    """The prefill worker itself if it has the tower; else of those that can send to it those that do nothing else, if
    there are any."""
    if Role.ENCODER in prefill.roles:
        return (prefill,)
    encoders = _with_role(view, Role.ENCODER)
    able = tuple(w for w in encoders if _can_send(w, prefill, w.embedding_layout, prefill.embedding_layout))
    fresh = tuple(worker for worker in able if worker.worker_id not in view.avoided) or able
    return tuple(worker for worker in fresh if _is_dedicated(worker)) or fresh


def _can_send(sender: WorkerInfo, receiver: WorkerInfo, layout: bytes, expected: bytes) -> bool:
    """What a worker's record does not say stands in nobody's way: the session between the two will tell."""
    if sender.ref == receiver.ref:
        return True
    if layout and expected and layout != expected:
        return False
    if not sender.transports or not receiver.transports:
        return True
    is_same_host = bool(sender.host_id) and sender.host_id == receiver.host_id
    return bool(shared_transports(sender.transports, receiver.transports, is_same_host=is_same_host))


def _can_convert(prefill: WorkerInfo, decode: WorkerInfo) -> bool:
    """As above: a record that says nothing of its pages forbids nothing."""
    sent, landed = prefill.kv_terms, decode.kv_terms
    return prefill.ref == decode.ref or sent is None or landed is None or why_not(sent, landed) is None


def _strangeness(path: Path) -> tuple[bool, int]:
    """What is to be avoided where the choice is free: KV in another number format, and then borrowed workers."""
    dtypes = {path.prefill.kv_dtype, path.decode.kv_dtype} - {None}
    return len(dtypes) > 1, _num_borrowed(path)


def _num_avoided(view: ClusterView, path: Path) -> int:
    used = (path.decode, path.prefill, *path.encoders[:1])  # the encoders of a path are all avoided, or none
    return len({worker.worker_id for worker in used} & view.avoided)


def _num_borrowed(path: Path) -> int:
    """Stages of the path that a worker does which is there for other requests' later stages too."""
    borrows_prefill = path.prefill != path.decode and Role.DECODE in path.prefill.roles
    borrows_tower = any(worker != path.prefill and not _is_dedicated(worker) for worker in path.encoders)
    return borrows_prefill + borrows_tower


def _is_dedicated(worker: WorkerInfo) -> bool:
    return len(worker.roles) == 1


def _rotated(options: Sequence[T], turn: int) -> list[T]:
    start = turn % len(options)
    return [*options[start:], *options[:start]]


def _rendezvous(identity: bytes, workers: Sequence[WorkerInfo]) -> WorkerInfo:
    return max(workers, key=lambda worker: xxhash.xxh3_64_intdigest(identity + worker.worker_id.encode()))


def _required(view: ClusterView, items: Mapping[int, Item]) -> dict[Role, tuple[WorkerInfo, ...]]:
    """The workers of each stage that the request needs. Raises Unavailable when one has none."""
    needed = (Role.PREFILL, *((Role.ENCODER,) if items else ()), Role.DECODE)
    found = {role: _with_role(view, role) for role in needed}
    for role, workers in found.items():
        if not workers:
            raise Unavailable(f"no {role.value} worker is ready; try again later")
    return found


def _with_role(view: ClusterView, role: Role) -> tuple[WorkerInfo, ...]:
    return tuple(worker for worker in view.workers if role in worker.roles)
