"""Installed packages against the bounds that this installation's own metadata declares."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from triptych.cli.checks.finding import Finding, fail, ok

if TYPE_CHECKING:
    from packaging.requirements import Requirement

DISTRIBUTION = "triptych"
_SHOWN = ("torch", "transformers", "grpcio", "protobuf", "pyzmq", "safetensors")


@dataclass(frozen=True, slots=True)
class Metadata:
    """Where versions and requirements come from: importlib.metadata, whose functions these are."""

    version: Callable[[str], str] = importlib.metadata.version
    requires: Callable[[str], list[str] | None] = importlib.metadata.requires


def packages(metadata: Metadata) -> Finding:
    try:
        needed = list(_requirements(metadata))
    except importlib.metadata.PackageNotFoundError:
        return fail("packages", "Triptych itself is not installed here", "run: pip install -e . in its folder")
    versions = {requirement.name: _version(metadata, requirement.name) for requirement in needed}
    wrong = [need for need in needed if not _fits(need, versions[need.name])]
    if wrong:
        found = ", ".join(f"{need.name} {versions[need.name] or 'missing'} (wanted {need.specifier})" for need in wrong)
        return fail("packages", found, "run: pip install " + " ".join(f'"{need}"' for need in wrong))
    shown = ", ".join(f"{name} {versions[name]}" for name in _SHOWN if name in versions)
    return ok("packages", f"{shown}, and {len(versions) - len(set(_SHOWN) & versions.keys())} more as declared")


def _requirements(metadata: Metadata) -> Iterator[Requirement]:
    """Those that always hold; extras are nobody's duty."""
    from packaging.requirements import Requirement

    for text in metadata.requires(DISTRIBUTION) or ():
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement


def _version(metadata: Metadata, name: str) -> str | None:
    try:
        return metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _fits(requirement: Requirement, version: str | None) -> bool:
    return version is not None and requirement.specifier.contains(version, prereleases=True)
