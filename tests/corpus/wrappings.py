"""How a picture is handed in, well and badly, whatever it shows: data URIs, and addresses that are none."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from urllib.parse import quote

from tests.corpus.drawing import drawn
from tests.corpus.sample import encoded

# Small enough for escapes, and with every kind of base64 character in it.
PICTURE = encoded(drawn((57, 56)), "PNG")
_TEXT = base64.b64encode(PICTURE).decode()
_URL_SAFE = base64.urlsafe_b64encode(PICTURE).decode()


@dataclass(frozen=True, slots=True)
class Wrapping:
    """A reference as it stands in a request, and the status that it leads to; with 200, PICTURE is what is seen."""

    name: str
    kind: str
    uri: str
    status: int


def _lines(text: str) -> str:
    return "\r\n".join(text[start : start + 76] for start in range(0, len(text), 76))


WRAPPINGS = (
    [
        Wrapping(name, "a data URI, as people write it", uri, 200)
        for name, uri in {
            "plain": f"data:image/png;base64,{_TEXT}",
            "capitals": f"DATA:IMAGE/PNG;BASE64,{_TEXT}",
            "no type": f"data:;base64,{_TEXT}",
            "another type": f"data:text/html;base64,{_TEXT}",
            "a charset": f"data:image/png;charset=utf-8;base64,{_TEXT}",
            "a name": f'data:image/png;name="a b.png";base64,{_TEXT}',
            "space before base64": f"data:image/png; base64,{_TEXT}",
            "lines": f"data:image/png;base64,{_lines(_TEXT)}",
            "white space around": f"data:image/png;base64, \t{_TEXT}\n ",
            "URL-safe": f"data:image/png;base64,{_URL_SAFE}",
            "no padding": f"data:image/png;base64,{_TEXT.rstrip('=')}",
            "escapes in base64": f"data:image/png;base64,{quote(_TEXT, safe='')}",
            "no base64": f"data:image/png,{quote(PICTURE, safe='')}",
        }.items()
    ]
    + [
        Wrapping(name, "a data URI that is broken", uri, 400)
        for name, uri in {
            "empty": "data:image/png;base64,",
            "no comma": f"data:image/png;base64{_TEXT}",
            "nothing": "data:",
            "a character that is none": f"data:image/png;base64,{_TEXT[:400]}*{_TEXT[400:]}",
            "a letter beyond ASCII": f"data:image/png;base64,{_TEXT[:400]}é{_TEXT[400:]}",
            "one character over": f"data:image/png;base64,{'A' * 401}",
            "padding in the middle": f"data:image/png;base64,{_TEXT[:400]}==={_TEXT[400:]}",
            "cut short": f"data:image/png;base64,{_TEXT[:41]}",
            "a long head": f"data:image/png;{'a=b;' * 400}base64,{_TEXT}",
            "base64 that is not called so": f"data:image/png;base64;x,{_TEXT[:7]}é",
        }.items()
    ]
    + [
        Wrapping(name, "an address that is none", uri, 400)
        for name, uri in {
            "a file": "file:///etc/passwd",
            "a path": "/etc/passwd",
            "no scheme": "picture.png",
            "ftp": "ftp://example.com/picture.png",
            "script": "javascript:alert(1)",
            "blob": "blob:https://example.com/1",
            "nothing": "",
            "white space": " ",
            "a null": "http://127.0.0.1\x00/",
            "metadata of a cloud": "http://169.254.169.254/latest/meta-data/",
            "loopback by number": "http://2130706433/",
            "loopback in IPv6": "http://[::ffff:127.0.0.1]/",
            "a private host": "http://10.0.0.1/picture.png",
        }.items()
    ]
)
