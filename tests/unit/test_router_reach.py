"""Which workers a router under TLS, or without, sends requests to."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.router.reach import ReachableWorkers
from tests.certificates import Authority
from triptych.core.worker import Role, WorkerInfo, WorkerState
from triptych.registry.records import from_json, to_json
from triptych.rpc.tls import load_tls


def worker(worker_id: str, *, speaks_tls: bool) -> WorkerInfo:
    roles = frozenset({Role.DECODE})
    return WorkerInfo(worker_id, 1, roles, WorkerState.READY, "127.0.0.1:1", speaks_tls=speaks_tls)


PLAIN, SECRET = worker("plain-0", speaks_tls=False), worker("secret-0", speaks_tls=True)


class Registry:
    def workers(self) -> tuple[WorkerInfo, ...]:
        return (PLAIN, SECRET)

    def refresh(self) -> tuple[WorkerInfo, ...]:
        return (SECRET, PLAIN)


@pytest.mark.parametrize("has_tls", [True, False])
def test_only_those_that_can_be_talked_to_and_the_others_are_named_once(
    has_tls: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tls = load_tls(Authority(tmp_path).issue()) if has_tls else None
    reachable = ReachableWorkers(Registry(), tls)
    mine, other = (SECRET, PLAIN) if has_tls else (PLAIN, SECRET)
    assert reachable.workers() == reachable.refresh() == (mine,)
    caplog.clear()
    for _ in range(3):
        reachable.warn_of_others(Registry().workers())
    (said,) = caplog.records
    assert said.__dict__["worker_id"] == other.worker_id and "--tls-cert" in said.getMessage()


def test_a_record_says_it() -> None:
    assert [from_json(to_json(info)) for info in (PLAIN, SECRET)] == [PLAIN, SECRET]
