"""A cluster on the bundled model, as its users and operators meet it."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import re
import shlex
import shutil
import signal
import subprocess
import threading
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from tests.integration.launching import Launcher, launched, living, segments, wait_gone
from tests.seed import rotating
from triptych.cli import sample
from triptych.cli.client import ChatClient, ChatFailed, picture_part

READY_SECONDS = 120.0
ANSWER = "The circle is red."


def _ask(url: str) -> Any:
    with ChatClient(url) as client:
        content = [picture_part(sample.picture_png()), {"type": "text", "text": sample.QUESTION}]
        body = {"model": client.model_name(), "messages": [{"role": "user", "content": content}], "max_tokens": 32}
        return client.ask(body | {"temperature": 0}, timeline=True)


def _parameters(metrics_address: str) -> dict[str, float]:
    text = urllib.request.urlopen(f"http://{metrics_address}/metrics", timeout=5).read().decode()
    found = re.findall(r'^triptych_model_parameters\{part="(\w+)"\} (\S+)$', text, re.MULTILINE)
    return {part: float(count) for part, count in found if float(count)}


@pytest.mark.parametrize("topology", ["cluster_url", "mono_url"])
def test_a_picture_goes_through_every_stage_and_the_answer_is_right(
    topology: str, request: pytest.FixtureRequest
) -> None:
    answer = _ask(request.getfixturevalue(topology))
    assert answer.text == ANSWER
    assert {row["stage"] for row in answer.timeline} == {"router", "encoder", "prefill", "decode"}


def test_again_and_again_it_is_right(cluster_url: str) -> None:
    """From the second time on the picture and the prompt are cached, and encoder and prefill race."""
    assert [_ask(cluster_url).text for _ in range(30)] == [ANSWER] * 30


def test_the_printed_curl_is_right(cluster_url: str) -> None:
    model = httpx.get(f"{cluster_url}/v1/models").json()["data"][0]["id"]
    command = shlex.split(sample.curl(cluster_url, model))
    printed = subprocess.run(command, capture_output=True, check=True, timeout=30).stdout
    assert json.loads(printed)["choices"][0]["message"]["content"] == ANSWER


@pytest.mark.timeout(180)
def test_stages_load_only_their_weights_and_a_stop_leaves_nothing(tmp_path: Path) -> None:
    with launched(tmp_path) as launcher:
        ready = launcher.wait_ready(READY_SECONDS)
        counts = {name: _parameters(worker["metrics_address"]) for name, worker in ready["workers"].items()}
        assert {name: set(parts) for name, parts in counts.items()} == {
            "encoder-0": {"vision"},
            "prefill-0": {"language"},
            "decode-0": {"language"},
        }
        mine = {name for name in segments() if _is_mapped_by(name, ready["pids"].values())}
        assert mine
        assert _ask(ready["url"]).text == ANSWER
        # An encoder has embeddings to land and nothing to do with KV: it must not even be able to reach it.
        assert {name: _arenas_of(pid) for name, pid in ready["pids"].items()} == {
            "encoder-0": {"landing"},
            "prefill-0": {"landing", "kv"},
            "decode-0": {"kv"},
            "router": set(),
        }
        status, output = launcher.signal_and_wait(signal.SIGINT)
    assert status == 0
    assert "was killed" not in output
    assert living(ready["pids"]) == {}
    assert not mine & segments()
    assert not launcher.runtime.exists()


@pytest.mark.timeout(180)
def test_after_kill_9_the_next_start_leaves_nothing_of_the_old_one(tmp_path: Path) -> None:
    with launched(tmp_path) as launcher:
        old = launcher.wait_ready(READY_SECONDS)
        mine = {name for name in segments() if _is_mapped_by(name, old["pids"].values())}
        for pid in old["pids"].values():
            _kill(pid)
        launcher.signal_and_wait(signal.SIGKILL)
    assert wait_gone(old["pids"]) == {}
    with launched(tmp_path) as launcher:
        new = launcher.wait_ready(READY_SECONDS)
        assert not mine & segments()
        assert _ask(new["url"]).text == ANSWER
        launcher.signal_and_wait(signal.SIGINT)
    assert not launcher.runtime.exists()


MERGED = {"vision", "language"}
# What a client may hear of a worker that died under its request.
RETRIABLE = {"peer_lost", "receiver_lost", "embedding_missing", "unavailable", "transfer_refused", "stale_attempt"}


# Topology; flags; what each worker has loaded; who is killed together.
Killing = tuple[str, tuple[str, ...], dict[str, set[str]], tuple[tuple[str, ...], ...]]
KILLINGS: list[Killing] = [
    (
        "e-pd",
        ("--encoders", "2", "--prefills", "2"),
        {"encoder-0": {"vision"}, "encoder-1": {"vision"}, "pd-0": {"language"}, "pd-1": {"language"}},
        (("encoder-0", "pd-1"),),
    ),
    (
        "p-d",
        ("--prefills", "2", "--decodes", "2"),
        {"ep-0": MERGED, "ep-1": MERGED, "decode-0": {"language"}, "decode-1": {"language"}},
        (("ep-1", "decode-0"),),
    ),
    (
        "e-p-d+mono",
        (),
        {"encoder-0": {"vision"}, "prefill-0": {"language"}, "decode-0": {"language"}, "mono-0": MERGED},
        (("prefill-0", "encoder-0"), ("mono-0",)),
    ),
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("killing", rotating(KILLINGS), ids=lambda killing: killing[0])
def test_workers_that_are_killed_cost_no_wrong_answer(killing: Killing, tmp_path: Path) -> None:
    """Each worker has loaded what its stages need. Killed under load, answers are right or typed errors, and mostly
    right: others can do what the dead ones did. Afterwards they serve again."""
    topology, flags, parts, rounds = killing
    with launched(tmp_path, "--topology", topology, *flags) as launcher:
        ready = launcher.wait_ready(READY_SECONDS)
        counts = {name: _parameters(worker["metrics_address"]) for name, worker in ready["workers"].items()}
        assert {name: set(loaded) for name, loaded in counts.items()} == parts
        assert len({loaded["language"] for loaded in counts.values() if "language" in loaded}) == 1
        with Load(ready["url"]) as load:
            load.wait_for_more(12)
            for victims in rounds:
                for victim in victims:
                    _kill(ready["pids"][victim])
                load.wait_for_more(12)
                for victim in victims:
                    _wait_restarted(launcher, victim, ready["pids"][victim])
            load.wait_for_more(12)
        assert load.wrong == []
        assert set(load.errors) <= RETRIABLE
        assert sum(load.errors.values()) <= load.NUM_THREADS * sum(map(len, rounds)) < load.num_right, load.errors
        assert load.used == set(parts), "every worker has served"
        status, _ = launcher.signal_and_wait(signal.SIGINT)
    assert status == 0


@pytest.mark.timeout(180)
def test_a_runtime_folder_that_is_cleaned_away_comes_back(tmp_path: Path) -> None:
    with launched(tmp_path, "--topology", "mono") as launcher:
        ready = launcher.wait_ready(READY_SECONDS)
        shutil.rmtree(launcher.runtime)
        give_up_at = time.monotonic() + 60
        while not (launcher.runtime / "workers" / "mono-0.json").exists():
            assert time.monotonic() < give_up_at, "the worker did not announce itself again"
            time.sleep(0.05)
        _wait_for_answer(ready["url"])
        assert launcher.runtime.stat().st_mode & 0o777 == 0o700
        _kill(ready["pids"]["mono-0"])
        _wait_restarted(launcher, "mono-0", ready["pids"]["mono-0"])
        _wait_for_answer(ready["url"])
        status, _ = launcher.signal_and_wait(signal.SIGINT)
    assert status == 0
    assert not launcher.runtime.exists()


def _wait_for_answer(url: str) -> None:
    """For a moment nobody finds the worker."""
    give_up_at = time.monotonic() + 60
    while True:
        try:
            answer = _ask(url)
        except ChatFailed:
            assert time.monotonic() < give_up_at
            time.sleep(0.1)
        else:
            assert answer.text == ANSWER
            return


class Load:
    """Asks from several threads, each time about a file that no cache has seen, until the block ends."""

    NUM_THREADS = 4

    def __init__(self, url: str) -> None:
        self.wrong: list[str] = []
        self.errors: Counter[str] = Counter()
        self.used: set[str] = set()
        self.num_right = 0
        self._url = url
        self._numbers = itertools.count()
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._ask_on) for _ in range(self.NUM_THREADS)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in self._threads), "a request has not ended"

    def wait_for_more(self, count: int) -> None:
        """Right answers, from now on."""
        wanted, give_up_at = self.num_right + count, time.monotonic() + 60
        while self.num_right < wanted:
            assert time.monotonic() < give_up_at, (self.wrong, self.errors)
            time.sleep(0.01)

    def _ask_on(self) -> None:
        with httpx.Client(timeout=60) as client:
            while not self._stopping.is_set():
                self._ask_once(client)

    def _ask_once(self, client: httpx.Client) -> None:
        content = [picture_part(_unseen(next(self._numbers))), {"type": "text", "text": sample.QUESTION}]
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 32, "temperature": 0}
        headers = {"x-triptych-timeline": "1"}
        response = client.post(f"{self._url}/v1/chat/completions", json=body, headers=headers)
        found = response.json()
        if response.status_code != 200:
            self.errors[found["error"]["code"]] += 1
        elif found["choices"][0]["message"]["content"] != ANSWER:
            self.wrong.append(found["choices"][0]["message"]["content"])
        else:
            self.num_right += 1
            self.used.update(*found["triptych"]["workers"].values())


def _unseen(number: int) -> bytes:
    """The same pixels in another file."""
    note, buffer = PngInfo(), io.BytesIO()
    note.add_text("number", str(number))
    Image.open(io.BytesIO(sample.picture_png())).save(buffer, "PNG", pnginfo=note)
    return buffer.getvalue()


def _wait_restarted(launcher: Launcher, worker_id: str, old_pid: int) -> None:
    record, give_up_at = launcher.runtime / "workers" / f"{worker_id}.json", time.monotonic() + READY_SECONDS
    while not record.exists() or f'"pid": {old_pid}' in (text := record.read_text()) or "READY" not in text:
        assert time.monotonic() < give_up_at, f"{worker_id} was not started again"
        time.sleep(0.05)


def _is_mapped_by(segment: str, pids: Any) -> bool:
    return any(segment in Path(f"/proc/{pid}/maps").read_text() for pid in pids)


def _arenas_of(pid: int) -> set[str]:
    """The kinds of our segments that a process has mapped, or open."""
    seen = Path(f"/proc/{pid}/maps").read_text()
    for handle in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
            seen += f"{handle.readlink()}\n"
    return set(re.findall(r"/dev/shm/triptych-([a-z]+)-", seen))


def _kill(pid: int) -> None:
    subprocess.run(["kill", "-KILL", str(pid)], check=True)
