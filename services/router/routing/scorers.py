"""What speaks for one path against another, in seconds: less is better, and seconds of all kinds add up. So there are
no weights to tune, and what a worker holds gives way to what it has to do exactly when that takes longer."""

from __future__ import annotations

from typing import Final, Protocol

from services.router.routing.forecast import Forecast

WORK_SHARE: Final = 1.0
"""How much of a second of work counts against a path beside the time that its own request spends on it: others wait
for it, too."""
FULL_POOL_S: Final = 0.1
"""What an empty KV pool is worth against a full one."""
SEQUENCE_S: Final = 0.0005
"""What each sequence that decodes at a worker adds to the steps of a new one."""


class Scorer(Protocol):
    name: str

    def seconds(self, forecast: Forecast) -> float: ...


class FirstToken:
    """Until the first token is there: the prompts before it, or the pictures; then its own prompt."""

    name = "first_token"

    def seconds(self, forecast: Forecast) -> float:
        return max(forecast.wait_s, forecast.encode_s) + forecast.compute_s + forecast.hop_s


class Work:
    """What is computed that is cached elsewhere, or could be: it holds up those who come next."""

    name = "work"

    def seconds(self, forecast: Forecast) -> float:
        return WORK_SHARE * (forecast.compute_s + forecast.tower_s)


class Sending:
    """KV that decode does not hold."""

    name = "sending"

    def seconds(self, forecast: Forecast) -> float:
        return forecast.send_s


class Crowd:
    """How full decode is: its pages, and the sequences in its batch."""

    name = "crowd"

    def seconds(self, forecast: Forecast) -> float:
        return FULL_POOL_S * forecast.used_share + SEQUENCE_S * forecast.num_sequences


SCORERS: Final[tuple[Scorer, ...]] = (FirstToken(), Work(), Sending(), Crowd())
