"""Whether memory can be written to by NIXL here, by doing it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from triptych.cli.checks.finding import Finding, fail, ok, warn

if TYPE_CHECKING:
    from triptych.transport.nixl_api import NixlDriver

_HOST: Final = "127.0.0.1"
_TIMEOUT_S: Final = 5.0
_PATTERN: Final = b"triptych"
_ONE, _AMONG_OTHERS = "nixl", "auto+nixl"


def nixl(transport: str) -> Finding:
    """`transport` is the setting: only where it lists NIXL does a cluster try it."""
    from triptych.transport.nixl_api import NixlError
    from triptych.transport.nixl_driver import UcxDriver

    try:
        fault = fault_of(UcxDriver(_HOST))
    except NixlError as error:
        fault = str(error)
    if fault is None:
        return ok("nixl", f"a write over loopback arrived; used where --transport is {_AMONG_OTHERS} or {_ONE}")
    if transport == _ONE:
        return fail("nixl", f"cannot be used: {fault}", "mend that, or use --transport auto")
    if transport == _AMONG_OTHERS:
        return warn("nixl", f"cannot be used: {fault}", "mend that, or use --transport auto; until then it is left out")
    return ok("nixl", f"not asked for, and cannot be used: {fault}")


def fault_of(driver: NixlDriver) -> str | None:
    """One end writes to the other, both of this process. None when it arrived. Raises NixlError."""
    import numpy as np

    arena = memoryview(bytearray(4096))
    target = driver.expose(arena)
    try:
        source = driver.connect(target.address, len(arena), 4096)
        try:
            source.staging[: len(_PATTERN)] = _PATTERN
            transfer = source.write(0, np.array([[64, len(_PATTERN)]]))
            give_up_at_s = time.monotonic() + _TIMEOUT_S
            while not transfer.is_done():
                if time.monotonic() > give_up_at_s:
                    return "a write over loopback did not end"
        finally:
            source.close()
        return None if bytes(arena[64 : 64 + len(_PATTERN)]) == _PATTERN else "what was written did not arrive"
    finally:
        target.revoke()
