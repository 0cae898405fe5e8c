"""The parts of the router's benchmark that decide what its figures mean."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from PIL import Image

from benchmarks.router.bodies import PICTURE_BYTES, Bodies, noise_jpeg
from benchmarks.router.keys import ECHO, KEYS, SATURATED, all_keys
from benchmarks.router.processes import cpu_s
from benchmarks.router.results import Figures, Results, percentile
from benchmarks.router.timing import BLOCK_TOKENS, PictureCache, PrefixCache, next_step_s


def test_a_prefix_is_held_in_whole_blocks_and_never_the_last_token() -> None:
    cache = PrefixCache(8 * BLOCK_TOKENS)
    prompt = list(range(3 * BLOCK_TOKENS))
    assert cache.match(prompt) == 0
    cache.keep(prompt)
    assert cache.match(prompt) == 3 * BLOCK_TOKENS - 1
    assert cache.match([*prompt, 7]) == 3 * BLOCK_TOKENS
    assert cache.match([*prompt[:-1], 999, 7]) == 2 * BLOCK_TOKENS
    assert cache.match([999, *prompt[1:]]) == 0, "the same block after another beginning is another block"


def test_the_least_recently_used_goes_first() -> None:
    cache, pictures = PrefixCache(2 * BLOCK_TOKENS), PictureCache(2)
    for start in (0, 100, 200):
        cache.keep(range(start, start + BLOCK_TOKENS))
        pictures.keep(bytes([start]))
    assert [cache.match(range(start, start + BLOCK_TOKENS + 1)) for start in (0, 100, 200)] == [0, 16, 16]
    assert [pictures.has(bytes([start])) for start in (0, 100, 200)] == [False, True, True]


def test_steps_go_by_a_clock_that_all_answers_share() -> None:
    assert next_step_s(1.0001, 0.004) == pytest.approx(next_step_s(1.0039, 0.004)) == pytest.approx(1.004)


def test_bodies_are_of_their_size_and_no_two_alike() -> None:
    one, other = (Bodies.picture("m", 32, stream=False).make(number) for number in (1, 2))
    uri = json.loads(one)["messages"][0]["content"][0]["image_url"]["url"]
    assert len(uri.partition(",")[2]) == 200_000
    assert len(one) == len(other) and one != other
    assert len(Bodies.plain(200_000).make(3)) == 200_000


def test_the_picture_is_one(tmp_path: Path) -> None:
    path = tmp_path / "noise.jpg"
    path.write_bytes(noise_jpeg(PICTURE_BYTES))
    assert path.stat().st_size == PICTURE_BYTES
    with Image.open(path) as picture:
        picture.load()
        assert picture.size == (448, 448)


def test_cpu_time_of_a_process_is_its_own() -> None:
    started_s, before_s = time.process_time(), cpu_s(os.getpid())
    while time.process_time() - started_s < 0.05:
        pass
    assert cpu_s(os.getpid()) - before_s == pytest.approx(time.process_time() - started_s, abs=0.02)


def test_keys_are_medians_over_rounds_or_null_with_a_reason() -> None:
    results = Results()
    for speed, echo in ((100.0, 1000.0), (300.0, 1000.0), (100.0, 500.0)):
        for cell, value in ((SATURATED, speed), (ECHO, echo)):
            results.keep(cell, Figures(1.0, value, 1.0, 1.0, 1.0, 0.1, 1.0, 10))
    found = all_keys(results)
    assert tuple(found) == KEYS
    assert found["req_per_s_vs_asgi_echo_200kb"].value == 0.2, "of the ratios, not of the speeds"
    assert found["cpu_ms_per_text_request"].value is None and found["cpu_ms_per_text_request"].note


def test_a_percentile_is_a_value_that_occurred() -> None:
    values = [float(value) for value in range(1, 101)]
    assert (percentile(values, 0.5), percentile(values, 0.99), percentile([4.0], 0.99)) == (50.0, 99.0, 4.0)
