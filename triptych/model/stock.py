"""transformers' own classes, built from a checkpoint's config without memory, and wired for paged attention."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers

from triptych.core.errors import StartupError
from triptych.model.adapters.base import Adapter
from triptych.model.checkpoint_files import CONFIG_FILE
from triptych.model.paged import ATTENTION_NAME, register_paged_attention

MAX_REASON_CHARS = 300


def stock_on_meta(adapter: Adapter) -> Any:
    """The architecture's own class without weights, its language model wired for paged attention.

    The class is chosen by our adapter's name of it; nothing that a checkpoint says is ever imported. Raises
    StartupError for a config that it refuses.
    """
    register_paged_attention()
    stock: Any = getattr(transformers, adapter.architecture)
    try:
        config = stock.config_class.from_dict(copy.deepcopy(adapter.config))
        parts = [part for name in ("text_config", "vision_config") if (part := getattr(config, name, None))]
        getattr(config, "text_config", config)._attn_implementation = ATTENTION_NAME
        for part in (config, *parts):
            # How results are handed back, which the parts rely on, is no matter of the checkpoint's.
            part.return_dict, part.output_hidden_states, part.output_attentions = True, False, False
        with torch.device("meta"):
            return stock(config)
    except Exception as error:
        raise StartupError(f"{CONFIG_FILE} is not one of a {adapter.architecture}: {in_one_line(error)}") from error


def in_one_line(error: Exception) -> str:
    """As much of it as a log line takes."""
    text = " ".join(str(error).split())
    return text if len(text) <= MAX_REASON_CHARS else f"{text[:MAX_REASON_CHARS]}..."
