"""`triptych chat IMAGE... "question"`: one question to a running cluster."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import httpx

from triptych.cli.client import Answer, ChatClient, ChatFailed, picture_part
from triptych.cli.timeline_view import render
from triptych.core.errors import StartupError

DEFAULT_URL = "http://127.0.0.1:8000"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise StartupError(f"{message}; {self.prog} --help shows how to ask")


def main(argv: Sequence[str]) -> int:
    """Prints the answer as it comes; status 1 when the server refused. Raises StartupError for a wrong command line."""
    options = _parse(argv)
    answer = Answer()
    content = [*map(picture_part, options.images), {"type": "text", "text": options.question}]
    try:
        with ChatClient(options.url) as client:
            body = _body(options, content, options.model or client.model_name())
            for piece in client.stream(body, answer, timeline=options.timeline):
                print(piece, end="", flush=True)
            print()
    except ChatFailed as failure:
        print(f"\nerror: {failure.message}" if answer.text else f"error: {failure.message}", file=sys.stderr)
        return 1
    except httpx.HTTPError as error:
        raise unreachable(options.url, error) from error
    except (httpx.InvalidURL, UnicodeError) as error:  # the texts are checked: only the host is left
        raise _no_address(options.url) from error
    if options.timeline:
        print(f"\n{render(answer.timeline)}")
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(prog="triptych chat", description="Asks a running cluster about pictures.")
    parser.add_argument("images", nargs="*", metavar="IMAGE", help="a file or a URL, any number of them")
    parser.add_argument("question", type=_text)
    parser.add_argument("--url", default=DEFAULT_URL, help="of the API (%(default)s)")
    parser.add_argument("--model", type=_text, help="name of the model; the server's first if not given")
    parser.add_argument("--max-tokens", type=int, default=256, metavar="N", help="length of the answer (%(default)s)")
    parser.add_argument("--temperature", type=_number, default=0.0, metavar="T", help="0 is greedy (%(default)s)")
    parser.add_argument("--system", type=_text, help="a system prompt")
    parser.add_argument("--timeline", action="store_true", help="show what each stage did, and when")
    options = parser.parse_intermixed_args(argv)
    if _is_file(options.question):
        parser.error(f"{options.question} is a file, and the question comes last")
    return options


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except (OSError, ValueError):  # too long for a name, or with a zero in it
        return False


def _text(value: str) -> str:
    """Bytes of the command line that are no text cannot go into JSON."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError("it is not valid UTF-8") from None
    return value


def _number(value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"{value!r} is not a number")
    return number


def _body(options: argparse.Namespace, content: list[dict[str, Any]], model_name: str) -> dict[str, Any]:
    system = [{"role": "system", "content": options.system}] if options.system else []
    return {
        "model": model_name,
        "messages": [*system, {"role": "user", "content": content}],
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
    }


def unreachable(url: str, error: httpx.HTTPError) -> StartupError:
    """What went wrong on the way to that server, as a sentence."""
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return StartupError(f"no server answers at {url}; start one with: triptych up (or give its --url)")
    if isinstance(error, httpx.UnsupportedProtocol):
        return _no_address(url)
    if isinstance(error, httpx.TimeoutException):
        return StartupError(f"the server at {url} did not answer in time")
    return StartupError(f"the connection to {url} broke: {type(error).__name__}")


def _no_address(url: str) -> StartupError:
    return StartupError(f"{url} is no address of a server; give one like {DEFAULT_URL}")
