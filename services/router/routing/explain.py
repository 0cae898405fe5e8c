"""A decision in full, for `/debug/plan`: what was known, what was considered, what was chosen and why."""

from __future__ import annotations

from typing import Any

from services.router.placement import ClusterView
from services.router.routing.board import Board
from services.router.routing.picker import Candidate, Picker
from services.router.routing.prompt import Prompt
from services.router.routing.reasons import reasons
from services.router.routing.routing import Choice, Routing
from triptych.core.worker import WorkerInfo


def explain(routing: Routing, view: ClusterView, prompt: Prompt, turn: int) -> dict[str, Any]:
    """JSON values. Decides as a request would and changes nothing. Raises Unavailable as that would."""
    choice = routing.choose(view, prompt, turn)
    board = Board(view.workers, routing.index, routing.outstanding)
    return {
        "prompt": {
            "tokens": prompt.num_tokens,
            "session": prompt.session is not None,
            "pictures": [{"index": each.index, "patches": each.num_patches} for each in prompt.pictures],
        },
        "chosen": _chosen(choice),
        "candidates": [_candidate(routing.picker, each, choice) for each in choice.considered],
        "workers": [_worker(routing, board, worker, view) for worker in view.workers],
    }


def _chosen(choice: Choice) -> dict[str, Any]:
    best = choice.ordered[0]
    path = best.forecast.path
    return {
        "prefill": path.prefill.worker_id,
        "decode": path.decode.worker_id,
        "encoders": _shares(best),
        "why": [{"stage": stage, "reason": reason} for stage, reason in reasons(best, choice.considered)],
        "asked_in_order": [each.forecast.path.decode.worker_id for each in choice.ordered],
    }


def _candidate(picker: Picker, candidate: Candidate, choice: Choice) -> dict[str, Any]:
    forecast = candidate.forecast
    ranks = zip(picker.filters, candidate.ranks, strict=True)
    seconds = zip(picker.scorers, candidate.seconds, strict=True)
    return {
        "prefill": forecast.path.prefill.worker_id,
        "decode": forecast.path.decode.worker_id,
        "encoders": _shares(candidate),
        "filters": {each.name: rank for each, rank in ranks if rank},
        "seconds": {each.name: round(value, 6) for each, value in seconds},
        "total_s": round(candidate.total_s, 6),
        "held_tokens": forecast.held.num_tokens,
        "held_by_account_of": forecast.held.account or None,
        "held_at_decode_tokens": forecast.held_at_decode,
        "new_tokens": forecast.new_tokens,
        "new_patches": forecast.new_patches,
        "is_asked": candidate in choice.ordered,
    }


def _shares(candidate: Candidate) -> list[dict[str, Any]]:
    return [
        {
            "picture": share.picture.index,
            "source": share.source,
            "encoder": None if share.encoder is None else share.encoder.worker_id,
        }
        for share in candidate.forecast.shares
    ]


def _worker(routing: Routing, board: Board, worker: WorkerInfo, view: ClusterView) -> dict[str, Any]:
    found = board.view(worker)
    return {
        "id": worker.worker_id,
        "roles": sorted(role.value for role in worker.roles),
        "is_avoided": worker.worker_id in view.avoided,
        "tells_what_it_holds": routing.index.is_synced(worker.ref),
        "entries": routing.index.num_entries(worker.ref),
        "waiting_tokens": found.waiting_tokens,
        "waiting_patches": found.waiting_patches,
        "sequences": found.num_sequences,
        "free_pages": found.free_pages,
        "tokens_per_s": round(found.tokens_per_s, 1),
        "patches_per_s": round(found.patches_per_s, 1),
        "rates_are_measured": found.is_measured,
    }
