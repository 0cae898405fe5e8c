"""Keys of the encrypted data connections (CurveZMQ). Each end makes its own, and tells the public half in the greeting:
over gRPC, which is under TLS wherever these are used, so nobody in between can put in another."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import zmq
from zmq.utils import z85

from triptych.core.errors import StartupError
from triptych.transport.data_frame import CURVE_KEY_BYTES

# What a frame grows by on the wire: a command's name, a nonce, flags and the authenticator, 33 bytes.
CURVE_OVERHEAD_BYTES: Final = 64


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """One end's pair, 32 bytes each."""

    public: bytes
    secret: bytes = field(repr=False)

    @staticmethod
    def make() -> CurveKeys:
        """A new pair. Raises StartupError when the installed ZeroMQ cannot encrypt."""
        if not zmq.has("curve"):
            raise StartupError(
                "the installed ZeroMQ has no CURVE, which TLS between workers needs for the data connections;"
                " run: pip install --force-reinstall pyzmq"
            )
        public, secret = (z85.decode(key) for key in zmq.curve_keypair())
        assert len(public) == len(secret) == CURVE_KEY_BYTES
        return CurveKeys(public, secret)
