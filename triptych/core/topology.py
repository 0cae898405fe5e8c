"""Topologies by name: which kinds of workers make a cluster. The same code serves them all, over fewer hops.

    e-p-d   encoder ──► prefill ──► decode     a process for each stage
    e-pd    encoder ──► pd                     prefill and decode in one process: no KV moves
    p-d     ep ──► decode                      the vision tower in the prefill worker: no embedding moves
    mono    mono                               all three in one

Any of them may be joined by `+` to a cluster of mixed pools: `e-p-d+mono` has the workers of both. A kind that both
have is there once, as often as its count says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from triptych.core.worker import Role


@dataclass(frozen=True, slots=True)
class WorkerKind:
    """A kind of worker.

    Attributes:
        name: begins the ids of its workers, like `pd-0`.
        service: `python -m services.SERVICE` runs it.
        roles: the stages that it serves.
        also: those of `roles` that the service has to be told of.
        count: the setting that says how many there are.
    """

    name: str
    service: str
    roles: frozenset[Role]
    also: tuple[str, ...] = ()
    count: str = ""


ENCODER = WorkerKind("encoder", "encoder", frozenset({Role.ENCODER}), count="encoders")
PREFILL = WorkerKind("prefill", "prefill", frozenset({Role.PREFILL}), count="prefills")
PREFILL_DECODE = WorkerKind("pd", "prefill", frozenset({Role.PREFILL, Role.DECODE}), ("decode",), "prefills")
ENCODER_PREFILL = WorkerKind("ep", "prefill", frozenset({Role.ENCODER, Role.PREFILL}), ("encoder",), "prefills")
DECODE = WorkerKind("decode", "decode", frozenset({Role.DECODE}), count="decodes")
MONO = WorkerKind("mono", "mono", frozenset(Role), count="monos")

KINDS = (ENCODER, PREFILL, PREFILL_DECODE, ENCODER_PREFILL, DECODE, MONO)
COUNTS = ("encoders", "prefills", "decodes", "monos")

TOPOLOGIES: Mapping[str, tuple[WorkerKind, ...]] = {
    "e-p-d": (ENCODER, PREFILL, DECODE),
    "e-pd": (ENCODER, PREFILL_DECODE),
    "p-d": (ENCODER_PREFILL, DECODE),
    "mono": (MONO,),
}


def kinds_of(topology: str) -> tuple[WorkerKind, ...]:
    """The kinds of workers of a topology or of several joined by `+`, each once, in the order of the stages.

    Raises ValueError with a sentence for a name that is none.
    """
    names = topology.split("+")
    for name in names:
        if name not in TOPOLOGIES:
            raise ValueError(
                f"the topology {name!r} is not known; use {', '.join(TOPOLOGIES)}, or several joined by +, "
                "like e-p-d+mono"
            )
        if names.count(name) > 1:
            raise ValueError(f"{topology!r} names {name} twice; raise a count to have more of its workers")
    wanted = {kind for name in names for kind in TOPOLOGIES[name]}
    return tuple(kind for kind in KINDS if kind in wanted)


def check_counts(topology: str, counts: Mapping[str, int]) -> None:
    """Raises ValueError for a count, other than one, of a kind of worker that the topology does not have."""
    meant = {kind.count for kind in kinds_of(topology)}
    for name, count in counts.items():
        if count != 1 and name not in meant:
            having = [known for known, kinds in TOPOLOGIES.items() if name in {kind.count for kind in kinds}]
            raise ValueError(
                f"--{name} counts workers that the topology {topology} does not have; "
                f"it belongs to {' and '.join(having)}"
            )
