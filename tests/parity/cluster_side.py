"""How the parity tests ask our cluster, and what they make of its answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tests.parity.compare import LOGITS_WITHIN, Comparison, compare
from tests.parity.prompts import Prompt
from tests.parity.reference import NEW_TOKENS, ReferenceModel
from triptych.obs import metrics
from triptych.testing.cluster import ChatRequest, ChatResult


def request_of(prompt: Prompt) -> ChatRequest:
    return ChatRequest(prompt.messages, prompt.media, NEW_TOKENS, stop_token_ids=frozenset())


def judged(reference: ReferenceModel, prompts: Sequence[Prompt], results: Sequence[ChatResult]) -> Comparison:
    total = Comparison()
    for prompt, result in zip(prompts, results, strict=True):
        one = compare(
            reference.generate(prompt),
            result.token_ids,
            result.logits,
            lambda tokens, prompt=prompt: reference.teacher_forced_logits(prompt, tokens),  # type: ignore[misc]
        )
        if one.differing or not one.max_logit_difference <= LOGITS_WITHIN:
            print(f"prompt {prompt.index} ({prompt.kind}, {len(prompt.media)} pictures): {one}")
        total.add(one)
    return total


def moved_bytes() -> dict[str, float]:
    """Bytes moved by this process's workers until now, like `kv over shm`."""
    counters = {"embedding": metrics.EMBEDDING_TRANSFER_BYTES, "kv": metrics.KV_TRANSFER_BYTES}
    samples = [(kind, s) for kind, counter in counters.items() for m in counter.collect() for s in m.samples]
    return {f"{kind} over {s.labels['transport']}": s.value for kind, s in samples if s.name.endswith("_total")}


def moved_since(before: Mapping[str, float]) -> dict[str, int]:
    """What has moved since, and how."""
    moved = {way: int(total - before.get(way, 0)) for way, total in moved_bytes().items()}
    return {way: num_bytes for way, num_bytes in moved.items() if num_bytes}


def expected_ways(topology: str, transport: str) -> set[str]:
    """How embeddings and KV must have moved: by the transport that was asked for wherever processes part."""
    ways = {
        "mono": {"embedding over inproc"},
        "e-p-d": {f"embedding over {transport}", f"kv over {transport}"},
        "e-pd": {f"embedding over {transport}"},
        "p-d": {"embedding over inproc", f"kv over {transport}"},
    }
    return ways[topology]


def cache_facts(results: Sequence[ChatResult]) -> dict[str, Any]:
    """Where the answers' prompts came from: a warm cell that reuses nothing would prove nothing."""
    sources: dict[str, int] = {}
    for event in (event for result in results for event in result.timeline):
        if event.source is not None and event.stage == "prefill":
            sources[event.source.value] = sources.get(event.source.value, 0) + 1
    return {
        "cached_tokens": sum(result.cached_tokens for result in results),
        "prompts_with_cached_tokens": sum(result.cached_tokens > 0 for result in results),
        "embedding_sources": sources,
    }
