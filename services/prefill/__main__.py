"""`python -m services.prefill`."""

from __future__ import annotations

import sys

from services.prefill.app import worker_plan
from services.prefill.settings import SERVICE, read_settings
from triptych.core.settings import run_main
from triptych.stages.process import run_worker


def main() -> int:
    return run_worker(worker_plan(read_settings()), SERVICE)


if __name__ == "__main__":
    sys.exit(run_main(main))
