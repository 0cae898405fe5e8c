"""Models and references that the parity tests share.

`TRIPTYCH_PARITY=full` (set by `make verify-parity`) asks all prompts; without it each run takes a small sample of
them, another one each time, chosen by the seed that pytest prints.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.parity import checkpoints
from tests.parity.prompts import FAMILY, Prompt, make_prompts
from tests.parity.reference import ReferenceModel, one_thread

PROMPTS_SEED = 20_260
PROMPTS = 200
TINY_MODELS = tuple(checkpoints.FAMILIES)
"""A random checkpoint of each family."""

MODELS = (*TINY_MODELS, "demo")


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is asked. A sample is made of whole families, so that its prompts still share what they share."""

    seed: int
    is_full: bool

    def prompts(self, families: int) -> list[Prompt]:
        """All prompts, or those of `families` families."""
        every = make_prompts(PROMPTS_SEED, PROMPTS)
        if self.is_full:
            return every
        chosen = sorted(random.Random(self.seed).sample(range(PROMPTS // FAMILY), families))
        return [prompt for family in chosen for prompt in every[family * FAMILY : (family + 1) * FAMILY]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.parity)


@pytest.fixture(scope="session")
def extent(seed: int) -> Extent:
    return Extent(seed, os.environ.get("TRIPTYCH_PARITY") == "full")


@pytest.fixture(autouse=True, scope="package")
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="session")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    tiny = {name: checkpoints.make_tiny(name, tmp_path_factory.mktemp(name)) for name in TINY_MODELS}
    return {**tiny, "demo": checkpoints.DEMO_DIR}


@pytest.fixture(scope="session")
def references(model_dirs: dict[str, Path]) -> dict[str, ReferenceModel]:
    return {name: ReferenceModel(path) for name, path in model_dirs.items()}
