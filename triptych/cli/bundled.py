"""Where the model is that comes with Triptych."""

from __future__ import annotations

import sys
from pathlib import Path

from triptych.core.errors import StartupError

_NAME = Path("assets") / "demo-vl"
_PLACES = (
    Path(__file__).resolve().parents[2] / _NAME,  # a clone, or an editable installation
    Path(sys.prefix) / "share" / "triptych" / _NAME,  # a wheel
)


def bundled_model() -> Path:
    """The folder of the demo model. Raises StartupError when this installation lacks it."""
    for place in _PLACES:
        if (place / "config.json").is_file():
            return place
    raise StartupError("the bundled model assets/demo-vl is missing from this installation; give --model PATH")
