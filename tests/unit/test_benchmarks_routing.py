"""The router's choices in virtual time, by the code that serves: better than the others where there is something to
gain, and no worse where there is nothing. All of it is a function of the seed."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from benchmarks.routing import compare
from benchmarks.routing.__main__ import main
from benchmarks.routing.compare import (
    BUSY,
    LEAST_SHARE,
    OTHERS,
    SATURATED,
    Outcomes,
    encodes,
    ratio,
    run_all,
    shares_of_best,
    ttft_mean,
    ttft_p50,
)
from benchmarks.routing.load import Workload
from benchmarks.routing.policies import OURS, POLICIES
from benchmarks.routing.simulation import Simulation
from services.router.routing.homes import Homes
from services.router.routing.index import CacheIndex
from tests.seed import IS_FULL

NUM_SEEDS = compare.NUM_SEEDS if IS_FULL else 5
pytestmark = pytest.mark.timeout(300 if IS_FULL else 60)


@pytest.fixture(scope="module")
def busy() -> Outcomes:
    return run_all(BUSY, NUM_SEEDS)


@pytest.mark.parametrize("other", OTHERS)
def test_the_first_token_comes_sooner_and_pictures_are_encoded_less_often(busy: Outcomes, other: str) -> None:
    assert ratio(busy, other, ttft_p50).is_better
    assert ratio(busy, other, encodes).is_better
    assert statistics.fmean(map(encodes, busy[OURS])) < 1.05


@pytest.mark.parametrize("workload", SATURATED if IS_FULL else SATURATED[2:], ids=lambda workload: workload.name)
def test_where_workers_are_saturated_it_is_no_worse_than_the_best(workload: Workload) -> None:
    assert statistics.fmean(shares_of_best(run_all(workload, NUM_SEEDS))) >= LEAST_SHARE


def test_a_run_is_a_function_of_its_seed() -> None:
    one, other, third = (Simulation(OURS, Workload("short", num_users=6), seed).run() for seed in (1, 1, 2))
    assert (one, one != third) == (other, True)


def test_a_router_that_looks_at_no_cache_is_found_out(monkeypatch: pytest.MonkeyPatch, busy: Outcomes) -> None:
    """The ratios show what they are to show: without the index, the homes and the hash nothing is gained."""
    monkeypatch.setattr(CacheIndex, "num_pages", lambda *_: 0)
    monkeypatch.setattr(CacheIndex, "holds", lambda *_: False)
    monkeypatch.setattr(Homes, "find", lambda *_: None)
    monkeypatch.setattr(Homes, "encoder_of", lambda *_: None)
    monkeypatch.setattr("services.router.routing.rendezvous.weight", lambda identity, worker_id: 0)
    broken = {**busy, OURS: [Simulation(OURS, BUSY, seed).run() for seed in range(NUM_SEEDS)]}
    assert not ratio(broken, "least_loaded", ttft_p50).is_better or not ratio(broken, "least_loaded", encodes).is_better


def test_a_router_that_looks_at_no_load_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Affinity alone: where all ask about one picture, all go to one worker."""
    sound = [Simulation(OURS, SATURATED[1], seed).run() for seed in range(2)]
    monkeypatch.setattr("services.router.routing.scorers.FirstToken.seconds", lambda _, forecast: forecast.compute_s)
    monkeypatch.setattr("services.router.routing.filters.Saturated.rank", lambda *_: 0)
    broken = [Simulation(OURS, SATURATED[1], seed).run() for seed in range(2)]
    assert statistics.fmean(map(ttft_mean, broken)) > 1.2 * statistics.fmean(map(ttft_mean, sound))


def test_the_command_writes_both_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.routing.__main__.SATURATED", ())
    assert main(["--seeds", "2", "--json", "--out", str(tmp_path)]) == 0
    said, written = json.loads(capsys.readouterr().out), json.loads((tmp_path / "routing.json").read_text())
    assert said == written
    assert set(written["workloads"]["busy"]["policies"]) == set(POLICIES)
    assert "| busy | triptych |" in (tmp_path / "routing.md").read_text()
