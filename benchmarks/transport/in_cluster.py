"""What a request feels of its transfers, in clusters of ours: `e-p-d`, one request at a time, four new pictures each.

Twice: as it is started by default, with a short question; and with a long one (some 1,900 tokens, in chunks of 128), KV
by TCP, and the way of the KV throttled to a link that needs `LINK_SHARE` of the time that prefill needs, which the
first cluster has shown.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.engine.arms import Case
from benchmarks.engine.budget import Budget
from benchmarks.engine.client import AskFailed, Question, ask
from benchmarks.engine.experiments.cluster import cluster
from benchmarks.engine.load import Server
from benchmarks.engine.prompts import COMMON_WORDS, with_pictures
from benchmarks.engine.samples import Sample
from benchmarks.transport.handoff import Exposed, KvTime, exposed, kv_time

PICTURES, WARM_UPS = 4, 2
SHORT_WORDS, LONG_WORDS = 10, 420
CHUNK_TOKENS = 128
LINK_SHARE = 0.8
# Below this share of the link's time the throttle cannot have worked.
LEAST_UNDER_WAY = 0.95


@dataclass(frozen=True, slots=True)
class Handoff:
    """Medians over requests. Milliseconds; `share` is of the time to the first token."""

    exposed_ms: float
    embedding_ms: float
    kv_ms: float
    grant_ms: float
    ttft_ms: float
    share: float
    requests: int


@dataclass(frozen=True, slots=True)
class Hidden:
    """Medians over requests. `share`: of `link_ms`, the time that the link needs for the KV."""

    share: float
    link_bytes_per_s: float
    kv_bytes: float
    link_ms: float
    computing_ms: float
    under_way_ms: float
    exposed_ms: float
    requests: int


@dataclass(frozen=True, slots=True)
class Plain:
    """What the cluster without a throttle shows: how it hands over, and what a long prompt costs."""

    handoff: Handoff
    long: KvTime


def measure_plain(case: Case, threads: int, budget: Budget, tries: int) -> Plain:
    """Raises StartFailed, AskFailed or ValueError."""
    with cluster(case, threads, budget) as running:
        short = _asked(running.server, SHORT_WORDS, tries, budget, 4)
        times = [kv_time(sample.timeline) for sample in _asked(running.server, LONG_WORDS, 3, budget, 5)]
    return Plain(handoff_of(short), sorted(times, key=lambda one: one.computing_ms)[len(times) // 2])


def measure_throttled(case: Case, threads: int, budget: Budget, tries: int, plain: KvTime) -> Hidden:
    """Raises StartFailed, AskFailed or ValueError."""
    rate = round(plain.num_bytes / (LINK_SHARE * plain.computing_ms / 1e3))
    variables = {
        "TRIPTYCH_CHUNK_TOKENS": str(CHUNK_TOKENS),
        "TRIPTYCH_FAILPOINTS": f"link.before_frame=throttle({rate}, worker=prefill-0)",
    }
    with cluster(case, threads, budget, "--transport", "zmq-tcp", variables=variables) as running:
        samples = _asked(running.server, LONG_WORDS, tries, budget, 6)
    return hidden_of([kv_time(sample.timeline) for sample in samples], rate)


def handoff_of(samples: list[Sample]) -> Handoff:
    found = [exposed(sample.timeline) for sample in samples]

    def median(figure: Callable[[Exposed], float]) -> float:
        return statistics.median(map(figure, found))

    return Handoff(
        median(lambda one: one.total_ms),
        median(lambda one: one.embedding_ms),
        median(lambda one: one.kv_ms),
        median(lambda one: one.grant_ms),
        statistics.median(1e3 * sample.first_s for sample in samples),
        statistics.median(one.total_ms / 1e3 / sample.first_s for one, sample in zip(found, samples, strict=True)),
        len(samples),
    )


def hidden_of(times: list[KvTime], bytes_per_s: float) -> Hidden:
    """Raises AskFailed when the KV came faster than the link is."""

    def median(figure: Callable[[KvTime], float]) -> float:
        return statistics.median(map(figure, times))

    link_ms = 1e3 * median(lambda one: one.num_bytes) / bytes_per_s
    under_way_ms = median(lambda one: one.under_way_ms)
    if under_way_ms < LEAST_UNDER_WAY * link_ms:
        raise AskFailed(f"the KV took {under_way_ms:.0f} ms over a link that needs {link_ms:.0f} ms: no throttle there")
    return Hidden(
        median(lambda one: one.hidden_share(bytes_per_s)),
        bytes_per_s,
        median(lambda one: one.num_bytes),
        link_ms,
        median(lambda one: one.computing_ms),
        under_way_ms,
        median(lambda one: one.exposed_ms),
        len(times),
    )


def _asked(server: Server, num_words: int, tries: int, budget: Budget, seed: int) -> list[Sample]:
    """One after the other, each with other pictures and words; the first ones warm up."""
    dice = random.Random(seed)
    samples = []
    for _ in range(WARM_UPS + tries):
        answer = ask(server.url, server.model, _question(dice, num_words), timeout_s=_patience(budget), timeline="1")
        samples.append(asyncio.run(answer))
    return samples[WARM_UPS:]


def _question(dice: random.Random, num_words: int) -> Question:
    """Four tokens to answer: the first is prefill's, and the others need the KV."""
    pictures = [dice.randrange(1 << 24) for _ in range(PICTURES)]
    return with_pictures(pictures, " ".join(dice.choices(COMMON_WORDS, k=num_words)), 4)


def _patience(budget: Budget) -> float:
    return max(1.0, budget.left_s())
