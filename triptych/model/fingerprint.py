"""Fingerprint of a checkpoint: equal on all workers that serve the same weights."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from triptych.core.errors import StartupError
from triptych.model.checkpoint_files import CONFIG_FILE, read_json

_FULL_HASH_BYTES = 64 << 20
_BLOCK_BYTES = 1 << 20
_SAMPLES = 64
_SAMPLE_BYTES = 64 << 10


def checkpoint_fingerprint(model_dir: Path) -> bytes:
    """SHA-256 over config.json and every safetensors shard.

    A shard up to 64 MiB is hashed whole; a larger one by its header and 64 evenly spaced blocks of 64 KiB, so that a
    start does not read hundreds of gigabytes. Raises StartupError when there are no weights, or they cannot be read.
    """
    shards = sorted(model_dir.glob("*.safetensors"))
    if not shards:
        raise StartupError(f"model {model_dir.name!r} has no .safetensors file; convert the checkpoint first")
    digest = hashlib.sha256(b"triptych/checkpoint/v1")
    config = read_json(model_dir / CONFIG_FILE)
    digest.update(json.dumps(config, sort_keys=True).encode())
    for shard in shards:
        if shard.exists() and not shard.is_file():  # reading a pipe would wait for ever
            raise StartupError(f"{shard.name} is no file; download the checkpoint again")
        try:
            digest.update(f"{shard.name}:{shard.stat().st_size}".encode())
            _update_with_shard(digest, shard)
        except OSError as error:  # such as a link into a download folder that was cleared
            raise StartupError(
                f"{shard.name} cannot be read ({error.strerror}); download the checkpoint again"
            ) from None
    return digest.digest()


def _update_with_shard(digest: hashlib._Hash, shard: Path) -> None:
    size = shard.stat().st_size
    with shard.open("rb") as file:
        if size <= _FULL_HASH_BYTES:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
            return
        header_bytes = int.from_bytes(file.read(8), "little")
        digest.update(file.read(min(header_bytes, _FULL_HASH_BYTES)))
        for index in range(_SAMPLES):
            file.seek(index * (size - _SAMPLE_BYTES) // (_SAMPLES - 1), os.SEEK_SET)
            digest.update(file.read(_SAMPLE_BYTES))
