"""Nobody gets the router to call what only the router can reach; beside it guards that are missing, each found."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Awaitable
from typing import Any

import pytest

from services.router import fetch, fetch_rules, fetch_url, public_addresses
from services.router.fetch_rules import FetchRules
from services.router.fetch_url import FetchUrl, parse_fetch_url, redirected
from services.router.public_addresses import IPAddress, is_public
from services.router.resolver import Resolver, is_this_machine
from tests.picture_server import body, redirect
from tests.unit.fetch_house import GOOD, PUBLIC, house
from tests.unit.fetch_tries import OWN, TRIES, Try
from triptych.core.errors import MediaInvalid, StartupError


async def breach(one: Try, monkeypatch: pytest.MonkeyPatch) -> str:
    """What went wrong, or nothing."""
    real = fetch.is_this_machine
    monkeypatch.setattr(fetch, "is_this_machine", lambda address, port: str(address) == OWN or real(address, port))
    async with house({name: [list(each) for each in answers] for name, answers in one.names.items()}) as at:
        at.server.answers = {"/": body(b"secret"), "/b": body(b"secret"), "": body(b"secret")}
        at.server.answers |= {path: redirect(location) for path, location in one.answers.items()}
        try:
            data = await at.fetch(one.url)
        except MediaInvalid as error:
            if error.param != "messages.0" or re.search(r"\d+\.\d+\.\d+|::|example", error.message):
                return f"told {error.message}"
        else:
            if one.names.keys() != {"rebind.example"} or [host for host, _ in at.network.called] != [PUBLIC]:
                return f"fetched {data!r}"
        wrong = [host for host, _ in at.network.called if host != PUBLIC]
        if wrong or len(at.network.called) > fetch.MAX_REDIRECTS + 1:
            return f"called {at.network.called}"
        if at.names.asked and not one.is_read:
            return f"looked up {at.names.asked}"
    return ""


@pytest.mark.parametrize("name", TRIES)
async def test_nobody_gets_where_nobody_may(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await breach(TRIES[name], monkeypatch) == ""


# --- builds without one of the guards ---------------------------------------------------------------------------------


def _looks_at_the_first(self: Any, host: str, port: int) -> Awaitable[list[IPAddress]]:
    async def permitted() -> list[IPAddress]:
        addresses: list[IPAddress] = await self._resolve(host, port)
        if not self._may_connect(host, port, addresses[0]):
            raise fetch.Forbidden
        return addresses[::-1]

    return permitted()


def _resolves_again(self: Any, host: str, port: int) -> Awaitable[list[IPAddress]]:
    async def permitted() -> list[IPAddress]:
        if not all(self._may_connect(host, port, each) for each in await self._resolve(host, port)):
            raise fetch.Forbidden
        again: list[IPAddress] = await self._resolve(host, port)
        return again

    return permitted()


def _looks_once(self: Any, host: str, port: int) -> Awaitable[list[IPAddress]]:
    """Only where the caller's own URL leads, not where that leads on."""

    async def permitted() -> list[IPAddress]:
        addresses: list[IPAddress] = await self._resolve(host, port)
        if not hasattr(self, "looked") and not all(self._may_connect(host, port, each) for each in addresses):
            raise fetch.Forbidden
        self.looked = True
        return addresses

    return permitted()


NEVER, ANY = re.compile(r"(?!)"), re.compile(r"(?s).*")
GUARDED = fetch._GuardedNetwork
Patch = tuple[object, str, object]

MUTATIONS: dict[str, Patch] = {
    "every address is public": (fetch_rules, "is_public", lambda address: True),
    "is_global is enough": (fetch_rules, "is_public", lambda address: address.is_global),
    "not is_private is enough": (fetch_rules, "is_public", lambda address: not address.is_private),
    "translations are public": (public_addresses, "_GLOBAL_UNICAST", ipaddress.ip_network("::/0")),
    "one of the addresses is enough": (GUARDED, "_permitted", _looks_at_the_first),
    "names are resolved again": (GUARDED, "_permitted", _resolves_again),
    "redirects are trusted": (GUARDED, "_permitted", _looks_once),
    "every port is the web's": (fetch_rules, "_is_for_the_web", lambda port: True),
    "this machine is like any other": (GUARDED, "_may_connect", lambda self, *at: self._rules.may_connect(*at)),
    "redirects without end": (fetch, "MAX_REDIRECTS", 50),
    "control characters and backslashes": (fetch_url, "_FORBIDDEN", NEVER),
    "numbers are names": (fetch_url, "_NUMBER", NEVER),
    "labels are anything": (fetch_url, "_LABEL", ANY),
    "user names are skipped": (
        fetch_url,
        "_AUTHORITY",
        re.compile(r"(?:.*@)?(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::([0-9]{1,5}))?"),
    ),
    "URLs of any length": (fetch_url, "MAX_URL_CHARS", 10**6),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
async def test_a_build_without_a_guard_is_found(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, name, value = MUTATIONS[mutation]
    monkeypatch.setattr(target, name, value)
    if mutation == "redirects without end":
        monkeypatch.setattr(fetch, "range", lambda _: range(51), raising=False)
        assert await _calls(TRIES["endless redirects"]) > 4
        return
    found = [each for each in TRIES.values() if await _breaks(each, monkeypatch)]
    assert found


async def _calls(one: Try) -> int:
    async with house() as at:
        at.server.answers = {path: redirect(location) for path, location in one.answers.items()}
        with pytest.raises(MediaInvalid):
            await at.fetch(one.url)
        return len(at.network.called)


async def _breaks(one: Try, monkeypatch: pytest.MonkeyPatch) -> bool:
    with monkeypatch.context() as inner:
        try:
            return await breach(one, inner) != ""
        except (AssertionError, ValueError, OSError, IndexError):
            return True


# --- what may be fetched ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["93.184.216.34", "8.8.8.8", "2606:2800:220:1::1", "2a00:1450:4001::1"])
def test_public_addresses(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))


def test_this_machines_addresses_are_told_from_others() -> None:
    assert is_this_machine(ipaddress.ip_address("127.0.0.1"), 80)
    assert not is_this_machine(ipaddress.ip_address("192.0.2.1"), 80)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://good.example", "http://good.example/"),
        ("HTTPS://Good.Example:443/A?b=C#d", "https://good.example/A?b=C"),
        ("http://good.example:8080?x", "http://good.example:8080/?x"),
        ("http://good.example./a", "http://good.example/a"),
        ("http://a_b.good.example/a%20b c/é?ü=1&k=[2]", "http://a_b.good.example/a%20b%20c/%C3%A9?%C3%BC=1&k=[2]"),
        ("http://xn--bcher-kva.example/", "http://xn--bcher-kva.example/"),
        ("http://93.184.216.34:81/", "http://93.184.216.34:81/"),
        ("http://[2606:2800:0220:1::1]:8080/x", "http://[2606:2800:220:1::1]:8080/x"),
        ("http://good.example/@127.0.0.1/", "http://good.example/@127.0.0.1/"),
        ("http://good.example?@127.0.0.1", "http://good.example/?@127.0.0.1"),
        ("http://good.example#@127.0.0.1", "http://good.example/"),
    ],
)
def test_how_a_url_is_read(text: str, shown: str) -> None:
    assert str(parse_fetch_url(text, "p")) == shown


@pytest.mark.parametrize(
    ("location", "shown"),
    [
        ("/b?c", "https://good.example/b?c"),
        ("b", "https://good.example/x/b"),
        ("../b", "https://good.example/b"),
        ("//other.example/b", "https://other.example/b"),
        ("https://other.example:8443/", "https://other.example:8443/"),
    ],
)
def test_where_a_redirect_leads(location: str, shown: str) -> None:
    assert str(redirected(FetchUrl("https", GOOD, 443, "/x/a"), location, "p")) == shown


@pytest.mark.parametrize("location", ["http://good.example/", "", "ftp://good.example/", "javascript:1", "http://"])
def test_redirects_that_are_not_followed(location: str) -> None:
    if location == "":
        assert redirected(FetchUrl("https", GOOD, 443, "/a"), location, "p").target == "/a"  # ends by their number
        return
    with pytest.raises(MediaInvalid):
        redirected(FetchUrl("https", GOOD, 443, "/a"), location, "p")


async def fetched(url: str, names: dict[str, list[list[str]]] | None = None, **lists: str) -> list[tuple[str, int]]:
    """Who was called for it; MediaInvalid when nobody may be."""
    rules = FetchRules.parse(*([lists[each]] if each in lists else [] for each in ("only", "allow", "deny")))
    async with house(names, rules) as at:
        at.server.answers = {"/": body(b"picture")}
        assert await at.fetch(url) == b"picture"
        return at.network.called


INSIDE = {"in.example": [["10.1.2.3"]], "a.in.example": [["10.1.2.4"]], "redis": [["10.9.9.9"]]}
ALLOWED = [
    ("http://10.1.2.3/", {"allow": "10.1.2.3"}),
    ("http://10.1.2.3/", {"allow": "10.1.0.0/16"}),
    ("http://10.1.2.3:99/", {"allow": "10.1.2.3:99"}),
    ("http://in.example/", {"allow": "in.example"}),
    ("http://in.example/", {"allow": "10.0.0.0/8"}),
    ("http://a.in.example/", {"allow": "*.in.example"}),
    ("http://redis/", {"allow": "redis"}),
    ("http://[::1]:9000/", {"allow": "[::1]:9000"}),
    ("http://[fd00::5]/", {"allow": "[fd00::/8]"}),
    (f"http://{GOOD}/", {"only": GOOD}),
    (f"http://{GOOD}/", {"only": "93.184.0.0/16"}),
    (f"http://{GOOD}/", {"deny": "in.example"}),
    ("http://127.0.0.1:9000/", {"allow": "127.0.0.1:9000", "only": "127.0.0.1"}),
]
DENIED = [
    ("http://10.1.2.3/", {"allow": "10.1.2.4"}),
    ("http://10.1.2.3:98/", {"allow": "10.1.2.3:99"}),
    ("http://in.example/", {"allow": "*.in.example"}),
    ("http://a.in.example/", {"allow": "in.example"}),
    ("http://in.example/", {"only": "in.example"}),
    (f"http://{GOOD}/", {"only": "in.example"}),
    (f"http://{GOOD}/", {"deny": GOOD}),
    (f"http://{GOOD}/", {"deny": "93.184.216.0/24"}),
    (f"http://{GOOD}:8080/", {"only": f"{GOOD}:80"}),
    ("http://in.example/", {"allow": "in.example", "deny": "10.0.0.0/8"}),
    ("http://mapped.example/", {"deny": PUBLIC}),
]


@pytest.mark.parametrize(("url", "lists"), ALLOWED)
async def test_the_lists_open(url: str, lists: dict[str, str]) -> None:
    assert len(await fetched(url, INSIDE, **lists)) == 1


@pytest.mark.parametrize(("url", "lists"), DENIED)
async def test_the_lists_close(url: str, lists: dict[str, str]) -> None:
    with pytest.raises(MediaInvalid, match="may not fetch"):
        await fetched(url, INSIDE | {"mapped.example": [[f"::ffff:{PUBLIC}"]]}, **lists)


async def test_a_name_that_is_denied_is_not_even_looked_up() -> None:
    for lists in ({"deny": [GOOD]}, {"only": ["other.example"]}):
        rules = FetchRules.parse(lists.get("only", ()), (), lists.get("deny", ()))
        async with house(rules=rules) as at:
            with pytest.raises(MediaInvalid):
                await at.fetch(f"http://{GOOD}/")
            assert at.names.asked == []


@pytest.mark.parametrize(
    "text", ["", "http://a.example", "10.0.0.0/33", "a b", "10.0.0.1.2", "*", "a.example:x", "10.1/8"]
)
def test_what_is_no_entry_stops_the_start(text: str) -> None:
    with pytest.raises(StartupError, match="fetch_allow"):
        FetchRules.parse((), (text,), ())


async def test_the_system_resolver_knows_this_machine() -> None:
    resolver = Resolver()
    try:
        assert ipaddress.ip_address("127.0.0.1") in await resolver("localhost", 80)
        with pytest.raises(OSError, match="not a name"):
            await resolver("a" * 64 + ".example", 80)
    finally:
        resolver.close()


async def test_the_server_is_told_the_name_and_nothing_else() -> None:
    async with house() as at:
        at.server.answers = {"/a?b": body(b"picture")}
        assert await at.fetch("http://good.example:8080/a?b#c") == b"picture"
        assert at.network.called == [(PUBLIC, 8080)]
        lines = at.server.asked[0].decode().lower().strip().split("\r\n")
        assert lines[0] == "get /a?b http/1.1"
        assert "host: good.example:8080" in lines
        assert {line.split(":")[0] for line in lines[1:]} == {
            "host",
            "accept",
            "accept-encoding",
            "connection",
            "user-agent",
        }
