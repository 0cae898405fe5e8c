"""Where tests find the bundled model's files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_BUNDLED = Path(__file__).parents[2] / "assets" / "demo-vl"


def demo_model_dir() -> Path:
    """The bundled checkpoint, or the folder that DEMO_MODEL_DIR names. Fails the test where there is none."""
    path = Path(os.environ.get("DEMO_MODEL_DIR") or _BUNDLED)
    if not (path / "tokenizer.json").is_file():
        pytest.fail("the bundled model is not there")
    return path
