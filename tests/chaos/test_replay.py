"""Workers that are killed or frozen at random moments under a mixed load, two of each stage: every answer is whole and
the one that an undisturbed cluster gave.

Streams are read piece by piece, greedy and seeded ones, long enough that most losses fall into the middle of an answer.
A few losses each run; twenty kills and as many freezes as stages with `make verify-cluster`.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from tests.integration.launching import Launcher, launched
from tests.seed import IS_FULL, SEED
from triptych.cli import sample
from triptych.cli.client import picture_part

READY_S = 120.0
PATIENCE_S = 300.0
"""For the next few answers: a frozen worker is found out by an unanswered ping, half a minute later."""
STAGES = ("encoder", "prefill", "decode")
NUM_KILLS = 20 if IS_FULL else len(STAGES)
NUM_REQUESTS = 200 if IS_FULL else 36
NUM_THREADS = 6

Body = dict[str, Any]


@dataclass(frozen=True)
class Heard:
    """What a client makes of a stream."""

    text: str
    finish_reason: str
    completion_tokens: int


def picture(number: int) -> bytes:
    """The sample with one pixel changed: another picture, which looks the same."""
    image, buffer = Image.open(io.BytesIO(sample.picture_png())), io.BytesIO()
    image.putpixel((number % image.width, number // image.width), (0, 0, 0))
    image.save(buffer, "PNG")
    return buffer.getvalue()


def bodies() -> list[Body]:
    """Text and pictures, known and unknown, greedy and seeded, short and long."""
    texts = [sample.TEXT_QUESTION, "Tell me of the sea.", "Say it again, and again."]
    contents: list[Any] = list(texts)
    for number in range(5):
        parts = [picture_part(picture(number + which)) for which in range(1 + number % 2)]
        contents.append([*parts, {"type": "text", "text": sample.QUESTION}])
    ways: list[Body] = [{"temperature": 0}, {"temperature": 0.9, "seed": 7}]
    lengths: list[Body] = [{"max_tokens": 24}, {"max_tokens": 96, "ignore_eos": True}]
    asked = [
        {"messages": [{"role": "user", "content": content}], **way, **length}
        for content, way, length in itertools.product(contents, ways, lengths)
    ]
    random.Random(SEED).shuffle(asked)
    return [body | {"stream": True, "stream_options": {"include_usage": True}} for body in asked]


def hear(client: httpx.Client, url: str, body: Body) -> Heard:
    """Raises AssertionError with what came instead of a whole stream."""
    text, reason, count, is_done = "", "", 0, False
    with client.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
        assert response.status_code == 200, (response.status_code, response.read())
        for line in response.iter_lines():
            data = line.removeprefix("data: ")
            if data == "[DONE]":
                is_done = True
            elif line:
                event = json.loads(data)
                assert "error" not in event, event
                for choice in event["choices"]:
                    text += choice["delta"].get("content") or ""
                    reason = choice["finish_reason"] or reason
                count = (event.get("usage") or {}).get("completion_tokens", count)
    assert is_done, "the stream broke off"
    return Heard(text, reason, count)


@dataclass
class Load:
    """Asks from several threads until so many answers were heard, and until the block ends."""

    url: str
    asked: list[Body]
    truth: list[Heard]
    num_heard: int = 0
    wrong: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._numbers = itertools.count()
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._ask_on) for _ in range(NUM_THREADS)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)

    def wait_for_more(self, count: int) -> None:
        wanted, give_up_at = self.num_heard + count, time.monotonic() + PATIENCE_S
        while self.num_heard < wanted and not self.wrong:
            assert time.monotonic() < give_up_at, "answers do not come any more"
            time.sleep(0.005)

    def _ask_on(self) -> None:
        with httpx.Client(timeout=PATIENCE_S) as client:
            while not self._stopping.is_set():
                number = next(self._numbers) % len(self.asked)
                try:
                    heard = hear(client, self.url, self.asked[number])
                except (AssertionError, httpx.HTTPError) as error:
                    self.wrong.append(repr(error))
                    continue
                if heard != self.truth[number]:
                    self.wrong.append((self.asked[number]["max_tokens"], self.truth[number], heard))
                self.num_heard += 1


def wait_restarted(launcher: Launcher, worker_id: str, old_pid: int) -> int:
    """The pid of the one that took its place, once it serves."""
    record, give_up_at = launcher.runtime / "workers" / f"{worker_id}.json", time.monotonic() + READY_S
    while True:
        with contextlib.suppress(FileNotFoundError):
            found = record.read_text()
            pid = re.search(r'"pid": (\d+)', found)
            if pid is not None and int(pid[1]) != old_pid and "READY" in found:
                return int(pid[1])
        assert time.monotonic() < give_up_at, f"{worker_id} was not started again"
        time.sleep(0.05)


def disturbed(folder: Path, disturb: Callable[[Launcher, Load, dict[str, int]], None]) -> None:
    """A cluster with two workers a stage, its own undisturbed answers as the truth, and a load that is disturbed."""
    flags = ("--topology", "e-p-d", "--encoders", "2", "--prefills", "2", "--decodes", "2")
    asked = bodies() if IS_FULL else bodies()[:14]
    with launched(folder, *flags) as launcher:
        ready = launcher.wait_ready(READY_S)
        with httpx.Client(timeout=PATIENCE_S) as client:
            truth = [hear(client, ready["url"], body) for body in asked]
        assert max(heard.completion_tokens for heard in truth) == 96, "none is long enough to be lost in its middle"
        with Load(ready["url"], asked, truth) as load:
            disturb(launcher, load, ready["pids"])
            load.wait_for_more(max(0, NUM_REQUESTS - load.num_heard))
        assert load.wrong == []
        status, _ = launcher.signal_and_wait(signal.SIGINT)
    assert status == 0


@pytest.mark.timeout(3000 if IS_FULL else 400)
def test_no_answer_fails_or_changes_when_workers_are_killed(tmp_path: Path) -> None:
    rng = random.Random(SEED)

    def kill(launcher: Launcher, load: Load, pids: dict[str, int]) -> None:
        for number in range(NUM_KILLS):
            victim = f"{STAGES[number % len(STAGES)]}-{rng.randrange(2)}"
            load.wait_for_more(rng.randint(2, 6))
            time.sleep(rng.random() * 0.3)
            os.kill(pids[victim], signal.SIGKILL)
            pids[victim] = wait_restarted(launcher, victim, pids[victim])

    disturbed(tmp_path, kill)


@pytest.mark.timeout(3000)
@pytest.mark.skipif(not IS_FULL, reason="takes minutes: in make verify-cluster")
def test_no_answer_fails_or_changes_when_workers_freeze(tmp_path: Path) -> None:
    """Those that they had are given to others when their silence has lasted; afterwards they serve again."""
    rng = random.Random(SEED + 1)

    def freeze(_: Launcher, load: Load, pids: dict[str, int]) -> None:
        for stage in STAGES:
            victim = pids[f"{stage}-{rng.randrange(2)}"]
            load.wait_for_more(rng.randint(2, 6))
            os.kill(victim, signal.SIGSTOP)
            try:
                load.wait_for_more(4 * NUM_THREADS)
            finally:
                os.kill(victim, signal.SIGCONT)
            load.wait_for_more(NUM_THREADS)

    disturbed(tmp_path, freeze)
