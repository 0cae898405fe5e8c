"""The servers that are compared: the command of each, printed as it is run, and how it is told when it is ready."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path

from triptych.core.topology import kinds_of

OURS = ("mono", "e-p-d")
ROOT = Path(__file__).resolve().parents[2]
GENERATE, CONTINUOUS, VLLM = "transformers-generate", "transformers-continuous", "vllm"
# Of our two KV pools, of vLLM's, and of the batches of `generate` none: it grows as it needs.
KV_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Case:
    """A checkpoint in one dtype. `num_words` makes prompts of text of about 320 tokens.

    Attributes:
        sees: it takes pictures.
    """

    name: str
    folder: Path
    dtype: str
    num_words: int
    sees: bool

    @property
    def arms(self) -> tuple[str, ...]:
        return (*OURS, GENERATE, CONTINUOUS, VLLM)


@dataclass(frozen=True, slots=True)
class Launch:
    """A command, its own environment variables, and where it will answer. `ready_path` turns 200 when it can."""

    arm: str
    command: tuple[str, ...]
    variables: dict[str, str] = field(default_factory=dict)
    port: int = 0
    model: str = "m"
    ready_path: str = "/health"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def line(self) -> str:
        """As one would type it."""
        return " ".join([*(f"{name}={value}" for name, value in self.variables.items()), *self.command])

    def portable_line(self) -> str:
        """The same for whoever reads it elsewhere: without the folders of this machine."""
        return " ".join(_portable(word) for word in self.line().split(" "))


def _portable(word: str) -> str:
    if not word.startswith("/"):
        return word
    path = Path(word)
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) and word != sys.executable else path.name


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def launch(arm: str, case: Case, threads: int, runtime: Path, vllm_python: Path | None) -> Launch:
    """Raises ValueError with a sentence when there is no such arm here."""
    port = free_port()
    if arm in OURS:
        return ours(arm, case, threads, runtime, port)
    if arm == VLLM:
        if vllm_python is None:
            raise ValueError("--vllm-python was not given")
        return _vllm(vllm_python, case, threads, port)
    engine = arm.removeprefix("transformers-")
    command = (
        *(sys.executable, "-m", "benchmarks.engine.transformers_server", engine, str(case.folder)),
        *("--dtype", case.dtype, "--threads", str(threads), "--port", str(port)),
    )
    return Launch(arm, command, {"OMP_NUM_THREADS": str(threads)}, port)


def ours(
    arm: str,
    case: Case,
    threads: int,
    runtime: Path,
    port: int,
    extra: tuple[str, ...] = (),
    variables: dict[str, str] | None = None,
) -> Launch:
    """Text alone has no encoder: three stages are two workers then. All workers together have `threads`, as every other
    arm has: two that compute at once would else wait for each other's threads at every product."""
    topology = "p-d" if arm == "e-p-d" and not case.sees else arm
    each = max(1, threads // len(kinds_of(topology)))
    command = (
        *(sys.executable, "-m", "triptych.cli", "up", "--topology", topology, "--model", str(case.folder)),
        *("--threads", str(each), "--port", str(port), "--runtime-dir", str(runtime), *extra),
    )
    told = {"TRIPTYCH_DTYPE": case.dtype, "TRIPTYCH_KV_POOL_BYTES": str(KV_BYTES), **(variables or {})}
    return Launch(arm, command, told, port, case.folder.resolve().name, "/ready")


def _vllm(python: Path, case: Case, threads: int, port: int) -> Launch:
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))
    command = (
        *(str(python), "-m", "vllm.entrypoints.cli.main", "serve", str(case.folder), "--served-model-name", "m"),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", case.dtype, "--max-model-len", "2048"),
        "--enable-prefix-caching",
    )
    variables = {
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_KVCACHE_SPACE": str(KV_BYTES >> 30),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    return Launch(VLLM, command, variables, port)
