"""What both ends must agree on before bytes move, and the checksum over the bytes."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import xxhash

from triptych.core.errors import StartupError

FINGERPRINT_BYTES = 32


def embedding_layout_fingerprint(dtype: str, row_elements: int, levels: int, model_fingerprint: bytes) -> bytes:
    """32 bytes over one embedding row: `levels` rows of `row_elements` elements of `dtype` ("float32") per token."""
    return _fingerprint("embedding", [dtype, row_elements, levels, model_fingerprint])


def kv_layout_fingerprint(num_layers: int, num_kv_heads: int, head_dim: int, model_fingerprint: bytes) -> bytes:
    """32 bytes over one token's KV, all heads of all layers together: heads that are split over several workers are
    another layout. Not over what pools may differ in: page size and dtype, which each side says in its greeting
    (`core/kv_format.py`), and the number of pages, which the sender learns from the arena."""
    return _fingerprint("kv", ["head after head", num_layers, num_kv_heads, head_dim, model_fingerprint])


@cache
def host_id() -> str:
    """Equal on all workers that can share memory: same boot of the same kernel, same /dev/shm, same user."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        shm = os.stat("/dev/shm")
    except OSError as err:
        raise StartupError(f"this machine cannot tell its identity ({err.strerror}): mount /proc and /dev/shm") from err
    # Containers of one machine have the same boot id but usually each its own /dev/shm, told apart by its device.
    fields: list[str | int | bytes] = ["host", boot_id, shm.st_dev, shm.st_ino, os.getuid()]
    return _fingerprint("host", fields).hex()[:32]


def checksum64(buffer: memoryview | bytes | bytearray) -> int:
    """xxh3_64 over contiguous bytes."""
    return xxhash.xxh3_64_intdigest(buffer)


def _fingerprint(domain: str, fields: Iterable[str | int | bytes]) -> bytes:
    """SHA-256 over length-prefixed fields, so that no two lists of fields give the same bytes."""
    digest = hashlib.sha256()
    for value in ("triptych.layout.v1", domain, sys.byteorder, *fields):
        raw = value if isinstance(value, bytes) else str(value).encode()
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return digest.digest()
