"""Names that settings may have, so that a misspelt one is told from one that belongs to another service.

An environment variable or a top-level TOML key is shared by all processes of a cluster, and each reads only what it
declares. `SETTING_NAMES` is the union of all services' fields: `tests/unit/test_settings.py` fails when a service
declares a field that is not listed here.
"""

from __future__ import annotations

ENVIRONMENT_PREFIX = "TRIPTYCH_"
CONFIG_VARIABLE = "TRIPTYCH_CONFIG"

# TOML tables: the services, and the launcher.
TABLES = frozenset({"router", "encoder", "prefill", "decode", "mono", "up"})

# Environment variables that are no service's setting.
OTHER_VARIABLES = frozenset(
    {
        CONFIG_VARIABLE,
        "TRIPTYCH_API_KEY",  # a caller's own: `triptych chat`, the demo
        "TRIPTYCH_PARITY",
        "TRIPTYCH_PARITY_OUT",
        "TRIPTYCH_PARITY_SHARD",
        "TRIPTYCH_TEST_REDIS",
        "TRIPTYCH_TEST_SEED",
        "TRIPTYCH_VERIFY",
    }
)

_EVERYWHERE = {
    "drain_timeout_s",
    "host",
    "log_format",
    "log_level",
    "model",
    "port",
    "runtime_dir",
    "strict",
    "tls_ca",
    "tls_cert",
    "tls_key",
}
_UP = {
    "encoder_nice",
    "topology",
    "transport",
    "encoders",
    "prefills",
    "decodes",
    "monos",
    "log_dir",
    "ready_file",
    "startup_timeout",
}
_ROUTER = {
    "allow_url_fetch",
    "listen_fd",
    "supervisor_pid",
    "workers",
    "api_keys",
    "api_keys_file",
    "failed_keys_per_minute",
    "fetch_allow",
    "fetch_deny",
    "fetch_only",
    "fetch_request_timeout_s",
    "fetch_timeout_s",
    "max_body_bytes",
    "max_held_bytes",
    "max_media_bytes",
    "max_media_items",
    "max_pixels",
    "max_queue",
    "max_request_media_bytes",
    "redis_ca",
    "redis_password_file",
    "redis_prefix",
    "redis_timeout_s",
    "redis_url",
    "request_timeout_s",
}
_WORKERS = {
    "also",
    "worker_id",
    "metrics_port",
    "transport",
    "data_port",
    "insecure_network",
    "device",
    "dtype",
    "failpoints",
    "nice",
    "threads",
}
_VISION = {
    "embedding_cache_bytes",
    "embedding_in_flight_bytes",
    "max_batch_items",
    "max_batch_patches",
    "media_cpu_s",
    "media_memory_bytes",
    "media_nice",
    "media_processes",
    "media_timeout_s",
}
_LANGUAGE = {
    "allow_kv_narrowing",
    "chunk_tokens",
    "host_pool_bytes",
    "kv_pool_bytes",
    "landed_cache_bytes",
    "landing_bytes",
    "max_sequences",
    "max_waiting",
    "min_partial_tokens",
    "page_tokens",
    "poison_freed",
    "step_tokens",
}
_DOCTOR = {"json"}

# What is one process's alone: the launcher, or whoever starts it by hand, says it to each.
_ONE_PROCESS = {"also", "worker_id", "metrics_port", "data_port"}

SETTING_NAMES = frozenset(_EVERYWHERE | _UP | _DOCTOR | _ROUTER | _WORKERS | _VISION | _LANGUAGE)
# Those that may be set for a whole cluster.
SHARED_NAMES = SETTING_NAMES - _ONE_PROCESS - _DOCTOR
