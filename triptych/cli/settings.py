"""What `triptych up` can be told."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from triptych.core.errors import StartupError
from triptych.transport.names import TRANSPORT_CHOICES

TOPOLOGIES = ("e-p-d", "mono")
DEFAULT_PORT = 8000


@dataclass(frozen=True, slots=True)
class UpSettings:
    """Flags, variables and the table [up] of the file. Services read the same file, each its own table."""

    model: Path | None = field(default=None, metadata={"help": "folder of the checkpoint; without it the bundled one"})
    topology: str = field(
        default="e-p-d", metadata={"choices": TOPOLOGIES, "help": "a process for each stage, or one for all"}
    )
    transport: str | None = field(
        default=None,
        metadata={
            "choices": tuple(TRANSPORT_CHOICES),
            "help": "how bytes move between the workers; not given: the best that works",
        },
    )
    encoders: int = field(default=1, metadata={"min": 1, "max": 64, "help": "encoder processes"})
    prefills: int = field(default=1, metadata={"min": 1, "max": 64, "help": "prefill processes"})
    decodes: int = field(default=1, metadata={"min": 1, "max": 64, "help": "decode processes"})
    host: str = field(default="127.0.0.1", metadata={"help": "where the API listens; workers stay on loopback"})
    port: int | None = field(
        default=None,
        metadata={
            "min": 0,
            "max": 65535,
            "help": f"of the API; 0: free ones everywhere; not given: {DEFAULT_PORT} if free",
        },
    )
    runtime_dir: Path | None = field(
        default=None, metadata={"help": "folder for what the processes share; $XDG_RUNTIME_DIR/triptych if not given"}
    )
    log_dir: Path | None = field(
        default=None, metadata={"help": "keep the logs here; without it they end with the cluster"}
    )
    ready_file: Path | None = field(default=None, metadata={"help": "written (JSON) when the cluster can serve"})
    threads: int = field(
        default=0, metadata={"min": 0, "max": 4096, "help": "of each worker; 0 shares the cores out among them"}
    )
    startup_timeout: float = field(default=180.0, metadata={"min": 1, "help": "seconds until a start has failed"})

    def __post_init__(self) -> None:
        if self.topology == "mono" and (self.encoders, self.prefills, self.decodes) != (1, 1, 1):
            raise ValueError("--encoders, --prefills and --decodes belong to the topology e-p-d")


def check_model(path: Path) -> Path:
    """Raises StartupError unless a checkpoint can be there."""
    if not (path / "config.json").is_file():
        raise StartupError(f"{path} is no model: it has no config.json; give --model the folder of a checkpoint")
    return path.resolve()
