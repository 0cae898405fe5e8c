"""What a client saw of one request, and the figures of many. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class Sample:
    """One streamed answer. Times are seconds since the request was sent.

    Attributes:
        first_s: until the first event, which each server sends with the first token.
        last_s: until the last event that belongs to a token.
        timeline: rows of the `triptych` field; empty unless asked for, and from others than us.
    """

    first_s: float
    last_s: float
    prompt_tokens: int
    completion_tokens: int
    text: str = ""
    timeline: Sequence[dict[str, Any]] = field(default=(), repr=False)

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None for an answer of one token."""
        if self.completion_tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.completion_tokens - 1)


@dataclass(frozen=True, slots=True)
class Figures:
    """One arm in one cell. Milliseconds; tokens are output tokens."""

    ttft_p50_ms: float
    ttft_p99_ms: float
    tpot_p50_ms: float
    tpot_p99_ms: float
    tokens_per_s: float
    prompt_tokens: float
    requests: int


def percentile(values: Sequence[float], percent: float) -> float:
    """By linear interpolation between the two nearest, as numpy's default. Raises ValueError for no values."""
    if not values:
        raise ValueError("no values have no percentile")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low, high = math.floor(place), math.ceil(place)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def figures(samples: Sequence[Sample], wall_s: float) -> Figures:
    """Of one round: `wall_s` from the first request to the last token."""
    ttft = [1e3 * sample.first_s for sample in samples]
    tpot = [1e3 * sample.tpot_s for sample in samples if sample.tpot_s is not None] or [math.nan]
    return Figures(
        percentile(ttft, 50),
        percentile(ttft, 99),
        percentile(tpot, 50),
        percentile(tpot, 99),
        sum(sample.completion_tokens for sample in samples) / wall_s,
        statistics.fmean(sample.prompt_tokens for sample in samples),
        len(samples),
    )


def over_rounds(rounds: Iterable[Figures]) -> Figures:
    """The median of each figure; the requests are added up."""
    known = list(rounds)
    medians = {item.name: statistics.median(getattr(one, item.name) for one in known) for item in fields(Figures)}
    return Figures(**{**medians, "requests": sum(one.requests for one in known)})
