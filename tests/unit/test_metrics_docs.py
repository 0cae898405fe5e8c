"""The page on metrics and their declarations agree, and the declarations keep the rules for names and buckets."""

from __future__ import annotations

import itertools
import re
import socket
import urllib.request
from pathlib import Path

import pytest
from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.metrics import MetricWrapperBase

from triptych.core.errors import StartupError
from triptych.obs import metrics

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
ROW = re.compile(r"^\| `(triptych_\w+)` \| (\w+) \|([^|]*)\| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)
FORBIDDEN_LABELS = {"request_id", "hash", "identity", "url", "address", "user"}


def _declared() -> dict[str, MetricWrapperBase]:
    found = [value for value in vars(metrics).values() if isinstance(value, MetricWrapperBase)]
    return {metric._name + ("_total" if isinstance(metric, Counter) else ""): metric for metric in found}


DECLARED = _declared()


def test_page_and_declarations_list_the_same_names_types_and_labels() -> None:
    rows = ROW.findall(PAGE.read_text(encoding="utf-8"))
    documented = {name: (kind, tuple(re.findall(r"`(\w+)`", labels))) for name, kind, labels, _, _ in rows}
    declared = {name: (metric._type, tuple(metric._labelnames)) for name, metric in DECLARED.items()}
    assert len(documented) == len(rows)
    assert documented == declared


@pytest.mark.parametrize("name", sorted(DECLARED))
def test_a_name_says_its_unit_and_labels_are_bounded(name: str) -> None:
    metric = DECLARED[name]
    assert re.fullmatch(r"triptych_[a-z]+(_[a-z]+)*", name)
    assert isinstance(metric, Counter | Gauge | Histogram)
    assert not FORBIDDEN_LABELS & set(metric._labelnames)


@pytest.mark.parametrize(
    ("histogram", "low", "high"),
    [
        (metrics.TTFT_SECONDS, 0.02, 5.0),
        (metrics.INTER_TOKEN_SECONDS, 0.002, 0.3),
        (metrics.REQUEST_SECONDS, 0.1, 30.0),
        (metrics.ENCODER_BATCH_SECONDS, 0.005, 2.0),
        (metrics.STEP_SECONDS, 0.002, 0.5),
    ],
)
def test_buckets_are_fine_around_the_targets(histogram: Histogram, low: float, high: float) -> None:
    bounds = [bound for bound in histogram._kwargs["buckets"] if low <= bound <= high]
    assert bounds[0] == low
    assert bounds[-1] == high
    assert all(after / before <= 1.1505 for before, after in itertools.pairwise(bounds))


def test_buckets_ascend_and_end_where_they_should() -> None:
    bounds = metrics.around(0.005, 0.02, 5.0, 120.0)
    assert list(bounds) == sorted(set(bounds))
    assert (bounds[0], bounds[-1]) == (0.005, 120.0)


def test_metrics_are_served_on_a_port_that_the_system_chose() -> None:
    metrics.FALLBACKS.labels(reason="test").inc()
    port = metrics.serve_metrics("127.0.0.1", 0)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        text = answer.read().decode()
    assert 'triptych_fallbacks_total{reason="test"}' in text
    assert "triptych_ttft_seconds_bucket" in text


def test_a_taken_metrics_port_is_a_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(StartupError, match=f"port {port} of 127.0.0.1: .*--metrics-port"):
            metrics.serve_metrics("127.0.0.1", port)


def test_what_is_served_is_documented_or_the_clients_own() -> None:
    """Series by their type's suffixes; in particular no `_created` beside each counter."""
    metrics.REQUESTS.labels("chat", "200").inc()
    text, _ = metrics.exposition()
    served = set(re.findall(r"^(\w+)[ {]", text.decode(), re.MULTILINE))
    documented = {name for name, *_ in ROW.findall(PAGE.read_text(encoding="utf-8"))}
    allowed = documented | {f"{name}_{suffix}" for name in documented for suffix in ("bucket", "sum", "count")}
    assert "triptych_requests_total" in served
    assert {name for name in served - allowed if not name.startswith(("python_", "process_"))} == set()
