"""How long a request may take, as its caller says; and headers without end, past a real socket."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

import pytest
import uvicorn

from services.router.app import Model
from services.router.headers import HttpProtocol
from tests.unit import router_house
from tests.unit.router_house import Api, error_of, serve

model, api = router_house.model, router_house.api
HEADER = "x-triptych-timeout-s"


@pytest.mark.parametrize(
    ("header", "field", "most_s"), [(None, None, 5), ("2", None, 2), (None, 2, 2), ("1.5", 3, 1.5), ("99", 99.0, 5)]
)
async def test_the_least_of_header_field_and_setting_counts(
    header: str | None, field: float | None, most_s: float, api: Api
) -> None:
    headers = {} if header is None else {HEADER: header}
    assert (await api.chat(headers=headers, **({} if field is None else {"timeout_s": field}))).status_code == 200
    assert most_s - 1 < api.pipeline.plans[-1].timeout_s <= most_s


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "1e3", "86401", "2147483648", "", "x", "1" * 999])
async def test_a_header_that_is_no_time_is_400(text: str, api: Api) -> None:
    assert error_of(await api.chat(headers={HEADER: text}), 400)["param"] == HEADER


@pytest.mark.parametrize("value", [0, -1, 86_401, 2**31, "1", True])
async def test_a_field_that_is_no_time_is_400(value: object, api: Api) -> None:
    assert error_of(await api.chat(timeout_s=value), 400)["param"] == "timeout_s"


async def test_time_that_is_over_is_504(api: Api) -> None:
    assert (await api.chat(timeout_s=1e-6)).status_code == 504


async def exchange(port: int, lines: Sequence[bytes]) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(b"\r\n".join(lines) + b"\r\n\r\n")
        return await reader.readline()
    finally:
        writer.close()


async def test_a_megabyte_of_headers_is_431_on_the_wire(model: Model) -> None:
    async with serve(model) as api:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            config = uvicorn.Config(api.app, http=HttpProtocol, log_config=None)
            server = uvicorn.Server(config)
            server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
            task = asyncio.create_task(server._serve(sockets=[listener]))
            port = listener.getsockname()[1]
            begin = [b"GET /v1/models HTTP/1.1", b"Host: x"]
            try:
                assert b" 200 " in await exchange(port, begin)
                assert b" 431 " in await exchange(port, [*begin, b"X: " + b"y" * 1_000_000])
                assert b" 400 " in await exchange(port, [b"NONSENSE"])
                assert b" 200 " in await exchange(port, begin)
            finally:
                server.should_exit = True
                await task
