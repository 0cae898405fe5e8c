"""Certificates for tests, by the `openssl` of the machine: an authority, and what it signs or does not."""

from __future__ import annotations

import subprocess
from pathlib import Path

from triptych.core.tls_files import TlsFiles
from triptych.rpc.tls_greeting import TLS_NAME

EC = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")


class Authority:
    """Owner of a folder with the authority's own key and certificate, and of what it makes there."""

    def __init__(self, folder: Path, name: str = "ca", *, days: int = 2, key: tuple[str, ...] = EC) -> None:
        self._folder = folder
        self._name = name
        self.path = folder / f"{name}.pem"
        _openssl(
            *("req", "-x509", *key, "-nodes", "-days", str(days), "-subj", f"/CN={name} of a test"),
            *("-keyout", str(folder / f"{name}.key"), "-out", str(self.path)),
        )

    def issue(
        self, name: str = "worker", *, names: str = f"DNS:{TLS_NAME}", days: int = 1, key: tuple[str, ...] = EC
    ) -> TlsFiles:
        """A certificate that names `names` (subjectAltName); with `days` below zero it expired then."""
        files = TlsFiles(self._folder / f"{name}.pem", self._folder / f"{name}.key", self.path)
        request, extensions = self._folder / f"{name}.csr", self._folder / f"{name}.ext"
        extensions.write_text(f"subjectAltName={names}\nbasicConstraints=critical,CA:FALSE\n")
        _openssl("req", "-new", *key, "-nodes", "-subj", f"/CN={name}", "-keyout", str(files.key), "-out", str(request))
        _openssl(
            *("x509", "-req", "-in", str(request), "-CA", str(self.path), "-CAkey", str(self.path.with_suffix(".key"))),
            *("-set_serial", "7", "-days", str(days), "-extfile", str(extensions), "-out", str(files.cert)),
        )
        files.key.chmod(0o600)
        return files


def _openssl(*arguments: str) -> None:
    done = subprocess.run(["openssl", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
