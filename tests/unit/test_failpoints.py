"""Failpoints: what is understood, what stops the start, and that each name fires where the page says."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from services.prefill.settings import read_settings
from tests.unit import link_house
from tests.unit.engine_house import House, heard
from tests.unit.link_house import EMBEDDING_LAYOUT, KV_LAYOUT, REF, Host, send
from tests.unit.test_engine_encoder import FakeTower
from tests.unit.test_stages_embeddings import Encoder
from tests.unit.zmq_house import slot_of, zmq_link
from triptych.core.clock import SystemClock
from triptych.core.errors import NoRoom, PeerLost, StartupError, Unavailable
from triptych.core.failpoints import POINTS, Delay, Exit, Fail, FailpointRule, Kill, Throttle, parse_failpoints
from triptych.core.grant import Grant
from triptych.core.plan import EmbeddingSource, Grid, Token
from triptych.engine.encoder import EncodeEngine
from triptych.engine.loop import LanguageEngine
from triptych.faults import points
from triptych.obs import metrics
from triptych.testing.failpoints import armed
from triptych.transport.layout import checksum64

PAGE = Path(__file__).parents[2] / "docs" / "failpoints.md"
host = link_house.host


# --- what is understood -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        ("", []),
        (" ; ", []),
        ("encoder.encode_item=delay(300, item=5)", [FailpointRule("encoder.encode_item", Delay(300.0), item=5)]),
        (
            "decode.before_step=kill(worker=decode-1)*1@0.01",
            [FailpointRule("decode.before_step", Kill(), worker="decode-1", count=1, probability=0.01)],
        ),
        ("link.before_commit=error(peer_lost)*3", [FailpointRule("link.before_commit", Fail("peer_lost"), count=3)]),
        (
            "link.before_frame=throttle(20)*2; link.before_frame=throttle(1.5, worker=p)",
            [
                FailpointRule("link.before_frame", Throttle(20.0), count=2),
                FailpointRule("link.before_frame", Throttle(1.5), worker="p"),
            ],
        ),
        (
            "prefill.before_step = exit; prefill.before_step=exit(7)@.5",
            [
                FailpointRule("prefill.before_step", Exit(1)),
                FailpointRule("prefill.before_step", Exit(7), probability=0.5),
            ],
        ),
    ],
)
def test_what_is_written_is_what_holds(text: str, rules: list[FailpointRule]) -> None:
    assert list(parse_failpoints(text)) == rules


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("nonsense", r"'nonsense' is not understood: it should read name=action"),
        ("encoder.nowhere=kill", "there is no encoder.nowhere; failpoints are decode.before_step, "),
        ("link.before_commit=explode", "there is no action explode; actions are delay, error, exit, kill, throttle"),
        ("link.before_commit=delay", "delay takes milliseconds"),
        ("link.before_commit=delay(soon)", "delay takes milliseconds"),
        ("link.before_commit=delay(1e9)", "delay takes milliseconds"),
        ("link.before_commit=delay(600001)", "at most 600000"),
        ("link.before_commit=delay(-5)", "delay takes milliseconds"),
        ("link.before_commit=error(oops)", "error takes one of aborted, "),
        ("link.before_commit=error", "error takes one of"),
        ("link.before_commit=exit(256)", "exit takes a status"),
        ("link.before_commit=kill(9)", "kill takes nothing"),
        ("link.before_commit=kill*0", "a count is at least 1"),
        ("link.before_commit=kill@0", "a probability is above 0"),
        ("link.before_commit=kill@1.5", "a probability is above 0"),
        ("link.before_commit=kill@1.2.3", "a probability is above 0"),
        ("link.before_commit=delay(1, item=2)", "'item=2' cannot be asked of link.before_commit, but worker="),
        ("link.before_frame=throttle", "throttle takes bytes a second, at least 1"),
        ("link.before_frame=throttle(0.5)", "throttle takes bytes a second, at least 1"),
        ("link.before_frame=throttle(1, 2)", "throttle takes bytes a second, at least 1"),
        ("link.before_commit=throttle(1000)", "only link.before_frame knows how many bytes pass"),
        ("encoder.encode_item=delay(1, item=x)", "item= needs the number"),
        ("encoder.encode_item=delay(1, item=1, item=2)", "'item=2' cannot be asked"),
        ("encoder.encode_item=delay(1)x", "it should read"),
    ],
)
def test_anything_else_stops_the_start_with_a_sentence(text: str, sentence: str) -> None:
    with pytest.raises(StartupError, match=re.escape(sentence) if "(" in sentence else sentence):
        parse_failpoints(text)
    with pytest.raises(StartupError, match=r"correct TRIPTYCH_FAILPOINTS"):
        read_settings(["--model", "m", "--worker-id", "p"], {"TRIPTYCH_FAILPOINTS": text})


def test_the_page_lists_the_names() -> None:
    rows = re.findall(r"^\| `([\w.]+)` \|[^|]*\| ([^|]*)\|[^|]*\|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    documented = {name: frozenset(re.findall(r"`(\w+)=`", arguments)) for name, arguments in rows if "." in name}
    assert documented == POINTS
    for example in re.findall(r"^\| `([\w.]+=[^`]+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE):
        assert parse_failpoints(example)


# --- how they fire ----------------------------------------------------------------------------------------------------


def fired(name: str) -> float:
    return float(metrics.FAILPOINTS.labels(name)._value.get())


def passages(count: int, name: str = "prefill.before_step") -> list[bool]:
    """For each passage, whether it failed."""
    failed = []
    for _ in range(count):
        try:
            points.passing(name)
            failed.append(False)
        except NoRoom:
            failed.append(True)
    return failed


def test_nothing_happens_unarmed_elsewhere_or_in_another_worker() -> None:
    assert passages(3) == [False] * 3
    with armed("decode.before_step=error(no_room); prefill.before_step=error(no_room, worker=p-1)", worker="p-0"):
        assert passages(3) == [False] * 3
    with armed("prefill.before_step=error(no_room, worker=p-1)", worker="p-1"):
        assert passages(1) == [True]
    assert passages(1) == [False]


def test_a_count_ends_it() -> None:
    before = fired("prefill.before_step")
    with armed("prefill.before_step=error(no_room)*2"):
        assert passages(5) == [True, True, False, False, False]
    assert fired("prefill.before_step") - before == 2


def test_a_probability_is_kept_and_drawn_the_same_every_time() -> None:
    runs = []
    for _ in range(2):
        with armed("prefill.before_step=error(no_room)@0.25"):
            runs.append(passages(1000))
    assert runs[0] == runs[1]
    assert 190 < sum(runs[0]) < 310


@pytest.mark.parametrize(("action", "status"), [("exit(7)", 7), ("exit", 1), ("kill", -9)])
def test_a_process_dies_as_told(action: str, status: int) -> None:
    code = (
        "from triptych.testing.failpoints import armed\nfrom triptych.faults import points\n"
        f"with armed('link.before_commit={action}'):\n    points.passing('link.before_commit')\nprint('alive')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=20, check=False)
    assert (done.returncode, done.stdout) == (status, b"")


# --- where they fire --------------------------------------------------------------------------------------------------


def before_encode() -> None:
    engine = EncodeEngine(FakeTower(), max_patches=100, max_items=8, clock=SystemClock())
    future = engine.submit(torch.full((8, 3), 1.0), Grid(1, 2, 4))
    engine.start()
    try:
        future.result(5)
    finally:
        engine.stop()


def a_step(stage: str) -> Callable[[], None]:
    def run() -> None:
        house = House()
        house.engine = LanguageEngine(
            house.runner, house.manager, house.landing, house.engine.limits, SystemClock(), stage
        )
        sequence = house.submit([1, 2, 3])
        house.turn_until(lambda: heard(sequence).ended.is_set())
        error = heard(sequence).error
        if error is not None:
            raise error

    return run


@pytest.mark.parametrize(
    ("name", "run"),
    [
        ("encoder.before_encode", before_encode),
        ("prefill.before_step", a_step("prefill")),
        ("decode.before_step", a_step("decode")),
    ],
)
def test_a_thread_is_slow_or_fails_there(name: str, run: Callable[[], None]) -> None:
    before = fired(name)
    start = time.monotonic()
    with armed(f"{name}=delay(120)*1"):
        run()
    assert time.monotonic() - start >= 0.12
    with armed(f"{name}=error(unavailable)*1"), pytest.raises(Unavailable, match=f"the failpoint {name}"):
        run()
    run()
    assert fired(name) - before == 2


async def test_one_picture_of_several_is_slow_or_fails() -> None:
    encoder = Encoder()
    encoder.engine.start()
    ended: dict[int, float] = {}

    async def get(index: int) -> None:
        try:
            await encoder.get(index + 1, index=index)
        finally:
            ended[index] = time.monotonic()

    try:
        start = time.monotonic()
        with armed("encoder.encode_item=delay(250, item=3)"):
            await asyncio.gather(*(get(index) for index in range(6)))
        assert max(ended, key=lambda index: ended[index]) == 3
        assert ended[3] - start >= 0.25
        assert max(ended[index] for index in ended if index != 3) < ended[3]
        encoder.supply.clear()
        with armed("encoder.encode_item=error(unavailable, item=3)"):
            outcomes = await asyncio.gather(*(get(index) for index in range(6)), return_exceptions=True)
        assert [isinstance(outcome, Unavailable) for outcome in outcomes] == [index == 3 for index in range(6)]
    finally:
        encoder.engine.stop()


@pytest.mark.parametrize("kind", ["embedding", "kv"])
async def test_a_commit_is_slow_or_fails(host: Host, kind: str) -> None:
    pool = host.pool()
    embeddings, kv = await pool.embedding_link(host.info, EMBEDDING_LAYOUT), await pool.kv_link(host.info, KV_LAYOUT)
    credit = Grant("grant-1", "prefill-1", 21, b"c" * 16, 4, 0)
    host.kv.credits["grant-1"] = credit

    async def commit() -> None:
        if kind == "embedding":
            await send(embeddings, REF, 3, b"x" * 100)
        else:
            await kv.commit_kv(REF, await kv.bind_kv(REF, credit), 3, 64, Token(0, 5), 0)

    with armed("link.before_commit=error(peer_lost)"), pytest.raises(PeerLost, match=r"link\.before_commit"):
        await commit()
    start = time.monotonic()
    with armed("link.before_commit=delay(120)"):
        await commit()
    assert time.monotonic() - start >= 0.12
    await pool.close()


async def test_data_frames_leave_as_slowly_as_told_or_break_the_link(host: Host) -> None:
    data = memoryview(bytes(range(250)) * 4)
    async with zmq_link(host) as link:
        grant = await slot_of(link, len(data))
        start = time.monotonic()
        with armed("link.before_frame=throttle(5000)"):
            await link.write_slot(grant, data)
        assert time.monotonic() - start >= len(data) / 5000
        await link.commit_embedding(REF, 0, grant, EmbeddingSource.REMOTE, checksum64(data))
        assert host.embedding.landed[REF, 0].data == data
        grant = await slot_of(link, len(data))
        with armed("link.before_frame=error(peer_lost)"), pytest.raises(PeerLost, match=r"link\.before_frame"):
            await link.write_slot(grant, data)
        async with asyncio.timeout(5):
            await link.closed.wait()
