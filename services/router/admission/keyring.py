"""Which tenant an API key belongs to. Keys themselves are not kept, only their digests."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping

from services.router.admission.tenants import Tenant
from triptych.core.errors import Unauthenticated

MAX_KEY_CHARS = 512
_SCHEME = b"bearer "

Headers = list[tuple[bytes, bytes]]


def digest_of(key: bytes) -> bytes:
    """32 bytes: what a keys file may hold instead of the key."""
    return hashlib.sha256(key).digest()


class Keyring:
    """Pure. Looking a key up takes no longer for one that is nearly right: the table's own keys are made with a secret
    of this process, so nobody can choose what they begin with, and the digests are compared in constant time."""

    def __init__(self, tenants: Mapping[bytes, Tenant]) -> None:
        """`tenants`: by the digest of a key, 32 bytes; not empty."""
        self._secret = secrets.token_bytes(32)
        self._entries = {self._blinded(digest): (digest, tenant) for digest, tenant in tenants.items()}

    @property
    def tenants(self) -> tuple[Tenant, ...]:
        """By name."""
        found = {tenant.name: tenant for _, tenant in self._entries.values()}
        return tuple(found[name] for name in sorted(found))

    def tenant_of(self, key: bytes) -> Tenant | None:
        digest = digest_of(key)
        known, tenant = self._entries.get(self._blinded(digest), (bytes(32), None))
        return tenant if hmac.compare_digest(known, digest) else None

    def authenticate(self, headers: Headers) -> Tenant:
        """Of a request's raw headers, with names in lower case. Raises Unauthenticated, which never says how near."""
        values = [value for name, value in headers if name == b"authorization"]
        if not values:
            raise Unauthenticated("an API key is needed: Authorization: Bearer KEY")
        tenant = self.tenant_of(_bearer_key(values[0])) if len(values) == 1 else None
        if tenant is None:
            raise Unauthenticated("this API key is not known here")
        return tenant

    def _blinded(self, digest: bytes) -> bytes:
        return hmac.digest(self._secret, digest, "sha256")


def _bearer_key(value: bytes) -> bytes:
    """Empty, which is nobody's key, where there is none."""
    if value[: len(_SCHEME)].lower() != _SCHEME or len(value) > len(_SCHEME) + MAX_KEY_CHARS:
        return b""
    return value[len(_SCHEME) :].strip()
