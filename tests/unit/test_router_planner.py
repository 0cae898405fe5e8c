from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from services.router.chat_request import ChatRequest, SamplingOptions
from services.router.image_header import ImageHeader
from services.router.media import Media
from services.router.planner import DEFAULT_MAX_TOKENS, Planner, SamplingDefaults
from triptych.core.errors import InvalidRequest, RequestTooLarge, StartupError
from triptych.core.expansion import check_ranges
from triptych.core.plan import Grid, Modality, TokenRange
from triptych.model.adapters.base import ItemLayout
from triptych.text.messages import ChatMessage, ImagePart
from triptych.text.tokenizer import EncodedChat

PAD = 7


class Model:
    """Pictures have one run per 10 pixels of height, each as long as a tenth of the width."""

    fingerprint = b"f" * 32
    eos_token_ids = frozenset({1, 2})
    vocab_size = 1000

    def image_layout(self, width_px: int, height_px: int) -> ItemLayout:
        return ItemLayout(Grid(1, height_px, width_px), (width_px // 10,) * (height_px // 10))

    def placeholder_id(self, modality: Modality) -> int:
        return PAD

    def identity(self, modality: Modality, media: bytes, tenant_salt: bytes = b"") -> bytes:
        return hashlib.sha256(tenant_salt + media).digest()

    def caller_identity(
        self, modality: Modality, grid: Grid, num_tokens: int, caller_hash: bytes, tenant_salt: bytes = b""
    ) -> bytes:
        return hashlib.sha256(b"caller" + tenant_salt + caller_hash).digest()


class Encoder:
    def __init__(self, ids: list[int]) -> None:
        self._ids = ids

    def encode_chat(self, messages: Sequence[ChatMessage]) -> EncodedChat:
        return EncodedChat(self._ids, [index for index, token in enumerate(self._ids) if token == PAD])


REQUEST = ChatRequest(
    model=None,
    messages=(ChatMessage("user", (ImagePart(), ImagePart())),),
    media=(),
    max_tokens=None,
    temperature=None,
    top_p=None,
    seed=None,
    stop=(),
    stream=False,
    include_usage=False,
    ignored=(),
)


def media(width: int, height: int) -> Media:
    return Media(bytes([width, height]), ImageHeader(width, height))


def planner(ids: list[int], defaults: SamplingDefaults | None = None) -> Planner:
    return Planner(Model(), Encoder(ids), defaults or SamplingDefaults(0.0, 1.0))


def test_ranges_and_repeated_placeholders() -> None:
    plan = planner([5, PAD, 6, PAD, 8]).plan(REQUEST, [media(40, 10), media(30, 20)], 100, 9.0)
    assert plan.compact_ids == (5, PAD, 6, PAD, PAD, 8)
    first, second = plan.items
    assert first.ranges == (TokenRange(1, 1, 4),)
    assert second.ranges == (TokenRange(3, 6, 3), TokenRange(4, 9, 3))
    assert (first.num_tokens, second.num_tokens) == (4, 6)
    check_ranges(plan.compact_ids, plan.items)
    assert plan.num_prompt_tokens == 3 + 4 + 6
    assert plan.timeout_s == 9.0
    assert plan.model_fingerprint == Model.fingerprint


def test_items_carry_what_the_stages_need() -> None:
    (item,) = planner([PAD]).plan(REQUEST, [media(40, 10)], 100, 9.0).items
    assert item.identity == hashlib.sha256(bytes([40, 10])).digest()
    assert (item.width_px, item.height_px, item.media_bytes, item.grid) == (40, 10, 2, Grid(1, 10, 40))


@pytest.mark.parametrize(
    ("asked", "context", "given"),
    [(None, 10_000, DEFAULT_MAX_TOKENS), (None, 13, 10), (5, 13, 5), (10, 13, 10), (11, 13, 10), (2**31 - 1, 13, 10)],
)
def test_room_for_the_answer(asked: int | None, context: int, given: int) -> None:
    request = dataclasses.replace(REQUEST, max_tokens=asked)
    assert planner([5, 6, 8]).plan(request, [], context, 9.0).sampling.max_tokens == given


@pytest.mark.parametrize("context", [1, 2, 3])
def test_a_prompt_that_leaves_no_room(context: int) -> None:
    with pytest.raises(RequestTooLarge, match=f"3 tokens.* {context}"):
        planner([5, 6, 8]).plan(REQUEST, [], context, 9.0)


def test_an_endless_text_is_not_tokenized() -> None:
    request = dataclasses.replace(REQUEST, messages=(ChatMessage("user", "x" * 6401),))
    with pytest.raises(RequestTooLarge, match="6401 characters"):
        planner([5]).plan(request, [], 100, 9.0)


def test_sampling() -> None:
    plain = planner([5], SamplingDefaults(0.7, 0.9))
    assert (lambda s: (s.temperature, s.top_p))(plain.plan(REQUEST, [], 100, 9.0).sampling) == (0.7, 0.9)
    asked = dataclasses.replace(REQUEST, temperature=0.0, top_p=0.5, seed=3)
    sampling = plain.plan(asked, [], 100, 9.0).sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed) == (0.0, 0.5, 3)
    assert sampling.stop_token_ids == Model.eos_token_ids
    tiny = dataclasses.replace(REQUEST, temperature=1e-30)
    assert plain.plan(tiny, [], 100, 9.0).sampling.temperature == 0.0


@pytest.mark.parametrize(("seed", "wire"), [(-1, 2**64 - 1), (-(2**63), 2**63), (2**64 - 1, 2**64 - 1), (0, 0)])
def test_seeds_fit_the_wire(seed: int, wire: int) -> None:
    request = dataclasses.replace(REQUEST, seed=seed)
    assert planner([5]).plan(request, [], 100, 9.0).sampling.seed == wire


def test_unseeded_requests_differ() -> None:
    seeds = {planner([5]).plan(REQUEST, [], 100, 9.0).sampling.seed for _ in range(20)}
    assert len(seeds) == 20
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_defaults_come_from_the_model(tmp_path: Path) -> None:
    assert SamplingDefaults.from_model(tmp_path) == SamplingDefaults(0.0, 1.0)

    def written(config: dict[str, object]) -> SamplingDefaults:
        (tmp_path / "generation_config.json").write_text(json.dumps(config))
        return SamplingDefaults.from_model(tmp_path)

    assert written({"do_sample": False, "temperature": 0.9}) == SamplingDefaults(0.0, 1.0)
    assert written({"do_sample": True, "temperature": 0.9, "top_p": 0.8}) == SamplingDefaults(0.9, 0.8)
    assert written({"do_sample": True}) == SamplingDefaults(1.0, 1.0)
    all_of_it = {"temperature": 0.9, "top_p": 0.8, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.05}
    assert written({"do_sample": True, **all_of_it}) == SamplingDefaults(0.9, 0.8, 20, 0.05, 1.05)
    greedy = SamplingDefaults(0.0, 1.0, repetition_penalty=1.05)
    assert written({"do_sample": False, **all_of_it}) == greedy, "a penalty holds for greedy answers too"
    assert written({"do_sample": True, "top_k": 0, "top_p": None}) == SamplingDefaults(1.0, 1.0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 9),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", True),
        ("top_k", -1),
        ("top_k", 1.5),
        ("min_p", 1.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", 11),
        ("repetition_penalty", [1]),
    ],
)
def test_a_default_out_of_range_stops_the_start(tmp_path: Path, name: str, value: object) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"do_sample": True, name: value}))
    with pytest.raises(StartupError, match=name):
        SamplingDefaults.from_model(tmp_path)


@pytest.mark.parametrize("value", ["false", 0, [], {}])
def test_a_do_sample_that_is_neither_true_nor_false_is_named(tmp_path: Path, value: object) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"do_sample": value, "temperature": 1.0}))
    with pytest.raises(StartupError, match="do_sample"):
        SamplingDefaults.from_model(tmp_path)


def asking(**options: Any) -> ChatRequest:
    return dataclasses.replace(REQUEST, options=SamplingOptions(**options))


def test_options_reach_the_plan() -> None:
    options = {
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "logit_bias": ((3, 1.0), (999, -100.0)),
        "min_tokens": 4,
        "num_logprobs": 2,
    }
    sampling = planner([5]).plan(asking(**options), [], 100, 9.0).sampling
    assert {name: getattr(sampling, name) for name in options} == options
    assert sampling.eos_token_ids == Model.eos_token_ids


def test_the_priority_reaches_the_plan() -> None:
    assert planner([5]).plan(dataclasses.replace(REQUEST, priority=-7), [], 100, 9.0).priority == -7
    assert planner([5]).plan(REQUEST, [], 100, 9.0).priority == 0


def test_the_caller_goes_before_the_models_defaults() -> None:
    plain = planner([5], SamplingDefaults(0.7, 0.9, 20, 0.05, 1.05))
    defaults = plain.plan(REQUEST, [], 100, 9.0).sampling
    assert (defaults.top_k, defaults.min_p, defaults.repetition_penalty) == (20, 0.05, 1.05)
    asked = plain.plan(asking(top_k=0, min_p=0.0, repetition_penalty=1.0), [], 100, 9.0).sampling
    assert (asked.top_k, asked.min_p, asked.repetition_penalty) == (None, 0.0, 1.0)


@pytest.mark.parametrize("top_k", [1000, 5000, 2**31 - 1])
def test_a_limit_beyond_the_vocabulary_is_none(top_k: int) -> None:
    assert planner([5]).plan(asking(top_k=top_k), [], 100, 9.0).sampling.top_k is None


def test_what_ends_an_answer() -> None:
    def ends(**options: Any) -> frozenset[int]:
        sampling = planner([5]).plan(asking(**options), [], 100, 9.0).sampling
        assert sampling.eos_token_ids == Model.eos_token_ids
        return sampling.stop_token_ids

    assert ends() == {1, 2}
    assert ends(stop_token_ids=(7, 2)) == {1, 2, 7}
    assert ends(ignore_eos=True) == frozenset()
    assert ends(ignore_eos=True, stop_token_ids=(7, 2)) == {2, 7}


@pytest.mark.parametrize("options", [{"logit_bias": ((3, 1.0), (1000, 1.0))}, {"stop_token_ids": (1000, 3)}])
def test_tokens_that_the_model_does_not_have_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="999") as caught:
        planner([5]).plan(asking(**options), [], 100, 9.0)
    assert caught.value.param == next(iter(options))


def test_a_minimum_makes_room_and_is_cut_with_it() -> None:
    long = planner([5]).plan(asking(min_tokens=3000), [], 10_000, 9.0).sampling
    assert (long.min_tokens, long.max_tokens) == (3000, 3000)
    cut = planner([5]).plan(asking(min_tokens=3000), [], 100, 9.0).sampling
    assert (cut.min_tokens, cut.max_tokens) == (99, 99)
