"""Who sends keys that nobody knows, and how many of them. Pure; times are passed in: seconds of a clock that never goes
back."""

from __future__ import annotations

import ipaddress
from collections import OrderedDict

from services.router.admission.bucket import Bucket

MAX_ADDRESSES = 10_000
_IPV6_NETWORK_BITS = 64


def caller_of(host: str | None) -> str:
    """What failures are counted by: an IPv4 address, or the network of an IPv6 one, since one machine has many in it.
    Empty where the peer has no address (a Unix-domain socket)."""
    if not host:
        return ""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return ""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        network = ipaddress.ip_network((address, _IPV6_NETWORK_BITS), strict=False)
        return str(network.network_address)
    return str(address)


class Strangers:
    """Owner of the counts: a bucket for each address that failed lately. At most `max_addresses` are remembered; those
    that were seen last stay."""

    def __init__(self, failures_per_minute: int, max_addresses: int = MAX_ADDRESSES) -> None:
        self._per_minute = failures_per_minute
        self._max_addresses = max_addresses
        self._buckets: OrderedDict[str, Bucket] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buckets)

    def wait_s(self, caller: str, now_s: float) -> float:
        """Until it may try a key; 0 when it may now."""
        bucket = self._buckets.get(caller)
        return 0.0 if bucket is None else bucket.wait_s(1.0, now_s)

    def failed(self, caller: str, now_s: float) -> None:
        bucket = self._buckets.pop(caller, None) or Bucket(self._per_minute, now_s)
        if bucket.wait_s(1.0, now_s) == 0:
            bucket.take(1.0, now_s)
        if len(self._buckets) >= self._max_addresses:
            self._buckets.popitem(last=False)
        self._buckets[caller] = bucket
