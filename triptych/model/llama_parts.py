"""The only half of a Llama: the language model."""

from __future__ import annotations

import torch

from triptych.model.adapters.llama import LlamaAdapter
from triptych.model.loader import check_all_claimed, select_prefix, tensor_index
from triptych.model.stock import stock_on_meta
from triptych.model.stock_language import HEAD_NAME, StockLanguage, load_stock_language

PREFIXES = ("model.",)


def load_language(adapter: LlamaAdapter, dtype: torch.dtype, device: torch.device) -> StockLanguage:
    """All weights. Raises StartupError."""
    index = tensor_index(adapter.model_dir)
    adapter.check_depths(len(index))
    names = select_prefix(index, PREFIXES)
    check_all_claimed(index, [*names.values(), HEAD_NAME])
    whole = stock_on_meta(adapter)
    return load_stock_language(adapter, StockLanguage, whole, whole.model, index, names, dtype, device)
