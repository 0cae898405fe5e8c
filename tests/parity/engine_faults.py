"""Faults planted in the running cluster, each through one narrow seam.

A planted fault is what a bug there would do: the wrong picture's rows in the scatter, a forgotten delta, pages of
another request. Each is a context manager; on leaving, the system is sound again.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from triptych.core.plan import Token
from triptych.engine.loop import LanguageEngine
from triptych.engine.sequence import Sequence as EngineSequence
from triptych.kv.grants import GrantTable
from triptych.mm.mrope import mrope_positions
from triptych.model import runner
from triptych.model.adapters import qwen_vl
from triptych.model.parts import EmbeddingLevels
from triptych.model.runner import EmbeddingSpan, RunSlice
from triptych.transport.pages import MappedPages

Spans = tuple[EmbeddingSpan, ...]


@contextlib.contextmanager
def pictures_swapped() -> Iterator[None]:
    """The scatter takes the pictures of a request in the opposite order."""

    def swap(spans: Spans) -> Spans:
        if len(spans) < 2:
            return spans
        rows = torch.cat([span.rows for span in reversed(spans)])
        parts = torch.split(rows, [span.rows.shape[0] for span in spans])
        return tuple(EmbeddingSpan(span.row, part) for span, part in zip(spans, parts, strict=True))

    with _scatter(swap):
        yield


@contextlib.contextmanager
def embeddings_reversed() -> Iterator[None]:
    """The scatter takes each picture's rows last row first."""
    with _scatter(lambda spans: tuple(EmbeddingSpan(span.row, span.rows.flip(0)) for span in spans)):
        yield


@contextlib.contextmanager
def levels_dropped() -> Iterator[None]:
    """The language model is given nothing but the first level of the embedding rows."""
    with _gathered(lambda levels: None):
        yield


@contextlib.contextmanager
def levels_misplaced() -> Iterator[None]:
    """Further levels go one row too far, as with an index that counts from the wrong end of a chunk."""

    def shift(levels: EmbeddingLevels) -> EmbeddingLevels:
        return EmbeddingLevels(levels.rows.roll(1), levels.levels)

    with _gathered(shift):
        yield


@contextlib.contextmanager
def delta_dropped() -> Iterator[None]:
    """Every stage forgets how far pictures set back the positions of what follows the prompt."""
    stock = mrope_positions

    def without_delta(*args: Any) -> Any:
        positions, _ = stock(*args)
        return positions, 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(qwen_vl, "mrope_positions", without_delta)
        yield


@contextlib.contextmanager
def keys_exchanged(layer: int) -> Iterator[None]:
    """The decode worker's pool holds the keys of two requests exchanged, in one layer and all pages that both fill.

    Requests come in pairs: the first is held back until the second is there.
    """
    held: list[tuple[EngineSequence, Token]] = []
    adopt = LanguageEngine.adopt

    def adopt_pair(engine: LanguageEngine, sequence: EngineSequence, token: Token) -> None:
        held.append((sequence, token))
        if len(held) < 2:
            return
        pages = [_full_pages(one, engine.manager.page_tokens) for one, _ in held]
        count = min(len(one) for one in pages)
        _exchange(engine._runner.pool[layer, 0], pages[0][:count], pages[1][:count])
        for one, first_token in held:
            adopt(engine, one, first_token)
        held.clear()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LanguageEngine, "adopt", adopt_pair)
        yield


@contextlib.contextmanager
def stale_page(page: int) -> Iterator[None]:
    """One page of the decode worker's pool still holds what the request before wrote there.

    Requests come in pairs: the second finds the first one's page. All of a prompt travels: what decode holds of it
    would be counted out of the grant's pages.
    """
    left: list[npt.NDArray[np.uint8]] = []
    copy = MappedPages.copy

    def copy_all_but_one(handoff: MappedPages, pages: Sequence[int], first: int) -> int:
        moved = copy(handoff, pages, first)
        if first <= page < first + len(pages):
            here = handoff.target[:, handoff.target_pages[page]]
            if left:
                here[:] = left.pop()
            else:
                left.append(here.copy())
        return moved

    sound = GrantTable.issue
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MappedPages, "copy", copy_all_but_one)
        patch.setattr(GrantTable, "issue", lambda table, ref, num_tokens, *_: sound(table, ref, num_tokens))
        yield


@contextlib.contextmanager
def _scatter(change: Callable[[Spans], Spans]) -> Iterator[None]:
    """Changes the spans before they are scattered. Prompts then wait for all their embeddings, so that every span is a
    whole picture and all pictures of a request are in one step."""
    sound, ready = runner.scatter, vars(EngineSequence)["num_ready"].fget

    def faulty(part: Any, ids: Any, slices: Sequence[RunSlice], lookup_id: int) -> Any:
        changed = [dataclasses.replace(piece, embeddings=change(piece.embeddings)) for piece in slices]
        return sound(part, ids, changed, lookup_id)

    def ready_as_a_whole(sequence: EngineSequence) -> int:
        tokens: int = ready(sequence)
        return tokens if tokens == sequence.num_prompt else sequence.num_computed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "scatter", faulty)
        patch.setattr(EngineSequence, "num_ready", property(ready_as_a_whole))
        yield


@contextlib.contextmanager
def _gathered(change: Callable[[EmbeddingLevels], EmbeddingLevels | None]) -> Iterator[None]:
    """Changes the further levels of each step before the language model sees them."""
    sound = runner.scatter

    def faulty(*args: Any) -> Any:
        embeddings, levels = sound(*args)
        return embeddings, None if levels is None else change(levels)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "scatter", faulty)
        yield


def _full_pages(sequence: EngineSequence, page_tokens: int) -> list[int]:
    assert sequence.pages is not None
    return sequence.pages.pages[: sequence.num_prompt // page_tokens]


def _exchange(keys: torch.Tensor, mine: list[int], theirs: list[int]) -> None:
    kept = keys[mine].clone()
    keys[mine] = keys[theirs]
    keys[theirs] = kept
