"""What is measured: cells, in the order of their worth, and which of them each key needs. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.engine.arms import CONTINUOUS, GENERATE, OURS, VLLM
from benchmarks.engine.prompts import Workload

DEMO, SMOL_F32, SMOL_BF16 = "demo-vl", "smollm2-f32", "smollm2-bf16"
CASES = (DEMO, SMOL_F32, SMOL_BF16)
ALL = (*OURS, GENERATE, CONTINUOUS, VLLM)
TEXT_ARMS = {DEMO: ("mono", "e-p-d", GENERATE, CONTINUOUS), SMOL_F32: ALL, SMOL_BF16: ALL}
PICTURE_ARMS = (*OURS, GENERATE, VLLM)


@dataclass(frozen=True, slots=True)
class Cell:
    """One workload on one model at one concurrency. `keys`: those that need it, with `key_arms`."""

    case: str
    workload: Workload
    concurrency: int
    arms: tuple[str, ...]
    keys: tuple[str, ...] = ()
    key_arms: tuple[str, ...] = ()

    @property
    def requests(self) -> int:
        """In a round: at least three, and one for each client."""
        return max(3, self.concurrency)


def cells_of(case: str) -> list[Cell]:
    """Those that keys need come first."""
    text = TEXT_ARMS[case]
    seen: Workload = "pictures-shared" if case == DEMO else "text-shared"
    found = [
        Cell(case, "text-cold", 16, text, ("tokens_per_s_vs_transformers_c16",), ("mono", CONTINUOUS)),
        Cell(case, seen, 1, _arms(case, seen), ("ttft_vs_transformers_shared_prefix",), ("mono", GENERATE)),
    ]
    if case != DEMO:
        keys = ("tokens_per_s_vs_vllm_c8", "ttft_vs_vllm_c8")
        found.append(Cell(case, "text-cold", 8, ("mono", VLLM), keys, ("mono", VLLM)))
    if case == SMOL_BF16:
        found.insert(0, Cell(case, "text-cold", 1, text, ("decode_bandwidth_fraction_c1",), ("mono",)))
    workloads: tuple[Workload, ...] = ("text-cold", "text-shared")
    if case == DEMO:
        workloads = ("pictures-cold", "pictures-shared", "text-cold", "text-shared")
    rest = [Cell(case, workload, clients, _arms(case, workload)) for clients in (1, 16, 4) for workload in workloads]
    known = {(cell.workload, cell.concurrency) for cell in found}
    return [*found, *(cell for cell in rest if (cell.workload, cell.concurrency) not in known)]


def only(key: str, cells: list[Cell]) -> list[Cell]:
    """The cells that a key needs, with the arms that it compares."""
    return [Cell(c.case, c.workload, c.concurrency, c.key_arms, c.keys, c.key_arms) for c in cells if key in c.keys]


def _arms(case: str, workload: Workload) -> tuple[str, ...]:
    return PICTURE_ARMS if workload.startswith("pictures") else TEXT_ARMS[case]
