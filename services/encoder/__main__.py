"""`python -m services.encoder`."""

from __future__ import annotations

import sys

from services.encoder.settings import SERVICE, read_settings
from triptych.core.settings import run_main


def main() -> int:
    settings = read_settings()
    # After the settings: torch takes seconds to import, and a misspelt setting should be told at once.
    from services.encoder.app import worker_plan
    from triptych.stages.process import run_worker

    return run_worker(worker_plan(settings), SERVICE)


if __name__ == "__main__":
    sys.exit(run_main(main))
