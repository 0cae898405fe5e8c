"""Which other stages a prefill process is told to serve."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.prefill.app import worker_plan
from services.prefill.settings import read_settings
from triptych.core.errors import StartupError
from triptych.core.topology import KINDS
from triptych.core.worker import Role

NEEDED = ["--model", "m", "--worker-id", "pd-0"]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.service == "prefill"], ids=lambda kind: kind.name)
def test_a_process_has_the_roles_that_its_topology_means(kind: object) -> None:
    settings = read_settings([*NEEDED, "--also", ",".join(kind.also)], {})  # type: ignore[attr-defined]
    assert settings.roles == worker_plan(settings).roles == kind.roles  # type: ignore[attr-defined]


def test_the_file_and_the_environment_can_say_it_too(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text('[prefill]\nalso = ["encoder", "decode"]\n')
    assert read_settings([*NEEDED, "--config", str(tmp_path / "c.toml")], {}).roles == frozenset(Role)
    assert read_settings(NEEDED, {"TRIPTYCH_ALSO": "decode"}).roles == {Role.PREFILL, Role.DECODE}
    assert read_settings(NEEDED, {}).roles == {Role.PREFILL}


@pytest.mark.parametrize("name", ["decoder", "prefill", "true"])
def test_a_stage_that_is_none_is_a_sentence(name: str) -> None:
    with pytest.raises(StartupError, match=f"--also takes encoder, decode or both, but not '{name}'"):
        read_settings([*NEEDED, "--also", name], {})


def test_who_receives_bytes_of_other_processes() -> None:
    """Only those arenas are shared memory."""

    def shared(*also: str) -> tuple[bool, bool]:
        plan = worker_plan(read_settings([*NEEDED, "--also", ",".join(also)], {}))
        return plan.lands_embeddings_of_others, plan.lands_kv_of_others

    assert shared() == (True, False)
    assert shared("decode") == (True, False)
    assert shared("encoder") == (False, False)
    assert shared("encoder", "decode") == (False, False)
