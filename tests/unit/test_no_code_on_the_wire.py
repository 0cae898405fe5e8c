"""No code on the wire: nothing of ours may turn bytes into code, and this reads the source to see it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SOURCES = sorted(path for folder in ("triptych", "services", "scripts") for path in (REPOSITORY / folder).rglob("*.py"))

FORBIDDEN_MODULES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
FORBIDDEN_NAMES = {
    "recv_pyobj",
    "send_pyobj",
    "ProcessPoolExecutor",
    "allow_pickle",
    "UnpicklingError",
    "JoinableQueue",
    "SimpleQueue",
}
FORBIDDEN_CALLS = {"torch.load", "eval", "exec", "compile", "__import__", "yaml.load", "yaml.unsafe_load"}
# Real queues between threads; the ones between processes pickle.
SAFE_QUEUES = {"queue", "asyncio", "janus"}


def offences(source: str) -> Iterator[str]:
    """What the source does that it must not, as `line: what`."""
    for node in ast.walk(ast.parse(source)):
        for offence in (*_imports(node), *_names(node), *_calls(node)):
            yield f"{getattr(node, 'lineno', 0)}: {offence}"


def _imports(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        modules = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        modules = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
    else:
        return
    for module in modules:
        if module.split(".")[0] in FORBIDDEN_MODULES or module in FORBIDDEN_CALLS:
            yield f"imports {module}"
        if module in ("multiprocessing.Queue", "multiprocessing.queues", "multiprocessing.managers"):
            yield f"imports {module}"
        if module.split(".")[-1] in FORBIDDEN_NAMES and module.split(".")[0] not in SAFE_QUEUES:
            yield f"imports {module}"


def _names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Attribute) and node.attr in FORBIDDEN_NAMES:
        if ast.unparse(node).split(".")[0] not in SAFE_QUEUES:
            yield f"uses {ast.unparse(node)}"
    elif isinstance(node, ast.Attribute) and ast.unparse(node) in FORBIDDEN_CALLS:
        yield f"uses {ast.unparse(node)}"


def _calls(node: ast.AST) -> Iterator[str]:
    if not isinstance(node, ast.Call):
        return
    called = ast.unparse(node.func)
    if called in FORBIDDEN_CALLS:
        yield f"calls {called}"
    if called.split(".")[-1] == "Queue" and called.split(".")[0] in ("multiprocessing", "mp", "ctx", "context"):
        yield f"calls {called}"
    for keyword in node.keywords:
        is_false = isinstance(keyword.value, ast.Constant) and not keyword.value.value
        if keyword.arg in ("trust_remote_code", "allow_pickle") and not is_false:
            yield f"passes {keyword.arg}"


def test_there_is_source_to_read() -> None:
    assert len(SOURCES) > 30


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_no_code_on_the_wire(path: Path) -> None:
    assert list(offences(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import torch.multiprocessing\nq = torch.multiprocessing.SimpleQueue()",
        "from cloudpickle import loads",
        "import multiprocessing as mp\nmp.Queue()",
        "from multiprocessing import Queue",
        "import multiprocessing\nmultiprocessing.get_context('spawn')\nctx.Queue()",
        "from concurrent.futures import ProcessPoolExecutor",
        "import concurrent.futures\nconcurrent.futures.ProcessPoolExecutor()",
        "torch.load(path)",
        "from torch import load",
        "socket.recv_pyobj()",
        "AutoModel.from_pretrained(p, trust_remote_code=True)",
        "AutoModel.from_pretrained(p, trust_remote_code=flag)",
        "np.load(p, allow_pickle=True)",
        "import marshal",
        "import shelve",
        "eval(text)",
    ],
)
def test_the_gate_sees(source: str) -> None:
    assert list(offences(source))


@pytest.mark.parametrize(
    "source",
    [
        "import queue\nq = queue.SimpleQueue()",
        "from queue import SimpleQueue",
        "import asyncio\nasyncio.Queue()",
        "model.eval()",
        "AutoModel.from_pretrained(p, trust_remote_code=False)",
        "re.compile('a')",
        "np.load(p, allow_pickle=False)",
        "safetensors.torch.load_file(p)",
    ],
)
def test_the_gate_lets_pass(source: str) -> None:
    assert list(offences(source)) == []
