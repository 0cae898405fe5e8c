"""A process with its TLS files greets itself before anybody else: by OpenSSL, which says what is wrong, and by gRPC,
which knows fewer kinds of keys. What its peers would refuse stops the start with a sentence."""

from __future__ import annotations

import ssl
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import grpc

from triptych.core.errors import StartupError
from triptych.core.tls_files import TlsFiles

TLS_NAME: Final = "triptych.internal"
GREETING_TIMEOUT_S: Final = 10.0
_MAX_FLIGHTS: Final = 8
_UNNAMED: Final = f"does not name {TLS_NAME}: make it with subjectAltName=DNS:{TLS_NAME}"
_SENTENCES: Final = {
    9: "is not valid yet: look at this host's clock, or wait",
    10: "has expired, or its authority's has: make new ones",
    7: "was not signed by the authority of --tls-ca",
    18: "was not signed by the authority of --tls-ca",
    19: "was not signed by the authority of --tls-ca",
    20: "was not signed by the authority of --tls-ca",
    21: "was not signed by the authority of --tls-ca",
    26: "may not be used for both ends of a connection: it needs serverAuth and clientAuth, or no extendedKeyUsage",
    62: _UNNAMED,
    66: "has too short a key: take EC P-256, or RSA of 2048 bits or more",
    67: "was signed by too short a key of its authority: take EC P-256, or RSA of 2048 bits or more",
}
"""By OpenSSL's number for what it found (X509_V_ERR_...)."""


def context(files: TlsFiles, protocol: Any) -> ssl.SSLContext:
    """For one end. Raises StartupError for files that do not belong together."""
    made = ssl.SSLContext(protocol)
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    made.verify_mode = ssl.CERT_REQUIRED
    made.hostname_checks_common_name = False
    try:
        made.load_cert_chain(files.cert, files.key, password=_no_password)
    except (ssl.SSLError, ValueError) as error:
        raise StartupError(_unusable(error)) from error
    try:
        made.load_verify_locations(cafile=files.ca)
    except (ssl.SSLError, ValueError) as error:
        raise StartupError("the file of --tls-ca holds no certificate (PEM)") from error
    return made


def greet_itself(server: ssl.SSLContext, client: ssl.SSLContext) -> dict[str, Any]:
    """A handshake in memory, as this process will have it with its peers, in both parts. Answers the certificate.
    Raises StartupError."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    caller = client.wrap_bio(back, there, server_hostname=TLS_NAME)
    called = server.wrap_bio(there, back, server_side=True)
    try:
        for _ in range(_MAX_FLIGHTS):
            if all([_is_done(caller), _is_done(called)]):
                break
        shown: Any = caller.getpeercert() or {}
    except ssl.SSLCertVerificationError as error:
        found = _SENTENCES.get(error.verify_code, f"is refused ({error.verify_message})")
        raise StartupError(f"the certificate of --tls-cert {found}") from error
    except (ssl.SSLError, ValueError) as error:
        raise StartupError(f"two processes with these TLS files could not talk to each other{_why(error)}") from error
    if ("DNS", TLS_NAME) not in [(kind, str(name).lower()) for kind, name in shown.get("subjectAltName", ())]:
        raise StartupError(f"the certificate of --tls-cert {_UNNAMED}")  # a wildcard that covers it names others, too
    return dict(shown)


def check_greeting(server: grpc.ServerCredentials, channel: grpc.ChannelCredentials) -> None:
    """The same over gRPC, on a free port of loopback. Raises StartupError when it does not come about."""
    threads = ThreadPoolExecutor(1, thread_name_prefix="tls-greeting")
    called = grpc.server(threads)
    try:
        port = called.add_secure_port("127.0.0.1:0", server)
        called.start()
        options = [("grpc.ssl_target_name_override", TLS_NAME), ("grpc.enable_http_proxy", 0)]
        with grpc.secure_channel(f"127.0.0.1:{port}", channel, options) as caller:
            caller.unary_unary("/triptych/greeting", None, None)(b"", timeout=GREETING_TIMEOUT_S)
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.UNIMPLEMENTED:  # then they have met
            raise StartupError(_NOT_BY_GRPC) from error
    except RuntimeError as error:  # it says no more than that it could not listen
        raise StartupError(_NOT_BY_GRPC) from error
    finally:
        called.stop(0)
        threads.shutdown(wait=False)


_NOT_BY_GRPC: Final = (
    "gRPC cannot use the certificate of --tls-cert with its key, though OpenSSL can; take EC P-256, or RSA of 2048 bits"
    " or more"
)


def _unusable(error: Exception) -> str:
    reason = getattr(error, "reason", None) or ""
    if reason.endswith(("KEY_TOO_SMALL", "MD_TOO_WEAK")):
        return "the certificate of --tls-cert is too weak: take EC P-256, or RSA of 2048 bits or more"
    if reason == "KEY_VALUES_MISMATCH":
        return "the key of --tls-key is not that of the certificate of --tls-cert"
    return f"the files of --tls-cert and --tls-key are not a certificate and its key (PEM, not encrypted){_why(error)}"


def _why(error: Exception) -> str:
    """OpenSSL's word for it, which names no file."""
    reason = getattr(error, "reason", None)
    return f" ({reason.lower().replace('_', ' ')})" if reason else ""


def _no_password() -> str:
    """OpenSSL would ask at the terminal."""
    return ""


def _is_done(end: ssl.SSLObject) -> bool:
    try:
        end.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True
