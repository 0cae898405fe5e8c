"""TLS between the processes of a cluster: both ends show a certificate that the cluster's own authority has signed.

Workers are found by the addresses in the registry, which change, so no certificate names them. All name the cluster
instead: TLS_NAME, in subjectAltName. A caller asks for that name wherever it connects, so a server with another
certificate of the same authority never hears the cluster token.
"""

from __future__ import annotations

import logging
import os
import ssl
import stat
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc

from triptych.core.errors import StartupError
from triptych.core.tls_files import TlsFiles

TLS_NAME: Final = "triptych.internal"
WARN_BEFORE_S: Final = 30 * 86400
TARGET_NAME_OPTIONS: Final[list[tuple[str, Any]]] = [("grpc.ssl_target_name_override", TLS_NAME)]
_ED25519: Final = b"\x06\x03\x2b\x65\x70"  # its object identifier, in DER
_MAX_FLIGHTS: Final = 8
_SENTENCES: Final = {
    9: "is not valid yet: look at this host's clock, or wait",
    10: "has expired, or its authority's has: make new ones",
    7: "was not signed by the authority of --tls-ca",
    18: "was not signed by the authority of --tls-ca",
    19: "was not signed by the authority of --tls-ca",
    20: "was not signed by the authority of --tls-ca",
    21: "was not signed by the authority of --tls-ca",
    26: "may not be used for both ends of a connection: it needs serverAuth and clientAuth, or no extendedKeyUsage",
    62: f"does not name {TLS_NAME}: make it with subjectAltName=DNS:{TLS_NAME}",
}
"""By OpenSSL's number for what it found (X509_V_ERR_...)."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ClusterTls:
    """What the files hold, read and tried once, at start; from `load_tls`.

    Attributes:
        certificate, key, authority: PEM.
        https: for servers of this process that do not speak gRPC; it demands a certificate of the cluster, too.
        expires_at: seconds since the epoch.
    """

    certificate: bytes
    key: bytes = field(repr=False)
    authority: bytes
    https: ssl.SSLContext
    expires_at: float

    def server_credentials(self) -> grpc.ServerCredentials:
        return grpc.ssl_server_credentials(
            [(self.key, self.certificate)], root_certificates=self.authority, require_client_auth=True
        )

    def channel_credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.authority, self.key, self.certificate)


def load_tls(files: TlsFiles | None) -> ClusterTls | None:
    """None when there are none. Raises StartupError, with what to do, for files that could not serve."""
    if files is None:
        return None
    _check_private(files.key)
    certificate, key, authority = (_read(path) for path in (files.cert, files.key, files.ca))
    if _ED25519 in _der(certificate):
        raise StartupError(
            "the certificate of --tls-cert has an Ed25519 key, which gRPC cannot use; take EC P-256 or RSA"
        )
    server, client = _context(files, ssl.PROTOCOL_TLS_SERVER), _context(files, ssl.PROTOCOL_TLS_CLIENT)
    expires_at = _expiry(_greet_itself(server, client))
    tls = ClusterTls(certificate, key, authority, server, expires_at)
    _warn_of_the_end(tls)
    return tls


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StartupError(f"the TLS file {path} cannot be read: {error.strerror}") from error


def _check_private(key: Path) -> None:
    try:
        found = os.stat(key)
    except OSError as error:
        raise StartupError(f"the TLS file {key} cannot be read: {error.strerror}") from error
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise StartupError(f"the TLS key {key} is open to other users; run: chmod 0600 {key}")


def _der(certificate: bytes) -> bytes:
    """Of the first certificate in a PEM file."""
    try:
        return ssl.PEM_cert_to_DER_cert(_first_certificate(certificate.decode("ascii")))
    except ValueError as error:  # UnicodeDecodeError and binascii.Error are such, too
        raise StartupError("the file of --tls-cert holds no certificate (PEM)") from error


def _first_certificate(text: str) -> str:
    begin, end = text.find(ssl.PEM_HEADER), text.find(ssl.PEM_FOOTER)
    if not 0 <= begin < end:
        raise ValueError("no certificate")
    return text[begin : end + len(ssl.PEM_FOOTER)]


def _context(files: TlsFiles, protocol: Any) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_mode = ssl.CERT_REQUIRED
    context.hostname_checks_common_name = False
    try:
        context.load_cert_chain(files.cert, files.key, password=_no_password)
    except (ssl.SSLError, ValueError) as error:
        raise StartupError(
            "the key of --tls-key is not that of the certificate of --tls-cert, or one of them is no PEM, or encrypted"
        ) from error
    try:
        context.load_verify_locations(cafile=files.ca)
    except (ssl.SSLError, ValueError) as error:
        raise StartupError("the file of --tls-ca holds no certificate (PEM)") from error
    return context


def _no_password() -> str:
    """OpenSSL would ask at the terminal."""
    return ""


def _greet_itself(server: ssl.SSLContext, client: ssl.SSLContext) -> dict[str, Any]:
    """A handshake in memory, as this process will have it with its peers, in both parts. Answers the certificate."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    caller = client.wrap_bio(back, there, server_hostname=TLS_NAME)
    called = server.wrap_bio(there, back, server_side=True)
    try:
        for _ in range(_MAX_FLIGHTS):
            if all([_is_done(caller), _is_done(called)]):
                break
        shown = caller.getpeercert()
    except ssl.SSLCertVerificationError as error:
        found = _SENTENCES.get(error.verify_code, f"is refused ({error.verify_message})")
        raise StartupError(f"the certificate of --tls-cert {found}") from error
    except (ssl.SSLError, ValueError) as error:
        raise StartupError("two processes with these TLS files could not talk to each other") from error
    return shown or {}


def _is_done(end: ssl.SSLObject) -> bool:
    try:
        end.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True


def _expiry(certificate: dict[str, Any]) -> float:
    return float(ssl.cert_time_to_seconds(certificate["notAfter"]))


def _warn_of_the_end(tls: ClusterTls) -> None:
    left_s = tls.expires_at - time.time()
    if left_s < WARN_BEFORE_S:
        _log.warning(
            "the TLS certificate expires soon: new connections fail then", extra={"days_left": int(left_s // 86400)}
        )
