"""The router's settings. The only place of this service that reads the environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from triptych.core.settings import load_settings
from triptych.core.tls_files import TlsSettings
from triptych.obs.log import LEVELS

SERVICE = "router"
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class RouterSettings(TlsSettings):
    model: Path = field(metadata={"help": "folder of the checkpoint that the workers serve"})
    host: str = field(default="127.0.0.1", metadata={"help": "address of the HTTP API"})
    port: int = field(
        default=8000, metadata={"help": "port of the HTTP API; 0 takes a free one", "min": 0, "max": 65535}
    )
    runtime_dir: Path | None = field(default=None, metadata={"help": "folder where the processes of a cluster meet"})
    ready_file: Path | None = field(
        default=None, metadata={"help": 'file to write {"url": ...} to when every stage can serve'}
    )
    request_timeout_s: float = field(
        default=120.0, metadata={"help": "seconds that a request may take in all", "min": 0.1, "max": 86400.0}
    )
    max_queue: int = field(
        default=256, metadata={"help": "requests that may wait for room; one more is a 503", "min": 0, "max": 1_000_000}
    )
    max_body_bytes: int = field(default=64 * _MIB, metadata={"help": "size of a request's body", "min": 1024})
    max_held_bytes: int = field(
        default=1024 * _MIB, metadata={"help": "bodies and fetched pictures of all requests together", "min": 1024}
    )
    max_media_items: int = field(default=16, metadata={"help": "pictures in one request", "min": 0, "max": 1024})
    max_media_bytes: int = field(default=20 * _MIB, metadata={"help": "encoded size of one picture", "min": 1})
    max_pixels: int = field(default=100_000_000, metadata={"help": "pixels of one picture", "min": 1})
    max_request_media_bytes: int = field(
        default=128 * _MIB, metadata={"help": "encoded size of all pictures of one request", "min": 1}
    )
    api_keys_file: Path | None = field(
        default=None, metadata={"help": "TOML file of tenants and their keys; with one, callers need a key"}
    )
    api_keys: tuple[str, ...] = field(default=(), repr=False, metadata={"secret": True})
    failed_keys_per_minute: int = field(
        default=60,
        metadata={"help": "unknown API keys that one address may send; one more is a 429", "min": 1, "max": 1_000_000},
    )
    redis_url: str | None = field(default=None, repr=False, metadata={"secret": True})
    redis_password_file: Path | None = field(
        default=None, metadata={"help": "file with the password of TRIPTYCH_REDIS_URL's Redis, which routers share"}
    )
    redis_ca: Path | None = field(
        default=None, metadata={"help": "certificate authority of that Redis, for rediss://; the system's if not given"}
    )
    redis_prefix: str = field(default="triptych", metadata={"help": "what keys in that Redis begin with"})
    redis_timeout_s: float = field(
        default=0.1,
        metadata={"help": "seconds that Redis may take before a router decides alone", "min": 0.001, "max": 5.0},
    )
    allow_url_fetch: bool = field(
        default=True, metadata={"help": "fetch pictures from http(s) URLs, not only from data: URIs"}
    )
    fetch_only: tuple[str, ...] = field(
        default=(), metadata={"help": "hosts and networks that pictures may be fetched from, and no others"}
    )
    fetch_allow: tuple[str, ...] = field(
        default=(), metadata={"help": "hosts and networks that may be fetched from though they are not public"}
    )
    fetch_deny: tuple[str, ...] = field(default=(), metadata={"help": "hosts and networks that are never fetched from"})
    fetch_timeout_s: float = field(
        default=10.0, metadata={"help": "seconds for one URL, redirects included", "min": 0.1, "max": 600.0}
    )
    fetch_request_timeout_s: float = field(
        default=30.0, metadata={"help": "seconds for all URLs of one request", "min": 0.1, "max": 3600.0}
    )
    workers: int = field(
        default=1,
        metadata={"help": "processes that share the port, each with its part of the limits", "min": 1, "max": 256},
    )
    listen_fd: int | None = field(
        default=None,
        metadata={"help": "descriptor of a socket that listens; each of several gets it", "min": 0},
    )
    supervisor_pid: int | None = field(
        default=None, metadata={"help": "the process that this one ends with; one of several gets it", "min": 1}
    )
    drain_timeout_s: float = field(
        default=30.0,
        metadata={
            "help": "seconds that requests under way may take at a stop",
            "min": 0.0,
            "max": 86400.0,
        },
    )
    strict: bool = field(default=False, metadata={"help": "refuse request parameters that would otherwise be ignored"})
    log_level: str = field(default="info", metadata={"help": "least level that is logged", "choices": LEVELS})
    log_format: str = field(default="text", metadata={"help": "how a record is written", "choices": ("text", "json")})


def share_of(limit: int, num_processes: int) -> int:
    """What each of several processes may have of a limit; together no more than all, where there is one for each."""
    return max(1, limit // num_processes)


def read_settings(argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> RouterSettings:
    """From flags, environment and file. Raises StartupError."""
    return load_settings(RouterSettings, SERVICE, argv, environ)
