"""Who asks: a tenant, what it may use, and what its callers may do."""

from __future__ import annotations

from dataclasses import dataclass, replace

from triptych.rpc.convert import MAX_PRIORITY


@dataclass(frozen=True, slots=True)
class Rates:
    """What a tenant may use in a minute, on average; after a quiet minute all of it at once. None is no limit.

    Tokens are those of the prompt, embedding rows included, and of the answers; pixels those of pictures as they were
    sent.
    """

    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    pixels_per_minute: float | None = None

    def part(self, num_parts: int) -> Rates:
        limits = (self.requests_per_minute, self.tokens_per_minute, self.pixels_per_minute)
        return Rates(*(None if limit is None else limit / num_parts for limit in limits))


@dataclass(frozen=True, slots=True)
class Tenant:
    """Whose caches are its own.

    Attributes:
        name: unique in a cluster; the label of metrics.
        max_concurrent: requests of this tenant that may be under way, those that wait included.
        weight: its part of the room in the cluster, against other tenants that wait for some.
        priority: the most urgent `priority` that its requests may have; the lower, the more urgent.
        is_admin: its callers may read what concerns all tenants.
        is_trusted: its callers may name pictures by hashes of their own.
    """

    name: str
    rates: Rates = Rates()
    max_concurrent: int | None = None
    weight: float = 1.0
    priority: int = 0
    is_admin: bool = False
    is_trusted: bool = False

    def part(self, num_parts: int) -> Tenant:
        """What one of several processes lets it use: together they let it use no more than all, but one at a time."""
        at_once = None if self.max_concurrent is None else max(1, self.max_concurrent // num_parts)
        return replace(self, rates=self.rates.part(num_parts), max_concurrent=at_once)

    def priority_of(self, wished: int) -> int:
        return max(wished, self.priority)


ANYBODY = Tenant("", priority=-MAX_PRIORITY, is_admin=True)
"""Everybody, where no keys are configured: whoever reaches the API may use all of it."""
