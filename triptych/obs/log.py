"""Logs: one record a line, as JSON or as text, with the id of the request where there is one.

Whatever ends up in a record, a line break in it cannot start a forged record: JSON escapes it, text escapes it in
messages and indents the lines of a traceback. Do not log keys, media or addresses of memory.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping, MutableMapping
from typing import Any, Literal, TextIO

LogFormat = Literal["json", "text"]
LEVELS = ("debug", "info", "warning", "error")

_STANDARD = frozenset(vars(logging.LogRecord("", 0, "", 0, "", (), None))) | {"message", "asctime", "taskName"}
_REPEATED = {"color_message"}  # uvicorn's: the message again, with the codes of a terminal
_TRACE_INDENT = "    | "


class RequestLog(logging.LoggerAdapter[logging.Logger]):
    """A logger that puts `request_id` on each record and keeps the record's own extra fields."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        kwargs["extra"] = {**(self.extra or {}), **(kwargs.get("extra") or {})}
        return msg, kwargs


def for_request(logger: logging.Logger, request_id: str) -> RequestLog:
    return RequestLog(logger, {"request_id": request_id})


class JsonFormatter(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": _timestamp(record.created),
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
            **_extra_fields(record),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str, ensure_ascii=True)


class TextFormatter(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {name}={_one_line(str(value))}" for name, value in _extra_fields(record).items())
        head = f"{_timestamp(record.created)} {record.levelname:<7} {self._service} {record.name}: "
        line = f"{head}{_one_line(record.getMessage())}{fields}"
        if not record.exc_info:
            return line
        trace = self.formatException(record.exc_info).splitlines()
        return "\n".join([line, *(_TRACE_INDENT + _one_line(row) for row in trace)])


def configure_logging(
    service: str, level: str = "info", log_format: LogFormat = "text", stream: TextIO | None = None
) -> None:
    """Sends all records of this process to `stream` (standard error). Called once, by `__main__`."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(service) if log_format == "json" else TextFormatter(service))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def _extra_fields(record: logging.LogRecord) -> Mapping[str, object]:
    return {name: value for name, value in vars(record).items() if name not in _STANDARD | _REPEATED}


def _timestamp(seconds: float) -> str:
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{int(seconds % 1 * 1000):03d}Z"


def _one_line(text: str) -> str:
    """Escapes everything that a terminal or a reader of lines could take for the end of one."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)
