"""What `triptych up` can be told."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from triptych.core.errors import StartupError
from triptych.core.tls_files import TlsSettings
from triptych.core.topology import COUNTS, TOPOLOGIES, check_counts
from triptych.transport.names import TRANSPORT_CHOICES

DEFAULT_PORT = 8000


@dataclass(frozen=True, slots=True)
class UpSettings(TlsSettings):
    """Flags, variables and the table [up] of the file. Services read the same file, each its own table."""

    model: Path | None = field(default=None, metadata={"help": "folder of the checkpoint; without it the bundled one"})
    topology: str = field(
        default="e-p-d",
        metadata={"help": f"which stages share a process: {', '.join(TOPOLOGIES)}, or several joined by +"},
    )
    transport: str | None = field(
        default=None,
        metadata={
            "choices": tuple(TRANSPORT_CHOICES),
            "help": "how bytes move between the workers; not given: the best that works",
        },
    )
    encoders: int = field(default=1, metadata={"min": 1, "max": 64, "help": "encoder processes"})
    prefills: int = field(
        default=1, metadata={"min": 1, "max": 64, "help": "prefill processes, with decode in e-pd, with vision in p-d"}
    )
    decodes: int = field(default=1, metadata={"min": 1, "max": 64, "help": "decode processes"})
    monos: int = field(default=1, metadata={"min": 1, "max": 64, "help": "processes of mono, which do all"})
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
    encoder_nice: int = field(
        default=2,
        metadata={
            "min": 0,
            "max": 19,
            "help": "how far encoders stand back for the other workers on their cores, as nice(1)",
        },
    )
    startup_timeout: float = field(default=180.0, metadata={"min": 1, "help": "seconds until a start has failed"})
    drain_timeout_s: float = field(
        default=30.0,
        metadata={"min": 0.0, "max": 86400.0, "help": "seconds that requests under way may take at a stop"},
    )

    def __post_init__(self) -> None:
        TlsSettings.__post_init__(self)  # `super()` does not know a dataclass with slots
        check_counts(self.topology, self.counts)

    @property
    def counts(self) -> dict[str, int]:
        """How many workers of the kinds that go by that count."""
        return {name: getattr(self, name) for name in COUNTS}


def check_model(path: Path) -> Path:
    """Raises StartupError unless a checkpoint can be there."""
    if not (path / "config.json").is_file():
        raise StartupError(f"{path} is no model: it has no config.json; give --model the folder of a checkpoint")
    return path.resolve()
