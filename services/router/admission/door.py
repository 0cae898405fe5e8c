"""Whose key it is, and how often an address may be wrong about that.

Beyond the limit an address is answered 429 whatever it sends, so that trying on tells it nothing, except where a key
comes that was right from there before: behind one proxy or NAT nobody can lock the others out.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

from services.router.admission.keyring import Headers, Keyring
from services.router.admission.strangers import Strangers
from services.router.admission.tenants import Tenant
from triptych.core.clock import Clock
from triptych.core.errors import RateLimited, Unauthenticated
from triptych.obs import metrics

MAX_ACQUAINTANCES = 10_000
NANOSECONDS = 1e9


class Failures(Protocol):
    """Where failed authentications are counted, by `caller_of` of the peer's address."""

    async def wait_s(self, caller: str) -> float:
        """Until that caller may try a key; 0 when it may now."""
        ...

    async def failed(self, caller: str) -> None: ...


class LocalFailures:
    """Counts in this process."""

    def __init__(self, failures_per_minute: int, clock: Clock) -> None:
        self._strangers = Strangers(failures_per_minute)
        self._clock = clock

    async def wait_s(self, caller: str) -> float:
        return self._strangers.wait_s(caller, self._clock.monotonic_ns() / NANOSECONDS)

    async def failed(self, caller: str) -> None:
        self._strangers.failed(caller, self._clock.monotonic_ns() / NANOSECONDS)


class Door:
    """Owner of what is known of callers that were let in."""

    def __init__(self, keyring: Keyring, failures: Failures) -> None:
        self._keyring = keyring
        self._failures = failures
        self._acquainted: OrderedDict[tuple[str, str], None] = OrderedDict()

    async def tenant_of(self, headers: Headers, caller: str) -> Tenant:
        """Of a request's raw headers, with names in lower case.

        Raises Unauthenticated, and RateLimited for one that has brought too many keys that nobody knows. One without
        any has tried nothing: it is not counted.
        """
        if not any(name == b"authorization" for name, _ in headers):
            metrics.AUTH_FAILURES.labels("no_key").inc()
            return self._keyring.authenticate(headers)
        try:
            tenant = self._keyring.authenticate(headers)
        except Unauthenticated:
            await self._check_may_try(caller)
            metrics.AUTH_FAILURES.labels("unknown_key").inc()
            await self._failures.failed(caller)
            raise
        if (caller, tenant.name) not in self._acquainted:
            await self._check_may_try(caller)
        self._remember(caller, tenant)
        return tenant

    async def _check_may_try(self, caller: str) -> None:
        wait_s = await self._failures.wait_s(caller)
        if wait_s > 0:
            metrics.AUTH_FAILURES.labels("too_many").inc()
            raise RateLimited("too many API keys that are not known here came from this address", retry_after_s=wait_s)

    def _remember(self, caller: str, tenant: Tenant) -> None:
        self._acquainted[caller, tenant.name] = None
        self._acquainted.move_to_end((caller, tenant.name))
        if len(self._acquainted) > MAX_ACQUAINTANCES:
            self._acquainted.popitem(last=False)
