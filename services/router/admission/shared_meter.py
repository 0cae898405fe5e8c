"""Limits that hold over all routers of a cluster, while the Redis that they share answers; else this router's own.

What is counted there is counted here too, so that a router that must decide alone knows what it has let in. Who is
under way holds a lease there, which this router renews: what a router that is gone held comes free by itself.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Final

from services.router.admission import shared_scripts as scripts
from services.router.admission.door import LocalFailures
from services.router.admission.ledger import Cost, check_possible, too_fast, too_many_at_once
from services.router.admission.meter import LocalMeter
from services.router.admission.shared_state import Answer, Shared, SharedLost
from services.router.admission.tenants import Tenant
from triptych.obs import metrics

LEASE_S: Final = 30.0
RENEWALS_PER_LEASE: Final = 3
IDS_PER_CALL: Final = 500


class SharedMeter:
    """A `Meter`. Owner of the leases of this router's requests."""

    def __init__(self, shared: Shared, local: LocalMeter, prefix: str, lease_s: float = LEASE_S) -> None:
        self._shared = shared
        self._local = local
        self._prefix = prefix
        self._lease_s = lease_s
        self._under_way: dict[str, Tenant] = {}  # of tenants that have a limit on these

    async def enter(self, tenant: Tenant, request_id: str) -> None:
        per_minute = tenant.rates.requests_per_minute
        if tenant.max_concurrent is None and per_minute is None:
            await self._local.enter(tenant, request_id)
            return
        args = (request_id, self._lease_ms, tenant.max_concurrent or 0, per_minute or 0)
        try:
            answer = await self._shared.run(scripts.ENTER, self._keys(tenant, "running", "requests"), args)
        except SharedLost:
            _decided_here()
            await self._local.enter(tenant, request_id)
        else:
            _check(tenant, answer)
            self._local.ledger(tenant).entered_elsewhere(self._local.now_s())
        if tenant.max_concurrent is not None:
            self._under_way[request_id] = tenant

    async def charge(self, tenant: Tenant, cost: Cost) -> None:
        rates = tenant.rates
        wanted = [("tokens", rates.tokens_per_minute, cost.tokens), ("pixels", rates.pixels_per_minute, cost.pixels)]
        limited = [(name, per_minute, amount) for name, per_minute, amount in wanted if per_minute is not None]
        if not limited:
            return
        check_possible(tenant, cost)
        keys = self._keys(tenant, *(name for name, _, _ in limited))
        try:
            answer = await self._shared.run(scripts.CHARGE, keys, [value for row in limited for value in row])
        except SharedLost:
            _decided_here()
            await self._local.charge(tenant, cost)
        else:
            _check(tenant, answer)
            self._local.ledger(tenant).charged_elsewhere(cost, self._local.now_s())

    async def settle(self, tenant: Tenant, num_tokens: int) -> None:
        await self._local.settle(tenant, num_tokens)
        per_minute = tenant.rates.tokens_per_minute
        if per_minute is not None:
            await self._try(scripts.SETTLE, self._keys(tenant, "tokens"), per_minute, num_tokens)

    async def leave(self, tenant: Tenant, request_id: str) -> None:
        await self._local.leave(tenant, request_id)
        if self._under_way.pop(request_id, None) is not None:
            await self._try(scripts.LEAVE, self._keys(tenant, "running"), request_id)

    async def renew_forever(self, came_back: asyncio.Event) -> None:
        """Also at once when Redis is back: it may have lost all that it knew."""
        while True:
            try:
                async with asyncio.timeout(self._lease_s / RENEWALS_PER_LEASE):
                    await came_back.wait()
            except TimeoutError:
                pass
            came_back.clear()
            await self._renew()

    async def _renew(self) -> None:
        ids: dict[str, list[str]] = defaultdict(list)
        tenants = {tenant.name: tenant for tenant in self._under_way.values()}
        for request_id, tenant in self._under_way.items():
            ids[tenant.name].append(request_id)
        for name, held in ids.items():
            keys = self._keys(tenants[name], "running")
            for start in range(0, len(held), IDS_PER_CALL):
                await self._try(scripts.RENEW, keys, self._lease_ms, *held[start : start + IDS_PER_CALL])

    async def _try(self, script: str, keys: list[str], *args: str | int | float) -> None:
        """What need not succeed: a lease ends by itself, and a bucket fills."""
        try:
            await self._shared.run(script, keys, args)
        except SharedLost:
            return

    def _keys(self, tenant: Tenant, *names: str) -> list[str]:
        return [f"{self._prefix}:{{{tenant.name}}}:{name}" for name in names]

    @property
    def _lease_ms(self) -> int:
        return round(self._lease_s * 1000)


class SharedFailures:
    """`Failures` over all routers."""

    def __init__(self, shared: Shared, local: LocalFailures, prefix: str, failures_per_minute: int) -> None:
        self._shared = shared
        self._local = local
        self._prefix = prefix
        self._per_minute = failures_per_minute

    async def wait_s(self, caller: str) -> float:
        wait_s = await self._local.wait_s(caller)
        if wait_s > 0:
            return wait_s
        try:
            return (await self._shared.run(scripts.MAY_TRY, [self._key(caller)], [self._per_minute]))[2]
        except SharedLost:
            _decided_here()
            return 0.0

    async def failed(self, caller: str) -> None:
        await self._local.failed(caller)
        try:
            await self._shared.run(scripts.FAILED, [self._key(caller)], [self._per_minute])
        except SharedLost:
            return

    def _key(self, caller: str) -> str:
        return f"{self._prefix}:failed:{{{caller or 'local'}}}"


def _decided_here() -> None:
    metrics.FALLBACKS.labels("shared_state").inc()


def _check(tenant: Tenant, answer: Answer) -> None:
    """Raises TooMuch."""
    outcome, name, wait_s = answer
    if outcome != scripts.LIMITED:
        return
    if name == scripts.CONCURRENCY:
        raise too_many_at_once(tenant.max_concurrent or 0)
    raise too_fast(name, getattr(tenant.rates, f"{name}_per_minute", None) or 0.0, wait_s)
