"""Which adapter serves a checkpoint: whatever the modules in `triptych/model/adapters` define."""

from __future__ import annotations

import importlib
import inspect
import logging
import pkgutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

from triptych.core.errors import StartupError
from triptych.model import adapters
from triptych.model.adapters.base import Adapter
from triptych.model.checkpoint_files import CONFIG_FILE, read_json

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BrokenModule:
    """A module that gives no adapter, and why: the error's class and text."""

    module: str
    reason: str


@dataclass(frozen=True, slots=True)
class Scan:
    """`adapters` by their architecture's name, `broken` by their module's."""

    adapters: tuple[type[Adapter], ...]
    broken: tuple[BrokenModule, ...]


@cache
def scan() -> Scan:
    """All adapters, looked for once. A module that cannot be imported is reported and left out; the others serve."""
    found: dict[str, type[Adapter]] = {}
    broken: list[BrokenModule] = []
    for name in sorted(info.name for info in pkgutil.iter_modules(adapters.__path__)):
        try:
            for adapter in _defined_in(importlib.import_module(f"{adapters.__name__}.{name}")):
                taken = found.setdefault(adapter.architecture, adapter)
                if taken is not adapter:
                    raise StartupError(f"{adapter.architecture} has an adapter already, in {taken.__module__}")
        except (Exception, SystemExit) as error:
            broken.append(BrokenModule(name, f"{type(error).__name__}: {error}"))
            log.warning("an adapter module was left out", extra={"adapter_module": name, "reason": broken[-1].reason})
    return Scan(tuple(found[name] for name in sorted(found)), tuple(broken))


def _defined_in(module: ModuleType) -> list[type[Adapter]]:
    """Adapters with an architecture of their own; bases that families share have none."""
    own = (value for value in vars(module).values() if inspect.isclass(value) and value.__module__ == module.__name__)
    return [c for c in own if issubclass(c, Adapter) and not inspect.isabstract(c) and hasattr(c, "architecture")]


def supported_architectures() -> tuple[str, ...]:
    return tuple(adapter.architecture for adapter in scan().adapters)


def adapter_for(model_dir: Path) -> Adapter:
    """The adapter of the checkpoint in `model_dir`. Imports no torch.

    Raises StartupError for a folder that is no checkpoint, and for an architecture that cannot be served, with the list
    of those that can.
    """
    config = read_json(model_dir / CONFIG_FILE)
    named = config.get("architectures")
    names = named if isinstance(named, list) and named else ["(none named)"]
    for adapter in scan().adapters:
        if adapter.architecture in names:
            return adapter(model_dir.resolve())
    raise StartupError(
        f"model {model_dir.name!r} has the architecture {names[0]}, which Triptych cannot serve; "
        f"supported: {', '.join(supported_architectures())}"
    )
