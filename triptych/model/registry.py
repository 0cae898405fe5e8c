"""Which adapter serves a checkpoint."""

from __future__ import annotations

from pathlib import Path

from triptych.core.errors import StartupError
from triptych.model.adapters.base import Adapter, read_json
from triptych.model.adapters.qwen2_5_vl import Qwen25VLAdapter

ADAPTERS: tuple[type[Adapter], ...] = (Qwen25VLAdapter,)


def supported_architectures() -> tuple[str, ...]:
    return tuple(adapter.architecture for adapter in ADAPTERS)


def adapter_for(model_dir: Path) -> Adapter:
    """The adapter of the checkpoint in `model_dir`. Imports no torch.

    Raises StartupError for a folder that is no checkpoint, and for an architecture that cannot be served, with the list
    of those that can.
    """
    config = read_json(model_dir / "config.json")
    names = config.get("architectures") or ["(none named)"]
    for adapter in ADAPTERS:
        if adapter.architecture in names:
            return adapter(model_dir.resolve())
    raise StartupError(
        f"model {model_dir.name!r} has the architecture {names[0]}, which Triptych cannot serve; "
        f"supported: {', '.join(supported_architectures())}"
    )
