"""Settings that all workers share. Each service's `settings.py` extends them and is the only reader of its process's
flags, environment and file."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from triptych.core.failpoints import parse_failpoints
from triptych.core.kv_format import MAX_PAGE_TOKENS
from triptych.core.tls_files import TlsSettings
from triptych.obs.log import LEVELS
from triptych.transport.in_flight import DEFAULT_IN_FLIGHT_BYTES
from triptych.transport.names import TRANSPORT_CHOICES

# More than any machine has, and less than what overflows on the way to the system.
_MAX_BYTES = 1 << 50

DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class WorkerSettings(TlsSettings):
    model: Path = field(metadata={"help": "checkpoint folder"})
    worker_id: str = field(metadata={"help": "name of this worker in the cluster, like encoder-0"})
    runtime_dir: Path | None = field(default=None, metadata={"help": "runtime folder of the cluster"})
    host: str = field(default="127.0.0.1", metadata={"help": "address to listen on"})
    port: int = field(default=0, metadata={"help": "gRPC port; 0 takes a free one", "min": 0, "max": 65535})
    metrics_port: int = field(default=0, metadata={"help": "metrics port; 0 takes a free one", "min": 0, "max": 65535})
    insecure_network: bool = field(default=False, metadata={"help": "allow listening beyond loopback without TLS"})
    transport: str = field(
        default="auto",
        metadata={
            "help": "how bytes move between workers: the best that both can do (auto+nixl: NIXL, too), or this one"
            " (zmq: by the host's socket or by TCP, whichever fits)",
            "choices": tuple(TRANSPORT_CHOICES),
        },
    )
    data_port: int = field(
        default=0, metadata={"help": "port for data frames (zmq); 0 takes a free one", "min": 0, "max": 65535}
    )
    strict: bool = field(default=False, metadata={"help": "a second-best way is an error instead of a fallback"})
    device: str = field(default="auto", metadata={"help": "cpu, cuda, cuda:N or auto"})
    dtype: str = field(default="auto", metadata={"help": "auto: float32 on CPU, bfloat16 on GPU", "choices": DTYPES})
    threads: int = field(
        default=0, metadata={"help": "CPU threads for torch; 0 leaves it to torch", "min": 0, "max": 4096}
    )
    nice: int = field(
        default=0,
        metadata={"help": "how far it stands back for other processes on its cores, as nice(1)", "min": 0, "max": 19},
    )
    failpoints: str = field(default="", metadata={"help": "for tests: where to be slow, to fail or to die"})
    log_level: str = field(default="info", metadata={"help": "least level that is logged", "choices": LEVELS})
    log_format: str = field(default="text", metadata={"help": "how a record is written", "choices": ("text", "json")})

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_failpoints(self.failpoints)  # told at once, not after seconds of imports


@dataclass(frozen=True, kw_only=True)
class VisionSettings:
    """What an encoder adds."""

    embedding_cache_bytes: int = field(default=256 << 20, metadata={"help": "embedding cache, in bytes", "min": 0})
    embedding_in_flight_bytes: int = field(
        default=DEFAULT_IN_FLIGHT_BYTES,
        metadata={
            "help": "embeddings on their way to one prefill worker and not yet acknowledged, in bytes; what is beyond"
            " waits for that worker and for no other",
            "min": 1,
            "max": _MAX_BYTES,
        },
    )
    max_batch_patches: int = field(
        default=0, metadata={"help": "patches in one vision pass; 0: 16384 on a GPU, 1024 on a CPU", "min": 0}
    )
    max_batch_items: int = field(default=32, metadata={"help": "pictures in one vision pass", "min": 1})
    max_pixels: int = field(default=100_000_000, metadata={"help": "largest picture decoded, in pixels", "min": 1})
    max_media_bytes: int = field(default=32 << 20, metadata={"help": "largest encoded picture, in bytes", "min": 1})
    media_processes: int = field(
        default=0,
        metadata={
            "help": "processes that decode pictures; 0: one for every two cores, up to 8",
            "min": 0,
            "max": 256,
        },
    )
    media_memory_bytes: int = field(
        default=2 << 30, metadata={"help": "what each may take to decode a picture, in bytes", "min": 1 << 24}
    )
    media_nice: int = field(
        default=5, metadata={"help": "how far they stand back for the worker itself, as nice(1)", "min": 0, "max": 19}
    )
    media_cpu_s: int = field(default=20, metadata={"help": "CPU for one picture, in seconds", "min": 1, "max": 3600})
    media_timeout_s: float = field(
        default=60.0, metadata={"help": "until a picture must be decoded, however busy the cores are", "min": 0.1}
    )


@dataclass(frozen=True, kw_only=True)
class LanguageSettings:
    """What a worker with a language model adds."""

    kv_pool_bytes: int = field(default=256 << 20, metadata={"help": "KV pool, in bytes", "min": 1, "max": _MAX_BYTES})
    host_pool_bytes: int = field(
        default=256 << 20,
        metadata={
            "help": "host memory for the KV of answers that make room for others, in bytes; 0: they are replayed",
            "min": 0,
            "max": _MAX_BYTES,
        },
    )
    page_tokens: int = field(default=16, metadata={"help": "tokens in a KV page", "min": 1, "max": MAX_PAGE_TOKENS})
    allow_kv_narrowing: bool = field(
        default=False,
        metadata={
            "help": "KV may be rounded from a prefill worker's --dtype to a decode worker's, if both allow it; not with"
            " --strict"
        },
    )
    chunk_tokens: int = field(default=512, metadata={"help": "longest prefill chunk, in tokens", "min": 1})
    step_tokens: int = field(default=1024, metadata={"help": "token budget of a step", "min": 1})
    min_partial_tokens: int = field(
        default=64, metadata={"help": "smallest chunk run beside others while embeddings are missing", "min": 1}
    )
    max_sequences: int = field(default=256, metadata={"help": "sequences that hold KV at once", "min": 1})
    max_waiting: int = field(default=1024, metadata={"help": "sequences that may wait for a reservation", "min": 1})
    landing_bytes: int = field(
        default=64 << 20,
        metadata={"help": "landing arena for embeddings, in bytes", "min": 4096, "max": _MAX_BYTES},
    )
    landed_cache_bytes: int = field(
        default=64 << 20,
        metadata={
            "help": "how much of the landing arena may hold embeddings that nobody needs right now, for those who may"
            " need them again; they give way to whatever lands. 0 keeps none",
            "min": 0,
            "max": _MAX_BYTES,
        },
    )
    poison_freed: bool = field(
        default=False,
        metadata={"help": "for tests: pages and slots that are given back are overwritten with what is no number"},
    )
