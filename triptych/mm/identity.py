"""Content-addressed identity of media items.

An identity is SHA-256 over length-prefixed fields, so that no two different field lists hash alike. Everything that
changes the embedding is in it: weights, vision dtype, processor version, modality, processing parameters, the tenant's
salt and the *encoded* media bytes (hashing those costs a tenth of hashing pixels), or for a tensor its number format,
shape, grid and elements, or for what a trusted caller names its own hash. Test vectors: docs/identity.md.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable

from triptych.core.plan import IDENTITY_BYTES, Grid, ItemFormat, Modality
from triptych.mm.tensor import TensorValue

_IDENTITY_TAG = b"triptych/item-identity/v1"
_TENSOR_TAG = b"triptych/tensor-identity/v1"
_CALLER_TAG = b"triptych/caller-identity/v1"
_SALT_TAG = b"triptych/tenant-salt/v1"


def tenant_salt(tenant: str, cache_salt: str = "") -> bytes:
    """What keeps the cached pictures and KV of a tenant's callers, with the salt that they ask for, from all others':
    32 bytes, or none for nobody's tenant without a salt. All routers of a cluster compute the same."""
    if not tenant and not cache_salt:
        return b""
    return _digest((_SALT_TAG, tenant.encode(), cache_salt.encode()))


def item_identity(
    *,
    model_fingerprint: bytes,
    vision_dtype: str,
    processor_version: str,
    modality: Modality,
    processing_key: bytes,
    tenant_salt: bytes,
    media: bytes,
) -> bytes:
    """32 bytes that name this media as this model sees it."""
    head = (
        _IDENTITY_TAG,
        model_fingerprint,
        vision_dtype.encode(),
        processor_version.encode(),
        modality.value.encode(),
        processing_key,
        tenant_salt,
    )
    return _digest((*head, media))


def tensor_identity(
    *,
    model_fingerprint: bytes,
    vision_dtype: str,
    processor_version: str,
    modality: Modality,
    processing_key: bytes,
    tenant_salt: bytes,
    format: ItemFormat,  # noqa: A002 - the field's name everywhere
    grid: Grid,
    tensor: TensorValue,
) -> bytes:
    """32 bytes that name a processor's output or an embedding. The grid is part of it: it decides over positions, and
    the elements do not tell it."""
    head = (
        _TENSOR_TAG,
        model_fingerprint,
        vision_dtype.encode(),
        processor_version.encode(),
        modality.value.encode(),
        processing_key,
        tenant_salt,
    )
    shape = struct.pack(f">{len(tensor.shape)}Q", *tensor.shape)
    sizes = struct.pack(">3Q", grid.t, grid.h, grid.w)
    return _digest((*head, format.value.encode(), tensor.dtype.value.encode(), shape, sizes, tensor.data))


def caller_identity(
    *,
    model_fingerprint: bytes,
    vision_dtype: str,
    processor_version: str,
    modality: Modality,
    processing_key: bytes,
    tenant_salt: bytes,
    grid: Grid,
    num_tokens: int,
    caller_hash: bytes,
) -> bytes:
    """32 bytes that name whatever a trusted caller calls `caller_hash`, within its own tenant and salt. Grid and tokens
    are part of it, so that one hash for pictures of two shapes names two items."""
    head = (
        _CALLER_TAG,
        model_fingerprint,
        vision_dtype.encode(),
        processor_version.encode(),
        modality.value.encode(),
        processing_key,
        tenant_salt,
    )
    return _digest((*head, struct.pack(">4Q", grid.t, grid.h, grid.w, num_tokens), caller_hash))


def item_hash(identity: bytes) -> int:
    """The identity's first 8 bytes, big-endian: a key for compact indexes, never the key of a cache."""
    if len(identity) != IDENTITY_BYTES:
        raise ValueError(f"an identity has {IDENTITY_BYTES} bytes, not {len(identity)}")
    return int.from_bytes(identity[:8], "big")


def _digest(parts: Iterable[bytes | memoryview]) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(struct.pack(">Q", len(part)))
        digest.update(part)
    return digest.digest()
