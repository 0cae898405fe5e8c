"""Why a path was chosen, in words that the metrics count and `/debug/plan` shows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from services.router.routing.picker import ALIKE_S, Candidate, Picker


def reasons(chosen: Candidate, considered: Sequence[Candidate]) -> Iterator[tuple[str, str]]:
    """(stage, reason): one for prefill, one for decode, one for each picture."""
    yield "prefill", prefill_reason(chosen, considered)
    for share in chosen.forecast.shares:
        yield "encode", share.source
    yield "decode", decode_reason(chosen, considered)


def prefill_reason(chosen: Candidate, considered: Sequence[Candidate]) -> str:
    """only, told / home / session / sibling (it holds the most of the prompt, by that account), released (another holds
    more and has too much to do), load, or turn (all are alike)."""
    mine = chosen.forecast
    others = [each.forecast for each in considered if each.forecast.path.prefill is not mine.path.prefill]
    if not others:
        return "only"
    most = max(other.held.num_tokens for other in others)
    if mine.held.num_tokens > most:
        return mine.held.account
    if most > mine.held.num_tokens:
        return "released"
    waits = [other.wait_s + other.compute_s for other in others]
    return "turn" if all(abs(wait - mine.wait_s - mine.compute_s) <= ALIKE_S for wait in waits) else "load"


def decode_reason(chosen: Candidate, considered: Sequence[Candidate]) -> str:
    """only, held (it holds the most of the prompt), room (its pool and batch are emptier), or turn."""
    mine = chosen.forecast
    others = [each.forecast for each in considered if each.forecast.path.decode is not mine.path.decode]
    if not others:
        return "only"
    if mine.held_at_decode > max(other.held_at_decode for other in others):
        return "held"
    crowds = {(other.used_share, other.num_sequences) for other in (*others, mine)}
    return "turn" if len(crowds) == 1 else "room"


def passed_over(picker: Picker, chosen: Candidate, considered: Sequence[Candidate]) -> Iterator[str]:
    """For each path that came behind the chosen one because of a filter, the first that it failed worse in."""
    for candidate in considered:
        for each, rank, least in zip(picker.filters, candidate.ranks, chosen.ranks, strict=True):
            if rank > least:
                yield each.name
                break
