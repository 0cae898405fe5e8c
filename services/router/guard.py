"""Who may come in. Before any route is looked for, and by the path that routing itself goes by: what a caller writes
into its Host header changes nothing."""

from __future__ import annotations

from contextlib import ExitStack

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from services.router.admission.door import Door
from services.router.admission.meter import Meter, Visit
from services.router.admission.strangers import caller_of
from services.router.admission.tenants import ANYBODY, Tenant
from services.router.drain import Drain
from services.router.headers import MAX_HEADER_BYTES, headers_too_large
from services.router.http import CHAT_PATH, error_response
from triptych.core.errors import Forbidden, TriptychError

# Whether the process lives and whether it takes requests, for those who start and stop it. They say nothing else.
OPEN_PATHS = frozenset({"/health", "/health/ready"})
# What concerns all tenants.
ADMIN_PATHS = frozenset({"/metrics"})
ADMIN_PREFIXES = ("/debug/",)


class Guard:
    """Within RequestScope. Lets a tenant's chat requests in one by one (`scope["state"]["visit"]`), or answers 401,
    403, 429, 431 or, while the router stops, 503 itself."""

    def __init__(self, app: ASGIApp, door: Door | None, meter: Meter, drain: Drain) -> None:
        """Without a door everybody may come in."""
        self._app = app
        self._door = door
        self._meter = meter
        self._drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await self._admit(scope, receive, send)

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        with ExitStack() as under_way:
            try:
                visit = Visit(await self._tenant(scope), self._meter, scope["state"]["request_id"])
                if scope["path"] == CHAT_PATH:
                    under_way.enter_context(self._drain.under_way())
                    await visit.enter()
            except TriptychError as error:
                await error_response(error)(scope, receive, send)
                return
            scope["state"]["visit"] = visit
            try:
                await self._app(scope, receive, send)
            finally:
                await visit.leave()

    async def _tenant(self, scope: Scope) -> Tenant:
        """Raises HeadersTooLarge, Unauthenticated, RateLimited or Forbidden."""
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        if sum(len(name) + len(value) for name, value in headers) > MAX_HEADER_BYTES:
            raise headers_too_large()
        path: str = scope["path"]
        if self._door is None or path in OPEN_PATHS:
            return ANYBODY
        tenant = await self._door.tenant_of(headers, caller_of((scope.get("client") or (None,))[0]))
        if not tenant.is_admin and (path in ADMIN_PATHS or path.startswith(ADMIN_PREFIXES)):
            raise Forbidden("this is for keys of a tenant with is_admin = true")
        return tenant


def visit_of(request: Request) -> Visit:
    visit: Visit = request.state.visit
    return visit
