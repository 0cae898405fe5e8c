"""Where the TLS files of a cluster lie: one set for all of its processes, or none."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files: the processes' certificate, its key, and the authority that signed it."""

    cert: Path
    key: Path
    ca: Path


@dataclass(frozen=True, kw_only=True)
class TlsSettings:
    """What every process of a cluster adds to its settings. All three, or none: else ValueError."""

    tls_cert: Path | None = field(
        default=None,
        metadata={"help": "certificate (PEM) that this process shows to the others of its cluster; without it no TLS"},
    )
    tls_key: Path | None = field(default=None, metadata={"help": "key (PEM) of the certificate, not encrypted"})
    tls_ca: Path | None = field(
        default=None, metadata={"help": "authority (PEM) that signed the certificates of this cluster, and no others"}
    )

    def __post_init__(self) -> None:
        paths = {"--tls-cert": self.tls_cert, "--tls-key": self.tls_key, "--tls-ca": self.tls_ca}
        missing = [flag for flag, path in paths.items() if path is None]
        if missing and len(missing) < len(paths):
            raise ValueError(
                f"TLS takes --tls-cert, --tls-key and --tls-ca together; {' and '.join(missing)} is missing"
            )

    @property
    def tls_files(self) -> TlsFiles | None:
        if self.tls_cert is None or self.tls_key is None or self.tls_ca is None:
            return None
        return TlsFiles(self.tls_cert, self.tls_key, self.tls_ca)
