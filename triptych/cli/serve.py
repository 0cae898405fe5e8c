"""`triptych serve ROLE [flags]`: one service in the foreground, for those who supervise processes themselves."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from triptych.core.errors import StartupError

ROLES = ("router", "encoder", "prefill", "decode", "mono")


def main(argv: Sequence[str]) -> NoReturn:
    """Becomes `python -m services.ROLE`; what follows the role are that service's flags."""
    if argv and argv[0] in ("-h", "--help"):
        print(f"usage: triptych serve {{{','.join(ROLES)}}} [flags]\n\ntriptych serve ROLE --help lists its flags")
        raise SystemExit(0)
    if not argv or argv[0] not in ROLES:
        raise StartupError(f"say which service to run: triptych serve {{{','.join(ROLES)}}} [flags]")
    os.execv(sys.executable, [sys.executable, "-m", f"services.{argv[0]}", *argv[1:]])  # noqa: S606
