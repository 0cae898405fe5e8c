"""What there is to reach: a bare ASGI application that reads a body and sends it back, in uvicorn's own server.

python -m benchmarks.router.echo    (ends with its standard input)
"""

from __future__ import annotations

import asyncio
import socket
import sys
from typing import Any

import uvicorn
import uvloop

from benchmarks.router.processes import say


async def echo(scope: Any, receive: Any, send: Any) -> None:
    assert scope["type"] == "http"
    body = b""
    while True:
        message = await receive()
        body += message["body"]
        if not message["more_body"]:
            break
    length = str(len(body)).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", length)]})
    await send({"type": "http.response.body", "body": body})


async def serve() -> None:
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    config = uvicorn.Config(echo, lifespan="off", log_config=None, access_log=False)
    server = asyncio.create_task(uvicorn.Server(config).serve(sockets=[listener]))
    say({"url": f"http://127.0.0.1:{listener.getsockname()[1]}"})
    await asyncio.to_thread(sys.stdin.read)
    server.cancel()


if __name__ == "__main__":
    uvloop.run(serve())
