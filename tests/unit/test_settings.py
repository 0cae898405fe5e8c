"""Settings: which source wins, and the sentences that say how to mend a wrong one."""

from __future__ import annotations

import dataclasses
import importlib
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from triptych.core import environment
from triptych.core.errors import StartupError
from triptych.core.settings import load_settings, run_main

REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True)
class Sample:
    model: Path
    port: int = field(default=8101, metadata={"help": "100% of it", "min": 0, "max": 65535})
    log_level: str = field(default="info", metadata={"choices": ("debug", "info")})
    threads: int | None = None
    metrics_port: float = 1.5
    worker_id: tuple[str, ...] = ("a",)
    host: bool = False

    def __post_init__(self) -> None:
        if self.threads == 13:
            raise ValueError("thirteen threads are one too many")


def load(*argv: str, config: str | None = None, tmp_path: Path | None = None, **variables: str) -> Sample:
    flags = list(argv)
    if config is not None:
        assert tmp_path is not None
        (tmp_path / "t.toml").write_text(config)
        flags += ["--config", str(tmp_path / "t.toml")]
    return load_settings(Sample, "encoder", flags, {f"TRIPTYCH_{k}": v for k, v in variables.items()})


def test_defaults() -> None:
    assert load("--model", "m") == Sample(Path("m"))


def test_flag_over_variable_over_table_over_top(tmp_path: Path) -> None:
    config = 'model = "top"\nport = 1\nthreads = 2\n[encoder]\nport = 3\n'
    assert load(config=config, tmp_path=tmp_path) == Sample(Path("top"), port=3, threads=2)
    assert load(config=config, tmp_path=tmp_path, PORT="4").port == 4
    assert load("--port=5", config=config, tmp_path=tmp_path, PORT="4").port == 5


def test_the_file_may_be_named_by_a_variable(tmp_path: Path) -> None:
    (tmp_path / "t.toml").write_text('model = "m"')
    assert load(CONFIG=str(tmp_path / "t.toml")).model == Path("m")


def test_every_type_from_text() -> None:
    found = load("--model", "m", "--host", "--worker-id", "a, b", THREADS="none", METRICS_PORT="2")
    assert found == Sample(Path("m"), threads=None, metrics_port=2.0, worker_id=("a", "b"), host=True)
    assert load("--model", "m", "--host=false", HOST="true").host is False


def test_every_type_from_toml(tmp_path: Path) -> None:
    config = 'model = "m"\n[encoder]\nthreads = 1\nmetrics_port = 2\nworker_id = ["x"]\nhost = true\n'
    assert load(config=config, tmp_path=tmp_path) == Sample(
        Path("m"), threads=1, metrics_port=2.0, worker_id=("x",), host=True
    )


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        ([], "the setting model is missing: give --model, TRIPTYCH_MODEL or model"),
        (["--model"], "expected one argument"),
        (["--model", "m", "--prt", "1"], r"does not know '--prt' \(did you mean --port\?\)"),
        (["--model", "m", "--wxyz"], "does not know '--wxyz'; "),
        (["--model", "m", "--hlep"], r"does not know '--hlep' \(did you mean --help\?\)"),
        (["--model", "m", "--kv-pool-bytes=1"], "has no flag --kv-pool-bytes, .* set TRIPTYCH_KV_POOL_BYTES, or"),
        (["--model", "m", "--json"], "does not know '--json'"),
        (["--model", "m", "stray"], "does not know 'stray'"),
        (["--model", "m", "--port", "x"], "port must be a whole number, but the flag --port gives x"),
        (["--model", "m", "--port", "-1"], "port must be at least 0"),
        (["--model", "m", "--port", "70000"], "port must be at most 65535"),
        (["--model", "m", "--log-level", "loud"], "log_level must be one of debug, info"),
        (["--model", "m", "--host=maybe"], "host must be true or false"),
        (["--model", "m", "--metrics-port", "nan"], "metrics_port must be a finite number"),
        (["--model", "m", "--threads", "13"], "thirteen threads are one too many"),
        (["--model", "m", "--config", "/nowhere.toml"], "--config cannot be read"),
    ],
)
def test_a_wrong_flag_stops_the_start(argv: list[str], sentence: str) -> None:
    with pytest.raises(StartupError, match=sentence):
        load(*argv)


def test_a_wrong_variable_stops_the_start() -> None:
    with pytest.raises(StartupError, match="TRIPTYCH_PORT gives x"):
        load("--model", "m", PORT="x")
    with pytest.raises(StartupError, match=r"TRIPTYCH_PROT is no setting of any service \(did you mean TRIPTYCH_PORT"):
        load("--model", "m", PROT="1")


def test_variables_of_others_are_left_alone() -> None:
    assert load("--model", "m", VERIFY="full", RUNTIME_DIR="/r") == Sample(Path("m"))


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ("prot = 1", r"sets 'prot', which is no setting \(did you mean port\?\)"),
        ("[encoder]\nruntime_dir = 'x'", "sets 'runtime_dir', which is no setting"),
        ("[decode]\nkv_pool_byte = 1", r"\[decode\] in .* sets 'kv_pool_byte', .*\(did you mean kv_pool_bytes\?\)"),
        ("[encoders]\nport = 1", r"has a table \[encoders\]; tables are decode, encoder"),
        ("port = '1'", "port must be a whole number"),
        ("port = true", "port must be a whole number"),
        ("worker_id = [1]", "worker_id must be a list of names"),
        ("model = 1", "model must be a path"),
        ("port =", "is not valid TOML"),
    ],
)
def test_a_wrong_file_stops_the_start(config: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=sentence):
        load("--model", "m", config=config, tmp_path=tmp_path)


def test_tables_and_top_keys_of_others_are_left_alone(tmp_path: Path) -> None:
    config = "runtime_dir = '/r'\n[decode]\nkv_pool_bytes = 1\n"
    assert load("--model", "m", config=config, tmp_path=tmp_path) == Sample(Path("m"))


def test_help_names_flags_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        load("--help")
    assert exit_info.value.code == 0
    text = capsys.readouterr().out
    assert "--log-level debug|info" in text
    assert "100% of it (default: 8101)" in text


def test_run_main_turns_a_startup_error_into_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    def failing() -> int:
        raise StartupError("do this instead")

    assert run_main(failing) == 1
    assert capsys.readouterr().err == "error: do this instead\n"
    assert run_main(lambda: 0) == 0


SETTINGS_FILES = sorted([*REPOSITORY.glob("services/*/settings.py"), *REPOSITORY.glob("triptych/*/settings.py")])


def _module_name(path: Path) -> str:
    return ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)


@pytest.mark.parametrize("path", SETTINGS_FILES, ids=_module_name)
def test_the_fields_of_every_service_are_listed(path: Path) -> None:
    """So that a variable meant for one service does not stop the others."""
    for value in vars(importlib.import_module(_module_name(path))).values():
        if dataclasses.is_dataclass(value) and isinstance(value, type) and value.__name__.endswith("Settings"):
            names = {entry.name for entry in dataclasses.fields(value)}
            assert names <= environment.SETTING_NAMES, "add them to triptych/core/environment.py"
