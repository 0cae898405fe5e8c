"""A small HTTP server over `transformers`, so that it meets the same client as the others.

python -m benchmarks.engine.transformers_server generate|continuous MODEL --dtype float32 --threads 2 --port 8700
"""

from __future__ import annotations

import argparse
import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from tokenizers.decoders import DecodeStream

from benchmarks.engine.transformers_continuous import ContinuousEngine
from benchmarks.engine.transformers_generate import GenerateEngine, Job
from benchmarks.engine.transformers_prompt import Prompt, Prompter, load


class Chat:
    """The API's one route that matters."""

    def __init__(self, prompter: Prompter, engine: GenerateEngine | ContinuousEngine) -> None:
        self._prompter = prompter
        self._engine = engine

    async def __call__(self, request: Request) -> Response:
        body = orjson.loads(await request.body())
        hint = re.search(r"batch_hint=(\d+)", body.get("user", ""))
        tokens: asyncio.Queue[int | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def on_token(token: int | None) -> None:
            loop.call_soon_threadsafe(tokens.put_nowait, token)

        try:
            prompt = self._prompter.prompt(body["messages"])
            self._engine.submit(Job(prompt, body["max_tokens"], int(hint[1]) if hint else 1, on_token))
        except ValueError as error:
            return JSONResponse({"error": {"message": str(error)}}, status_code=400)
        return StreamingResponse(self._events(prompt, tokens), media_type="text/event-stream")

    async def _events(self, prompt: Prompt, tokens: asyncio.Queue[int | None]) -> AsyncIterator[bytes]:
        text, count = DecodeStream(skip_special_tokens=True), 0
        while (token := await tokens.get()) is not None:
            count += 1
            piece = text.step(self._prompter.tokenizer.backend_tokenizer, token) or ""
            yield _event({"choices": [{"index": 0, "delta": {"content": piece}, "finish_reason": None}]})
        usage = {"prompt_tokens": len(prompt.ids), "completion_tokens": count}
        yield _event({"choices": [], "usage": usage})
        yield b"data: [DONE]\n\n"


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(content) + b"\n\n"


async def _healthy(_request: Request) -> Response:
    return JSONResponse({"status": "ok"})


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.engine.transformers_server")
    parser.add_argument("engine", choices=("generate", "continuous"))
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = load(options.model, options.dtype)
    prompter = Prompter(options.model, model)
    engine = GenerateEngine(model) if options.engine == "generate" else ContinuousEngine(model)
    engine.start()
    chat = Chat(prompter, engine)
    routes = [Route("/v1/chat/completions", chat.__call__, methods=["POST"]), Route("/health", _healthy)]
    uvicorn.run(Starlette(routes=routes), host="127.0.0.1", port=options.port, log_level="warning")


if __name__ == "__main__":
    main()
