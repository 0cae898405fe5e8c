"""Which IP addresses are anybody's, out on the internet. Pure.

Python's own `is_global` is not enough: it lets translations through (NAT64, 6to4), whose packets arrive at an IPv4
address that nobody has looked at, and what single clouds serve their secrets from.
"""

from __future__ import annotations

import ipaddress
from typing import Final

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
IPNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network

_SPECIAL_V4: Final = (
    "0.0.0.0/8",  # this host
    "10.0.0.0/8",  # private
    "100.64.0.0/10",  # carriers' NAT; a cloud's metadata at 100.100.100.200
    "127.0.0.0/8",  # loopback
    "168.63.129.16/32",  # a cloud's metadata
    "169.254.0.0/16",  # link-local; most clouds' metadata at 169.254.169.254
    "172.16.0.0/12",  # private
    "192.0.0.0/24",  # protocol assignments; a cloud's metadata at 192.0.0.192
    "192.0.2.0/24",  # documentation
    "192.31.196.0/24",  # AS112
    "192.52.193.0/24",  # AMT
    "192.88.99.0/24",  # 6to4 relays
    "192.168.0.0/16",  # private
    "192.175.48.0/24",  # AS112
    "198.18.0.0/15",  # benchmarks
    "198.51.100.0/24",  # documentation
    "203.0.113.0/24",  # documentation
    "224.0.0.0/4",  # multicast
    "240.0.0.0/4",  # reserved, and broadcast
)
# All of IPv6 that is public lies in this. So loopback, mapped and compatible IPv4, NAT64 (64:ff9b::/96 and
# 64:ff9b:1::/48), unique-local, link-local, site-local and multicast do not.
_GLOBAL_UNICAST: Final = ipaddress.IPv6Network("2000::/3")
_SPECIAL_V6: Final = (
    "2001::/23",  # protocol assignments: Teredo, ORCHID, benchmarks
    "2001:db8::/32",  # documentation
    "2002::/16",  # 6to4
    "3fff::/20",  # documentation
)

_NOT_PUBLIC: Final = tuple(ipaddress.ip_network(text) for text in (*_SPECIAL_V4, *_SPECIAL_V6))


def is_public(address: IPAddress) -> bool:
    """An IPv4 address that is written as an IPv6 one counts as what it is."""
    address = unmapped(address)
    if isinstance(address, ipaddress.IPv6Address) and address not in _GLOBAL_UNICAST:
        return False
    return address.is_global and not any(is_within(address, network) for network in _NOT_PUBLIC)


def unmapped(address: IPAddress) -> IPAddress:
    """The IPv4 address that an IPv6 one (::ffff:a.b.c.d) stands for, else the address."""
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def is_within(address: IPAddress, network: IPNetwork) -> bool:
    return address.version == network.version and address in network
