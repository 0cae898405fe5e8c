"""What a worker reserves at its start: more than there is, or than makes sense, is a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.prefill.settings import read_settings
from triptych.core.errors import StartupError
from triptych.kv.pool import PoolShape
from triptych.stages.language import choose_compute
from triptych.stages.worker import _enough_memory, _new_pool


def test_a_pool_that_no_machine_can_hold() -> None:
    with pytest.raises(StartupError, match=r"no memory for the \d+ bytes of --kv-pool-bytes"):
        _new_pool(PoolShape(2, 2**34, 16, 2, 64), choose_compute("cpu", "float32"))


def test_an_arena_that_no_machine_can_hold() -> None:
    size = 2**50
    with pytest.raises(StartupError, match="of --landing-bytes; ask"), _enough_memory("--landing-bytes", size):
        bytearray(size)


def test_what_is_no_lack_of_memory_is_passed_on() -> None:
    with pytest.raises(ValueError, match="a bug"), _enough_memory("--landing-bytes", 1):
        raise ValueError("a bug")


@pytest.mark.parametrize("flag", ["--kv-pool-bytes", "--landing-bytes"])
@pytest.mark.parametrize("number", ["0", "1" + "0" * 30])
def test_sizes_that_make_no_sense_are_named(flag: str, number: str, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=flag):
        read_settings(["--model", str(tmp_path), "--worker-id", "p", flag, number], {})


def test_a_pool_that_fits_is_zeroed() -> None:
    assert torch.count_nonzero(_new_pool(PoolShape(1, 2, 16, 1, 4), choose_compute("cpu", "float32"))) == 0
