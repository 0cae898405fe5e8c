"""The figures of `benchmarks/transport`: their arithmetic, that its arms move what they say, and that what was not
measured is null and says why."""

from __future__ import annotations

import asyncio
import json
import math
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from benchmarks.engine.budget import Budget
from benchmarks.engine.client import AskFailed
from benchmarks.engine.samples import Sample
from benchmarks.transport import cells, keys, peer, plot, report
from benchmarks.transport.arms import Linked, Links, summed_up
from benchmarks.transport.child import Absent, Child
from benchmarks.transport.handoff import KvTime, exposed, kv_time, merged, total_ns, without
from benchmarks.transport.in_cluster import handoff_of, hidden_of
from benchmarks.transport.landing import receiver
from benchmarks.transport.opening import made_up
from benchmarks.transport.others import GrpcBytes, NotMoved, Pyzmq
from benchmarks.transport.receivers import grpc_bytes, pyzmq_ipc
from benchmarks.transport.results import Results, Turn
from benchmarks.transport.turns import Pace, take_turns
from triptych.core.errors import TransferRefused

MS = 10**6
SHORT = Pace(rounds=2, large_rounds=1, seconds=0.01, least=2, most=8)


# --- arithmetic -------------------------------------------------------------------------------------------------------


def test_time_is_counted_once_and_without_its_holes() -> None:
    """Against sets of whole numbers."""
    spans, holes = [(0, 5), (3, 9), (12, 14), (20, 30)], [(4, 6), (13, 22), (25, 26)]
    times = {at for start, end in spans for at in range(start, end)}
    empty = {at for start, end in holes for at in range(start, end)}
    assert total_ns(merged(spans)) == len(times)
    left = without(merged(spans), merged(holes))
    assert {at for start, end in left for at in range(start, end)} == times - empty
    assert total_ns(left) == len(times - empty)
    assert without([(3, 4)], []) == [(3, 4)] and without([(3, 4)], [(0, 9)]) == []


def row(stage: str, event: str, start_ms: float, end_ms: float, item: int | None = None, num_bytes: int = 0) -> Any:
    return {
        "stage": stage,
        "event": event,
        "start_ns": round(start_ms * MS),
        "end_ns": round(end_ms * MS),
        "item": item,
        "bytes": num_bytes,
    }


def handed_over() -> list[Any]:
    return [
        row("encoder", "slot_wait", 0, 3, item=0),
        row("encoder", "slot_wait", 0, 4, item=1),
        row("encoder", "encode", 5, 20, item=0),
        row("encoder", "write", 20, 26, item=0),
        row("prefill", "embedding_wait", 1, 24, item=0),
        row("prefill", "chunk", 25, 40),
        row("encoder", "write", 38, 43, item=1),
        row("prefill", "embedding_wait", 1, 42, item=1),
        row("prefill", "chunk", 44, 60),
        row("prefill", "kv_write", 40, 41, num_bytes=600),
        row("prefill", "kv_write", 60, 61, num_bytes=400),
        row("decode", "kv_wait", 2, 66, num_bytes=1000),
    ]


def test_what_is_exposed_is_what_a_stage_waits_for_and_nothing_else() -> None:
    """The first embedding from 20 to its landing at 24, the second from 40, when prefill ran dry, to 42."""
    found = exposed(handed_over())
    assert (found.embedding_ms, found.kv_ms, found.grant_ms) == (6.0, 6.0, 4.0)
    assert found.total_ms == 12.0


def test_a_transfer_behind_computing_is_not_exposed() -> None:
    rows = [each for each in handed_over() if each["event"] != "chunk"]
    assert exposed([*rows, row("prefill", "chunk", 20, 66)]).total_ms == 0


def test_a_timeline_without_a_handover_is_refused() -> None:
    with pytest.raises(ValueError, match="decode got no KV"):
        exposed([each for each in handed_over() if each["stage"] != "decode"])
    with pytest.raises(ValueError, match="prefill wrote no KV"):
        kv_time([each for each in handed_over() if each["event"] != "kv_write"])


def test_kv_is_hidden_as_far_as_nobody_waits_for_it() -> None:
    found = kv_time(handed_over())
    assert found == KvTime(1000, computing_ms=31.0, under_way_ms=26.0, exposed_ms=6.0)
    assert found.hidden_share(1000 / 0.024) == pytest.approx(0.75)
    assert found.hidden_share(1000 / 0.003) == 0, "more was exposed than the link needs: nothing was hidden"


def test_kv_that_outruns_the_link_was_not_throttled() -> None:
    times = [kv_time(handed_over())]
    assert hidden_of(times, 1000 / 0.024).share == pytest.approx(0.75)
    with pytest.raises(AskFailed, match="26 ms over a link that needs 100 ms"):
        hidden_of(times, 1000 / 0.1)


def test_a_handoff_is_the_median_of_its_requests() -> None:
    samples = [Sample(first_s, 1.0, 300, 4, "", handed_over()) for first_s in (0.1, 0.2, 0.4)]
    found = handoff_of(samples)
    assert (found.exposed_ms, found.ttft_ms, found.requests) == (12.0, 200.0, 3)
    assert found.share == pytest.approx(0.06)


def turns(arm: str, num_bytes: int, *speeds: float) -> dict[tuple[str, int], dict[int, Turn]]:
    return {(arm, num_bytes): {number: Turn(5e-5, 1e-4, speed) for number, speed in enumerate(speeds)}}


def test_a_ratio_is_taken_within_each_round() -> None:
    """One round was slow for both, another for one of them: neither changes what is usual."""
    results = Results()
    results.turns |= turns(cells.SHM, 8 * cells.MIB, 30e9, 3e9, 30e9, 30e9, 1e9)
    results.turns |= turns(cells.MEMCPY, 8 * cells.MIB, 40e9, 4e9, 40e9, 40e9, 40e9)
    found = keys.all_keys(results)
    assert found["shm_vs_memcpy_8mib"].value == 0.75
    assert found["shm_vs_raw_zmq_8mib"].value is None
    assert found["shm_vs_raw_zmq_8mib"].note == "no pyzmq-ipc: it was not measured"


def test_nothing_measured_is_nothing_but_nulls_with_notes() -> None:
    found = keys.all_keys(Results())
    assert set(found) == set(keys.KEYS)
    assert all(key.value is None and key.note for key in found.values())


def test_each_figure_has_the_arms_that_it_compares() -> None:
    for name, comparison in cells.COMPARISONS.items():
        assert cells.wanted(name) == cells.Wanted(comparison.arms, (comparison.num_bytes,))
        assert set(comparison.arms) <= set(cells.ARMS) and comparison.num_bytes in cells.SIZES
    assert cells.wanted(keys.EXPOSED).arms == ()
    assert cells.wanted(None) == cells.Wanted(cells.ARMS, cells.SIZES)
    assert cells.room_bytes(cells.SIZES) == 256 * cells.MIB and cells.room_bytes([64 * cells.KIB]) == 256 * cells.KIB


# --- what is written --------------------------------------------------------------------------------------------------


def test_what_is_written_is_json_a_table_and_a_picture(tmp_path: Path) -> None:
    results = Results(
        missing={"nixl": "it is not installed"}, handoff=handoff_of([Sample(0.1, 1, 9, 4, "", handed_over())])
    )
    results.turns |= turns(cells.SHM, 64 * cells.KIB, 30e9) | turns(cells.MEMCPY, 64 * cells.KIB, 40e9)
    results.turns |= turns(cells.SHM, 8 * cells.MIB, 20e9)
    found = keys.all_keys(results)
    written = report.as_json(results, found, {"threads": 2})
    report.write(tmp_path, written, found)
    read = json.loads((tmp_path / "transport.json").read_text())
    assert (read["shm_round_trip_us_64kib"], read["handoff_exposed_ms"]) == (50.0, 12.0)
    assert [row["bytes"] for row in read["cells"]] == [64 * cells.KIB, 64 * cells.KIB, 8 * cells.MIB]
    table = (tmp_path / "transport.md").read_text()
    assert "| shm | 64 KiB | 50 | 100 | 30.00 | 0.75 | 1 |" in table
    assert "| shm | 8 MiB | 50 | 100 | 20.00 |  | 1 |" in table
    assert "- nixl: it is not installed" in table
    plot.draw(written["cells"], tmp_path / "transport.png")
    with Image.open(tmp_path / "transport.png") as picture:
        assert len(picture.convert("RGB").getcolors(1 << 16) or ()) > 3
    plot.draw([], tmp_path / "empty.png")


def test_an_axis_is_logarithmic() -> None:
    place = plot.scale(1, 1000, 10, 310)
    assert [round(place(value)) for value in (1, 10, 100, 1000)] == [10, 110, 210, 310]
    assert plot.decades([3, 42]) == (1, 100)
    low, high = plot.decades([10.0])
    assert low <= 10 <= high and math.log10(high / low) >= 1


# --- arms -------------------------------------------------------------------------------------------------------------


async def test_bytes_that_change_on_their_way_are_refused(tmp_path: Path) -> None:
    """Arms whose commit shows a checksum would not measure a transfer that moves something else."""
    links = Links()
    try:
        async with receiver(cells.SHM, tmp_path, 1 << 16) as info:
            where = {"worker_id": info.worker_id, "epoch": info.epoch, "address": info.grpc_address}
            link = await links.to_child(cells.SHM, _Where(where))
            await Linked(link, made_up(1 << 16), summed_up).stream(1 << 12, 9)
            wrong = Linked(link, made_up(1 << 16), lambda data: summed_up(data) ^ 1)
            move = await wrong.prepare(1 << 12)
            with pytest.raises(TransferRefused, match="other bytes have landed"):
                await move()
            await links.close()
    finally:
        await links.close()


class _Where(Child):
    """A process that is this one."""

    def __init__(self, where: dict[str, Any]) -> None:
        self.where = where


async def test_other_libraries_move_whole_messages(tmp_path: Path) -> None:
    source = made_up(1 << 18)
    for arm in (Pyzmq(pyzmq_ipc(tmp_path, 0), source), GrpcBytes(grpc_bytes(tmp_path, 0), source)):
        try:
            for num_bytes in (1 << 12, 1 << 18):
                await arm.stream(num_bytes, 7)
                move = await arm.prepare(num_bytes)
                await move()
        finally:
            arm.close()


class Brittle:
    """Moves nothing, and not for long."""

    def __init__(self, lives: int) -> None:
        self.lives = lives

    async def prepare(self, num_bytes: int) -> Any:
        return self._move

    async def stream(self, num_bytes: int, count: int) -> None:
        self.lives -= 1
        if self.lives < 0:
            raise NotMoved("it broke")

    async def _move(self) -> None:
        await asyncio.sleep(0)


async def test_an_arm_that_breaks_is_missing_and_the_others_go_on() -> None:
    results = Results()
    arms = {"memcpy": Brittle(99), "nixl": Brittle(3)}
    await take_turns(arms, [64, 128], SHORT, Budget.of(60), results)
    assert results.missing == {"nixl": "128 B: NotMoved: it broke"}
    assert {place: sorted(found) for place, found in results.turns.items()} == {
        ("memcpy", 64): [0, 1],
        ("memcpy", 128): [0, 1],
        ("nixl", 64): [0],
    }


async def test_large_sizes_come_last_and_in_rounds_of_their_own() -> None:
    results = Results()
    await take_turns({"memcpy": Brittle(99)}, [64 * cells.MIB, 64], SHORT, Budget.of(60), results)
    assert [(place[1], sorted(found)) for place, found in results.turns.items()] == [
        (64, [0, 1]),
        (64 * cells.MIB, [0]),
    ]


async def test_what_does_not_fit_into_the_time_says_so() -> None:
    results = Results()
    await take_turns({"memcpy": Brittle(9)}, [64], SHORT, Budget.of(0), results)
    assert results.turns == {} and "did not fit" in results.missing["memcpy"]


@pytest.fixture
def without_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("nixl._api", "nixl._bindings"):
        monkeypatch.setitem(sys.modules, module, None)


@pytest.mark.usefixtures("without_nixl")
@pytest.mark.parametrize("kind", ["raw-nixl", "raw-nixl-tcp", "nixl"])
def test_a_library_that_is_not_installed_is_an_absent_arm(
    kind: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert peer.main([kind, str(tmp_path), "4096"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(peer.WORD) and "it is not installed" in json.loads(said[len(peer.WORD) :])["absent"]


async def test_a_receiver_that_dies_is_an_absent_arm_with_its_last_words(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        with pytest.raises(Absent, match="KeyError"):
            stack.push_async_callback((await Child.start("carrier-pigeon", tmp_path, 4096, 30)).stop)
