"""Models and references that the parity tests share.

`TRIPTYCH_PARITY=full` (set by `make verify-parity`) asks all prompts; without it each run takes a small sample of
them, another one each time, chosen by the seed that pytest prints.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.parity import checkpoints
from tests.parity.matrix import MODELS, PROMPTS, PROMPTS_SEED, Shard, prompts_of, sampled_families
from tests.parity.prompts import Prompt, make_prompts
from tests.parity.reference import ReferenceModel, one_thread

TINY_MODELS = tuple(name for name in MODELS if name != "demo")
"""A random checkpoint of each family."""


def is_full_run() -> bool:
    return os.environ.get("TRIPTYCH_PARITY") == "full"


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is asked. A sample is made of whole families, so that its prompts still share what they share."""

    seed: int
    is_full: bool

    def prompts(self, families: int) -> list[Prompt]:
        """All prompts, or those of `families` families."""
        if self.is_full:
            return make_prompts(PROMPTS_SEED, PROMPTS)
        return prompts_of(sampled_families(self.seed, families))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a run in several shards the first one takes all that is not the matrix."""
    here = Path(__file__).parent
    is_first = Shard.from_environment().index == 0
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.parity)
    items[:] = [item for item in items if is_first or "test_parity_matrix[" in item.nodeid]


@pytest.fixture(scope="session")
def extent(seed: int) -> Extent:
    return Extent(seed, is_full_run())


@pytest.fixture(autouse=True, scope="package")
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="session")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    assert set(TINY_MODELS) == set(checkpoints.FAMILIES)
    tiny = {name: checkpoints.make_tiny(name, tmp_path_factory.mktemp(name)) for name in TINY_MODELS}
    return {**tiny, "demo": checkpoints.DEMO_DIR}


@pytest.fixture(scope="session")
def references(model_dirs: dict[str, Path]) -> dict[str, ReferenceModel]:
    return {name: ReferenceModel(path) for name, path in model_dirs.items()}
