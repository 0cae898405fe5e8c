"""Ways in which somebody tries to get a router to call what only the router can reach."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.unit.fetch_house import GOOD, PUBLIC

OWN = "93.184.216.99"

SPECIAL = """
    127.0.0.1 127.8.9.10 0.0.0.0 0.1.2.3 10.1.2.3 172.16.0.1 172.31.255.255 192.168.1.1 169.254.169.254 100.64.0.1
    100.100.100.200 100.127.255.255 192.0.0.1 192.0.0.9 192.0.0.192 192.0.2.1 192.88.99.1 198.18.0.1 198.19.255.255
    198.51.100.1 203.0.113.1 168.63.129.16 224.0.0.1 239.255.255.255 240.0.0.1 255.255.255.255
    :: ::1 ::7f00:1 ::ffff:127.0.0.1 ::ffff:10.0.0.1 ::ffff:a9fe:a9fe fe80::1 fec0::1 fc00::1 fd00:ec2::254 ff02::1
    64:ff9b::7f00:1 64:ff9b::808:808 64:ff9b:1::a00:1 2002:7f00:1::1 2002:808:808::1 2001::1 2001:0:7f00:1::1
    ::ffff:0:127.0.0.1 64:ff9b::a9fe:a9fe 2001:db8::1 2001:10::1 100::1 5f00::1 3fff::1
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
        "mapped IPv4 in capitals": Try("HTTP://[::FFFF:7F00:1]/"),
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
        "half-width dots": "http://127\uff610\uff610\uff611/",
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
        "an IPv6 address of nine parts": "http://[0:0:0:0:0:ffff:7f00:1:1]/",
        "an address of five parts": "http://127.0.0.0.1/",
        "an address over 255": "http://127.0.0.257/",
        "a negative number": "http://-1062731775/",
        "a zone that is a number": "http://[::1%1]/",
        "empty label": "http://good..example/",
        "nothing": "http://",
        "too long": "http://good.example/" + "a" * 9000,
    }
    return found | {name: Try(url, is_read=False) for name, url in shapes.items()}


TRIES = _tries()
