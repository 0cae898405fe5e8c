"""Settings of a process: a frozen dataclass filled once, at start.

    --field-name VALUE  >  TRIPTYCH_FIELD_NAME  >  [service] field_name in TOML  >  field_name at its top  >  default

A field is a str, int, float, bool, Path, tuple[str, ...] or one of these `| None`. Its metadata may hold `help`,
`choices`, `min`, `max` and `secret`: then it has no flag, and its value is shown nowhere. Anything unknown or malformed
raises StartupError with a sentence that says how to mend it.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import sys
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NoReturn, Protocol, TypeVar, get_type_hints

from triptych.core.environment import (
    CONFIG_VARIABLE,
    ENVIRONMENT_PREFIX,
    OTHER_VARIABLES,
    SETTING_NAMES,
    SHARED_NAMES,
    TABLES,
)
from triptych.core.errors import StartupError
from triptych.core.setting_values import Setting, parse_text, parse_toml


class SettingsClass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]


S = TypeVar("S", bound=SettingsClass)


def load_settings(
    cls: type[S],
    service: str,
    argv: Sequence[str] | None = None,
    environ: Mapping[str, str] | None = None,
    *,
    command: str | None = None,
) -> S:
    """An instance of the frozen dataclass `cls`.

    Args:
        cls: fields as described above; one without a default is required.
        service: the TOML table to read, and the name in messages.
        argv: without the program's name; the process's own by default.
        environ: the process's own by default.
        command: what the user types to come here, for the usage text; `triptych serve SERVICE` by default.

    Raises:
        StartupError: a flag, a variable or a key is unknown or malformed, or a required one is missing.
        SystemExit: `--help` was asked for and has been printed.
    """
    environ = os.environ if environ is None else environ
    settings = _settings_of(cls)
    command = command or f"triptych serve {service}"
    flags = _read_flags(settings, command, sys.argv[1:] if argv is None else argv)
    variables = _read_environment(settings, environ)
    config = flags.pop("config", None) or environ.get(CONFIG_VARIABLE)
    table = _read_toml(settings, service, Path(config)) if config else {}
    values = {**table, **variables}
    for name, text in flags.items():
        values[name] = parse_text(settings[name], text, f"the flag {settings[name].flag}")
    _require(settings, values)
    try:
        return cls(**values)
    except ValueError as error:
        raise StartupError(f"the settings of {service} do not fit together: {error}") from error


def config_path(argv: Sequence[str], environ: Mapping[str, str]) -> Path | None:
    """The file that `load_settings` reads with the same arguments; for those who start others with it."""
    parser = _Parser(allow_abbrev=False, add_help=False)
    parser.add_argument("--config")
    named = parser.parse_known_args(argv)[0].config or environ.get(CONFIG_VARIABLE)
    return Path(named).absolute() if named else None


def config_tables(path: Path) -> dict[str, dict[str, object]]:
    """The tables of a file with settings, by name, as they stand. Raises StartupError when it cannot be read."""
    return {name: table for name, table in _parse_document(path).items() if isinstance(table, dict)}


def run_main(main: Callable[[], int]) -> int:
    """The exit status of `main`; a StartupError becomes one sentence on standard error and status 1."""
    try:
        return main()
    except StartupError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 1


def _settings_of(cls: type[SettingsClass]) -> dict[str, Setting]:
    hints = get_type_hints(cls)
    return {
        field.name: Setting.of(field, hints[field.name]) for field in cls.__dataclass_fields__.values() if field.init
    }


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise StartupError(f"{message}; {self.prog} --help lists the flags")


def _read_flags(settings: Mapping[str, Setting], command: str, argv: Sequence[str]) -> dict[str, str]:
    """The flags that were given, as text, by field name."""
    parser = _Parser(prog=command, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("--config", metavar="FILE", help="TOML file with settings")
    for setting in settings.values():
        if setting.is_secret:  # whoever is on the machine can read command lines
            continue
        if setting.kind is bool:
            parser.add_argument(
                setting.flag, dest=setting.name, nargs="?", const="true", metavar="true|false", help=setting.help
            )
        else:
            parser.add_argument(setting.flag, dest=setting.name, metavar=setting.metavar, help=setting.help)
    known, unknown = parser.parse_known_args(argv)
    if unknown:
        raise _unknown_flag(settings, command, unknown[0])
    return dict(vars(known))


def _unknown_flag(settings: Mapping[str, Setting], command: str, word: str) -> StartupError:
    flag = word.split("=")[0]
    name = flag.removeprefix("--").replace("-", "_")
    if flag.startswith("--") and name in SHARED_NAMES:
        return StartupError(
            f"{command} has no flag {flag}, which other processes of a cluster have; "
            f"set {ENVIRONMENT_PREFIX}{name.upper()}, or {name} in the file of --config, for all of them"
        )
    known = [setting.flag for setting in settings.values()] + ["--config", "--help"]
    near = suggestion(flag, known, prefix="--") if flag.startswith("--") else ""
    return StartupError(f"{command} does not know {word!r}{near}; {command} --help lists the flags")


def _read_environment(settings: Mapping[str, Setting], environ: Mapping[str, str]) -> dict[str, object]:
    values: dict[str, object] = {}
    for variable, text in environ.items():
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable in OTHER_VARIABLES:
            continue
        name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
        if name in settings:
            values[name] = parse_text(settings[name], text, f"the environment variable {variable}")
        elif name not in SETTING_NAMES:
            known = [ENVIRONMENT_PREFIX + known.upper() for known in {*settings, *SETTING_NAMES}]
            raise StartupError(
                f"the environment variable {variable} is no setting of any service"
                f"{suggestion(variable, known, prefix=ENVIRONMENT_PREFIX)}; unset it or correct its name"
            )
    return values


def _read_toml(settings: Mapping[str, Setting], service: str, path: Path) -> dict[str, object]:
    document = _parse_document(path)
    shared = {name: value for name, value in document.items() if not isinstance(value, dict)}
    tables = {name: value for name, value in document.items() if isinstance(value, dict)}
    for name in tables:
        if name not in TABLES | {service}:
            raise StartupError(f"{path.name} has a table [{name}]; tables are {', '.join(sorted(TABLES))}")
        if name != service:  # its own reader knows its settings; a name that no reader knows is told by the first
            _toml_values({}, tables[name], f"[{name}] in {path.name}", also_known=SETTING_NAMES)
    values = _toml_values(settings, shared, f"the top of {path.name}", also_known=SETTING_NAMES)
    own = tables.get(service, {})
    return {**values, **_toml_values(settings, own, f"[{service}] in {path.name}", also_known=())}


def _parse_document(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StartupError(f"the file given by --config cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise StartupError(f"{path.name} is not valid TOML: {error}") from error


def _toml_values(
    settings: Mapping[str, Setting], table: Mapping[str, object], where: str, also_known: Collection[str]
) -> dict[str, object]:
    values: dict[str, object] = {}
    for name, value in table.items():
        if name in settings:
            values[name] = parse_toml(settings[name], value, where)
        elif name not in also_known:
            raise StartupError(
                f"{where} sets {name!r}, which is no setting{suggestion(name, [*settings, *also_known])}; "
                "remove it or correct its name"
            )
    return values


def _require(settings: Mapping[str, Setting], values: Mapping[str, object]) -> None:
    for setting in settings.values():
        if setting.required and setting.name not in values:
            raise StartupError(
                f"the setting {setting.name} is missing: give {setting.flag}, "
                f"{ENVIRONMENT_PREFIX}{setting.name.upper()} or {setting.name} in the file of --config"
            )


def suggestion(name: str, known: Collection[str], prefix: str = "") -> str:
    """ " (did you mean X?)" with the known name that is nearest, or nothing when none is near.

    `prefix`: what all of them begin with, which makes none like another.
    """
    bare = sorted(one.removeprefix(prefix) for one in known)
    close = difflib.get_close_matches(name.removeprefix(prefix), bare, n=1)
    return f" (did you mean {prefix}{close[0]}?)" if close else ""
