"""Media processes: real ones, with pictures that are right, that lie, that swell, and with a hand that kills."""

from __future__ import annotations

import errno
import io
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.bombs import png_bomb
from tests.parity.prompts import draw_picture
from triptych.core.clock import SystemClock
from triptych.core.errors import Aborted, DeadlineExceeded, MediaInvalid, NoRoom, TriptychError, Unavailable
from triptych.media import process
from triptych.media.frames import (
    MAX_REFUSAL_BYTES,
    REPLY,
    REQUEST,
    Limits,
    MalformedFrame,
    Target,
    pack_picture,
    pack_refusal,
    pack_request,
    refusal,
    unpack_reply,
    unpack_request,
)
from triptych.media.pool import MediaLimits, MediaPool
from triptych.media.process import Confinement, Decoded, MediaProcess, ProcessLost
from triptych.obs import metrics
from triptych.testing.failpoints import armed

BICUBIC = int(Image.Resampling.BICUBIC)
TARGET = Target(56, 28, BICUBIC)
ALLOWED = MediaLimits(1, Limits(10**8, 20), Confinement(1 << 30, 0), 20.0, 64)
PICTURE = draw_picture(1, (90, 70))
WAIT_S = 20.0


@pytest.fixture
def pool() -> Iterator[MediaPool]:
    made = MediaPool(ALLOWED, SystemClock())
    made.start()
    yield made
    made.stop()


def pool_of(**changes: object) -> MediaPool:
    made = MediaPool(replace(ALLOWED, **changes), SystemClock())  # type: ignore[arg-type]
    made.start()
    return made


def pid_of(pool: MediaPool) -> int:
    eventually(lambda: bool(pool.pids))
    return pool.pids[0]


def eventually(condition: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.01)


def is_there(pid: int) -> bool:
    """Running, and neither gone nor waiting to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def results(name: str) -> float:
    return float(metrics.MEDIA_PICTURES.labels(name)._value.get())


# --- what comes of a picture ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(90, 70), (28, 28), (500, 31), (31, 500), (1100, 900)])
def test_pixels_are_those_of_the_stock_processor(pool: MediaPool, size: tuple[int, int]) -> None:
    stock = Qwen2VLImageProcessorPil(size={"shortest_edge": 3136, "longest_edge": 50176})
    media = draw_picture(7, size)
    expected = stock(images=[Image.open(io.BytesIO(media)).convert("RGB")], return_tensors="np")
    _, rows, columns = (int(side) for side in expected["image_grid_thw"][0])
    decoded = pool.submit(media, Target(columns * 14, rows * 14, BICUBIC)).result(WAIT_S)
    assert (decoded.width_px, decoded.height_px) == size
    again = stock(images=[decoded.pixels], do_resize=False, input_data_format="channels_last", return_tensors="np")
    assert np.array_equal(again["pixel_values"], expected["pixel_values"])
    assert np.array_equal(again["image_grid_thw"], expected["image_grid_thw"])


def test_the_filter_is_the_one_that_was_named(pool: MediaPool) -> None:
    image = Image.open(io.BytesIO(PICTURE)).convert("RGB")
    for number in (Image.Resampling.NEAREST, Image.Resampling.LANCZOS):
        decoded = pool.submit(PICTURE, Target(33, 44, int(number))).result(WAIT_S)
        assert np.array_equal(decoded.pixels, np.asarray(image.resize((33, 44), number)))


def test_many_at_once_each_get_their_own() -> None:
    many = pool_of(processes=2)
    media = [draw_picture(number, (40 + number, 60)) for number in range(24)]
    try:
        futures = [many.submit(data, TARGET) for data in media]
        for number, future in enumerate(futures):
            decoded = future.result(WAIT_S)
            assert decoded.width_px == 40 + number
            image = Image.open(io.BytesIO(media[number])).convert("RGB").resize((56, 28), BICUBIC)
            assert np.array_equal(decoded.pixels, np.asarray(image))
    finally:
        many.stop()


@pytest.mark.parametrize(
    ("media", "sentence"),
    [
        (b"", "damaged or cut short"),
        (b"no picture", "damaged or cut short"),
        (PICTURE[: len(PICTURE) // 2], "damaged or cut short"),
        (png_bomb(20_000, 6_000), "more than 100000000 pixels"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "damaged or cut short"),
    ],
)
def test_what_cannot_be_decoded_is_refused_and_the_process_goes_on(
    pool: MediaPool, media: bytes, sentence: str
) -> None:
    pid = pid_of(pool)
    with pytest.raises(MediaInvalid, match=sentence):
        pool.submit(media, TARGET).result(WAIT_S)
    assert pool.submit(PICTURE, TARGET).result(WAIT_S).pixels.shape == (28, 56, 3)
    assert pool.pids == [pid]


def test_a_picture_that_swells_beyond_the_memory_is_refused() -> None:
    small = pool_of(confinement=Confinement(64 << 20, 0))
    try:
        pid = pid_of(small)
        bomb = png_bomb(12_000, 8_000)  # 96 MB of grey, and three times that in colours
        assert len(bomb) < 200_000
        with pytest.raises(MediaInvalid, match="too much memory"):
            small.submit(bomb, TARGET).result(WAIT_S)
        assert small.submit(PICTURE, TARGET).result(WAIT_S).width_px == 90
        assert small.pids == [pid]
    finally:
        small.stop()


def test_a_picture_that_takes_too_long_ends_its_process_alone() -> None:
    """The kernel counts whole seconds of CPU, so the limit is put below what is used already."""
    hasty = pool_of(picture=Limits(10**8, 0))
    try:
        pid, slow = pid_of(hasty), png_bomb(12_000, 8_000)
        large = Target(4000, 4000, int(Image.Resampling.LANCZOS))
        outcomes = (hasty.submit(slow, large).exception(WAIT_S) for _ in range(10))
        assert any("too long to decode" in str(outcome) for outcome in outcomes)
        assert hasty.submit(PICTURE, TARGET).result(WAIT_S).width_px == 90
        assert hasty.pids != [pid]
    finally:
        hasty.stop()


# --- processes that die or hang ---------------------------------------------------------------------------------------


def test_a_process_killed_in_the_middle_is_replaced_and_the_picture_decoded(pool: MediaPool) -> None:
    pid, starts = pid_of(pool), metrics.MEDIA_PROCESS_STARTS._value.get()
    os.kill(pid, signal.SIGSTOP)
    future = pool.submit(PICTURE, TARGET)
    time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    assert future.result(WAIT_S).width_px == 90
    assert pool.pids != [pid]
    assert metrics.MEDIA_PROCESS_STARTS._value.get() == starts + 1


def test_a_process_killed_while_idle_is_no_matter(pool: MediaPool) -> None:
    for _ in range(3):
        os.kill(pid := pid_of(pool), signal.SIGKILL)
        eventually(lambda gone=pid: not is_there(gone))  # type: ignore[misc]
        assert pool.submit(PICTURE, TARGET).result(WAIT_S).width_px == 90


def test_processes_killed_again_and_again_are_an_error_that_may_pass(
    pool: MediaPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, pid = results("lost"), pid_of(pool)

    def dies(self: MediaProcess, *_: object) -> Decoded:
        os.kill(self.pid, signal.SIGKILL)
        raise ProcessLost(self.end())

    with monkeypatch.context() as patched:
        patched.setattr(MediaProcess, "decode", dies)
        with pytest.raises(Unavailable, match="try again"):
            pool.submit(PICTURE, TARGET).result(WAIT_S)
    assert results("lost") == before + 1
    assert pool.submit(PICTURE, TARGET).result(WAIT_S).width_px == 90
    assert pool.pids != [pid]


@pytest.mark.parametrize("answer", [b"x" * 200, pack_picture((90, 70), TARGET.num_bytes - 3) + bytes(9000)])
def test_a_process_that_answers_nonsense_is_ended(
    pool: MediaPool, monkeypatch: pytest.MonkeyPatch, answer: bytes
) -> None:
    pid_of(pool)
    lane = pool._lanes[0]
    assert lane._process is not None
    ours, theirs = socket.socketpair()
    theirs.sendall(answer)
    lane._process._stream.close()
    monkeypatch.setattr(lane._process, "_stream", ours)
    assert pool.submit(PICTURE, TARGET).result(WAIT_S).width_px == 90  # by the one that replaced it
    theirs.close()


def test_processes_that_do_not_start_are_not_the_pictures_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(process, "sys", SimpleNamespace(executable="/bin/false"))
        lame = pool_of()
        with pytest.raises(Unavailable, match="do not start; try again later"):
            lame.submit(PICTURE, TARGET).result(WAIT_S)
    try:
        assert lame.submit(PICTURE, TARGET).result(WAIT_S).width_px == 90
    finally:
        lame.stop()


def test_a_machine_without_room_for_a_process_is_an_error_that_may_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    before = results("lost")
    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "Popen", refuse)
        full = pool_of()
        with pytest.raises(Unavailable, match="try again later"):
            full.submit(PICTURE, TARGET).result(WAIT_S)
    try:
        assert full.is_progressing()
        assert full.submit(PICTURE, TARGET).result(WAIT_S).width_px == 90
        assert results("lost") == before + 1
    finally:
        full.stop()


def test_what_is_left_of_one_pictures_reply_is_never_taken_for_anothers(
    pool: MediaPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker has no memory for the first one's pixels, which spell a whole reply of the size of the second's."""
    small = Target(8, 8, BICUBIC)
    forged = pack_picture((90, 70), small.num_bytes) + bytes([66]) * small.num_bytes
    pixels = np.frombuffer(forged.ljust(TARGET.num_bytes, b"\0"), dtype=np.uint8).reshape(28, 56, 3)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    read = process.read_exactly

    def without_memory(stream: socket.socket, num_bytes: int, give_up_at: float | None = None) -> bytearray:
        if num_bytes == TARGET.num_bytes:
            raise MemoryError
        return read(stream, num_bytes, give_up_at)

    with monkeypatch.context() as patched:
        patched.setattr(process, "read_exactly", without_memory)
        with pytest.raises(TriptychError):
            pool.submit(buffer.getvalue(), TARGET).result(WAIT_S)
    expected = Image.open(io.BytesIO(PICTURE)).convert("RGB").resize((8, 8), BICUBIC)
    assert np.array_equal(pool.submit(PICTURE, small).result(WAIT_S).pixels, np.asarray(expected))


def test_a_process_that_hangs_is_killed_in_time() -> None:
    hasty = pool_of(timeout_s=0.5)
    try:
        eventually(lambda: _works(hasty))  # at once, but for a machine that is very busy
        before, pid = results("late"), pid_of(hasty)
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(DeadlineExceeded):
            hasty.submit(PICTURE, TARGET).result(WAIT_S)
        assert not is_there(pid)
        assert results("late") == before + 1
        eventually(lambda: _works(hasty))  # a new one takes a while to start
    finally:
        hasty.stop()


def _works(pool: MediaPool) -> bool:
    try:
        return pool.submit(PICTURE, TARGET).result(WAIT_S).width_px == 90
    except DeadlineExceeded:
        return False


# --- queue and end ----------------------------------------------------------------------------------------------------


def test_the_queue_is_bounded_and_what_was_given_up_is_never_decoded() -> None:
    full, before = pool_of(max_waiting=3), results("decoded")
    try:
        os.kill(pid := pid_of(full), signal.SIGSTOP)
        running = full.submit(PICTURE, TARGET)
        eventually(running.running)
        waiting = [full.submit(PICTURE, TARGET) for _ in range(3)]
        with pytest.raises(NoRoom):
            full.submit(PICTURE, TARGET)
        for future in waiting:
            assert future.cancel()
        os.kill(pid, signal.SIGCONT)
        assert running.result(WAIT_S).width_px == 90
        assert full.submit(PICTURE, TARGET).result(WAIT_S).width_px == 90
        assert results("decoded") == before + 2
    finally:
        full.stop()


def test_an_ending_pool_refuses_what_waits_and_leaves_nobody() -> None:
    ending = pool_of(processes=2)
    eventually(lambda: len(ending.pids) == 2)
    pids = ending.pids
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    futures: list[Future[Decoded]] = [ending.submit(PICTURE, TARGET) for _ in range(6)]
    eventually(lambda: sum(future.running() for future in futures) == 2)
    ending.stop()
    for future in futures:
        assert isinstance(future.exception(WAIT_S), Aborted)
    with pytest.raises(Aborted):
        ending.submit(PICTURE, TARGET)
    assert not any(is_there(pid) for pid in pids)
    assert not ending.is_progressing()
    ending.stop()


def test_a_pool_ends_though_a_lane_takes_the_last_picture_at_that_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    ending = pool_of()
    monkeypatch.setattr(ending._queue, "empty", lambda: False)  # it was not, a moment ago
    pid = pid_of(ending)
    ending.stop()
    assert not is_there(pid)
    assert not ending.is_progressing()


WORKER = """
import os, signal, time
from triptych.media.frames import Limits, Target
from triptych.media.process import Confinement, MediaProcess
process = MediaProcess(Confinement(1 << 30, 0))
try:
    process.decode(b"", Target(9, 9, 3), Limits(9, 9), time.monotonic() + 20)  # it has started when it answers
except Exception:
    pass
os.kill(process.pid, signal.SIGSTOP)  # it cannot notice by itself
print(process.pid, flush=True)
time.sleep(60)
"""


def test_a_process_ends_with_its_worker_however_that_ends() -> None:
    worker = subprocess.Popen([sys.executable, "-c", WORKER], stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    pid = int(worker.stdout.readline())
    assert is_there(pid)
    worker.kill()
    worker.communicate()
    eventually(lambda: not is_there(pid))


def test_a_process_is_confined_and_knows_no_secret(pool: MediaPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIPTYCH_SECRET", "sesame")
    process = MediaProcess(Confinement(1 << 28, 3))
    try:
        process.decode(PICTURE, TARGET, Limits(10**8, 20), time.monotonic() + WAIT_S)
        folder = Path(f"/proc/{process.pid}")
        assert b"sesame" not in (folder / "environ").read_bytes()
        limits = {line[:25].strip(): line[26:46].strip() for line in (folder / "limits").read_text().splitlines()}
        assert limits["Max file size"] == limits["Max core file size"] == "0"
        assert int(limits["Max open files"]) <= 64
        assert (1 << 28) < int(limits["Max address space"]) < (1 << 30)
        assert int(limits["Max cpu time"]) <= 30
        assert (folder / "stat").read_text().rsplit(")", 1)[1].split()[16] == str(os.nice(0) + 3)
        mapped = (folder / "maps").read_text()
        assert "libtorch" not in mapped and "grpc" not in mapped
    finally:
        assert process.end() == 0


def test_a_failpoint_before_decoding(pool: MediaPool) -> None:
    with armed("media.before_decode=error(no_room)*1"), pytest.raises(NoRoom):
        pool.submit(PICTURE, TARGET).result(WAIT_S)
    assert pool.submit(PICTURE, TARGET).result(WAIT_S).width_px == 90


# --- frames -----------------------------------------------------------------------------------------------------------


def test_a_request_says_what_was_asked() -> None:
    packed = pack_request(Target(640, 480, 3), Limits(10**8, 20), 12345)
    assert unpack_request(packed) == (Target(640, 480, 3), Limits(10**8, 20), 12345)
    for spoilt in (b"X" + packed[1:], packed[:4] + b"\x02" + packed[5:]):
        with pytest.raises(MalformedFrame):
            unpack_request(spoilt)
    assert REQUEST.size == 28 and REPLY.size == 24


@pytest.mark.parametrize(
    "head",
    [
        b"x" * 24,
        pack_picture((90, 70), TARGET.num_bytes + 1),
        pack_picture((0, 70), TARGET.num_bytes),
        pack_picture((90, 1 << 21), TARGET.num_bytes),
        REPLY.pack(b"TPMR", 1, 2, 0, 9, 9, TARGET.num_bytes),
        REPLY.pack(b"TPMR", 1, 1, 0, 0, 0, MAX_REFUSAL_BYTES + 1),
        REPLY.pack(b"TPMR", 2, 0, 0, 9, 9, TARGET.num_bytes),
    ],
)
def test_a_reply_of_another_shape_is_not_believed(head: bytes) -> None:
    with pytest.raises(MalformedFrame):
        unpack_reply(head, TARGET)


def test_a_refusal_arrives_as_the_error_it_was() -> None:
    packed = pack_refusal(MediaInvalid("wörds " * 1000))
    head = unpack_reply(packed[: REPLY.size], TARGET)
    assert head.size_px is None and head.num_bytes == len(packed) - REPLY.size <= MAX_REFUSAL_BYTES
    error: TriptychError = refusal(packed[REPLY.size :])
    assert isinstance(error, MediaInvalid) and error.message.startswith("wörds wörds")
    assert type(refusal(b"startup\nno such error here")) is MediaInvalid


def test_the_depth_shown_is_what_waits_and_nothing_after_the_end() -> None:
    depth = metrics.MEDIA_QUEUE_DEPTH._value
    before = depth.get()
    pool = MediaPool(replace(ALLOWED, max_waiting=2), SystemClock())  # no lane takes anything yet
    waiting = [pool.submit(PICTURE, TARGET) for _ in range(2)]
    with pytest.raises(NoRoom):
        pool.submit(PICTURE, TARGET)
    assert depth.get() == before + 2
    pool.stop()
    assert all(isinstance(each.exception(WAIT_S), Aborted) for each in waiting)
    assert depth.get() == before
    working = pool_of()
    try:
        for each in [working.submit(PICTURE, TARGET) for _ in range(5)]:
            each.result(WAIT_S)
        assert depth.get() == before
    finally:
        working.stop()
