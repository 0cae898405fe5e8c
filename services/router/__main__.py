"""`python -m services.router --model PATH`: the HTTP API of a cluster."""

from __future__ import annotations

import sys

import uvloop

from services.router.app import serve
from services.router.settings import SERVICE, read_settings
from triptych.core.settings import run_main
from triptych.obs.log import configure_logging


def main() -> int:
    settings = read_settings()
    configure_logging(SERVICE, settings.log_level, "json" if settings.log_format == "json" else "text")
    uvloop.run(serve(settings))
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
