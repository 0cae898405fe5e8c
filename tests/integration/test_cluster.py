"""A cluster on the bundled model, as its users and operators meet it."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.launching import launched, living, segments, wait_gone
from triptych.cli import sample
from triptych.cli.client import ChatClient, picture_part

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


def _is_mapped_by(segment: str, pids: Any) -> bool:
    return any(segment in Path(f"/proc/{pid}/maps").read_text() for pid in pids)


def _kill(pid: int) -> None:
    subprocess.run(["kill", "-KILL", str(pid)], check=True)
