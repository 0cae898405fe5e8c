"""The comparison as JSON and as a page."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.routing.compare import (
    LEAST_SHARE,
    OTHERS,
    Outcomes,
    encodes,
    ratio,
    shares_of_best,
    ttft_mean,
    ttft_p50,
)
from benchmarks.routing.load import Workload
from benchmarks.routing.simulation import NUM_REPLICAS
from benchmarks.routing.workers import Rates, Sizes


def as_json(results: Mapping[str, tuple[Workload, Outcomes]], num_seeds: int) -> dict[str, Any]:
    """By workload: figures of each policy (means over seeds), ratios to ours, and the share of the best."""
    return {
        "seeds": num_seeds,
        "replicas_per_stage": NUM_REPLICAS,
        "rates": asdict(Rates()),
        "sizes": asdict(Sizes()),
        "test": "Student's t, paired by seed, of log(theirs / ours); 95% confidence interval",
        "workloads": {name: _cell(workload, outcomes) for name, (workload, outcomes) in results.items()},
    }


def _cell(workload: Workload, outcomes: Outcomes) -> dict[str, Any]:
    shares = shares_of_best(outcomes)
    return {
        "workload": asdict(workload),
        "policies": {
            name: {
                "ttft_p50_ms": _mean_ms(map(ttft_p50, runs)),
                "ttft_mean_ms": _mean_ms(map(ttft_mean, runs)),
                "encodes_per_unique_picture": round(statistics.fmean(map(encodes, runs)), 3),
                "requests_per_s": round(statistics.fmean(run.requests_per_s for run in runs), 2),
            }
            for name, runs in outcomes.items()
        },
        "ttft_p50_vs": {other: _ratio(outcomes, other, ttft_p50) for other in OTHERS},
        "encodes_vs": {other: _ratio(outcomes, other, encodes) for other in OTHERS},
        "mean_ttft_share_of_best": {"mean": round(statistics.fmean(shares), 3), "least_seed": round(min(shares), 3)},
    }


def _ratio(outcomes: Outcomes, other: str, figure: Any) -> dict[str, Any]:
    found = ratio(outcomes, other, figure)
    low, high = round(found.low, 3), round(found.high, 3)
    return {"ratio": round(found.mean, 3), "ci95": [low, high], "is_better": found.is_better}


def _mean_ms(values: Any) -> float:
    return round(statistics.fmean(values) * 1e3, 2)


def write(folder: Path, written: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "routing.json").write_text(json.dumps(written, indent=1) + "\n")
    (folder / "routing.md").write_text(page(written))


def page(written: Mapping[str, Any]) -> str:
    lines = [
        "# Routing benchmark",
        "",
        "Made by `python -m benchmarks.routing`, in virtual time; docs/routing.md explains it.",
        f"{written['seeds']} seeds, {written['replicas_per_stage']} workers a stage. Ratios are theirs over ours: "
        "above 1 ours is better. " + written["test"] + ".",
        "",
        "| workload | policy | TTFT p50 ms | mean ms | encodes per unique picture | requests/s | TTFT p50 over ours"
        " | encodes over ours |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, cell in written["workloads"].items():
        for policy, figures in cell["policies"].items():
            values = " | ".join(str(value) for value in figures.values())
            ratios = f"{_shown(cell['ttft_p50_vs'], policy)} | {_shown(cell['encodes_vs'], policy)}"
            lines.append(f"| {name} | {policy} | {values} | {ratios} |")
    lines += [
        "",
        f"Mean TTFT of the best of the others over ours (asked for: {LEAST_SHARE} in the mean over seeds):",
        "",
    ]
    for name, cell in written["workloads"].items():
        share = cell["mean_ttft_share_of_best"]
        lines.append(f"- {name}: {share['mean']}; in the worst seed {share['least_seed']}")
    return "\n".join(lines) + "\n"


def _shown(ratios: Mapping[str, Any], policy: str) -> str:
    if policy not in ratios:
        return ""
    found = ratios[policy]
    return f"{found['ratio']} [{found['ci95'][0]}, {found['ci95'][1]}]"
