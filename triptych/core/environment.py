"""Names that settings may have, so that a misspelt one is told from one that belongs to another service.

An environment variable or a top-level TOML key is shared by all processes of a cluster, and each reads only what it
declares. `SETTING_NAMES` is the union of all services' fields: `tests/unit/test_settings.py` fails when a service
declares a field that is not listed here.
"""

from __future__ import annotations

ENVIRONMENT_PREFIX = "TRIPTYCH_"

# TOML tables
SERVICES = frozenset({"router", "encoder", "prefill", "decode", "mono"})

# Environment variables that are no service's setting.
OTHER_VARIABLES = frozenset({"TRIPTYCH_CONFIG", "TRIPTYCH_FAILPOINTS", "TRIPTYCH_TEST_SEED"})

SETTING_NAMES = frozenset(
    {
        "host",
        "log_format",
        "log_level",
        "metrics_port",
        "model",
        "port",
        "runtime_dir",
        "threads",
        "worker_id",
    }
)
