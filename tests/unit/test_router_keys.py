"""Keys and tenants: the keys file, who comes in and who does not, and whose caches are whose."""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.types import Scope

from services.router.admission.key_file import MAX_TENANTS, is_open_to_others, load_keyring
from services.router.admission.keyring import Keyring, digest_of
from services.router.admission.tenants import ANYBODY, Rates, Tenant
from services.router.app import Model
from services.router.chat_request import parse_chat_request
from services.router.guard import OPEN_PATHS, Guard
from services.router.settings import read_settings
from tests.unit import router_house
from tests.unit.router_house import Api, ask, error_of, picture, serve
from triptych.core.errors import InvalidRequest, StartupError, TriptychError, Unauthenticated
from triptych.mm.identity import tenant_salt

model = router_house.model

KEY_A, KEY_B, KEY_ADMIN = "tk-of-acme-0123456789", "tk-of-beta-0123456789", "tk-of-ops-01234567890"
FILE = f"""
[tenants.acme]
keys = ["{KEY_A}"]
requests_per_minute = 600
tokens_per_minute = 1e6
max_concurrent = 32
weight = 2
priority = -5

[tenants.beta]
keys = ["sha256:{hashlib.sha256(KEY_B.encode()).hexdigest()}"]

[tenants.ops]
keys = ["{KEY_ADMIN}"]
is_admin = true
"""


def keyring_of(text: str, folder: Path, *pairs: str) -> Keyring | None:
    path = folder / "keys.toml"
    path.write_text(text)
    return load_keyring(path, pairs)


@pytest.fixture
def keyring(tmp_path: Path) -> Keyring:
    found = keyring_of(FILE, tmp_path)
    assert found is not None
    return found


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


# --- the file ---------------------------------------------------------------------------------------------------------


def test_the_file_says_all_of_each_tenant(keyring: Keyring) -> None:
    acme, beta, ops = keyring.tenants
    assert acme == Tenant("acme", Rates(600, 1e6), max_concurrent=32, weight=2, priority=-5)
    assert beta == Tenant("beta")
    assert ops == Tenant("ops", is_admin=True)
    for key, tenant in ((KEY_A, acme), (KEY_B, beta), (KEY_ADMIN, ops), (KEY_A + "x", None), ("", None)):
        assert keyring.tenant_of(key.encode()) is tenant


def test_keys_come_from_the_environment_too(tmp_path: Path) -> None:
    found = keyring_of(FILE, tmp_path, f"acme:{KEY_A}:more", "new:another-key-of-16-chars")
    assert found is not None
    assert found.tenant_of(f"{KEY_A}:more".encode()) is found.tenant_of(KEY_A.encode())
    assert found.tenant_of(b"another-key-of-16-chars") == Tenant("new")
    environ = {"TRIPTYCH_MODEL": "m", "TRIPTYCH_API_KEYS": f"a:{KEY_A}, b:{KEY_B}"}
    read = read_settings([], environ)
    assert read.api_keys == (f"a:{KEY_A}", f"b:{KEY_B}")
    assert KEY_A not in repr(read)
    assert load_keyring(None, ()) is None


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "must hold tables"),
        ("x = 1", "must hold tables"),
        (FILE + "\n[other]\n", "must hold tables"),
        ("[tenants.Acme]\n", "lower-case"),
        ("[tenants]\nacme = 3\n", "is a table"),
        ("[tenants.a]\nkeys = []\n", "holds no key"),
        ("[tenants.a]\nkeys = 'SECRET-0123456789'\n", "must be a list"),
        ("[tenants.a]\nkeys = ['SECRET']\n", "16 to 512"),
        ("[tenants.a]\nkeys = ['SECRET 0123456789']\n", "visible ASCII"),
        ("[tenants.a]\nkeys = ['sha256:SECRET0123456789']\n", "64 lower-case"),
        ("[tenants.a]\nkeys = [1234567890123456]\n", "is none"),
        ("[tenants.a]\nSECRET-0123456789 = 1\n", "none of requests_per_minute"),
        ("[tenants.a]\nkeys = ['SECRET-0123456789\n", r"not valid TOML \(at "),
        (f"[tenants.a]\nkeys=['{KEY_A}']\n[tenants.b]\nkeys=['{KEY_A}']\n", "a key in common"),
        *(
            (f"[tenants.a]\nkeys=['{KEY_A}']\n{line}\n", sentence)
            for line, sentence in (
                ("requests_per_minute = 0", "a number from"),
                ("tokens_per_minute = nan", "a number from"),
                ("pixels_per_minute = inf", "a number from"),
                ("requests_per_minute = true", "a number from"),
                ("weight = 0", "a number from"),
                ("max_concurrent = 0", "a whole number from"),
                ("max_concurrent = 1.0", "a whole number from"),
                ("priority = -101", "a whole number from"),
                ("is_admin = 1", "true or false"),
                ("is_admin = 'yes'", "true or false"),
            )
        ),
    ],
)
def test_what_is_wrong_stops_the_start_and_no_key_is_repeated(text: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=sentence) as caught:
        keyring_of(text, tmp_path)
    assert "SECRET" not in caught.value.message
    assert KEY_A not in caught.value.message


@pytest.mark.parametrize("pair", ["SECRET-0123456789", "Upper:SECRET-0123456789", "a:SECRET", ":SECRET-0123456789"])
def test_a_wrong_pair_in_the_environment_stops_the_start(pair: str) -> None:
    with pytest.raises(StartupError) as caught:
        load_keyring(None, [pair])
    assert "SECRET" not in caught.value.message


def test_tenants_are_bounded_and_an_open_file_is_seen(tmp_path: Path) -> None:
    pairs = [f"t{number}:key-number-{number:09d}" for number in range(MAX_TENANTS + 1)]
    with pytest.raises(StartupError, match="at most"):
        load_keyring(None, pairs)
    assert load_keyring(None, pairs[:-1]) is not None
    with pytest.raises(StartupError, match="cannot be read"):
        load_keyring(tmp_path / "none.toml", ())
    path = tmp_path / "keys.toml"
    for mode, is_open in ((0o600, False), (0o640, False), (0o644, True)):
        path.write_text(FILE)
        path.chmod(mode)
        assert is_open_to_others(path) is is_open


def test_keys_have_no_flag_and_are_shown_nowhere(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        read_settings(["--help"], {})
    shown = capsys.readouterr().out
    assert "--api-keys-file" in shown
    assert "--api-keys " not in shown
    with pytest.raises(StartupError, match="--api-keys"):
        read_settings(["--model", "m", "--api-keys", "a:SECRET-0123456789"], {})
    config = tmp_path / "triptych.toml"
    config.write_text("[router]\napi_keys = 'a:SECRET-0123456789'\n")
    with pytest.raises(StartupError) as caught:
        read_settings(["--model", "m", "--config", str(config)], {})
    assert "SECRET" not in caught.value.message


# --- keys -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value", [KEY_A, f"Basic {KEY_A}", f"Bearer{KEY_A}", "Bearer ", "", f"Bearer {KEY_A} x", "x" * 9999]
)
def test_other_headers_are_no_key(value: str, keyring: Keyring) -> None:
    with pytest.raises(Unauthenticated):
        keyring.authenticate([(b"authorization", value.encode())])


def test_one_key_and_no_more(keyring: Keyring) -> None:
    good = (b"authorization", f"bEaReR  {KEY_A} ".encode())
    assert keyring.authenticate([(b"host", b"x"), good]).name == "acme"
    for headers in ([], [good, good], [good, (b"authorization", b"Bearer x")]):
        with pytest.raises(Unauthenticated):
            keyring.authenticate(headers)


@settings(max_examples=200)
@given(st.binary(max_size=80))
def test_no_other_bytes_are_a_key(key: bytes) -> None:
    found = load_keyring(None, [f"acme:{KEY_A}"])
    assert found is not None
    assert (found.tenant_of(key) is not None) == (key == KEY_A.encode())


def test_digests_are_compared_in_constant_time_found_or_not(keyring: Keyring, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[int, int]] = []
    compare = hmac.compare_digest

    def noted(a: bytes, b: bytes) -> bool:
        compared.append((len(a), len(b)))
        return compare(a, b)

    monkeypatch.setattr(hmac, "compare_digest", noted)
    for key in (KEY_A, KEY_A[:-1] + "x", ""):
        keyring.tenant_of(key.encode())
    assert compared == [(32, 32)] * 3
    assert digest_of(KEY_A.encode()) not in keyring._entries, "a table that a caller could probe"


# --- the door ---------------------------------------------------------------------------------------------------------

HOSTS = ("x", "evil/health", "x/health?", "health", "[::1]/health#", "x:1/../health", "", "127.0.0.1@health", "a b")
PATHS = (
    *("/v1/chat/completions", "/v1/models", "/v1/models/x", "/ready", "/metrics", "/openapi.json", "/debug/plan"),
    *("/", "/nothing", "//health", "/health/", "/health/x", "/health//ready", "/HEALTH", "/health%2f", "/v1/../health"),
    *("/v1/models?x=/health", "/%2e%2e/health", "*", "http://x/health", "/health;x", "/health%00", "/docs", "/redoc"),
)


async def uninvited(app: Any) -> list[tuple[str, str, int]]:
    """What answers a stranger with anything but 401, health apart."""
    asked = [(path, host, method) for path in PATHS for host in HOSTS for method in ("GET", "POST")]
    found = [(path, host, await ask(app, path, host, method)) for path, host, method in asked]
    return [row for row in found if row[2] != 401]


async def test_every_route_but_health_is_401_without_a_key_whatever_the_host(model: Model, keyring: Keyring) -> None:
    async with serve(model, keyring=keyring) as api:
        assert await uninvited(api.app) == []
        for path in sorted(OPEN_PATHS):
            assert {await ask(api.app, path, host) for host in HOSTS} == {200}


async def _by_the_host(self: Guard, scope: Scope) -> Tenant:
    """As in the advisories: the URL that is put together again from the Host header."""
    path = urlsplit(f"http://{dict(scope['headers'])[b'host'].decode()}{scope['path']}").path
    return ANYBODY if path in OPEN_PATHS else await self._door.tenant_of(scope["headers"], "")  # type: ignore[union-attr]


async def _by_the_beginning(self: Guard, scope: Scope) -> Tenant:
    is_open = scope["path"].startswith("/health")
    return ANYBODY if is_open else await self._door.tenant_of(scope["headers"], "")  # type: ignore[union-attr]


async def _only_what_is_known(self: Guard, scope: Scope) -> Tenant:
    is_open = not scope["path"].startswith("/v1/")
    return ANYBODY if is_open else await self._door.tenant_of(scope["headers"], "")  # type: ignore[union-attr]


async def _nobody_asks(_self: Guard, _scope: Scope) -> Tenant:
    return ANYBODY


@pytest.mark.parametrize("fault", [_by_the_host, _by_the_beginning, _only_what_is_known, _nobody_asks])
async def test_a_broken_guard_is_found(
    fault: Callable[..., Any], model: Model, keyring: Keyring, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Guard, "_tenant", fault)
    async with serve(model, keyring=keyring) as api:
        assert await uninvited(api.app)


async def test_a_key_opens_and_an_admins_key_opens_more(model: Model, keyring: Keyring) -> None:
    async with serve(model, keyring=keyring) as api:
        refused = await api.chat()
        assert error_of(refused, 401)["type"] == "authentication_error"
        assert refused.headers["www-authenticate"] == "Bearer"
        assert api.pipeline.plans == []
        for key in (KEY_A, KEY_B, KEY_ADMIN):
            assert (await api.chat(headers=bearer(key))).status_code == 200
            for path in ("/v1/models", "/ready", "/openapi.json"):
                assert (await api.client.get(path, headers=bearer(key))).status_code == 200
        for path in ("/metrics", "/debug/plan"):
            answer = await api.client.get(path, headers=bearer(KEY_A))
            assert error_of(answer, 403)["type"] == "permission_error"
        assert (await api.client.get("/metrics", headers=bearer(KEY_ADMIN))).status_code == 200


async def test_readiness_says_little_to_those_without_a_key(model: Model, keyring: Keyring) -> None:
    async with serve(model, keyring=keyring) as api:
        assert (await api.client.get("/health/ready")).json() == {"status": "ready"}
        api.missing.extend(router_house.Role)
        answer = await api.client.get("/health/ready")
        assert (answer.status_code, answer.json()) == (503, {"status": "waiting"})


async def test_keys_are_never_logged(model: Model, keyring: Keyring, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with serve(model, keyring=keyring) as api:

        async def fail(_: object) -> None:
            raise TriptychError("a bug")

        api.pipeline.drive = fail
        for key in (KEY_A, "tk-that-nobody-knows"):
            await api.chat(headers=bearer(key), unknown_parameter=1)
    written = "\n".join(f"{record.getMessage()} {record.__dict__} {record.exc_text}" for record in caplog.records)
    assert "tk-" not in written
    assert caplog.records


async def test_a_websocket_is_turned_away(model: Model, keyring: Keyring) -> None:
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    async with serve(model, keyring=keyring) as api:
        await api.app({"type": "websocket", "path": "/health", "headers": []}, receive, send)
    assert [message["type"] for message in sent] == ["websocket.close"]


async def test_a_megabyte_of_headers_is_431_with_a_key_and_without(model: Model, keyring: Keyring) -> None:
    async with serve(model, keyring=keyring) as api:
        for size, status in ((60_000, 200), (70_000, 431), (1_000_000, 431)):
            for headers in (bearer(KEY_A) | {"x": "y" * size}, {f"x-{n}": "y" * (size // 100) for n in range(100)}):
                answer = await api.chat(headers=headers | bearer(KEY_A))
                assert answer.status_code == status
        assert error_of(answer, 431)["code"] == "headers_too_large"


# --- whose caches -----------------------------------------------------------------------------------------------------


async def plans_of(api: Api, *asked: tuple[dict[str, str], dict[str, Any]]) -> list[Any]:
    content = [picture(), {"type": "text", "text": "what?"}]
    for headers, fields in asked:
        answer = await api.chat(headers=headers, messages=[{"role": "user", "content": content}], **fields)
        assert answer.status_code == 200, answer.text
    return api.pipeline.plans[-len(asked) :]


async def test_each_tenant_and_each_salt_of_its_own_has_other_names_for_the_same(
    model: Model, keyring: Keyring
) -> None:
    asked = [
        (bearer(key), fields)
        for key in (KEY_A, KEY_B)
        for fields in ({}, {"cache_salt": "s"}, {"cache_salt": "t"}, {"cache_salt": "beta"})
    ]
    async with serve(model, keyring=keyring) as api:
        plans = await plans_of(api, *asked)
        again = await plans_of(api, *asked)
    assert len({plan.cache_salt for plan in plans}) == len(asked)
    assert len({plan.items[0].identity for plan in plans}) == len(asked)
    for before, after in zip(plans, again, strict=True):
        assert (before.cache_salt, before.items) == (after.cache_salt, after.items), "its own it finds again"
        assert model.adapter.identity(before.items[0].modality, api.pipeline.media[0][0], before.cache_salt) == (
            before.items[0].identity
        ), "the encoder computes it again"
    async with serve(model) as api:
        (nobody, salted) = await plans_of(api, ({}, {}), ({}, {"cache_salt": "acme"}))
    assert nobody.cache_salt == b""
    assert salted.cache_salt not in {plan.cache_salt for plan in plans}


@given(st.lists(st.tuples(st.text(max_size=9), st.text(max_size=9)), min_size=2, max_size=9, unique=True))
def test_no_two_tenants_and_salts_share_a_salt(pairs: Iterable[tuple[str, str]]) -> None:
    salts = [tenant_salt(*pair) for pair in pairs]
    assert len(set(salts)) == len(salts)


@pytest.mark.parametrize("salt", ["", "x" * 257, 3, ["x"]])
def test_a_salt_out_of_bounds_is_an_error_that_names_it(salt: object) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "cache_salt": salt}
    with pytest.raises(InvalidRequest) as caught:
        parse_chat_request(body)
    assert caught.value.param == "cache_salt"


async def test_nobody_is_more_urgent_than_its_tenant(model: Model, keyring: Keyring) -> None:
    async with serve(model, keyring=keyring) as api:
        for key, wished, given in ((KEY_A, -100, -5), (KEY_A, 7, 7), (KEY_B, -1, 0), (KEY_B, 0, 0)):
            await api.chat(headers=bearer(key), priority=wished)
            assert api.pipeline.plans[-1].priority == given
    async with serve(model) as api:
        await api.chat(priority=-100)
        assert api.pipeline.plans[-1].priority == -100
