"""Tensors from trusted callers: the answer is the picture's own, and what is wrong with one harms nobody."""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import re
import signal
import struct
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from transformers.modeling_outputs import BaseModelOutputWithPooling

from services.router.pipeline import Pipeline
from services.router.queue import AdmissionQueue
from tests.integration import tiny_cluster
from tests.integration.launching import launched, living
from tests.integration.tiny_cluster import MAX_TOKENS, SMALL_POOL
from tests.integration.trusted import Answered, StockPicture, StockPrompt, ask, prompt_of, stock_prompt, with_item
from tests.parity.checkpoints import DEMO_DIR
from tests.parity.prompts import draw_picture
from tests.parity.reference import ReferenceModel
from triptych.core.clock import SystemClock
from triptych.core.errors import InvalidRequest, MediaMismatch, RequestError, TriptychError
from triptych.core.ids import AttemptRef, new_request_id
from triptych.core.plan import EmbeddingSource, Grid, Item, ItemFormat, Modality, Plan
from triptych.mm.tensor import TensorValue
from triptych.mm.trusted import ItemData, TrustedRequest
from triptych.model.registry import adapter_for
from triptych.registry.runtime import RuntimeFolder
from triptych.registry.static import StaticRegistry
from triptych.rpc import convert
from triptych.rpc.client import ChannelPool, encoder_stub
from triptych.testing.cluster import ChatRequest, InProcessCluster
from triptych.wire.v1 import encoder_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")
model_dir, shared, epd = tiny_cluster.model_dir, tiny_cluster.shared, tiny_cluster.epd

QUESTION = "what is it?"
PICTURE = draw_picture(1, (84, 56))
OTHER = draw_picture(2, (56, 84))
ITEMS_PAGE = Path(__file__).parents[2] / "docs" / "items.md"


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> ReferenceModel:
    return ReferenceModel(model_dir)


@pytest.fixture(scope="module")
def stock(reference: ReferenceModel) -> StockPrompt:
    return stock_prompt(reference, prompt_of(QUESTION, PICTURE))


@pytest.fixture(scope="module")
def truth(reference: ReferenceModel) -> list[int]:
    """What stock transformers answers, from the picture."""
    return list(reference.generate_now(prompt_of(QUESTION, PICTURE), MAX_TOKENS).tokens)


def asked(*media: bytes, text: str = QUESTION) -> ChatRequest:
    parts = [*({"type": "image"} for _ in media), {"type": "text", "text": text}]
    return ChatRequest([{"role": "user", "content": parts}], media, MAX_TOKENS)


async def answer(cluster: InProcessCluster, request: TrustedRequest) -> Answered:
    return await ask(cluster.pipeline, request.plan, request.media)


async def is_whole(cluster: InProcessCluster, truth: list[int]) -> None:
    """The next answer is right, from the picture itself, with nothing cached and with whatever is."""
    assert (await cluster.generate(asked(PICTURE))).token_ids == truth
    cluster.clear_caches()
    assert (await cluster.generate(asked(PICTURE))).token_ids == truth
    await asyncio.to_thread(cluster.check_integrity)


# --- right answers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("topology", ["e-p-d", "mono"])
async def test_processor_output_and_embedding_of_stock_transformers_give_the_answer_of_the_picture(
    model_dir: Path, topology: Any, reference: ReferenceModel
) -> None:
    prompt = prompt_of(QUESTION, PICTURE, OTHER)
    stock = stock_prompt(reference, prompt)
    truth = list(reference.generate_now(prompt, MAX_TOKENS).tokens)
    first, second = stock.pictures
    media = [
        ItemData(ItemFormat.NORMAL, one.grid, blob) for one, blob in zip(stock.pictures, prompt.media, strict=True)
    ]
    async with InProcessCluster(model_dir, topology, kv_pool_bytes=SMALL_POOL) as cluster:
        kinds: dict[str, list[ItemData]] = {
            "pictures": media,
            "processed": [first.processed, second.processed],
            "embedded": [first.embedded, second.embedded],
            "mixed": [first.embedded, media[1]],
            "mixed otherwise": [first.processed, second.embedded],
        }
        for kind, data in kinds.items():
            cluster.clear_caches()
            found = await answer(cluster, stock.request(cluster.adapter, data, MAX_TOKENS))
            assert found.token_ids == truth, kind
            computed = sum(one.format is not ItemFormat.PRECOMPUTED_EMBEDDING for one in data)
            assert len(found.events("encode")) == computed, "the tower runs for all but embeddings"
        assert (await cluster.generate(asked(PICTURE, OTHER))).token_ids == truth


async def test_the_plan_of_a_trusted_caller_is_the_routers_but_for_identity_and_format(
    epd: InProcessCluster, stock: StockPrompt
) -> None:
    ours = epd.plan(asked(PICTURE))
    media = [ItemData(ItemFormat.NORMAL, stock.pictures[0].grid, PICTURE)]
    theirs = stock.request(epd.adapter, media, MAX_TOKENS).plan
    assert theirs.compact_ids == ours.compact_ids
    assert theirs.items[0] == dataclasses.replace(ours.items[0], width_px=0, height_px=0)
    tensor = stock.request(epd.adapter, [stock.pictures[0].embedded], MAX_TOKENS).plan.items[0]
    assert (tensor.ranges, tensor.grid) == (ours.items[0].ranges, ours.items[0].grid)
    assert tensor.identity != ours.items[0].identity


@pytest.mark.parametrize("kind", ["processed", "embedded"])
async def test_what_is_known_crosses_the_wire_once(epd: InProcessCluster, stock: StockPrompt, kind: str) -> None:
    data = [getattr(stock.pictures[0], kind)]
    request = stock.request(epd.adapter, data, MAX_TOKENS)
    first, again = await answer(epd, request), await answer(epd, request)
    assert first.token_ids == again.token_ids
    assert len(first.events("fetch")) == 1
    assert not again.events("fetch") and not again.events("encode")
    assert {event.source for event in again.events("radix_hit")} <= {EmbeddingSource.RADIX}, "if it is asked at all"
    assert not again.events("write")
    epd.clear_language_caches()
    third = await answer(epd, request)
    assert third.token_ids == first.token_ids
    assert len(third.events("cache_hit")) == 1 and not third.events("fetch")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
async def test_other_number_formats_are_taken_for_the_numbers_they_hold(
    epd: InProcessCluster, reference: ReferenceModel, stock: StockPrompt, dtype: str
) -> None:
    """Truth: stock transformers on the same rounded rows, given to it in place of its tower's."""
    picture = stock.pictures[0]
    rounded = torch.from_numpy(picture.rows.copy()).to(getattr(torch, dtype))
    raw = rounded.view(torch.uint8).numpy().tobytes()
    tensor = TensorValue.from_bytes(dtype, tuple(picture.rows.shape), raw)
    data = ItemData(ItemFormat.PRECOMPUTED_EMBEDDING, picture.grid, tensor)
    found = await answer(epd, stock.request(epd.adapter, [data], MAX_TOKENS))
    assert found.token_ids == stock_answer_from_rows(reference, stock, rounded.float())


def stock_answer_from_rows(reference: ReferenceModel, stock: StockPrompt, rows: torch.Tensor) -> list[int]:
    model, inputs = reference.model, reference.inputs(prompt_of(QUESTION, PICTURE))
    kept = model.model.visual.forward
    given = BaseModelOutputWithPooling(last_hidden_state=rows, pooler_output=rows)
    try:
        model.model.visual.forward = lambda *_, **__: given
        model.model.rope_deltas = None
        with torch.inference_mode():
            out = model.generate(**inputs, do_sample=False, max_new_tokens=MAX_TOKENS)
    finally:
        model.model.visual.forward = kept
    return list(out[0, len(stock.ids) :].tolist())


async def test_a_tenants_salt_is_part_of_what_the_encoder_checks(
    epd: InProcessCluster, stock: StockPrompt, truth: list[int]
) -> None:
    request = stock.request(epd.adapter, [stock.pictures[0].embedded], MAX_TOKENS, b"tenant-a")
    assert (await answer(epd, request)).token_ids == truth
    epd.clear_caches()
    with pytest.raises(MediaMismatch, match="identity"):
        await ask(epd.pipeline, dataclasses.replace(request.plan, cache_salt=b"tenant-b"), request.media)
    await is_whole(epd, truth)


# --- wrong tensors ----------------------------------------------------------------------------------------------------

Broken = tuple[Plan, list[bytes]]


def of_tensor(epd: InProcessCluster, request: TrustedRequest, tensor: TensorValue, **changed: Any) -> Broken:
    """Another tensor under its own right identity: all that is wrong is the tensor."""
    item = dataclasses.replace(request.plan.items[0], **changed)
    identity = epd.adapter.tensor_identity(item.modality, item.format, item.grid, tensor)
    return with_item(request, tensor.to_frame(), identity=identity, **changed)


def edited(array: np.ndarray, value: float) -> TensorValue:
    changed = array.copy()
    changed.flat[-1] = value
    return TensorValue.from_array(changed)


def header(frame: bytes, at: int, data: bytes) -> bytes:
    return frame[:at] + data + frame[at + len(data) :]


SIZES_AT = 8
FRAMES: dict[str, Callable[[bytes], bytes]] = {
    "cut short": lambda frame: frame[:-1],
    "cut to its header": lambda frame: frame[:41],
    "cut within its header": lambda frame: frame[:20],
    "a trailing byte": lambda frame: frame + b"\0",
    "twice": lambda frame: frame + frame,
    "another magic": lambda frame: header(frame, 0, b"PK\x03\x04"),
    "another version": lambda frame: header(frame, 4, b"\x02"),
    "number format 0": lambda frame: header(frame, 5, b"\x00"),
    "number format 9": lambda frame: header(frame, 5, b"\x09"),
    "claims to be float16": lambda frame: header(frame, 5, b"\x03"),
    "no dimensions": lambda frame: header(frame, 6, b"\x00"),
    "five dimensions": lambda frame: header(frame, 6, b"\x05"),
    "three dimensions": lambda frame: header(frame, 6, b"\x03"),
    "minus one row": lambda frame: header(frame, SIZES_AT, struct.pack("<q", -1)),
    "no rows": lambda frame: header(frame, SIZES_AT, struct.pack("<q", 0)),
    "2**62 rows": lambda frame: header(frame, SIZES_AT, struct.pack("<Q", 2**62)),
    "sizes exchanged": lambda frame: header(frame, SIZES_AT, frame[16:24] + frame[8:16]),
    "a picture": lambda _: PICTURE,
    "a pickle": lambda frame: b"\x80\x04\x95" + frame,
}


@pytest.mark.parametrize("name", FRAMES)
@pytest.mark.parametrize("kind", ["processed", "embedded"])
async def test_what_is_no_tensor_of_the_item_is_refused_and_the_next_answer_is_right(
    epd: InProcessCluster, stock: StockPrompt, truth: list[int], kind: str, name: str
) -> None:
    request = stock.request(epd.adapter, [getattr(stock.pictures[0], kind)], MAX_TOKENS)
    plan, media = with_item(request, FRAMES[name](request.media[0]))
    with pytest.raises(RequestError, match="picture 1 of the request") as caught:
        await ask(epd.pipeline, plan, media)
    assert caught.value.http_status == 400
    await is_whole(epd, truth)
    assert (await answer(epd, request)).token_ids == truth


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", ["processed", "embedded"])
async def test_numbers_that_are_not_finite_are_refused(
    epd: InProcessCluster, stock: StockPrompt, truth: list[int], kind: str, value: float
) -> None:
    picture = stock.pictures[0]
    array = picture.patches if kind == "processed" else picture.rows
    request = stock.request(epd.adapter, [getattr(picture, kind)], MAX_TOKENS)
    plan, media = of_tensor(epd, request, edited(array, value))
    for _ in range(2):  # a failure is not cached
        with pytest.raises(InvalidRequest, match=r"picture 1 of the request: .* infinity or a NaN"):
            await ask(epd.pipeline, plan, media)
    await is_whole(epd, truth)


SHAPES: dict[str, Callable[[StockPicture], np.ndarray]] = {
    "one element wider": lambda picture: np.pad(picture.rows, ((0, 0), (0, 1))),
    "half as wide": lambda picture: picture.rows[:, : picture.rows.shape[1] // 2],
    "one row more": lambda picture: np.pad(picture.rows, ((0, 1), (0, 0))),
    "one row less": lambda picture: picture.rows[:-1],
    "turned": lambda picture: picture.rows.T,
    "flat": lambda picture: picture.rows.reshape(-1),
    "with an axis more": lambda picture: picture.rows[None],
}


@pytest.mark.parametrize("name", SHAPES)
async def test_an_embedding_of_another_shape_is_refused(
    epd: InProcessCluster, stock: StockPrompt, truth: list[int], name: str
) -> None:
    request = stock.request(epd.adapter, [stock.pictures[0].embedded], MAX_TOKENS)
    plan, media = of_tensor(epd, request, TensorValue.from_array(SHAPES[name](stock.pictures[0])))
    with pytest.raises(RequestError, match="picture 1 of the request"):
        await ask(epd.pipeline, plan, media)
    await is_whole(epd, truth)


@pytest.mark.parametrize(
    "grid", [Grid(1, 6, 4), Grid(1, 2, 12), Grid(1, 3, 8), Grid(2, 4, 3), Grid(1, 4, 8), Grid(1, 1, 1)]
)
@pytest.mark.parametrize("kind", ["processed", "embedded"])
async def test_a_grid_that_is_not_the_tensors_is_refused_or_is_another_item(
    epd: InProcessCluster, stock: StockPrompt, truth: list[int], kind: str, grid: Grid
) -> None:
    """The claim of another grid under the same identity; where the grid is possible, only the bytes tell."""
    picture = stock.pictures[0]
    assert grid != picture.grid
    request = stock.request(epd.adapter, [getattr(picture, kind)], MAX_TOKENS)
    plan, media = with_item(request, request.media[0], grid=grid)
    with pytest.raises(RequestError):
        await ask(epd.pipeline, plan, media)
    await is_whole(epd, truth)
    assert (await answer(epd, request)).token_ids == truth


@pytest.mark.parametrize("num_bytes", [0, 1, 40, 2**34])
@pytest.mark.parametrize("kind", ["processed", "embedded"])
async def test_sizes_that_cannot_be_are_refused_before_a_byte_is_asked_for(
    epd: InProcessCluster, stock: StockPrompt, truth: list[int], kind: str, num_bytes: int
) -> None:
    request = stock.request(epd.adapter, [getattr(stock.pictures[0], kind)], MAX_TOKENS)
    plan, media = with_item(request, request.media[0], media_bytes=num_bytes)
    with pytest.raises(InvalidRequest, match="announced"):
        await ask(epd.pipeline, plan, media)
    await is_whole(epd, truth)


async def test_media_of_no_bytes_are_taken_when_they_are_known_and_refused_when_not(
    epd: InProcessCluster, truth: list[int]
) -> None:
    plan = epd.plan(asked(PICTURE))
    known = dataclasses.replace(plan, items=(dataclasses.replace(plan.items[0], media_bytes=0),))
    with pytest.raises(InvalidRequest, match="no bytes were announced"):
        await ask(epd.pipeline, known, [b""])
    await is_whole(epd, truth)
    assert (await ask(epd.pipeline, known, [b""])).token_ids == truth


@pytest.mark.parametrize("count", [2, 1025])
async def test_an_encode_call_with_an_item_twice_or_with_too_many_is_refused(
    epd: InProcessCluster, count: int, truth: list[int]
) -> None:
    plan = epd.plan(asked(PICTURE))
    workers = {worker.ref.worker_id: worker.info for worker in epd.workers}
    encoder, prefill = workers["encoder-0"], workers["prefill-0"]
    assert encoder is not None and prefill is not None
    entry = encoder_pb2.EncodeItem(item_index=0, item=convert.item_to_proto(plan.items[0]))
    start = encoder_pb2.EncodeStart(
        ref=convert.ref_to_proto(AttemptRef(new_request_id())),
        prefill_worker_id=prefill.worker_id,
        prefill_epoch=prefill.epoch,
        items=[entry] * count,
        timeout_ms=5000,
        model_fingerprint=plan.model_fingerprint,
    )

    async def requests() -> AsyncIterator[encoder_pb2.EncodeRequest]:
        yield encoder_pb2.EncodeRequest(start=start)

    with pytest.raises(grpc.aio.AioRpcError) as raised:
        async for _ in encoder_stub(epd.pipeline._channels, encoder).Encode(requests(), timeout=5):
            pass
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await is_whole(epd, truth)


async def test_a_video_is_refused(epd: InProcessCluster, stock: StockPrompt, truth: list[int]) -> None:
    request = stock.request(epd.adapter, [stock.pictures[0].embedded], MAX_TOKENS)
    plan, media = with_item(request, request.media[0], modality=Modality.VIDEO)
    with pytest.raises(InvalidRequest, match="not served yet"):
        await ask(epd.pipeline, plan, media)
    await is_whole(epd, truth)


# --- wrong names ------------------------------------------------------------------------------------------------------


def item_of(epd: InProcessCluster, stock: StockPrompt, data: ItemData) -> Item:
    return stock.request(epd.adapter, [data], MAX_TOKENS).plan.items[0]


async def test_no_cache_keeps_an_embedding_under_a_name_that_is_not_its_own(
    epd: InProcessCluster, reference: ReferenceModel, stock: StockPrompt, truth: list[int]
) -> None:
    """Whatever of `evil` claims to be the picture or its tensors is refused; then those are asked for."""
    evil = stock_prompt(reference, prompt_of(QUESTION, draw_picture(7, (84, 56)))).pictures[0]
    evil_media = ItemData(ItemFormat.NORMAL, evil.grid, draw_picture(7, (84, 56)))
    picture = stock.pictures[0]
    good = [ItemData(ItemFormat.NORMAL, picture.grid, PICTURE), picture.processed, picture.embedded]
    for victim in good:
        for liar in (evil_media, evil.processed, evil.embedded, *(each for each in good if each is not victim)):
            request = stock.request(epd.adapter, [liar], MAX_TOKENS)
            claimed = item_of(epd, stock, victim).identity
            plan, media = with_item(request, request.media[0], identity=claimed)
            with pytest.raises(MediaMismatch, match="identity names"):
                await ask(epd.pipeline, plan, media)
        assert (await answer(epd, stock.request(epd.adapter, [victim], MAX_TOKENS))).token_ids == truth
        epd.clear_caches()
    await is_whole(epd, truth)


async def test_who_waits_for_a_liar_gets_his_own_answer(
    epd: InProcessCluster, reference: ReferenceModel, stock: StockPrompt, truth: list[int]
) -> None:
    """Liars and honest callers of one identity at once: the flights of the liars fail, and only theirs."""
    evil = stock_prompt(reference, prompt_of(QUESTION, draw_picture(7, (84, 56)))).pictures[0]
    honest = stock.request(epd.adapter, [stock.pictures[0].embedded], MAX_TOKENS)
    lying = stock.request(epd.adapter, [evil.embedded], MAX_TOKENS)
    plan, media = with_item(lying, lying.media[0], identity=honest.plan.items[0].identity)
    asking = [ask(epd.pipeline, plan, media) if n % 3 else answer(epd, honest) for n in range(18)]
    outcomes = await asyncio.gather(*asking, return_exceptions=True)
    for number, outcome in enumerate(outcomes):
        if number % 3 == 0:
            assert isinstance(outcome, Answered), outcome
        # Once the honest one's embedding is cached, a liar's bytes are not even asked for: he gets what he named.
        if isinstance(outcome, Answered):
            assert outcome.token_ids == truth
        else:
            assert isinstance(outcome, MediaMismatch)
    await is_whole(epd, truth)


async def test_a_wrong_grid_does_not_meet_the_cached_embedding(
    epd: InProcessCluster, stock: StockPrompt, truth: list[int]
) -> None:
    request = stock.request(epd.adapter, [stock.pictures[0].embedded], MAX_TOKENS)
    assert (await answer(epd, request)).token_ids == truth
    epd.clear_language_caches()
    grid = request.plan.items[0].grid
    plan, media = with_item(request, request.media[0], grid=Grid(grid.t, grid.w, grid.h))
    with pytest.raises(MediaMismatch, match="identity names"):
        await ask(epd.pipeline, plan, media)


async def test_pictures_planned_by_other_processor_settings_than_the_encoders_are_refused(
    epd: InProcessCluster, truth: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(epd.adapter, "processing_key", b'{"patch_size": 15}')
        with pytest.raises(MediaMismatch, match="identity names"):
            await epd.generate(asked(PICTURE))
    await is_whole(epd, truth)


# --- number formats ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("encoder", "others"), [("bfloat16", "float32"), ("float16", "bfloat16")])
async def test_an_encoder_of_another_number_format_gives_an_error_and_never_an_answer(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, encoder: str, others: str
) -> None:
    """The second pair has rows of one size, so that nothing but the layout tells them apart."""
    common = InProcessCluster._common

    def mixed(self: InProcessCluster, worker_id: str) -> Any:
        chosen = encoder if worker_id.startswith("encoder") else others
        return dataclasses.replace(common(self, worker_id), dtype=chosen)

    monkeypatch.setattr(InProcessCluster, "_common", mixed)
    async with InProcessCluster(model_dir, kv_pool_bytes=SMALL_POOL) as cluster:
        with pytest.raises(TriptychError):
            await cluster.generate(asked(PICTURE))
        text = await cluster.generate(asked(text="only text"))
        assert len(text.token_ids) == MAX_TOKENS
        await asyncio.to_thread(cluster.check_integrity)


# --- processes --------------------------------------------------------------------------------------------------------


async def run_published_code(names: dict[str, Any]) -> None:
    """The blocks of Python in docs/items.md, one after the other, in one namespace."""
    blocks = re.findall(r"```python\n(.*?)```", ITEMS_PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        code = compile(block, ITEMS_PAGE.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        running = eval(code, names)
        if running is not None:
            await running
    await names["channels"].close()


@pytest.mark.timeout(180)
@pytest.mark.cluster
async def test_workers_keep_their_pids_whatever_a_trusted_caller_sends(tmp_path: Path) -> None:
    """Over the gRPC interface of a cluster of processes, found by its runtime folder. The code of docs/items.md, as it
    stands there, then gets the picture's answer."""
    reference = ReferenceModel(DEMO_DIR)
    stock = stock_prompt(reference, prompt_of(QUESTION, PICTURE))
    truth = list(reference.generate_now(prompt_of(QUESTION, PICTURE), MAX_TOKENS).tokens)
    adapter = adapter_for(DEMO_DIR)
    picture = stock.pictures[0]
    good = stock.request(adapter, [picture.embedded], MAX_TOKENS)
    bad = [with_item(good, edit(good.media[0])) for edit in FRAMES.values()]
    bad += [with_item(good, good.media[0], identity=bytes(32)), with_item(good, good.media[0], grid=Grid(1, 3, 8))]
    with launched(tmp_path, "--topology", "e-p-d") as launcher:
        await asyncio.to_thread(launcher.wait_ready, 120.0)
        folder = RuntimeFolder(launcher.runtime)
        registry, channels = StaticRegistry(folder), ChannelPool(folder.token())
        pipeline = Pipeline(registry, channels, AdmissionQueue(16), SystemClock())
        before = {worker.worker_id: (worker.pid, worker.epoch) for worker in registry.refresh()}
        try:
            for plan, media in bad:
                with pytest.raises(RequestError):
                    await ask(pipeline, plan, media)
            published = {"runtime_dir": launcher.runtime, "model_dir": DEMO_DIR}
            published |= {"rows": picture.rows, "input_ids": stock.ids}
            await run_published_code(published)
            assert published["tokens"] == truth
        finally:
            await channels.close()
        assert len(before) == 3
        assert {worker.worker_id: (worker.pid, worker.epoch) for worker in registry.refresh()} == before
        assert living({name: pid for name, (pid, _) in before.items()}).keys() == before.keys()
        output = launcher.signal_and_wait(signal.SIGTERM)[1]
    assert "Traceback" not in output
