"""Checkpoints that unit tests share."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.parity.checkpoints import DEFAULT_SEED, DEMO_DIR, FAMILIES, make_tiny


@pytest.fixture(scope="session")
def tiny_model_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By family: a random checkpoint of some 100,000 parameters, its head not tied; read-only, copy it to change it."""
    base = Path(os.environ.get("DEMO_MODEL_DIR") or DEMO_DIR)
    return {name: make_tiny(name, tmp_path_factory.mktemp(name), DEFAULT_SEED, base) for name in FAMILIES}


@pytest.fixture(scope="session")
def tiny_model_dir(tiny_model_dirs: dict[str, Path]) -> Path:
    """The one of Qwen2.5-VL."""
    return tiny_model_dirs["qwen2.5-vl"]


@pytest.fixture
def model_dir(tiny_model_dir: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(tiny_model_dir, tmp_path / "spoiled"))
