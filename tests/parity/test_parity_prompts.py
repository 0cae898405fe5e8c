"""The prompts are what the matrix needs them to be: repeatable, varied, and alike where it matters."""

from __future__ import annotations

import io

from PIL import Image

from tests.parity.conftest import PROMPTS, PROMPTS_SEED
from tests.parity.prompts import KINDS, MAX_SIDE_PX, MIN_SIDE_PX, Prompt, make_prompts


def family_of(kind: str) -> list[Prompt]:
    return [prompt for prompt in make_prompts(PROMPTS_SEED, 20) if prompt.kind == kind]


def test_parity_prompts_are_a_function_of_the_seed() -> None:
    first, again, other = make_prompts(5, 20), make_prompts(5, 20), make_prompts(6, 20)
    assert [p.digest for p in first] == [p.digest for p in again]
    assert [p.digest for p in first] != [p.digest for p in other]
    assert [p.digest for p in make_prompts(5, 7)] == [p.digest for p in first[:7]]


def test_parity_prompts_are_varied() -> None:
    prompts = make_prompts(PROMPTS_SEED, PROMPTS)
    sizes = {Image.open(io.BytesIO(blob)).size for prompt in prompts for blob in prompt.media}
    turns = {sum(m["role"] == "user" for m in prompt.messages) for prompt in prompts}
    assert len(prompts) == PROMPTS
    assert {prompt.kind for prompt in prompts} == set(KINDS)
    assert {len(prompt.media) for prompt in prompts} == {0, 1, 2, 3, 4}
    assert turns >= {1, 2, 3}
    assert {m["role"] for prompt in prompts for m in prompt.messages} == {"system", "user", "assistant"}
    assert len(sizes) > 100
    assert all(MIN_SIDE_PX <= side <= MAX_SIDE_PX for size in sizes for side in size)


def test_parity_prompts_name_as_many_pictures_as_they_carry() -> None:
    for prompt in make_prompts(PROMPTS_SEED, PROMPTS):
        parts = [part for m in prompt.messages if isinstance(m["content"], list) for part in m["content"]]
        assert sum(part["type"] == "image" for part in parts) == len(prompt.media)
        assert prompt.messages[-1]["role"] == "user"


def test_parity_prompts_share_openings() -> None:
    family = family_of("same opening")
    openings = {str(prompt.messages[:-2]) for prompt in family}
    assert len(openings) == 1
    assert len({prompt.digest for prompt in family}) == len(family)
    assert len({prompt.media[0] for prompt in family}) == 1


def test_parity_prompts_look_alike() -> None:
    family = family_of("look-alikes")
    assert len({str(prompt.messages) for prompt in family}) == 1
    assert len({prompt.media for prompt in family}) == len(family)
    assert len({tuple(picture.size for picture in prompt.pictures) for prompt in family}) == 1


def test_parity_prompts_repeat() -> None:
    family = family_of("repeated")
    assert len({prompt.digest for prompt in family[:3]}) == 1
    assert family[3].media[0] == family[3].media[-1]
