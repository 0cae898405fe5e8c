"""The only half of a Llama: the language model."""

from __future__ import annotations

from triptych.model.adapters.llama import LlamaAdapter
from triptych.model.language_weights import HEAD_NAME, LanguageWeights
from triptych.model.loader import check_all_claimed, select_prefix, tensor_index
from triptych.model.stock import stock_on_meta

PREFIXES = ("model.",)


def language_weights(adapter: LlamaAdapter) -> LanguageWeights:
    """All weights there are. Raises StartupError."""
    index = tensor_index(adapter.model_dir)
    adapter.check_depths(len(index))
    names = select_prefix(index, PREFIXES)
    check_all_claimed(index, [*names.values(), HEAD_NAME])
    whole = stock_on_meta(adapter)
    return LanguageWeights(adapter, whole, whole.model, index, names)
