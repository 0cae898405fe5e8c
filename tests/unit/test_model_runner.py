"""The step: every sentinel gets its embedding row, no other token does, and neighbours do not matter."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from triptych.core.errors import EmbeddingMissing, MediaMismatch
from triptych.core.plan import Sampling
from triptych.mm.sentinels import SENTINEL_BASE, item_sentinels
from triptych.model.registry import adapter_for
from triptych.model.runner import EmbeddingSpan, LanguageRunner, RunSlice, check_coverage, scatter
from triptych.model.sampler import SampleRow

S = SENTINEL_BASE
HIDDEN = 64
SAMPLED = SampleRow(Sampling(1), 0, 0)


def piece(ids: list[int], *spans: tuple[int, int], pages: tuple[int, ...] = (1,), start: int = 0) -> RunSlice:
    """A slice with spans of (row, count); their rows count up from 1."""
    embeddings = tuple(
        EmbeddingSpan(row, torch.arange(1.0, count + 1)[:, None].expand(-1, HIDDEN)) for row, count in spans
    )
    positions = np.arange(start, start + len(ids))[None].repeat(3, axis=0)
    return RunSlice(np.array(ids, dtype=np.int64), positions, pages, start, embeddings, SAMPLED)


@pytest.mark.parametrize(
    "good",
    [piece([1, 2]), piece([1, S, S + 1, 2], (1, 2)), piece([S, S + 2**62 - 1], (0, 1), (1, 1)), piece([S], (0, 1))],
)
def test_embeddings_that_cover_the_sentinels_are_taken(good: RunSlice) -> None:
    check_coverage(good)


@pytest.mark.parametrize("bad", [piece([1, S]), piece([S, S, 1], (0, 1)), piece([S, 1, S], (0, 1))])
def test_a_sentinel_without_its_embedding_is_an_error(bad: RunSlice) -> None:
    with pytest.raises(EmbeddingMissing):
        check_coverage(bad)


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(piece([S, 1], (0, 2)), id="over text"),
        pytest.param(piece([1, 2], (1, 1)), id="only text"),
        pytest.param(piece([1, S, S], (1, 3)), id="beyond the end"),
        pytest.param(piece([S, S], (-1, 2), (1, 1)), id="before the start"),
        pytest.param(piece([S, S], (0, 2), (1, 1)), id="twice"),
    ],
)
def test_an_embedding_where_none_belongs_is_an_error(bad: RunSlice) -> None:
    with pytest.raises(MediaMismatch):
        check_coverage(bad)


@pytest.fixture(scope="module")
def runner(tiny_model_dir: Path) -> LanguageRunner:
    adapter = adapter_for(tiny_model_dir)
    kv = adapter.kv_shape
    pool = torch.zeros(kv.num_layers, 2, 12, kv.num_kv_heads, 16, kv.head_dim)
    return LanguageRunner(adapter.load_language(torch.float32, torch.device("cpu")), pool, 16, lookup_id=5)


def test_rows_of_all_slices_go_where_their_sentinels_are(runner: LanguageRunner) -> None:
    slices = [piece([1, S, S + 1, 2], (1, 2)), piece([3]), piece([S, 4], (0, 1))]
    ids = np.concatenate([each.ids for each in slices])
    with torch.inference_mode():
        rows, levels = scatter(runner.part, ids, slices, lookup_id=5)
    assert levels is None
    table = runner.part.embed(torch.tensor([1, 2, 3, 4]))
    expected = [table[0], torch.full((HIDDEN,), 1.0), torch.full((HIDDEN,), 2.0), table[1], table[2]]
    expected += [torch.full((HIDDEN,), 1.0), table[3]]
    assert torch.equal(rows, torch.stack(expected))


def test_a_refused_step_writes_nothing(runner: LanguageRunner) -> None:
    runner.pool.zero_()
    with pytest.raises(EmbeddingMissing):
        runner.run([piece([1, 2, 3]), piece([1, S], pages=(2,))])
    assert not runner.pool.any()


def test_a_slices_logits_do_not_depend_on_its_neighbours(runner: LanguageRunner) -> None:
    sentinels = item_sentinels(bytes(32), 2).tolist()
    mine = piece([7, *sentinels, 9], (1, 2), pages=(3,))
    alone = runner.run([mine]).logits
    assert alone is not None
    crowd = [piece(list(range(20)), pages=(4, 5)), mine, piece([11], pages=(6,))]
    mixed = runner.run(crowd).logits
    assert mixed is not None
    torch.testing.assert_close(mixed[1], alone[0], rtol=1e-5, atol=1e-5)


def test_only_those_who_ask_get_a_token(runner: LanguageRunner) -> None:
    silent = RunSlice(np.array([1, 2]), np.arange(2)[None].repeat(3, axis=0), (1,), 0)
    output = runner.run([silent, piece([3], pages=(2,)), silent])
    assert [token is None for token in output.token_ids] == [True, False, True]
    assert output.logits is not None
    assert output.logits.shape[0] == 1
    assert output.logits.dtype == torch.float32
    assert runner.run([silent]).logits is None
