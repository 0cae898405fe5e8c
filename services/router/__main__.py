"""`python -m services.router --model PATH`: the HTTP API of a cluster, in one process or in several."""

from __future__ import annotations

import sys

from services.router.settings import SERVICE, RouterSettings, read_settings
from services.router.supervisor import supervise, tie_to
from triptych.core.settings import run_main
from triptych.obs.log import configure_logging


def main() -> int:
    settings = read_settings()
    configure_logging(SERVICE, settings.log_level, "json" if settings.log_format == "json" else "text")
    if settings.supervisor_pid is not None:
        tie_to(settings.supervisor_pid)
    elif settings.workers > 1:
        return supervise(settings, sys.argv[1:])
    _serve(settings)
    return 0


def _serve(settings: RouterSettings) -> None:
    """A supervisor loads none of this."""
    import uvloop

    from services.router.app import serve

    uvloop.run(serve(settings))


if __name__ == "__main__":
    sys.exit(run_main(main))
