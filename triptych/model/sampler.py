"""Chooses tokens. Randomness is a function of (seed, choice, absolute position) alone, so neither the batch mix, nor
the topology, nor a replay changes a seeded answer."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from triptych.core.plan import Sampling


@dataclass(frozen=True, slots=True)
class SampleRow:
    """How one row of logits is to be sampled; `position` is the index of the new token in the whole sequence."""

    sampling: Sampling
    choice: int
    position: int


def uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits."""
    digest = hashlib.blake2b(struct.pack(">QQQ", seed, choice, position), digest_size=8, person=b"triptych-sample")
    return (int.from_bytes(digest.digest(), "big") >> 11) / (1 << 53)


def sample(logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[int]:
    """Token ids for (rows, vocabulary) float32 logits. The one place where the host waits for the device."""
    chosen = logits.argmax(dim=-1)
    random_rows = [index for index, row in enumerate(rows) if row.sampling.temperature > 0]
    if random_rows:
        picked = [_sample_row(logits[index], rows[index]) for index in random_rows]
        chosen[random_rows] = torch.stack(picked)
    ids: list[int] = chosen.tolist()
    return ids


def _sample_row(logits: torch.Tensor, row: SampleRow) -> torch.Tensor:
    """Nucleus sampling (Holtzman et al., arXiv:1904.09751) by inverting the cumulative distribution at `uniform`.

    Tokens of equal probability keep the order of their ids (stable sort), so the result is reproducible.
    """
    scores = logits.double()
    # Less the largest first: however small the temperature is, the best token stays at 0 and nothing becomes NaN.
    probabilities = torch.softmax((scores - scores.max()) / row.sampling.temperature, dim=-1)
    ordered, ids = torch.sort(probabilities, descending=True, stable=True)
    cumulative = torch.cumsum(ordered, dim=-1)
    kept = int(torch.searchsorted(cumulative, min(row.sampling.top_p, float(cumulative[-1])))) + 1
    kept = min(kept, len(ids))
    target = uniform(row.sampling.seed, row.choice, row.position) * float(cumulative[kept - 1])
    index = min(int(torch.searchsorted(cumulative[:kept], target, right=True)), kept - 1)
    return ids[index]
