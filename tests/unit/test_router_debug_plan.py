"""`/debug/plan` explains the choice of workers without running anything; a session goes where it went before."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from services.router.admission.keyring import Keyring, digest_of
from services.router.admission.tenants import Tenant
from services.router.app import Model
from services.router.placement import ClusterView
from services.router.routing.explain import explain
from services.router.routing.routing import Routing
from tests.unit import router_house
from tests.unit.router_house import Api, picture, serve
from tests.unit.routing_house import prompt_of
from tests.unit.test_router_parts import D0, D1, E0, E1, P0, P1, PICTURE
from triptych.core.cache_feed import Change, FeedKind, FeedMessage, Holding, WorkerLoad, number_of

model = router_house.model
VIEW = ClusterView((E0, E1, P0, P1, D0, D1))
PROMPT = prompt_of(PICTURE)


def told(routing: Routing, worker: Any, load: WorkerLoad, **held: tuple[int, ...]) -> None:
    changes = {Holding(name): Change(numbers) for name, numbers in held.items()}
    routing.apply(worker.ref, FeedMessage(worker.epoch, 1, FeedKind.SNAPSHOT, changes, load))


def test_it_says_what_was_considered_and_why_the_best_is_the_best() -> None:
    routing = Routing()
    told(routing, P0, WorkerLoad(waiting_tokens=9000, tokens_per_s=3000.0), landed=(number_of(PICTURE[0].identity),))
    told(routing, P1, WorkerLoad(tokens_per_s=3000.0))
    found = explain(routing, VIEW, PROMPT, turn=0)
    assert found["chosen"]["prefill"] == "p-1"
    assert {"stage": "prefill", "reason": "load"} in found["chosen"]["why"]
    assert found["chosen"]["encoders"][0]["source"] == "rendezvous"
    by_prefill = {each["prefill"]: each for each in found["candidates"] if each["decode"] == "d-0"}
    assert by_prefill["p-0"]["filters"] == {"saturated": 1} and by_prefill["p-1"]["filters"] == {}
    assert by_prefill["p-0"]["encoders"] == [{"picture": 0, "source": "landed", "encoder": None}]
    assert by_prefill["p-0"]["seconds"]["first_token"] == pytest.approx(3.0, abs=0.1)
    assert by_prefill["p-0"]["total_s"] == pytest.approx(sum(by_prefill["p-0"]["seconds"].values()), abs=1e-4)
    workers = {worker["id"]: worker for worker in found["workers"]}
    assert (workers["p-0"]["waiting_tokens"], workers["p-0"]["tells_what_it_holds"]) == (9000, True)
    assert not workers["d-0"]["tells_what_it_holds"]
    assert explain(routing, VIEW, PROMPT, turn=0) == found, "nothing has changed"


def test_affinity_is_released_when_waiting_takes_longer_than_computing_again() -> None:
    """40 tokens are 10 ms: worth a wait of 5 ms, and not one of 100."""
    for waiting, chosen, why in ((20, "p-0", "told"), (400, "p-1", "released")):
        routing, prompt = Routing(), prompt_of(pages=(11, 12))
        view = ClusterView(tuple(with_pages(worker) for worker in VIEW.workers))
        told(routing, P0, WorkerLoad(waiting_tokens=waiting, tokens_per_s=4000.0), page=(11, 12))
        told(routing, P1, WorkerLoad(tokens_per_s=4000.0))
        found = explain(routing, view, prompt, turn=1)["chosen"]
        assert (found["prefill"], found["why"][0]["reason"]) == (chosen, why)


def with_pages(worker: Any) -> Any:
    return replace(worker, page_tokens=16, num_pages=100)


# --- by HTTP ----------------------------------------------------------------------------------------------------------

BODY: dict[str, Any] = {"messages": [{"role": "user", "content": [{"type": "text", "text": "what?"}, picture()]}]}
ADMIN, CALLER = "an-administrators-key", "some-callers-key-here"


@pytest.fixture
async def api(model: Model) -> AsyncIterator[Api]:
    keyring = Keyring(
        {
            digest_of(ADMIN.encode()): Tenant("ops", is_admin=True),
            digest_of(CALLER.encode()): Tenant("shop"),
        }
    )
    async with serve(model, keyring=keyring) as found:
        found.pipeline.explain = lambda plan, prompt: explain(Routing(), VIEW, prompt, 0)  # type: ignore[attr-defined]
        yield found


async def plan(api: Api, key: str, body: dict[str, Any] = BODY) -> httpx.Response:
    return await api.client.post("/debug/plan", json=body, headers={"authorization": f"Bearer {key}"})


async def test_an_admin_is_told_and_nobody_else(api: Api) -> None:
    response = await plan(api, ADMIN)
    assert response.status_code == 200
    assert response.json()["prompt"]["pictures"][0]["patches"] > 0
    assert response.json()["chosen"]["prefill"] in ("p-0", "p-1")
    assert (await plan(api, CALLER)).status_code == 403
    assert (await plan(api, "nobodys-key-at-all-x")).status_code == 401
    assert api.pipeline.plans == [], "nothing has run"


async def test_what_is_wrong_with_a_request_is_said_there_too(api: Api) -> None:
    assert (await plan(api, ADMIN, {"messages": []})).status_code == 400


async def test_a_session_is_passed_on_and_a_bad_one_refused(api: Api) -> None:
    key = {"authorization": f"Bearer {CALLER}"}
    assert (await api.chat({**key, "x-triptych-session-id": "s-1"})).status_code == 200
    assert (await api.chat(key)).status_code == 200
    assert [prompt.session if prompt else "" for prompt in api.pipeline.prompts] == ["s-1", None]
    assert (await api.chat({**key, "x-triptych-session-id": "s" * 257})).status_code == 400


def test_a_session_goes_where_it_went_before() -> None:
    routing = Routing()
    first = routing.choose(VIEW, prompt_of(session="s"), 0).ordered[0].forecast
    routing.sent(prompt_of(session="s"), first).ended()
    for turn in range(4):
        again = routing.choose(VIEW, prompt_of(session="s"), turn).ordered[0].forecast
        assert (again.path.prefill, again.path.decode) == (first.path.prefill, first.path.decode)
    firsts = [routing.choose(VIEW, prompt_of(session="t"), turn).ordered[0].forecast.path for turn in range(4)]
    assert len({(path.decode.worker_id, path.prefill.worker_id) for path in firsts}) == 4, "another session takes turns"
