"""What another process wrote into shared memory is there, whole, when its commit is: a million times by
`make verify-transport`."""

from __future__ import annotations

import pytest

from tests.integration.shm_rounds import run_rounds
from tests.seed import IS_FULL

NUM_ROUNDS = 1_000_000 if IS_FULL else 20_000


@pytest.mark.timeout(900)
def test_bytes_are_there_when_their_commit_is(seed: int) -> None:
    rounds = run_rounds(NUM_ROUNDS, seed)
    print(f"{rounds.done} rounds, {rounds.num_bytes >> 20} MiB in {rounds.wall_s:.1f} s")
    assert (rounds.done, rounds.wrong) == (NUM_ROUNDS, 0)


def test_a_commit_that_comes_before_its_bytes_is_seen(seed: int) -> None:
    """The test above can fail."""
    assert run_rounds(2_000, seed, mode="early").wrong > 100
