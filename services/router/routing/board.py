"""One immutable view of each worker: its own account and what this router has given it, joined."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from services.router.routing.index import CacheIndex
from services.router.routing.outstanding import Outstanding
from triptych.core.worker import WorkerInfo

DEFAULT_TOKENS_PER_S = 4_000.0
DEFAULT_PATCHES_PER_S = 20_000.0


@dataclass(frozen=True, slots=True)
class WorkerView:
    """What counts for a decision.

    Attributes:
        waiting_tokens: of prompts that it has and has not computed.
        waiting_patches: of pictures that it has and has not encoded.
        num_sequences: that decode there, or will.
        used_share: of its KV pool, in [0, 1].
        free_pages: None where nobody has told.
        tokens_per_s, patches_per_s: as it measured them; those of its peers while it has not, or a guess.
        is_measured: whether it has.
    """

    waiting_tokens: int
    waiting_patches: int
    num_sequences: int
    used_share: float
    free_pages: int | None
    tokens_per_s: float
    patches_per_s: float
    is_measured: bool


class Board:
    """Views of workers, made as they are asked for; for one decision."""

    def __init__(self, workers: Iterable[WorkerInfo], index: CacheIndex, outstanding: Outstanding) -> None:
        self._index = index
        self._outstanding = outstanding
        self._views: dict[str, WorkerView] = {}
        loads = [load for worker in workers if (load := index.load(worker.ref)) is not None]
        self._tokens_per_s = _mean((load.tokens_per_s for load in loads), DEFAULT_TOKENS_PER_S)
        self._patches_per_s = _mean((load.patches_per_s for load in loads), DEFAULT_PATCHES_PER_S)

    def view(self, worker: WorkerInfo) -> WorkerView:
        view = self._views.get(worker.worker_id)
        if view is None:
            view = self._views[worker.worker_id] = self._make(worker)
        return view

    def _make(self, worker: WorkerInfo) -> WorkerView:
        ref = worker.ref
        told, owed, others = self._index.load(ref), self._outstanding.of(ref), self._outstanding.of_others(ref)
        pool_tokens = worker.num_pages * worker.page_tokens
        used = owed.room_tokens / pool_tokens if pool_tokens else 0.0
        if told is None:
            return WorkerView(
                waiting_tokens=owed.tokens,
                waiting_patches=owed.patches,
                num_sequences=owed.sequences,
                used_share=min(used, 1.0),
                free_pages=None,
                tokens_per_s=self._tokens_per_s,
                patches_per_s=self._patches_per_s,
                is_measured=False,
            )
        if told.free_pages is not None and worker.num_pages:
            used = 1.0 - min(told.free_pages / worker.num_pages, 1.0)
        return WorkerView(
            waiting_tokens=owed.tokens + others.tokens,
            waiting_patches=owed.patches + others.patches,
            num_sequences=owed.sequences + others.sequences,
            used_share=min(used, 1.0),
            free_pages=told.free_pages,
            tokens_per_s=told.tokens_per_s or self._tokens_per_s,
            patches_per_s=told.patches_per_s or self._patches_per_s,
            is_measured=told.tokens_per_s is not None or told.patches_per_s is not None,
        )


def _mean(values: Iterable[float | None], default: float) -> float:
    known = [value for value in values if value]
    return sum(known) / len(known) if known else default
