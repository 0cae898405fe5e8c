"""Content-addressed identity of media items.

An identity is SHA-256 over length-prefixed fields, so that no two different field lists hash alike. Everything that
changes the embedding is in it: weights, vision dtype, processor version, modality, processing parameters, the tenant's
salt and the *encoded* media bytes (hashing those costs a tenth of hashing pixels). Test vectors: docs/identity.md.
"""

from __future__ import annotations

import hashlib
import struct

from triptych.core.plan import IDENTITY_BYTES, Modality

_IDENTITY_TAG = b"triptych/item-identity/v1"


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
    digest = hashlib.sha256()
    head = (
        _IDENTITY_TAG,
        model_fingerprint,
        vision_dtype.encode(),
        processor_version.encode(),
        modality.value.encode(),
        processing_key,
        tenant_salt,
    )
    for part in head:
        digest.update(struct.pack(">Q", len(part)))
        digest.update(part)
    digest.update(struct.pack(">Q", len(media)))
    digest.update(media)
    return digest.digest()


def item_hash(identity: bytes) -> int:
    """The identity's first 8 bytes, big-endian: a key for compact indexes, never the key of a cache."""
    if len(identity) != IDENTITY_BYTES:
        raise ValueError(f"an identity has {IDENTITY_BYTES} bytes, not {len(identity)}")
    return int.from_bytes(identity[:8], "big")
