"""Nobody gets the router to call what only the router can reach; beside it guards that are missing, each found."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any

import pytest

from services.router import fetch, fetch_rules, fetch_url, public_addresses
from services.router.fetch_rules import FetchRules
from services.router.fetch_url import FetchUrl, parse_fetch_url, redirected
from services.router.public_addresses import IPAddress, is_public
from services.router.resolver import Resolver, is_this_machine
from tests.picture_server import body, redirect
from tests.unit.fetch_house import GOOD, PUBLIC, house
from triptych.core.errors import MediaInvalid, StartupError

OWN = "93.184.216.99"

SPECIAL = """
    127.0.0.1 127.8.9.10 0.0.0.0 0.1.2.3 10.1.2.3 172.16.0.1 172.31.255.255 192.168.1.1 169.254.169.254 100.64.0.1
    100.100.100.200 100.127.255.255 192.0.0.1 192.0.0.9 192.0.0.192 192.0.2.1 192.88.99.1 198.18.0.1 198.19.255.255
    198.51.100.1 203.0.113.1 168.63.129.16 224.0.0.1 239.255.255.255 240.0.0.1 255.255.255.255
    :: ::1 ::7f00:1 ::ffff:127.0.0.1 ::ffff:10.0.0.1 ::ffff:a9fe:a9fe fe80::1 fec0::1 fc00::1 fd00:ec2::254 ff02::1
    64:ff9b::7f00:1 64:ff9b::808:808 64:ff9b:1::a00:1 2002:7f00:1::1 2002:808:808::1 2001::1 2001:0:7f00:1::1
    2001:db8::1 2001:10::1 100::1 5f00::1 3fff::1
""".split()
SOME = ("127.0.0.1", "169.254.169.254", "10.1.2.3", "100.64.0.1", "::1", "64:ff9b::a9fe:a9fe", "2002:a00:1::1")


@dataclass(frozen=True)
class Try:
    """Somebody who tries to get where nobody may."""

    url: str
    names: dict[str, list[list[str]]] = field(default_factory=dict)
    answers: dict[str, str] = field(default_factory=dict)
    is_read: bool = True
    """Whether it is a URL at all: else not even a name may be looked up."""


def _literal(address: str) -> str:
    return f"http://[{address}]/" if ":" in address else f"http://{address}/"


def _tries() -> dict[str, Try]:
    found = {f"named {each}": Try("http://bad.example/", {"bad.example": [[each]]}) for each in SPECIAL}
    found |= {f"as it is {each}": Try(_literal(each)) for each in SPECIAL}
    found |= {f"behind a public one {each}": Try("http://b.example/", {"b.example": [[PUBLIC, each]]}) for each in SOME}
    found |= {f"redirect to {each}": Try(f"http://{GOOD}/a", answers={"/a": _literal(each)}) for each in SOME}
    found |= {
        "rebinding": Try("http://rebind.example/", {"rebind.example": [[PUBLIC], ["127.0.0.1"]]}),
        "rebinding by a redirect": Try(
            "http://rebind.example/a", {"rebind.example": [[PUBLIC], ["127.0.0.1"]]}, {"/a": "/b"}
        ),
        "redirect to a name": Try(f"http://{GOOD}/a", {"in.example": [["10.0.0.1"]]}, {"/a": "//in.example/"}),
        "second redirect": Try(f"http://{GOOD}/a", answers={"/a": "/b", "/b": "http://127.0.0.1/"}),
        "redirect to a file": Try(f"http://{GOOD}/a", answers={"/a": "file:///etc/passwd"}),
        "redirect with a user name": Try(f"http://{GOOD}/a", answers={"/a": "http://good.example@127.0.0.1/"}),
        "endless redirects": Try(f"http://{GOOD}/a", answers={"/a": "/a"}),
        "localhost": Try("http://localhost/", {"localhost": [["127.0.0.1"]]}),
        "localhost with a dot": Try("http://localhost./", {"localhost": [["127.0.0.1"]]}),
        "this machine's public address": Try("http://own.example/", {"own.example": [[OWN]]}),
        "a mail server": Try(f"http://{GOOD}:25/"),
        "a shell": Try(f"http://{GOOD}:22/"),
        "no address": Try("http://none.example/", {"none.example": [[]]}),
    }
    shapes = {
        "decimal": "http://2130706433/",
        "hexadecimal": "http://0x7f000001/",
        "hexadecimal parts": "http://0x7f.0x0.0x0.0x1/",
        "octal": "http://0177.0.0.1/",
        "octal at the end": "http://127.0.0.01/",
        "three parts": "http://127.0.1/",
        "two parts": "http://127.1/",
        "a number with a dot": "http://2130706433./",
        "an address with a dot": "http://127.0.0.1./",
        "full-width dots": "http://127\uff0e0\uff0e0\uff0e1/",
        "ideographic dots": "http://127\u30020\u30020\u30021/",
        "full-width digits": "http://\uff11\uff12\uff17.0.0.1/",
        "circled digits": "http://\u2460\u2461\u2466.0.0.1/",
        "a soft hyphen": "http://local\u00adhost/",
        "backslash and at": "http://good.example\\@127.0.0.1/",
        "at behind a backslash": "http://127.0.0.1\\@good.example/",
        "backslashes": "http:\\\\127.0.0.1\\",
        "user": "http://good.example@127.0.0.1/",
        "user and port": "http://good.example:80@127.0.0.1/",
        "user and password": "http://a:b@good.example/",
        "two ats": "http://a@127.0.0.1:80@good.example/",
        "escaped at": "http://good.example%40127.0.0.1/",
        "escaped dot": "http://127%2e0%2e0%2e1/",
        "escaped host": "http://%6cocalhost/",
        "tab": "http://127.0.\t0.1/",
        "line feed": "http://good.example/\r\nhost: 127.0.0.1",
        "null": "http://good.example\x00.127.0.0.1/",
        "space": "http://good.example 127.0.0.1/",
        "no host": "http:///127.0.0.1/",
        "no slashes": "http:127.0.0.1/",
        "three slashes": "https:///127.0.0.1",
        "file": "file:///etc/passwd",
        "file on a host": "file://127.0.0.1/etc/passwd",
        "gopher": "gopher://127.0.0.1:6379/_FLUSHALL",
        "ftp": "ftp://good.example/",
        "dict": "dict://127.0.0.1:11211/stat",
        "unix": "http+unix://%2Fvar%2Frun%2Fdocker.sock/info",
        "zone": "http://[fe80::1%25eth0]/",
        "zone that is escaped once": "http://[fe80::1%eth0]/",
        "an open bracket": "http://[::1/",
        "a bracket that holds a name": "http://[localhost]/",
        "IPv6 without brackets": "http://::1/",
        "port 0": "http://good.example:0/",
        "port too large": "http://good.example:65616/",
        "no port": "http://good.example:/",
        "signed port": "http://good.example:+80/",
        "full-width port": "http://good.example:\uff18\uff10/",
        "empty label": "http://good..example/",
        "nothing": "http://",
        "too long": "http://good.example/" + "a" * 9000,
    }
    return found | {name: Try(url, is_read=False) for name, url in shapes.items()}


TRIES = _tries()


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
