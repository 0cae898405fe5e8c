"""The seed of this run of the tests: `TRIPTYCH_TEST_SEED`, or a new one."""

from __future__ import annotations

import os
import secrets

SEED = int(os.environ.get("TRIPTYCH_TEST_SEED") or secrets.randbits(31))
