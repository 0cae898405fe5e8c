"""Faults planted in the stock model: what wrong serving would compute.

They measure the witnesses (the random checkpoint and the question list), before and apart from any code of ours.
Each is a context manager over a `ReferenceModel`; what is generated within shows the fault.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tests.parity.prompts import Prompt
from tests.parity.reference import ReferenceModel

Fault = Callable[[ReferenceModel], contextlib.AbstractContextManager[None]]
Applies = Callable[[Prompt], bool]


@contextlib.contextmanager
def pictures_swapped(reference: ReferenceModel) -> Iterator[None]:
    """The scatter takes the pictures' embeddings in the opposite order."""
    with _pooled(reference, lambda pictures: list(reversed(pictures))):
        yield


@contextlib.contextmanager
def embeddings_reversed(reference: ReferenceModel) -> Iterator[None]:
    """Each picture's rows arrive last row first."""
    with _pooled(reference, lambda pictures: [picture.flip(0) for picture in pictures]):
        yield


@contextlib.contextmanager
def delta_dropped(reference: ReferenceModel) -> Iterator[None]:
    """Decode counts positions by tokens, as if the prompt had held no picture."""

    def drop(positions: torch.Tensor) -> torch.Tensor:
        return positions[:1].expand_as(positions) if positions.shape[-1] == 1 else positions

    with _positions(reference, drop):
        yield


@contextlib.contextmanager
def height_and_width_exchanged(reference: ReferenceModel) -> Iterator[None]:
    with _positions(reference, lambda positions: positions[[0, 1, 3, 2]]):
        yield


@contextlib.contextmanager
def one_dimensional(reference: ReferenceModel) -> Iterator[None]:
    """No M-RoPE at all: picture tokens count like words."""
    with _positions(reference, lambda positions: positions[:1].expand_as(positions)):
        yield


@contextlib.contextmanager
def levels_dropped(reference: ReferenceModel) -> Iterator[None]:
    """DeepStack: nothing but the first level of the embedding rows reaches the language model."""
    with _levels(reference, lambda pictures: [torch.zeros_like(picture) for picture in pictures]):
        yield


@contextlib.contextmanager
def levels_swapped(reference: ReferenceModel) -> Iterator[None]:
    """DeepStack: the pictures' further levels go in reverse row order, the first level as it should."""
    with _levels(reference, lambda pictures: [picture.flip(0) for picture in pictures]):
        yield


@contextlib.contextmanager
def _pooled(reference: ReferenceModel, change: Callable[[list[torch.Tensor]], list[torch.Tensor]]) -> Iterator[None]:
    """Changes the rows that `get_image_features` gives, all levels of them alike."""
    with _features(reference, change, change):
        yield


@contextlib.contextmanager
def _levels(reference: ReferenceModel, change: Callable[[list[torch.Tensor]], list[torch.Tensor]]) -> Iterator[None]:
    with _features(reference, list, change):
        yield


@contextlib.contextmanager
def _features(
    reference: ReferenceModel,
    first: Callable[[list[torch.Tensor]], list[torch.Tensor]],
    further: Callable[[list[torch.Tensor]], list[torch.Tensor]],
) -> Iterator[None]:
    inner = reference.model.model
    stock = inner.get_image_features

    @functools.wraps(stock)  # `generate` reads the signature to know what to pass
    def changed(*args: Any, **kwargs: Any) -> Any:
        out = stock(*args, **kwargs)
        out.pooler_output = first(list(out.pooler_output))
        if getattr(out, "deepstack_features", None) is not None:
            out.deepstack_features = [further(list(level)) for level in out.deepstack_features]
        return out

    inner.get_image_features = changed
    try:
        yield
    finally:
        del inner.get_image_features


@contextlib.contextmanager
def _positions(reference: ReferenceModel, change: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """`change` sees int64 (4, 1, tokens): the plain count, then time, height and width."""

    def hook(_module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        positions = kwargs["position_ids"]
        assert positions is not None and positions.shape[0] == 4, "generate prepares four rows of positions"
        return args, {**kwargs, "position_ids": change(positions)}

    handle = reference.model.model.language_model.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


# -- faults of the cache, planted between prefill and decode ------------------------------------------------------

PAGE_TOKENS = 16
CacheFault = Callable[[Any, Any], None]
"""(the request's cache, another request's cache): changes the first."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A greedy answer without its stop token; `margin` is the least distance from a chosen logit to the runner-up."""

    tokens: list[int]
    margin: float


def answer(
    reference: ReferenceModel,
    prompt: Prompt,
    stops: frozenset[int],
    *,
    donor: Prompt | None = None,
    corrupt: CacheFault | None = None,
    limit: int = 64,
) -> Answer:
    """With `corrupt`, decoded over a corrupted cache."""
    with torch.inference_mode():
        other = _prefilled(reference, donor).cache if donor is not None else None
        out = _prefilled(reference, prompt)
        if corrupt is not None:
            corrupt(out.cache, other)
        tokens, margin = list[int](), float("inf")
        while len(tokens) < limit:
            best, second = out.logits[0, -1].topk(2).values.tolist()
            margin = min(margin, best - second)
            tokens.append(int(out.logits[0, -1].argmax()))
            if tokens[-1] in stops:
                return Answer(tokens[:-1], margin)
            out = reference.model(input_ids=torch.tensor([tokens[-1:]]), cache=out.cache, use_cache=True)
    return Answer(tokens, margin)


def _prefilled(reference: ReferenceModel, prompt: Prompt) -> Any:
    reference.model.model.rope_deltas = None
    return reference.model(**reference.inputs(prompt), use_cache=True)


def keys_of_another(layer: int) -> CacheFault:
    """The keys of `layer` in all full pages are another request's."""

    def corrupt(cache: Any, other: Any) -> None:
        tokens = _shared_full_pages(cache, other)
        cache.layers[layer].keys[:, :, :tokens] = other.layers[layer].keys[:, :, :tokens]

    return corrupt


def stale_page(page: int) -> CacheFault:
    """One page still holds what another request left there, in all layers."""

    def corrupt(cache: Any, other: Any) -> None:
        rows = slice(page * PAGE_TOKENS, (page + 1) * PAGE_TOKENS)
        for mine, theirs in zip(cache.layers, other.layers, strict=True):
            mine.keys[:, :, rows] = theirs.keys[:, :, rows]
            mine.values[:, :, rows] = theirs.values[:, :, rows]

    return corrupt


def _shared_full_pages(cache: Any, other: Any) -> int:
    """Tokens in the full pages that both have."""
    return min(int(c.get_seq_length()) for c in (cache, other)) // PAGE_TOKENS * PAGE_TOKENS
