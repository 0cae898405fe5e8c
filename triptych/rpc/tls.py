"""TLS between the processes of a cluster: both ends show a certificate that the cluster's own authority has signed.

Workers are found by the addresses in the registry, which change, so no certificate names them. All name the cluster
instead: TLS_NAME, in subjectAltName. A caller asks for that name wherever it connects, so a server with another
certificate of the same authority never hears the cluster token; a server lets nobody in who has it not (`callers.py`).
"""

from __future__ import annotations

import asyncio
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
from triptych.obs import metrics
from triptych.rpc.tls_greeting import TLS_NAME, check_greeting, context, greet_itself

WARN_BEFORE_S: Final = 30 * 86400
WARN_EVERY_S: Final = 86400.0
TARGET_NAME_OPTIONS: Final[list[tuple[str, Any]]] = [("grpc.ssl_target_name_override", TLS_NAME)]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ClusterTls:
    """What the files hold, read and tried once, at start; from `load_tls`.

    Attributes:
        certificate, key, authority: PEM.
        https: for servers of this process that do not speak gRPC; it demands a certificate of the authority, too.
        expires_at: seconds since the epoch, of the certificate or of what signed it, whichever comes first.
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
    server, client = context(files, ssl.PROTOCOL_TLS_SERVER), context(files, ssl.PROTOCOL_TLS_CLIENT)
    tls = ClusterTls(certificate, key, authority, server, _expiry(greet_itself(server, client), client))
    check_greeting(tls.server_credentials(), tls.channel_credentials())
    metrics.TLS_EXPIRY.set(tls.expires_at)
    _warn_of_the_end(tls)
    return tls


async def tell_of_the_end(tls: ClusterTls | None) -> None:
    """Until cancelled. A process may run for longer than its certificate: who reads only the log hears of it, too."""
    while tls is not None:
        await asyncio.sleep(WARN_EVERY_S)
        _warn_of_the_end(tls)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StartupError(f"the TLS file {path} cannot be read: {error.strerror}") from error


def _check_private(key: Path) -> None:
    """Nobody else may read or change it. One of root's may be open to a group: that is how orchestrators hand secrets
    to processes that are not root."""
    try:
        found = os.stat(key)
    except OSError as error:
        raise StartupError(f"the TLS file {key} cannot be read: {error.strerror}") from error
    if found.st_uid not in (os.getuid(), 0):
        raise StartupError(f"the TLS key {key} belongs to another user, who could change it; make a copy of your own")
    is_handed_out = found.st_uid == 0 and os.getuid() != 0
    if stat.S_IMODE(found.st_mode) & (0o037 if is_handed_out else 0o077):
        raise StartupError(f"the TLS key {key} is open to other users; run: chmod 0600 {key}")


def _expiry(certificate: dict[str, Any], client: ssl.SSLContext) -> float:
    """`client` knows the authority; of several with one name the last counts."""
    end = float(ssl.cert_time_to_seconds(certificate["notAfter"]))
    signers = [each for each in client.get_ca_certs() if each["subject"] == certificate["issuer"]]
    return min([end, *sorted(float(ssl.cert_time_to_seconds(str(each["notAfter"]))) for each in signers)[-1:]])


def _warn_of_the_end(tls: ClusterTls) -> None:
    left_s = tls.expires_at - time.time()
    if left_s < 0:
        _log.error("the TLS certificate has expired: no new connection is made; make another and restart")
    elif left_s < WARN_BEFORE_S:
        _log.warning(
            "the TLS certificate expires soon: new connections fail then", extra={"days_left": int(left_s // 86400)}
        )
