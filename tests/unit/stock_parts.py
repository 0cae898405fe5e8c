"""The language part in transformers' own modules, whose tensors a test can look at."""

from __future__ import annotations

from pathlib import Path

import torch

from triptych.model.adapters.qwen3_vl import Qwen3VLAdapter
from triptych.model.adapters.qwen_vl import QwenVLAdapter
from triptych.model.qwen3_vl_parts import Qwen3Language
from triptych.model.qwen_vl_parts import QwenLanguage, language_weights
from triptych.model.registry import adapter_for
from triptych.model.stock_language import StockLanguage


def load_stock_language(model_dir: Path, dtype: torch.dtype = torch.float32) -> StockLanguage:
    """Of one of the Qwen families."""
    adapter = adapter_for(model_dir)
    assert isinstance(adapter, QwenVLAdapter)
    part = Qwen3Language if isinstance(adapter, Qwen3VLAdapter) else QwenLanguage
    return language_weights(adapter).load_stock(part, dtype, torch.device("cpu"))
