"""Tests that see the whole machine's shared memory are known as such, or they would disturb each other."""

from __future__ import annotations

from tests.sharing_out import group_of


def test_those_that_start_clusters_or_sweep_stay_together_and_each_other_file_by_itself() -> None:
    starting = [f"tests/integration/test_{name}.py" for name in ("cluster", "launcher", "openai_client", "zmq_cluster")]
    sweeping = [f"tests/unit/test_{name}.py" for name in ("transport_shm", "cli_leftovers", "cli_doctor")]
    assert {group_of(path) for path in starting + sweeping} == {"the whole machine"}
    assert group_of("tests/unit/test_text_stop.py") == "tests/unit/test_text_stop.py"
