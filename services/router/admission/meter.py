"""Where the limits of tenants are kept, and one request's way through them."""

from __future__ import annotations

from typing import Protocol

from services.router.admission.ledger import Cost, Ledger, TooMuch
from services.router.admission.tenants import Tenant
from triptych.core.clock import Clock
from triptych.obs import metrics

NANOSECONDS = 1e9


class Meter(Protocol):
    """Each raises TooMuch for what is beyond the tenant's limits, `charge` RequestTooLarge for what always will be."""

    async def enter(self, tenant: Tenant, request_id: str) -> None: ...
    async def charge(self, tenant: Tenant, cost: Cost) -> None: ...
    async def settle(self, tenant: Tenant, num_tokens: int) -> None: ...
    async def leave(self, tenant: Tenant, request_id: str) -> None: ...


class LocalMeter:
    """Counts in this process: with several routers a tenant has its limits at each, with several processes of one
    router its part of them (`num_processes`)."""

    def __init__(self, clock: Clock, num_processes: int = 1) -> None:
        self._clock = clock
        self._num_processes = num_processes
        self._ledgers: dict[str, Ledger] = {}  # as many as there are tenants

    async def enter(self, tenant: Tenant, request_id: str) -> None:
        self.ledger(tenant).enter(self.now_s())

    async def charge(self, tenant: Tenant, cost: Cost) -> None:
        self.ledger(tenant).charge(cost, self.now_s())

    async def settle(self, tenant: Tenant, num_tokens: int) -> None:
        self.ledger(tenant).settle(num_tokens, self.now_s())

    async def leave(self, tenant: Tenant, request_id: str) -> None:
        self.ledger(tenant).leave()

    def ledger(self, tenant: Tenant) -> Ledger:
        if tenant.name not in self._ledgers:
            self._ledgers[tenant.name] = Ledger(tenant.part(self._num_processes), self.now_s())
        return self._ledgers[tenant.name]

    def now_s(self) -> float:
        return self._clock.monotonic_ns() / NANOSECONDS


class Visit:
    """One chat request of a tenant, from when it was let in. `enter`, then always `leave`."""

    def __init__(self, tenant: Tenant, meter: Meter, request_id: str) -> None:
        self.tenant = tenant
        self._label = tenant.name or "none"
        self._meter = meter
        self._request_id = request_id
        self._has_entered = False
        self._num_unused = 0

    async def enter(self) -> None:
        """Raises TooMuch."""
        metrics.TENANT_REQUESTS.labels(self._label).inc()
        try:
            await self._meter.enter(self.tenant, self._request_id)
        except TooMuch as error:
            self._refused(error)
            raise
        self._has_entered = True

    async def charge(self, cost: Cost) -> None:
        """Raises TooMuch or RequestTooLarge."""
        try:
            await self._meter.charge(self.tenant, cost)
        except TooMuch as error:
            self._refused(error)
            raise
        self._num_unused = cost.tokens
        metrics.TENANT_PIXELS.labels(self._label).inc(cost.pixels)

    def used(self, num_prompt_tokens: int, num_completion_tokens: int) -> None:
        """Of what was charged; the rest is given back with `leave`. An answer that never began costs nothing."""
        metrics.TENANT_TOKENS.labels(self._label, "prompt").inc(num_prompt_tokens)
        metrics.TENANT_TOKENS.labels(self._label, "completion").inc(num_completion_tokens)
        self._num_unused = max(0, self._num_unused - num_prompt_tokens - num_completion_tokens)

    async def leave(self) -> None:
        """Idempotent."""
        if self._num_unused:
            await self._meter.settle(self.tenant, self._num_unused)
            self._num_unused = 0
        if self._has_entered:
            self._has_entered = False
            await self._meter.leave(self.tenant, self._request_id)

    def _refused(self, error: TooMuch) -> None:
        metrics.TENANT_REFUSALS.labels(self._label, error.reason).inc()
