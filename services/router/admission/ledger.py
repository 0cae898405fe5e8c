"""What one tenant uses. Pure; times are passed in.

enter ──► charge ──► settle ──► leave
request    tokens,    what was
+ 1 under  pixels     not used
way
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from services.router.admission.bucket import Bucket
from services.router.admission.tenants import Tenant
from triptych.core.errors import RateLimited, RequestTooLarge

# One of them ends sooner or later, and nobody knows when.
CONCURRENCY_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one request: tokens of its prompt and the most that its answers may have, and pixels of its pictures."""

    tokens: int
    pixels: int


class TooMuch(RateLimited):
    """`reason` is the label of the metric."""

    def __init__(self, message: str, reason: str, retry_after_s: float) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.reason = reason


class Ledger:
    """Owner of a tenant's counts in this process."""

    def __init__(self, tenant: Tenant, now_s: float) -> None:
        self._tenant = tenant
        rates = tenant.rates
        self._requests = _bucket(rates.requests_per_minute, now_s)
        self._tokens = _bucket(rates.tokens_per_minute, now_s)
        self._pixels = _bucket(rates.pixels_per_minute, now_s)
        self._num_under_way = 0

    @property
    def num_under_way(self) -> int:
        return self._num_under_way

    def enter(self, now_s: float) -> None:
        """Counts a request. Raises TooMuch, and has counted nothing then."""
        limit = self._tenant.max_concurrent
        if limit is not None and self._num_under_way >= limit:
            raise too_many_at_once(limit)
        if self._requests is not None:
            _check(self._requests, "requests", 1, now_s)
            self._requests.take(1, now_s)
        self._num_under_way += 1

    def charge(self, cost: Cost, now_s: float) -> None:
        """All of it or, with an error, nothing. Raises TooMuch, or RequestTooLarge for what no minute has room for."""
        wanted = list(self._wanted(cost))
        for bucket, kind, amount in wanted:
            _check(bucket, kind, amount, now_s)
        for bucket, _, amount in wanted:
            bucket.take(amount, now_s)

    def entered_elsewhere(self, now_s: float) -> None:
        """Counts a request that others have let in, whatever this ledger would have said."""
        _take_what_is_there(self._requests, 1, now_s)
        self._num_under_way += 1

    def charged_elsewhere(self, cost: Cost, now_s: float) -> None:
        """The same for what it costs."""
        for bucket, _, amount in self._wanted(cost):
            _take_what_is_there(bucket, amount, now_s)

    def settle(self, num_tokens: int, now_s: float) -> None:
        """Gives back tokens that were charged and not used."""
        if self._tokens is not None:
            self._tokens.give_back(num_tokens, now_s)

    def leave(self) -> None:
        assert self._num_under_way > 0
        self._num_under_way -= 1

    def _wanted(self, cost: Cost) -> Iterator[tuple[Bucket, str, int]]:
        if self._tokens is not None:
            yield self._tokens, "tokens", cost.tokens
        if self._pixels is not None:
            yield self._pixels, "pixels", cost.pixels


def check_possible(tenant: Tenant, cost: Cost) -> None:
    """Raises RequestTooLarge for what no minute has room for."""
    rates = tenant.rates
    for kind, per_minute, amount in (
        ("tokens", rates.tokens_per_minute, cost.tokens),
        ("pixels", rates.pixels_per_minute, cost.pixels),
    ):
        if per_minute is not None and amount > max(per_minute, 1.0):
            raise too_large(kind, amount, per_minute)


def too_many_at_once(limit: int) -> TooMuch:
    return TooMuch(
        f"{limit} requests of this key's tenant are under way, its limit", "concurrency", CONCURRENCY_RETRY_S
    )


def too_fast(kind: str, per_minute: float, wait_s: float) -> TooMuch:
    return TooMuch(f"this key's tenant has used its {per_minute:g} {kind} a minute; try again later", kind, wait_s)


def too_large(kind: str, amount: int, per_minute: float) -> RequestTooLarge:
    return RequestTooLarge(
        f"the request may use {amount} {kind}, and this key's tenant has {per_minute:g} a minute; ask for less"
    )


def _bucket(per_minute: float | None, now_s: float) -> Bucket | None:
    return None if per_minute is None else Bucket(per_minute, now_s)


def _take_what_is_there(bucket: Bucket | None, amount: float, now_s: float) -> None:
    if bucket is not None:
        bucket.take(min(amount, max(0.0, bucket.level(now_s))), now_s)


def _check(bucket: Bucket, kind: str, amount: int, now_s: float) -> None:
    if amount > max(bucket.burst, 1.0):
        raise too_large(kind, amount, bucket.burst)
    wait_s = bucket.wait_s(min(amount, bucket.burst), now_s)
    if wait_s > 0:
        raise too_fast(kind, bucket.burst, wait_s)
