"""A language model that can be computed in the head, with real pages.

What a token is depends on everything before it *as it stands in the pages*: a wrong page, a lost chunk, a swapped
embedding or a page given to two sequences changes the answer, and `expected_answer` says what is right.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, cast

import torch

from triptych.mm.sentinels import SENTINEL_BASE
from triptych.model.parts import LanguagePart
from triptych.model.runner import LanguageRunner, RunOutput, RunSlice, check_coverage

FIRST_TOKEN = 100
NUM_TOKENS = 900


def next_token(values: Sequence[float]) -> int:
    """The token that follows a context of ids and embedding values."""
    return FIRST_TOKEN + zlib.crc32(repr([float(value) for value in values]).encode()) % NUM_TOKENS


def expected_answer(prompt: Sequence[float], max_tokens: int) -> list[int]:
    """`prompt`: ids, and for each embedding row its first element."""
    values = [float(value) for value in prompt]
    for _ in range(max_tokens):
        values.append(next_token(values))
    return [int(value) for value in values[len(prompt) :]]


class _FakePart:
    num_parameters = 1_000


class FakeRunner(LanguageRunner):
    """Takes the real runner's place in an engine.

    Attributes:
        steps: the slices of every step that ran.
        cells: (page, offset) -> what stands there.
    """

    def __init__(self, page_tokens: int) -> None:
        super().__init__(cast(LanguagePart, _FakePart()), torch.zeros(0), page_tokens, lookup_id=0)
        self.steps: list[list[RunSlice]] = []
        self.cells: dict[tuple[int, int], float] = {}
        self._failures: list[Exception] = []

    def fail_next(self, error: Exception) -> None:
        """The next step raises `error` instead of running."""
        self._failures.append(error)

    def run(self, slices: Sequence[RunSlice]) -> RunOutput:
        if self._failures:
            raise self._failures.pop(0)
        for piece in slices:
            check_coverage(piece)
        self.steps.append(list(slices))
        for piece in slices:
            self._write(piece)
        tokens = [next_token(self._context(piece)) if piece.sample is not None else None for piece in slices]
        num_sampled = sum(token is not None for token in tokens)
        return RunOutput(tokens, torch.zeros(num_sampled, 1) if num_sampled else None, [None] * num_sampled)

    @property
    def page_bytes(self) -> int:
        return 8 * self.page_tokens

    def save_pages(self, pages: Sequence[int]) -> torch.Tensor:
        """(1, 1, pages, page_tokens) float64; a cell that was never written is not a number."""
        rows = [[self.cells.get((page, offset), float("nan")) for offset in range(self.page_tokens)] for page in pages]
        return torch.tensor([[rows]], dtype=torch.float64)

    def load_pages(self, saved: torch.Tensor, pages: Sequence[int]) -> None:
        for page, row in zip(pages, saved[0, 0].tolist(), strict=True):
            for offset, value in enumerate(row):
                self.cells[page, offset] = value

    def _write(self, piece: RunSlice) -> None:
        values: list[Any] = piece.ids.tolist()
        for span in piece.embeddings:
            values[span.row : span.row + span.rows.shape[0]] = span.rows[:, 0].tolist()
        assert all(value < SENTINEL_BASE for value in values)
        for index, value in enumerate(values, piece.start):
            self.cells[self._cell(piece, index)] = value

    def _context(self, piece: RunSlice) -> list[float]:
        return [self.cells[self._cell(piece, index)] for index in range(piece.start + len(piece.ids))]

    def _cell(self, piece: RunSlice, index: int) -> tuple[int, int]:
        return piece.pages[index // self.page_tokens], index % self.page_tokens
