"""Whether a worker offers `nixl`."""

from __future__ import annotations

import logging

from triptych.core.address import is_loopback
from triptych.core.errors import StartupError
from triptych.obs import metrics
from triptych.stages.settings import WorkerSettings
from triptych.transport.names import NIXL, TRANSPORT_CHOICES
from triptych.transport.nixl_api import NixlDriver, NixlError
from triptych.transport.nixl_driver import UcxDriver

log = logging.getLogger(__name__)

_ON_THE_NETWORK = (
    "what NIXL sends is not encrypted, and whoever reaches the ports that it opens can write to this worker's memory:"
    " beyond loopback it needs a network of trusted machines alone and --insecure-network, also under TLS"
)


def offers_nixl(common: WorkerSettings) -> bool:
    return NIXL in TRANSPORT_CHOICES[common.transport]


def without_nixl(transports: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in transports if name != NIXL)


def open_nixl(common: WorkerSettings) -> NixlDriver | None:
    """None when the worker may not use it, or when it does not work and something else is allowed. Takes its time.

    Raises StartupError when it does not work and nothing else is allowed, or with `strict`.
    """
    if not offers_nixl(common):
        return None
    try:
        check_network(common)
        return UcxDriver(common.host)
    except NixlError as error:
        if common.transport == NIXL or common.strict:
            raise StartupError(f"--transport {common.transport} cannot use NIXL: {error}") from error
        metrics.FALLBACKS.labels("nixl_unavailable").inc()
        log.warning("NIXL cannot be used, other transports are", extra={"reason": str(error)})
        return None


def check_network(common: WorkerSettings) -> None:
    """Raises NixlError where it would open memory to a network that nobody has called safe."""
    if not is_loopback(common.host) and not common.insecure_network:
        raise NixlError(_ON_THE_NETWORK)
