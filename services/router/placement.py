"""Which workers can serve a request together: pure choices over the registry's view. Which of them do is for
`routing/picker.py`.

A path is complete when each stage has a worker that can do its part:

    decode    any worker that decodes. One that also prefills decodes only what it prefilled itself.
    prefill   the decode worker itself, if it can; else any worker that prefills, which hands the KV over.
    encoders  the prefill worker itself, if it can; else any worker that encodes. None for text alone.

Whoever sends to another process must be able to: the two share a transport and lay the data out alike. Of KV the sender
converts page sizes, and number formats where it may (`core/kv_format.py`). Those who compute in unlike formats are
joined only where nobody computes in the same: answers must not depend on whose turn it is.

So roles of one process stay together once it is chosen, and `mono`, `e-pd` and `p-d` need no switch. Across processes a
worker that is there for the one stage is taken before one that would do it beside its own work (`num_borrowed`).
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass

from triptych.core.errors import Unavailable
from triptych.core.kv_format import why_not
from triptych.core.worker import Role, WorkerInfo, WorkerState
from triptych.transport.names import shared_transports

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


def complete_paths(view: ClusterView, *, has_pictures: bool) -> tuple[Path, ...]:
    """Every complete path, decode worker by decode worker. Raises Unavailable when there is none."""
    _require(view, has_pictures=has_pictures)
    found = tuple(
        path
        for decode in _with_role(view, Role.DECODE)
        for prefill in ([decode] if Role.PREFILL in decode.roles else _with_role(view, Role.PREFILL))
        if (path := _path(view, decode, prefill, has_pictures=has_pictures)) is not None
    )
    if not found:
        raise Unavailable(_CANNOT_SEND)
    return found


def renewed(path: Path, view: ClusterView) -> Path:
    """The same decode and prefill workers, with the encoders that are there now. Raises Unavailable when none is."""
    _require(view, has_pictures=True)
    again = _path(view, path.decode, path.prefill, has_pictures=True)
    if again is None:
        raise Unavailable(_CANNOT_SEND)
    return again


def _path(view: ClusterView, decode: WorkerInfo, prefill: WorkerInfo, *, has_pictures: bool) -> Path | None:
    """None when the two cannot be joined, or no encoder can send to the prefill worker."""
    if not _can_send(prefill, decode, prefill.kv_layout, decode.kv_layout) or not _can_convert(prefill, decode):
        return None
    encoders = _encoders_for(view, prefill) if has_pictures else ()
    return Path(decode, prefill, encoders) if encoders or not has_pictures else None


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


def has_other_format(path: Path) -> bool:
    """KV changes its number format on the way."""
    sent, landed = path.prefill.kv_dtype, path.decode.kv_dtype
    return sent is not landed and sent is not None and landed is not None


def num_avoided(avoided: Set[str], path: Path) -> int:
    used = (path.decode, path.prefill, *path.encoders[:1])  # the encoders of a path are all avoided, or none
    return len({worker.worker_id for worker in used} & avoided)


def num_borrowed(path: Path) -> int:
    """Stages of the path that a worker does which is there for other requests' later stages too."""
    prefill = path.prefill
    borrows_prefill = prefill is not path.decode and Role.DECODE in prefill.roles
    borrows_tower = any(worker is not prefill and not _is_dedicated(worker) for worker in path.encoders)
    return borrows_prefill + borrows_tower


def _is_dedicated(worker: WorkerInfo) -> bool:
    return len(worker.roles) == 1


def _require(view: ClusterView, *, has_pictures: bool) -> None:
    """Raises Unavailable when a stage that the request needs has no worker."""
    for role in (Role.PREFILL, *((Role.ENCODER,) if has_pictures else ()), Role.DECODE):
        if not _with_role(view, role):
            raise Unavailable(f"no {role.value} worker is ready; try again later")


def _with_role(view: ClusterView, role: Role) -> tuple[WorkerInfo, ...]:
    return tuple(worker for worker in view.workers if role in worker.roles)
