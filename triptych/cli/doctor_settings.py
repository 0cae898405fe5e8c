"""What `triptych doctor` can be told: all that `triptych up` can, and what the workers read for themselves."""

from __future__ import annotations

from dataclasses import dataclass, field

from triptych.cli.settings import UpSettings
from triptych.core.kv_format import MAX_PAGE_TOKENS

_MAX_BYTES = 1 << 50


@dataclass(frozen=True, slots=True)
class DoctorSettings(UpSettings):
    """None where the service's own default, or its table in the file, holds."""

    json: bool = field(default=False, metadata={"help": "print one JSON object instead of a table"})
    kv_pool_bytes: int | None = field(
        default=None, metadata={"help": "KV pool of each worker, in bytes", "min": 1, "max": _MAX_BYTES}
    )
    host_pool_bytes: int | None = field(
        default=None,
        metadata={"help": "host memory for KV that makes room for others, in bytes", "min": 0, "max": _MAX_BYTES},
    )
    landing_bytes: int | None = field(
        default=None, metadata={"help": "landing arena for embeddings, in bytes", "min": 4096, "max": _MAX_BYTES}
    )
    landed_cache_bytes: int | None = field(
        default=None,
        metadata={"help": "how much of it may keep what has landed, in bytes", "min": 0, "max": _MAX_BYTES},
    )
    page_tokens: int | None = field(
        default=None, metadata={"help": "tokens in a KV page", "min": 1, "max": MAX_PAGE_TOKENS}
    )
    embedding_cache_bytes: int | None = field(default=None, metadata={"help": "embedding cache, in bytes", "min": 0})
    media_processes: int | None = field(
        default=None, metadata={"help": "processes of each encoder that decode pictures", "min": 0, "max": 256}
    )
    media_memory_bytes: int | None = field(
        default=None, metadata={"help": "what each may take to decode a picture, in bytes", "min": 1 << 24}
    )
    dtype: str | None = field(
        default=None,
        metadata={
            "help": "auto: float32 on CPU, bfloat16 on GPU",
            "choices": ("auto", "float32", "bfloat16", "float16"),
        },
    )
    device: str | None = field(default=None, metadata={"help": "cpu, cuda, cuda:N or auto"})
    allow_kv_narrowing: bool | None = field(
        default=None, metadata={"help": "KV may be rounded to a decode worker's dtype, if both sides allow it"}
    )
    strict: bool | None = field(default=None, metadata={"help": "a second-best way is an error"})
