"""The keys file, and keys from the environment: text to a keyring. docs/tenants.md describes the format.

No message repeats a key, or anything that stands where a key should.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from services.router.admission.keyring import MAX_KEY_CHARS, Keyring, digest_of
from services.router.admission.tenants import Rates, Tenant
from triptych.core.errors import StartupError
from triptych.rpc.convert import MAX_PRIORITY

# The label of metrics takes as many values.
MAX_TENANTS = 1000
MAX_KEYS = 10_000
MIN_KEY_CHARS = 16
_PLACE = re.compile(r" \(at (line [0-9]+, column [0-9]+|end of document)\)")
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
_KEY = re.compile(rf"[\x21-\x7e]{{{MIN_KEY_CHARS},{MAX_KEY_CHARS}}}")
_DIGEST_PREFIX = "sha256:"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_RATES = ("requests_per_minute", "tokens_per_minute", "pixels_per_minute")
_OTHERS = ("keys", "max_concurrent", "weight", "priority", "is_admin", "is_trusted")


def load_keyring(path: Path | None, pairs: Sequence[str]) -> Keyring | None:
    """None when no keys are configured: nobody is asked for one.

    Args:
        path: the keys file.
        pairs: "tenant:key", from the environment; such tenants have no limits unless the file names them, too.

    Raises:
        StartupError: with how to mend it.
    """
    tables = _tables_of(path) if path else {}
    tenants = {name: _tenant(name, table, path.name if path else "") for name, table in tables.items()}
    by_digest: dict[bytes, Tenant] = {}
    for name, table in tables.items():
        _add_keys(by_digest, tenants[name], table.get("keys", ()))
    for pair in pairs:
        name, colon, key = pair.partition(":")
        if not colon or not _NAME.fullmatch(name):
            raise StartupError("each of TRIPTYCH_API_KEYS must be tenant:key, with a tenant's name in lower case")
        _add_keys(by_digest, tenants.setdefault(name, Tenant(name)), (key,))
    if path and not by_digest:
        raise StartupError(f"{path.name} holds no key, so nobody could use the API; add one, or give no keys file")
    if len(tenants) > MAX_TENANTS or len(by_digest) > MAX_KEYS:
        raise StartupError(f"at most {MAX_TENANTS} tenants and {MAX_KEYS} keys can be served")
    return Keyring(by_digest) if by_digest else None


def is_open_to_others(path: Path) -> bool:
    """Whether more users than its owner and group may read it."""
    return bool(path.stat().st_mode & 0o004)


def _tables_of(path: Path) -> dict[str, Mapping[str, Any]]:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StartupError(f"the keys file {path.name} (--api-keys-file) cannot be read: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        place = _PLACE.search(str(error))  # the rest may quote what stands there
        raise StartupError(f"{path.name} is not valid TOML{place[0] if place else ''}") from None
    except UnicodeDecodeError:
        raise StartupError(f"{path.name} is not UTF-8") from None
    tenants = document.get("tenants")
    if set(document) != {"tenants"} or not isinstance(tenants, dict):
        raise StartupError(f"{path.name} must hold tables [tenants.NAME] and nothing else")
    for name, table in tenants.items():
        if not _NAME.fullmatch(name) or not isinstance(table, dict):
            raise StartupError(
                f"in {path.name} each tenant is a table [tenants.NAME]; a name has lower-case letters, digits, - and _"
            )
    return tenants


def _tenant(name: str, table: Mapping[str, Any], file: str) -> Tenant:
    where = f"[tenants.{name}] in {file}"
    for key in table:
        if key not in (*_RATES, *_OTHERS):
            raise StartupError(f"{where} sets something that is none of {', '.join((*_RATES, *_OTHERS))}")
    return Tenant(
        name=name,
        rates=Rates(**{rate: _number(table, rate, where, 1e-3, 1e15) for rate in _RATES}),
        max_concurrent=_whole(table, "max_concurrent", where, 1, 1_000_000),
        weight=_or(_number(table, "weight", where, 1e-3, 1e3), 1.0),
        priority=_whole(table, "priority", where, -MAX_PRIORITY, MAX_PRIORITY) or 0,
        is_admin=_flag(table, "is_admin", where),
        is_trusted=_flag(table, "is_trusted", where),
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _number(table: Mapping[str, Any], name: str, where: str, low: float, high: float) -> float | None:
    value = table.get(name)
    if value is None:
        return None
    if type(value) not in (int, float) or not math.isfinite(value) or not low <= value <= high:
        raise StartupError(f"{where}: {name} must be a number from {low:g} to {high:g}")
    return float(value)


def _whole(table: Mapping[str, Any], name: str, where: str, low: int, high: int) -> int | None:
    value = table.get(name)
    if value is None:
        return None
    if type(value) is not int or not low <= value <= high:
        raise StartupError(f"{where}: {name} must be a whole number from {low} to {high}")
    return value


def _flag(table: Mapping[str, Any], name: str, where: str) -> bool:
    value = table.get(name, False)
    if type(value) is not bool:
        raise StartupError(f"{where}: {name} must be true or false")
    return value


def _add_keys(by_digest: dict[bytes, Tenant], tenant: Tenant, keys: object) -> None:
    for digest in _digests(tenant, keys):
        if by_digest.setdefault(digest, tenant) is not tenant:
            raise StartupError(f"tenants {by_digest[digest].name} and {tenant.name} have a key in common")


def _digests(tenant: Tenant, keys: object) -> Iterable[bytes]:
    if not isinstance(keys, list | tuple):
        raise StartupError(f"the keys of tenant {tenant.name} must be a list")
    for key in keys:
        if isinstance(key, str) and _DIGEST.fullmatch(key):
            yield bytes.fromhex(key.removeprefix(_DIGEST_PREFIX))
        elif isinstance(key, str) and _KEY.fullmatch(key) and not key.startswith(_DIGEST_PREFIX):
            yield digest_of(key.encode())
        else:
            raise StartupError(
                f"a key of tenant {tenant.name} is none: it needs {MIN_KEY_CHARS} to {MAX_KEY_CHARS} visible ASCII "
                f"characters, or {_DIGEST_PREFIX} and 64 lower-case hexadecimal digits"
            )
