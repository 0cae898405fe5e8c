"""Are greedy answers the same, whatever ran beside them? Exact, but for ties.

Where the two best logits of a token lie within `TIE`, the sums of another batch may decide either way, and from there
on the texts part. A tiny random model says such a token once in a thousand or so.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.parity.compare import TIE
from triptych.testing.cluster import ChatResult


def assert_same_answers(expected: Sequence[ChatResult], found: Sequence[Sequence[int]]) -> None:
    """`expected` must come from a cluster that captures logits."""
    for number, (truth, ids) in enumerate(zip(expected, found, strict=True)):
        if list(ids) == truth.token_ids:
            continue
        parted = next((i for i, (a, b) in enumerate(zip(truth.token_ids, ids, strict=False)) if a != b), None)
        assert parted is not None, f"answer {number} has {len(ids)} tokens, not {len(truth.token_ids)}"
        row = truth.logits[parted].astype(np.float64)
        gap = row.max() - row[ids[parted]]
        assert gap <= TIE, f"answer {number} parts at token {parted}, {gap} below the best: {truth.token_ids} {ids}"
