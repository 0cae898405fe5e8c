"""The figures by name that a run ends in. A key is null where an arm of it is absent, with a note that says why."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from benchmarks.engine.arms import CONTINUOUS, GENERATE, VLLM
from benchmarks.engine.cells import CASES, DEMO, SMOL_BF16, SMOL_F32
from benchmarks.engine.results import Results, bandwidth_share
from benchmarks.engine.samples import Figures

EXPERIMENTS = ("encodes_per_unique_picture", "overlap_ratio", "text_ttft_p99_under_images", "radix_cost_1m_vs_10k")
COMPARISONS = (
    "tokens_per_s_vs_transformers_c16",
    "ttft_vs_transformers_shared_prefix",
    "tokens_per_s_vs_vllm_c8",
    "ttft_vs_vllm_c8",
    "decode_bandwidth_fraction_c1",
)
KEYS = (*COMPARISONS, *EXPERIMENTS)
SMOL = (SMOL_F32, SMOL_BF16)


@dataclass(frozen=True, slots=True)
class Key:
    """A value: a figure, figures by name (each may be None), or None; and why what is None is None."""

    value: object
    note: str = ""


def all_keys(results: Results) -> Mapping[str, Key]:
    found = {
        "tokens_per_s_vs_transformers_c16": _by_case(results, CASES, CONTINUOUS, lambda _: "text-cold", 16, _speed),
        "ttft_vs_transformers_shared_prefix": _by_case(
            results, CASES, GENERATE, lambda case: "pictures-shared" if case == DEMO else "text-shared", 1, _ttft
        ),
        "tokens_per_s_vs_vllm_c8": _by_case(results, SMOL, VLLM, lambda _: "text-cold", 8, _speed),
        "ttft_vs_vllm_c8": _by_case(results, SMOL, VLLM, lambda _: "text-cold", 8, _ttft),
        "decode_bandwidth_fraction_c1": _bandwidth(results),
    }
    return {**found, **{name: _experiment(results, name) for name in EXPERIMENTS}}


def _speed(figures: Figures) -> float:
    return figures.tokens_per_s


def _ttft(figures: Figures) -> float:
    return figures.ttft_p50_ms


def _by_case(
    results: Results,
    cases: tuple[str, ...],
    peer: str,
    workload: Callable[[str], str],
    concurrency: int,
    figure: Callable[[Figures], float],
) -> Key:
    """Ours (`mono`) over the peer's, for each model; None as a whole where no model has it."""
    ratios: dict[str, float | None] = {}
    notes = []
    for case in cases:
        mine = results.figures("mono", case, workload(case), concurrency)
        theirs = results.figures(peer, case, workload(case), concurrency)
        ratios[case] = round(figure(mine) / figure(theirs), 3) if mine and theirs else None
        for arm, known in (("mono", mine), (peer, theirs)):
            if known is None:
                notes.append(f"{case}: no {arm}: {results.why_missing(arm, case)}")
    return Key(ratios if any(ratio is not None for ratio in ratios.values()) else None, "; ".join(notes))


def _bandwidth(results: Results) -> Key:
    mine = results.figures("mono", SMOL_BF16, "text-cold", 1)
    if mine is None:
        return Key(None, results.why_missing("mono", SMOL_BF16))
    weights, kv = results.weights[SMOL_BF16], results.kv[SMOL_BF16]
    share = bandwidth_share(mine, 1, weights, kv, results.triad_bytes_per_s)
    if not share:
        return Key(None, results.notes.get("triad", "the triad was not measured"))
    return Key(round(share["bandwidth_share"], 3))


def _experiment(results: Results, name: str) -> Key:
    if name in results.experiments:
        return Key(results.experiments[name], results.notes.get(name, ""))
    return Key(None, results.notes.get(name, "it was not measured"))
