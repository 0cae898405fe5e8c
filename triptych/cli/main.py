"""The command `triptych`: picks the subcommand, and turns what stops a start into a sentence."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from triptych.cli.display import write_what_the_terminal_can
from triptych.cli.version import version
from triptych.core.errors import StartupError
from triptych.core.settings import run_main, suggestion

# name -> (module with `main(argv) -> int`, what it does); imported on use, so that each starts fast
COMMANDS = {
    "up": ("triptych.cli.up", "start a cluster on this machine and watch over it"),
    "chat": ("triptych.cli.chat", "ask a running cluster about pictures"),
    "doctor": ("triptych.cli.doctor", "look at this machine and say what would keep a cluster from running"),
    "serve": ("triptych.cli.serve", "run one service in the foreground"),
    "models": ("triptych.cli.models", "list the architectures that can be served"),
}


def entry() -> int:
    """The exit status: 0 done, 1 could not start or failed, 130 interrupted."""
    write_what_the_terminal_can()
    try:
        return run_main(lambda: run(sys.argv[1:]))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 1


def run(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0
    if argv[0] in ("-V", "--version"):
        print(f"triptych {version()}")
        return 0
    if argv[0] not in COMMANDS:
        near = suggestion(argv[0], COMMANDS)
        raise StartupError(f"triptych has no command {argv[0]!r}{near}; it has {', '.join(COMMANDS)}")
    command = importlib.import_module(COMMANDS[argv[0]][0])
    status: int = command.main(argv[1:])
    return status


def _usage() -> str:
    rows = [f"  {name:<8}{about}" for name, (_, about) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: triptych COMMAND [flags]",
            "",
            *rows,
            "",
            "triptych COMMAND --help lists its flags, triptych --version says which this is",
        ]
    )
