"""`triptych chat` against a server of this test's own."""

from __future__ import annotations

import contextlib
import http.server
import json
import shlex
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from triptych.cli import chat, sample
from triptych.cli.client import media_type
from triptych.cli.timeline_view import render, served_by
from triptych.core.errors import StartupError

TIMELINE = [
    {"stage": "router", "event": "parse", "start_ns": 1_000_000, "end_ns": 2_000_000, "worker": "router"},
    {"stage": "encoder", "event": "encode", "start_ns": 2_000_000, "end_ns": 9_000_000, "worker": "encoder-0"}
    | {"tokens": 16, "bytes": 0, "item": 0, "source": None, "attempt": 0},
    {"stage": "prefill", "event": "first_token", "start_ns": 11_000_000, "end_ns": 11_000_000, "worker": "prefill-0"}
    | {"tokens": 1, "attempt": 1, "source": "remote"},
]
CHUNKS: list[dict[str, Any]] = [
    {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
    {"choices": [{"delta": {"content": "The circle"}}]},
    {"choices": [{"delta": {"content": " is red."}, "finish_reason": "stop"}]},
    {"choices": [], "usage": {"prompt_tokens": 1}, "triptych": {"timeline": TIMELINE}},
]


class _Handler(http.server.BaseHTTPRequestHandler):
    chunks = CHUNKS
    seen: dict[str, Any]
    path_seen: str

    def do_GET(self) -> None:
        self._send(200, json.dumps({"data": [{"id": "demo-vl"}]}))

    def do_POST(self) -> None:
        type(self).path_seen = self.path
        type(self).seen = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.seen["messages"][-1]["content"][-1]["text"] == "fail":
            self._send(400, json.dumps({"error": {"message": "no such thing"}}))
        else:
            self._send(200, "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in self.chunks) + "data: [DONE]\n\n")

    def _send(self, status: int, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_the_answer_is_printed_and_the_pictures_come_first(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "p.png"
    picture.write_bytes(sample.picture_png())
    assert chat.main([str(picture), "http://x/y.png", "What?", "--url", url, "--max-tokens", "7"]) == 0
    assert capsys.readouterr().out == "The circle is red.\n"
    content = _Handler.seen["messages"][0]["content"]
    assert [part["type"] for part in content] == ["image_url", "image_url", "text"]
    assert content[0]["image_url"]["url"].startswith("data:image/png;base64,")
    assert content[1]["image_url"]["url"] == "http://x/y.png"
    assert (_Handler.seen["model"], _Handler.seen["max_tokens"]) == ("demo-vl", 7)


def test_the_timeline_is_a_table_with_bars(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert chat.main(["What?", "--url", url, "--timeline"]) == 0
    rows = capsys.readouterr().out.splitlines()[2:]
    assert rows[0].split() == "stage event worker start ms took ms tokens bytes note when".split()
    assert rows[2].split()[:6] == ["encoder", "encode", "encoder-0", "1.0", "7.0", "16"]
    assert rows[3].endswith("·")
    assert "remote, attempt 1" in rows[3]
    bars = [row.rstrip("·█") for row in rows[1:]]
    assert len(bars[0]) < len(bars[1]) < len(bars[2])


def test_an_error_of_the_server_is_shown_with_status_1(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert chat.main(["fail", "--url", url]) == 1
    assert capsys.readouterr().err == "error: no such thing (HTTP 400)\n"


def test_an_error_inside_a_stream_is_shown(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_Handler, "chunks", [CHUNKS[1], {"error": {"message": "a worker died"}}])
    assert chat.main(["What?", "--url", url]) == 1
    assert "error: a worker died" in capsys.readouterr().err


def test_without_a_server_it_says_how_to_start_one() -> None:
    with pytest.raises(StartupError, match="start one with: triptych up"):
        chat.main(["What?", "--url", "http://127.0.0.1:1"])


def test_an_address_without_http_is_named() -> None:
    with pytest.raises(StartupError, match=r"127\.0\.0\.1:8000 is no address of a server; give one like http://"):
        chat.main(["What?", "--url", "127.0.0.1:8000"])


@pytest.mark.parametrize("address", ["http://[::1", "http://x\x01y", f"http://{'a' * 300}", "http://\udcff", "http://"])
def test_an_address_that_is_none_is_named(address: str) -> None:
    with pytest.raises(StartupError, match="is no address of a server; give one like http://"):
        chat.main(["What?", "--url", address])


@pytest.mark.parametrize("flags", [["--temperature", "nan"], ["--temperature", "x"], ["--model", "\udcff"], ["\udcff"]])
def test_what_cannot_be_sent_is_a_sentence(url: str, flags: list[str]) -> None:
    with pytest.raises(StartupError, match=r"argument .*is not .*; triptych chat --help"):
        chat.main(["picture.png", "What?", "--url", url, *flags])


@pytest.mark.parametrize("body", ["<html>", "[]", "3", '{"data": []}', '{"data": [3]}', '{"data": {"0": {}}}'])
def test_another_server_at_the_address_is_named(
    url: str, body: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_Handler, "do_GET", lambda self: self._send(200, body))
    assert chat.main(["What?", "--url", url]) == 1
    assert "does not speak this API" in capsys.readouterr().err


def test_the_address_may_end_as_the_openai_client_wants_it(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert chat.main(["What?", "--url", f"{url}/v1/"]) == 0
    assert _Handler.path_seen == "/v1/chat/completions"
    assert capsys.readouterr().out == "The circle is red.\n"


def test_a_missing_picture_is_named() -> None:
    with pytest.raises(StartupError, match=r"the picture gone\.png cannot be read: No such file"):
        chat.main(["gone.png", "What?"])


def test_a_wrong_flag_is_a_sentence() -> None:
    with pytest.raises(StartupError, match="triptych chat --help"):
        chat.main(["What?", "--nope"])
    with contextlib.suppress(SystemExit):
        chat.main(["--help"])


def test_an_empty_timeline_is_a_sentence() -> None:
    assert "no timeline" in render([])


def test_who_served() -> None:
    assert served_by(TIMELINE) == {"router": "router", "encoder": "encoder-0", "prefill": "prefill-0"}


def test_media_types() -> None:
    assert media_type(sample.picture_png()) == "image/png"
    assert media_type(b"RIFF\0\0\0\0WEBPVP8 ") == "image/webp"
    assert media_type(b"?") == "application/octet-stream"


def test_the_curl_is_one_command_for_a_shell() -> None:
    words = shlex.split(sample.curl("http://h:1", "it's"))
    assert words[0] == "curl" and "http://h:1/v1/chat/completions" in words
    body = json.loads(words[-1])
    assert body["model"] == "it's"
    assert len(words[-1]) < 1200
    of_text = json.loads(shlex.split(sample.text_curl("http://h:1", "it's"))[-1])
    assert of_text["messages"] == [{"role": "user", "content": sample.TEXT_QUESTION}]


def test_a_question_that_is_a_file_was_forgotten(tmp_path: Path) -> None:
    (tmp_path / "a.png").touch()
    for argv in ([str(tmp_path / "a.png")], ["What is it?", str(tmp_path / "a.png")]):
        with pytest.raises(StartupError, match="the question comes last"):
            chat.main(argv)
