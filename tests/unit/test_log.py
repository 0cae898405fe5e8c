"""Log records: one line each, whatever is in them."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from triptych.obs.log import LogFormat, configure_logging, for_request


@pytest.fixture(autouse=True)
def _restore_root() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def _logged(log_format: LogFormat, message: str, level: str = "info") -> str:
    stream = io.StringIO()
    configure_logging("router", level, log_format, stream)
    log = for_request(logging.getLogger("triptych.test"), "req-1")
    log.info(message, extra={"tokens": 3})
    return stream.getvalue()


def test_json_carries_the_request_and_extra_fields() -> None:
    entry = json.loads(_logged("json", "served"))
    assert entry["message"] == "served"
    assert (entry["service"], entry["level"], entry["request_id"], entry["tokens"]) == ("router", "info", "req-1", 3)


@pytest.mark.parametrize("log_format", ["json", "text"])
@pytest.mark.parametrize("forged", ["a\nERROR b", "a\r\nb", "a\x1b[2Jb", "a\u2028b", "a\x85b"])
def test_a_record_is_one_line(log_format: LogFormat, forged: str) -> None:
    text = _logged(log_format, forged)
    assert text.count("\n") == 1
    assert len(text.splitlines()) == 1
    assert "\x1b" not in text


def test_a_traceback_is_indented_so_that_it_forges_nothing() -> None:
    stream = io.StringIO()
    configure_logging("router", "info", "text", stream)
    try:
        raise ValueError("x\n2026-01-01T00:00:00.000Z ERROR router forged: y")
    except ValueError:
        logging.getLogger("t").exception("failed")
    assert all(line.startswith("    | ") for line in stream.getvalue().splitlines()[1:])


def test_the_level_filters() -> None:
    assert _logged("text", "quiet", level="warning") == ""


@pytest.mark.parametrize("log_format", ["json", "text"])
def test_uvicorns_coloured_copy_of_a_message_is_left_out(log_format: LogFormat) -> None:
    stream = io.StringIO()
    configure_logging("router", "info", log_format, stream)
    logging.getLogger("uvicorn.error").info("started", extra={"color_message": "\x1b[36mstarted\x1b[0m", "port": 1})
    assert "color" not in stream.getvalue() and "port" in stream.getvalue()
