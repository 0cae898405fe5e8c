"""Chooses tokens, and tells how probable they were.

What happens to a row of logits, in this order:

1. `logit_bias` is added (OpenAI's parameter of that name).
2. Repetition penalty over prompt and answer (Keskar et al., CTRL, arXiv:1909.05858, section 4.1, in the form that keeps
   its sense for negative logits: divided when positive, multiplied when not). Rows of pictures are no tokens and do
   not count.
3. Presence and frequency penalty over the answer so far, by OpenAI's definition:
   `logit -= count * frequency_penalty + (count > 0) * presence_penalty`.
4. Until the answer has `min_tokens`, what would end it is ruled out.

Greedy takes the largest then, the first of equals. Otherwise:

5. Temperature.
6. top-k (Fan et al., arXiv:1805.04833); all that equal the k-th stay in.
7. top-p, the nucleus (Holtzman et al., arXiv:1904.09751): the fewest of the likeliest that reach it together.
8. min-p (Nguyen et al., arXiv:2407.01082): what is less than `min_p` times as likely as the likeliest goes.
9. The cumulative distribution of what is left, likeliest first, is inverted at `uniform`.

Everything is a function of the row alone, in float64 and with reductions of one row at a time: a reduction over a
matrix may add in another order when the number of rows changes. So neither the batch mix, nor the topology, nor a
replay changes a seeded answer. Rows that ask for nothing of this share one argmax.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from triptych.core.expansion import IdArray
from triptych.core.plan import Sampling, TokenLogprobs

# What JSON and the wire carry in place of minus infinity, as OpenAI's API does.
LEAST_LOGPROB = -9999.0
NUM_LIKELIEST = 256
LIKELIEST_SHARE = 16
"""In a vocabulary of fewer than so many times the likeliest, all are sorted at once."""
ROUNDING = 1e-9
"""Far more than what the order of a sum of float64 over any vocabulary changes."""


@dataclass(frozen=True, slots=True)
class TokenHistory:
    """What penalties look at: the ids that the prompt holds (each at least once, no sentinels), and the answer's."""

    prompt_ids: IdArray
    answer_ids: IdArray


@dataclass(frozen=True, slots=True)
class SampleRow:
    """How one row of logits is to be sampled.

    Attributes:
        position: index of the new token in the whole sequence.
        index: its index in the answer.
        history: needed when the sampling has penalties.
    """

    sampling: Sampling
    choice: int
    position: int
    index: int = 0
    history: TokenHistory | None = None

    @property
    def must_go_on(self) -> bool:
        """The answer may not end with this token."""
        return self.index < self.sampling.min_tokens

    @property
    def is_plain(self) -> bool:
        """Nothing but the argmax is asked for."""
        how = self.sampling
        return not (how.temperature > 0 or how.logit_bias or how.has_penalties or self.must_go_on)


def uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits: a function of (seed + choice) mod 2^64 and the position.

    So choice k of a request with seed s draws what choice 0 of a request with seed s + k draws.
    """
    key = struct.pack(">QQQ", (seed + choice) % 2**64, 0, position)
    digest = hashlib.blake2b(key, digest_size=8, person=b"triptych-sample")
    return (int.from_bytes(digest.digest(), "big") >> 11) / (1 << 53)


def sample(logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[int]:
    """Token ids for (rows, vocabulary) float32 logits. The host waits for the device here: at the end, and once for
    each row with a top-k."""
    chosen = logits.argmax(dim=-1)
    special = [index for index, row in enumerate(rows) if not row.is_plain]
    if special:
        chosen[special] = torch.stack([_choose(logits[index], rows[index]) for index in special])
    ids: list[int] = chosen.tolist()
    return ids


def logprobs(logits: torch.Tensor, rows: Sequence[SampleRow], ids: Sequence[int]) -> list[TokenLogprobs | None]:
    """Of the chosen `ids` and their alternatives, for the rows whose sampling asks for it. `logits` as the model gave
    them, (rows, vocabulary)."""
    return [
        None
        if row.sampling.num_logprobs is None
        else _row_logprobs(logits[index], ids[index], row.sampling.num_logprobs)
        for index, row in enumerate(rows)
    ]


def adjusted(logits: torch.Tensor, row: SampleRow) -> torch.Tensor:
    """Steps 1 to 4: float64 (vocabulary,), a copy."""
    how = row.sampling
    scores = logits.to(torch.float64, copy=True)
    if how.logit_bias:
        ids = torch.tensor([token_id for token_id, _ in how.logit_bias], device=scores.device)
        scores[ids] += torch.tensor([bias for _, bias in how.logit_bias], dtype=scores.dtype, device=scores.device)
    if how.has_penalties:
        _penalize(scores, row)
    if row.must_go_on:
        ends = sorted(token_id for token_id in how.stop_token_ids | how.eos_token_ids if token_id < len(scores))
        scores[torch.tensor(ends, dtype=torch.int64, device=scores.device)] = float("-inf")
    return scores


def shortlist(scores: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """Steps 5 to 8: (probabilities, ids), likeliest first, equals by id. What is ruled out is not in it, or stands at
    the end with probability 0. The probabilities need not add up to 1."""
    # Less the largest first: however small the temperature is, the best token stays at 0 and nothing becomes NaN.
    scaled = (scores - scores.max()) / sampling.temperature
    candidates = _at_least_kth(scaled, min(sampling.top_k or len(scaled), len(scaled)))
    scaled, order = torch.sort(scaled[candidates], descending=True, stable=True)
    probabilities, ids = torch.softmax(scaled, dim=-1), candidates[order]
    kept = torch.ones_like(probabilities, dtype=torch.bool)
    if sampling.top_p < 1:
        kept[1:] = torch.cumsum(probabilities, dim=-1)[:-1] < sampling.top_p
    if sampling.min_p > 0:
        kept &= probabilities >= sampling.min_p * probabilities[0]
    return probabilities.where(kept, 0.0), ids


def _choose(logits: torch.Tensor, row: SampleRow) -> torch.Tensor:
    scores = adjusted(logits, row)
    if row.sampling.temperature == 0:
        return scores.argmax()
    drawn = uniform(row.sampling.seed, row.choice, row.position)
    if scores.device.type == "cpu" and (near := choose_among_likeliest(scores, row.sampling, drawn)) is not None:
        return torch.tensor(near)
    return choose_among_all(scores, row.sampling, drawn)


def choose_among_all(scores: torch.Tensor, sampling: Sampling, drawn: float) -> torch.Tensor:
    """The id where `drawn` in [0, 1) falls, by steps 5 to 9."""
    probabilities, ids = shortlist(scores, sampling)
    cumulative = torch.cumsum(probabilities, dim=-1)
    target = cumulative[-1] * drawn
    index = torch.searchsorted(cumulative, target.view(1), right=True)
    # Rounding may put the target at the very end, which must not reach what was ruled out.
    return ids[torch.minimum(index, (probabilities > 0).sum() - 1)][0]


def choose_among_likeliest(scores: torch.Tensor, sampling: Sampling, drawn: float) -> int | None:
    """What `choose_among_all` gives, from the likeliest alone, without sorting a vocabulary.

    None where they do not decide it: what is kept reaches beyond them, or a boundary is so near that rounding, which
    differs with the order of a sum, could have moved it.
    """
    if sampling.top_k is not None or len(scores) < LIKELIEST_SHARE * NUM_LIKELIEST:
        return None
    scaled = (scores - scores.max()) / sampling.temperature
    ids = _at_least_kth(scaled, NUM_LIKELIEST)
    ordered, order = torch.sort(scaled[ids], descending=True, stable=True)
    probabilities = torch.exp(ordered) / torch.exp(scaled).sum()
    cumulative = torch.cumsum(probabilities, dim=-1)
    reached = cumulative[-1].item()
    if not reached > 0:  # a row of NaN
        return None
    num_kept, kept = len(ids), 1.0
    if sampling.top_p < 1:
        if _is_near(cumulative, sampling.top_p):
            return None
        if reached > sampling.top_p:
            num_kept = int((cumulative < sampling.top_p).sum().item()) + 1
            kept = cumulative[num_kept - 1].item()
    if sampling.min_p > 0:
        least = sampling.min_p * probabilities[0].item()
        if _is_near(probabilities, least):
            return None
        likely = int((probabilities > least).sum().item())
        if likely < num_kept:
            num_kept, kept = likely, cumulative[likely - 1].item()
    if num_kept == len(ids) and (sampling.top_p < 1 or sampling.min_p > 0):
        return None  # how much is kept is not known
    target = kept * drawn
    if target > cumulative[num_kept - 1].item() or _is_near(cumulative, target):
        return None
    return int(ids[order[torch.searchsorted(cumulative, target, right=True)]].item())


def _is_near(values: torch.Tensor, boundary: float) -> bool:
    return bool(((values - boundary).abs() <= ROUNDING).any())


def _penalize(scores: torch.Tensor, row: SampleRow) -> None:
    assert row.history is not None, "penalties need the history"
    how, device = row.sampling, scores.device
    answer, counts = torch.unique(torch.from_numpy(row.history.answer_ids), return_counts=True)
    if how.repetition_penalty != 1.0:
        # An id that stands in both is written twice, with the same value.
        seen = torch.cat([torch.from_numpy(row.history.prompt_ids), answer]).to(device)
        values = scores[seen]
        penalized = torch.where(values < 0, values * how.repetition_penalty, values / how.repetition_penalty)
        # A penalty near 0 divides beyond float64; the difference of two infinities would be no number.
        scores[seen] = penalized.clamp(max=torch.finfo(scores.dtype).max)
    scores[answer.to(device)] -= how.frequency_penalty * counts.to(device, scores.dtype) + how.presence_penalty


def _row_logprobs(logits: torch.Tensor, chosen: int, num_top: int) -> TokenLogprobs:
    values = torch.log_softmax(logits.double(), dim=-1)
    if not num_top:
        return TokenLogprobs(_bounded(values[chosen].item()))
    near = _at_least_kth(values, min(num_top, len(values)))
    ordered, at = torch.sort(values[near], descending=True, stable=True)
    top = zip(near[at[:num_top]].tolist(), ordered[:num_top].tolist(), strict=True)
    return TokenLogprobs(_bounded(values[chosen].item()), tuple((token_id, _bounded(value)) for token_id, value in top))


def _at_least_kth(values: torch.Tensor, k: int) -> torch.Tensor:
    """Ids of the k largest and of all that equal the k-th, ascending: so a stable sort keeps equals in their order.

    NaN is not less than anything: a row of it keeps all and harms none beside it.
    """
    if k == len(values):
        return torch.arange(k, device=values.device)
    least = torch.topk(values, k).values[-1]
    return torch.nonzero(~(values < least)).view(-1)


def _bounded(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
