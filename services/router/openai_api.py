"""The HTTP API: routes and nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from services.router.admission.door import Door
from services.router.admission.meter import LocalMeter, Meter
from services.router.byte_budget import ByteBudget
from services.router.chat_request import ChatCompletionBody
from services.router.chat_service import ChatService
from services.router.drain import Drain
from services.router.guard import Guard
from services.router.http import CHAT_PATH, JsonResponse, RequestScope, on_http_error, on_triptych_error
from services.router.responses import model_json
from triptych.core.errors import ModelNotFound, TriptychError
from triptych.core.worker import Role
from triptych.obs import metrics

_BODY_SCHEMA: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": ChatCompletionBody.model_json_schema()}},
    }
}


def build_api(
    chat: ChatService,
    missing_roles: Callable[[], tuple[Role, ...]],
    budget: ByteBudget,
    door: Door | None = None,
    meter: Meter | None = None,
    drain: Drain | None = None,
) -> FastAPI:
    """`missing_roles()`: the stages without a ready worker. `budget`: of what all requests hold. `door`: whose keys
    open the API; without one it is open to all. `meter`: of what tenants use; one of this process if not given.
    `drain`: of the requests under way."""
    drain, meter = drain or Drain(), meter or LocalMeter(chat.clock)
    # A redirect would name whatever host the caller wrote into its Host header.
    app = _Api(title="Triptych", docs_url=None, redoc_url=None, redirect_slashes=False)
    app.add_middleware(Guard, door=door, meter=meter, drain=drain)
    app.add_middleware(RequestScope, budget=budget)  # around the guard
    app.chat = RequestScope(Guard(_chat_alone(chat), door, meter, drain), budget)
    app.add_exception_handler(TriptychError, on_triptych_error)
    app.add_exception_handler(HTTPException, on_http_error)
    _add_chat(app, chat)
    _add_debug(app, chat)
    _add_models(app, chat.model_name)
    _add_probes(app, missing_roles, drain)
    return app


class _Api(FastAPI):
    """Answers chat requests by `chat`, without the layers that the framework puts around a route: each of them would
    see every token that is sent."""

    chat: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == CHAT_PATH and scope["method"] == "POST":
            await self.chat(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)


def _chat_alone(chat: ChatService) -> ASGIApp:
    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        try:
            answer = await chat.answer(request)
            await answer(scope, receive, send)
        except TriptychError as error:
            response = await on_triptych_error(request, error)
            await response(scope, receive, send)

    return serve


def _add_chat(app: FastAPI, chat: ChatService) -> None:
    """For the schema, and for other methods' 405; `_Api` has answered what is asked."""

    @app.post(CHAT_PATH, openapi_extra=_BODY_SCHEMA)
    async def chat_completions(request: Request) -> Response:
        return await chat.answer(request)


def _add_debug(app: FastAPI, chat: ChatService) -> None:
    @app.post("/debug/plan", openapi_extra=_BODY_SCHEMA)
    async def plan(request: Request) -> Response:
        """Which workers a chat completion would go to, and why. Where keys are configured, for admins."""
        return JsonResponse(await chat.explain(request))


def _add_models(app: FastAPI, name: str) -> None:
    created = int(time.time())

    @app.get("/v1/models")
    async def list_models() -> Response:
        return JsonResponse({"object": "list", "data": [model_json(name, created)]})

    @app.get("/v1/models/{model_id:path}")
    async def get_model(model_id: str) -> Response:
        if model_id != name:
            raise ModelNotFound(f"this server serves {name!r} and no other model", param="model")
        return JsonResponse(model_json(name, created))


def _add_probes(app: FastAPI, missing_roles: Callable[[], tuple[Role, ...]], drain: Drain) -> None:
    def state() -> str:
        return "stopping" if drain.has_begun else "waiting" if missing_roles() else "ready"

    @app.get("/health")
    @app.head("/health", include_in_schema=False)
    async def health() -> Response:
        """The event loop turns."""
        return JsonResponse({"status": "ok"})

    @app.get("/ready")
    @app.head("/ready", include_in_schema=False)
    async def ready() -> Response:
        """Every stage has a worker that is ready, and the router does not stop."""
        told = state()
        body = {"status": told, "missing": [role.value for role in missing_roles()]}
        return JsonResponse(body, status_code=200 if told == "ready" else 503)

    @app.get("/health/ready")
    @app.head("/health/ready", include_in_schema=False)
    async def health_ready() -> Response:
        """The same for those who have no key, without saying what is missing."""
        told = state()
        return JsonResponse({"status": told}, status_code=200 if told == "ready" else 503)

    @app.get("/metrics")
    async def prometheus() -> Response:
        body, content_type = metrics.exposition()
        return Response(body, headers={"content-type": content_type})
