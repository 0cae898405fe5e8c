"""The order in which to ask: by the filters' ranks, then by the scorers' seconds; those that are alike take turns."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Final

from services.router.routing.filters import FILTERS, Field, Filter
from services.router.routing.forecast import Forecast
from services.router.routing.homes import Home
from services.router.routing.scorers import SCORERS, Scorer

ALIKE_S: Final = 1e-6
"""Less is no difference."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A path with what was found for and against it: `ranks` by filter, `seconds` by scorer."""

    forecast: Forecast
    ranks: tuple[int, ...]
    seconds: tuple[float, ...]
    total_s: float


class Picker:
    """Pure: the same forecasts and the same turn give the same order."""

    def __init__(self, filters: Sequence[Filter] = FILTERS, scorers: Sequence[Scorer] = SCORERS) -> None:
        self.filters = tuple(filters)
        self.scorers = tuple(scorers)

    def judge(self, forecasts: Sequence[Forecast], avoided: Set[str], sibling: Home | None = None) -> list[Candidate]:
        """All of them, in the order given."""
        field = Field(avoided, min((forecast.wait_s for forecast in forecasts), default=0.0), sibling)
        judged: list[Candidate] = []
        for forecast in forecasts:
            ranks = tuple(each.rank(forecast, field) for each in self.filters)
            seconds = tuple(each.seconds(forecast) for each in self.scorers)
            judged.append(Candidate(forecast, ranks, seconds, sum(seconds)))
        return judged

    def order(self, candidates: Sequence[Candidate], turn: int) -> list[Candidate]:
        """One for each decode worker, the best first. Those with more avoided workers than need be are left out. Of
        those that are alike the decode workers take turns, and their prefill workers at a slower pace, so that every
        pair comes up."""
        if not candidates:
            return []
        least_avoided = min(candidate.ranks[0] for candidate in candidates)
        by_decode: dict[str, list[Candidate]] = {}
        for candidate in candidates:
            if candidate.ranks[0] == least_avoided:
                by_decode.setdefault(candidate.forecast.path.decode.worker_id, []).append(candidate)
        bests = sorted((_alike(options) for options in by_decode.values()), key=_rank_of_first)
        ordered: list[Candidate] = []
        while bests:
            group = list(takewhile(partial(_begins_like, bests[0][0]), bests))
            bests = bests[len(group) :]
            start = turn % len(group)
            for equals in [*group[start:], *group[:start]]:
                ordered.append(equals[turn // len(group) % len(equals)])
        return ordered


def _alike(options: Sequence[Candidate]) -> list[Candidate]:
    """The best of them, and all that are as good."""
    best = min(options, key=_rank)
    return [option for option in options if _are_alike(option, best)]


def _are_alike(one: Candidate, best: Candidate) -> bool:
    return one.ranks == best.ranks and one.total_s <= best.total_s + ALIKE_S


def _begins_like(best: Candidate, equals: Sequence[Candidate]) -> bool:
    return _are_alike(equals[0], best)


def _rank(candidate: Candidate) -> tuple[tuple[int, ...], float]:
    return candidate.ranks, candidate.total_s


def _rank_of_first(equals: Sequence[Candidate]) -> tuple[tuple[int, ...], float]:
    return min(_rank(candidate) for candidate in equals)
