"""What a path should not be. A filter never leaves a request without a path: what it would not have is asked last.

Each gives a rank; 0 is what it lets pass. The first filter's rank counts before the second's, and all of them before
any scorer's seconds.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Final, Protocol

from services.router.placement import has_other_format, num_avoided, num_borrowed
from services.router.routing.forecast import Forecast
from services.router.routing.homes import Home

SATURATED_S: Final = 0.5
SATURATED_FACTOR: Final = 2.0


@dataclass(frozen=True, slots=True)
class Field:
    """What the paths of a request have in common. `least_wait_s`: the shortest wait for a prefill worker. `sibling`:
    who serves another choice of the same request."""

    avoided: Set[str]
    least_wait_s: float
    sibling: Home | None = None


class Filter(Protocol):
    """`name` is the reason that `/debug/plan` and the metrics give."""

    name: str

    def rank(self, forecast: Forecast, field: Field) -> int: ...


class Avoided:
    """A worker that has just failed this request, or fails all."""

    name = "avoided"

    def rank(self, forecast: Forecast, field: Field) -> int:
        return num_avoided(field.avoided, forecast.path) if field.avoided else 0


class OtherFormat:
    """KV would change its number format on the way."""

    name = "other_format"

    def rank(self, forecast: Forecast, field: Field) -> int:
        return int(has_other_format(forecast.path))


class Borrowed:
    """A worker would do a stage for others beside its own work."""

    name = "borrowed"

    def rank(self, forecast: Forecast, field: Field) -> int:
        return num_borrowed(forecast.path)


class NoRoom:
    """The decode worker had no pages for the prompt when it last told."""

    name = "no_room"

    def rank(self, forecast: Forecast, field: Field) -> int:
        return int(forecast.pages_short > 0)


class Saturated:
    """The prefill worker has far more to do than the least busy: whatever it holds, it is passed over."""

    name = "saturated"

    def rank(self, forecast: Forecast, field: Field) -> int:
        return int(forecast.wait_s > max(SATURATED_S, SATURATED_FACTOR * field.least_wait_s))


class Apart:
    """Another choice of the same request is served elsewhere: these workers would compute its prompt again."""

    name = "apart"

    def rank(self, forecast: Forecast, field: Field) -> int:
        home, path = field.sibling, forecast.path
        return int(home is not None and (path.decode.ref, path.prefill.ref) != (home.decode, home.prefill))


FILTERS: Final[tuple[Filter, ...]] = (Avoided(), OtherFormat(), Borrowed(), NoRoom(), Saturated(), Apart())
