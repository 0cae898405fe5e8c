"""Runs one step of the language model: packs rows, scatters embeddings, attends over pages, samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from triptych.core.errors import EmbeddingMissing, MediaMismatch
from triptych.core.expansion import IdArray
from triptych.core.plan import TokenLogprobs
from triptych.mm.mrope import PositionArray
from triptych.mm.sentinels import SENTINEL_BASE
from triptych.model.paged import build_batch
from triptych.model.parts import EmbeddingLevels, LanguagePart
from triptych.model.sampler import SampleRow, logprobs, sample


@dataclass(frozen=True, slots=True)
class EmbeddingSpan:
    """Embedding rows that go over `count` rows of a slice, from its `row` on; `rows` is (count, row_elements): the
    first level (hidden elements), then the others in order."""

    row: int
    rows: torch.Tensor


@dataclass(frozen=True, slots=True)
class RunSlice:
    """What one sequence adds to a step.

    Attributes:
        ids: int64 (count,), sentinels where embeddings go.
        positions: int64 (axes, count).
        pages: block table that covers the slice's end.
        start: index of its first token in the sequence.
        embeddings: must cover exactly the sentinels.
        sample: set when the last row's logits are wanted.
        follows: set when the only id is not known yet: it is what the slice at this index of the launch before
            samples.
    """

    ids: IdArray
    positions: PositionArray
    pages: Sequence[int]
    start: int
    embeddings: tuple[EmbeddingSpan, ...] = ()
    sample: SampleRow | None = None
    follows: int | None = None


@dataclass(frozen=True, slots=True)
class RunOutput:
    """Sampled id of each slice (None where none was wanted), the float32 logits behind them (one row for each that was
    wanted), and the log probabilities of those rows that ask for them."""

    token_ids: list[int | None]
    logits: torch.Tensor | None = field(repr=False)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)


class Flight(Protocol):
    """A step that was launched."""

    def wait(self) -> RunOutput:
        """Blocks until its samples are on the host. Called once, in the order of the launches. Raises what the step
        raised."""
        ...


@dataclass(frozen=True, slots=True)
class Landed:
    """The flight of a runner that computes at once."""

    output: RunOutput

    def wait(self) -> RunOutput:
        return self.output


class LanguageRunner:
    """Owns the pool tensor's use on this device; called by the engine's thread only.

    Attributes:
        lookahead: how many steps may be launched before the first of them is waited for, less one. 0 on the CPU, which
            computes in `launch`; a runner with a device of its own has 1, and resolves `RunSlice.follows` there.
    """

    lookahead = 0

    def __init__(self, part: LanguagePart, pool: torch.Tensor, page_tokens: int, lookup_id: int) -> None:
        self.part = part
        self.pool = pool
        self.page_tokens = page_tokens
        self._lookup_id = lookup_id

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers."""
        return self.pool[:, :, 0].nbytes

    def save_pages(self, pages: Sequence[int]) -> torch.Tensor:
        """A copy on the host of what the launches before this wrote to those pages: (layers, 2, pages, page_tokens,
        kv_heads, head_dim)."""
        return self.pool[:, :, torch.tensor(pages, device=self.pool.device)].cpu()

    def load_pages(self, saved: torch.Tensor, pages: Sequence[int]) -> None:
        """Writes what `save_pages` gave (or some pages of it) to other pages, before any later launch."""
        self.pool[:, :, torch.tensor(pages, device=self.pool.device)] = saved.to(self.pool.device)

    def launch(self, slices: Sequence[RunSlice]) -> Flight:
        """Starts one forward pass over what the launches before it wrote. Raises as `run` does, here or in `wait`."""
        return Landed(self.run(slices))

    @torch.inference_mode()
    def run(self, slices: Sequence[RunSlice]) -> RunOutput:
        """One forward pass. Raises as `check_coverage` does, and then nothing was written."""
        for piece in slices:
            check_coverage(piece)
        ids = np.concatenate([piece.ids for piece in slices])
        positions = np.concatenate([piece.positions for piece in slices], axis=1)
        embeddings, levels = scatter(self.part, ids, slices, self._lookup_id)
        batch = build_batch(self.pool, [(p.pages, p.start, len(p.ids)) for p in slices], self.part.device)
        hidden = self.part.hidden(embeddings, torch.from_numpy(positions).to(self.part.device), batch, levels)
        return self._sample(hidden, slices)

    def _sample(self, hidden: torch.Tensor, slices: Sequence[RunSlice]) -> RunOutput:
        ends = np.cumsum([len(piece.ids) for piece in slices]) - 1
        wanted = [index for index, piece in enumerate(slices) if piece.sample is not None]
        token_ids: list[int | None] = [None] * len(slices)
        if not wanted:
            return RunOutput(token_ids, None)
        logits = self.part.logits(hidden[torch.from_numpy(ends[wanted]).to(hidden.device)])
        rows = [piece.sample for piece in slices if piece.sample is not None]
        sampled = sample(logits, rows)
        for index, token_id in zip(wanted, sampled, strict=True):
            token_ids[index] = token_id
        return RunOutput(token_ids, logits, logprobs(logits, rows, sampled))


def check_coverage(piece: RunSlice) -> None:
    """Every sentinel gets exactly one embedding row, and no other token gets any. Counted on the host.

    Raises EmbeddingMissing or MediaMismatch.
    """
    is_sentinel = piece.ids >= SENTINEL_BASE
    if not piece.embeddings and not is_sentinel.any():
        return
    covered = np.zeros(len(piece.ids), dtype=np.int64)
    for span in piece.embeddings:
        if span.row < 0 or span.row + span.rows.shape[0] > len(piece.ids):
            raise MediaMismatch("an embedding reaches beyond its place in the prompt")
        covered[span.row : span.row + span.rows.shape[0]] += 1
    if np.any(is_sentinel & (covered == 0)):
        raise EmbeddingMissing("an embedding that was dispatched did not arrive")
    if np.any(covered != is_sentinel):
        raise MediaMismatch("the embeddings do not match the prompt's places for them")


def scatter(
    part: LanguagePart, ids: IdArray, slices: Sequence[RunSlice], lookup_id: int
) -> tuple[torch.Tensor, EmbeddingLevels | None]:
    """Looks up all ids (sentinels as the family's look-up id) and overwrites the sentinels' rows with the embeddings'
    first level: (tokens, hidden); gathers the other levels, where the family has them."""
    lookup = torch.from_numpy(np.where(ids >= SENTINEL_BASE, lookup_id, ids)).to(part.device)
    embeddings = part.embed(lookup)
    placed: list[tuple[int, torch.Tensor]] = []
    first_row = 0
    for piece in slices:
        for span in piece.embeddings:
            placed.append((first_row + span.row, span.rows.to(embeddings.device, embeddings.dtype)))
        first_row += len(piece.ids)
    hidden = embeddings.shape[1]
    for at, rows in placed:
        assert rows.shape[1] == (1 + part.num_embedding_levels) * hidden, "an embedding row has another width"
        embeddings[at : at + rows.shape[0]] = rows[:, :hidden]
    return embeddings, _gather_levels(placed, hidden) if part.num_embedding_levels and placed else None


def _gather_levels(placed: Sequence[tuple[int, torch.Tensor]], hidden: int) -> EmbeddingLevels:
    """All levels but the first of rows that were placed at (row in the step, rows); ascending, as the slices are."""
    indices = np.concatenate([np.arange(at, at + rows.shape[0]) for at, rows in placed])
    further = torch.cat([rows[:, hidden:] for _, rows in placed])
    return EmbeddingLevels(torch.from_numpy(indices).to(further.device), torch.split(further, hidden, dim=1))
