"""A checkpoint without loading it: its config, the headers of its weights, its tokenizer and template."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triptych.cli.checks.finding import Finding, fail, ok, size
from triptych.core.errors import StartupError

if TYPE_CHECKING:
    from triptych.model.adapters.base import Adapter

AGAIN = "download or convert the checkpoint again"
_NAMED = 3
_MAX_REASON_CHARS = 300
# Checkpoints of different ages put different roots before the same names.
_ROOTS = frozenset({"model", "language_model"})


@dataclass(frozen=True, slots=True)
class Parts:
    """Parameters, in elements, of what encoders load and of what prefill and decode workers load."""

    vision: int
    language: int


def config(model_dir: Path) -> tuple[Finding, Adapter | None]:
    """The adapter is None when the finding is a failure."""
    from triptych.model.registry import adapter_for, supported_architectures

    try:
        adapter = adapter_for(model_dir)
    except StartupError as error:
        todo = f"give --model a checkpoint folder of {' or '.join(supported_architectures())}, with safetensors weights"
        return fail("model", error.message, todo), None
    found = f"{adapter.model_name}: {adapter.architecture}, {adapter.max_sequence_tokens} tokens long at most"
    return ok("model", found), adapter


def weights(adapter: Adapter) -> tuple[Finding, Parts | None]:
    """Every tensor that the architecture has must be there in its shape. Parts is None when some is not.

    The truth is the architecture's own class, built without memory; names are compared without their roots.
    """
    from triptych.model.loader import tensor_index

    try:
        index = tensor_index(adapter.model_dir)
        present = _shapes(index)
    except StartupError as error:
        return fail("weights", error.message, AGAIN), None
    try:
        adapter.check_depths(len(index))
        model = _empty_model(adapter)
        _check_tied_head(model, index)
    except StartupError as error:
        return fail("weights", error.message, AGAIN), None
    expected = _expected_shapes(model)
    missing = sorted(expected.keys() - present.keys())
    if missing:
        return fail("weights", f"the checkpoint lacks {_some(missing)}", AGAIN), None
    misshapen = sorted(name for name, shape in expected.items() if present[name] != shape)
    if misshapen:
        name = misshapen[0]
        found = f"{name} has the shape {present[name]}, by config.json it is {expected[name]}"
        return fail("weights", found, f"{AGAIN}: config.json and weights are of different models"), None
    parts = _parts(model)
    files = set(index.values())
    found = (
        f"{len(present)} tensors in {len(files)} file{'s'[: len(files) > 1]}, "
        f"{size(sum(path.stat().st_size for path in files))}; parameters: vision {parts.vision:,}, "
        f"language {parts.language:,}"
    )
    unexpected = sorted(present.keys() - expected.keys() - _tied_names(model))
    if unexpected:
        return fail("weights", f"{found}; not of this architecture: {_some(unexpected)}", AGAIN), None
    return ok("weights", found), parts


def tokenizer(adapter: Adapter) -> Finding:
    """Tokenizer and chat template take a question, with a picture if the model takes any."""
    from triptych.text.tokenizer import ChatTokenizer

    try:
        chat = ChatTokenizer(adapter.model_dir, adapter.image_placeholder_id)
        chat.check_fits(adapter.vocab_size)
        encoded = chat.encode_chat(chat.example())
    except StartupError as error:
        return fail(
            "tokenizer", error.message, f"{AGAIN}, with tokenizer.json, tokenizer_config.json and chat template"
        )
    except Exception as error:  # the tokenizers library raises bare Exceptions for a damaged file
        return fail("tokenizer", f"it cannot be used: {error}", AGAIN)
    kind = "a question with a picture" if encoded.placeholder_indices else "a question"
    return ok("tokenizer", f"{chat.tokenizer.get_vocab_size()} tokens; {kind} is {len(encoded.compact_ids)}")


def _shapes(index: Mapping[str, Path]) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor, by its name without roots, from headers. Raises StartupError naming a file or tensor."""
    shapes: dict[str, tuple[int, ...]] = {}
    for shard in sorted(set(index.values())):
        found = _shapes_in(shard)
        for name in (name for name, path in index.items() if path == shard):
            if name not in found:
                raise StartupError(f"{shard.name} lacks the tensor {name}, which the list of shards says it has")
            shapes[_without_roots(name)] = found[name]
    return shapes


def _shapes_in(shard: Path) -> dict[str, tuple[int, ...]]:
    """As a worker opens it, which checks the file's length against its header: so one cut short is found."""
    from triptych.model.weights_file import WeightsFile

    with WeightsFile(shard) as file:
        for name in file.tensors:
            file.check_is_float(name)
        return {name: stored.shape for name, stored in file.tensors.items()}


def _empty_model(adapter: Adapter) -> Any:
    """The stock model with its shapes and no memory. Raises StartupError for a config that stock refuses.

    As in a worker, the class is the adapter's own, whatever else the config calls itself or brings along.
    """
    import torch
    import transformers

    stock = getattr(transformers, adapter.architecture)
    try:
        settings = stock.config_class.from_dict(copy.deepcopy(adapter.config))
        with torch.device("meta"):
            return stock(settings)
    except Exception as error:
        reason = " ".join(str(error).split())[:_MAX_REASON_CHARS]
        raise StartupError(f"config.json is not one of a {adapter.architecture}: {reason}") from None


def _check_tied_head(model: Any, index: Mapping[str, Path]) -> None:
    """Raises StartupError for a head of its own where the config says that it is the embeddings."""
    from triptych.model.loader import is_same_tensor

    head = next((name for name in index if name.endswith("lm_head.weight")), None)
    table = next((name for name in index if name.endswith("embed_tokens.weight")), None)
    if model.config.tie_word_embeddings and head and table and not is_same_tensor(index, head, table):
        raise StartupError(f"config.json ties the head to the embeddings, but {head} has weights of its own")


def _expected_shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """What a checkpoint must hold; a tied tensor once."""
    return {_without_roots(name): tuple(parameter.shape) for name, parameter in model.named_parameters()}


def _tied_names(model: Any) -> set[str]:
    """Second names of tied tensors, which a checkpoint may hold too, and buffers."""
    return {_without_roots(name) for name in model.state_dict()}


def _parts(model: Any) -> Parts:
    """The decoder and the head are the language part; what is left (tower, projector) computes embeddings."""
    head = model.get_output_embeddings()
    language = {id(parameter): parameter.numel() for parameter in model.get_decoder().parameters()}
    language |= {id(parameter): parameter.numel() for parameter in head.parameters()}
    whole = sum(parameter.numel() for parameter in model.parameters())
    return Parts(whole - sum(language.values()), sum(language.values()))


def _without_roots(name: str) -> str:
    parts = name.split(".")
    while parts[0] in _ROOTS:
        parts.pop(0)
    return ".".join(parts)


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - _NAMED} more" if len(listed) > _NAMED else ""
    return ", ".join(listed[:_NAMED]) + more
