"""GPUs, and whether this torch can use them."""

from __future__ import annotations

import re

from triptych.cli.checks.finding import Finding, counted, fail, ok, size, warn
from triptych.cli.checks.machine import Machine

# Triton's kernels and bfloat16 need Ampere.
OLDEST_CAPABILITY = (8, 0)
_DEVICE = re.compile(r"nvidia\d+")


def torch_and_gpu(machine: Machine) -> Finding:
    torch, devices = machine.torch, _devices(machine)
    if torch is None:
        return fail("gpu", f"torch cannot be imported ({machine.torch_error})", "install torch again: make setup")
    if not devices and not torch.gpus:
        return ok("gpu", f"none: CPU only (torch {torch.version})")
    driver = _driver(machine)
    here = f"{counted(len(devices), 'NVIDIA device file')} (driver {driver})"
    if torch.cuda_build is None:
        return warn(
            "gpu",
            f"{here}, but torch {torch.version} was built for the CPU",
            "install the CUDA build: pip install --force-reinstall torch from the index that PyTorch's 'Get started' "
            "page names for this driver; or leave it, and workers stay on the CPU",
        )
    if not torch.gpus:
        return warn(
            "gpu",
            f"{here}, but torch {torch.version} finds no GPU",
            f"run nvidia-smi: the driver must support CUDA {torch.cuda_build}; start containers with --gpus all",
        )
    shown = ", ".join(_shown(gpu.name, gpu.free_bytes, gpu.total_bytes, gpu.capability) for gpu in torch.gpus)
    found = f"{shown}; driver {driver}, torch {torch.version} for CUDA {torch.cuda_build}"
    old = [gpu.name for gpu in torch.gpus if gpu.capability < OLDEST_CAPABILITY]
    if old:
        return warn("gpu", found, f"{', '.join(old)}: too old for bfloat16; set dtype to float16, or device to cpu")
    return ok("gpu", found)


def _devices(machine: Machine) -> list[str]:
    folder = machine.root / "dev"
    return sorted(path.name for path in folder.glob("nvidia*") if _DEVICE.fullmatch(path.name))


def _driver(machine: Machine) -> str:
    found = re.search(r"Module\s+(?:for \S+\s+)?(\d+(?:\.\d+)+)", machine.text("proc/driver/nvidia/version") or "")
    return found[1] if found else "unknown"


def _shown(name: str, free_bytes: int, total_bytes: int, capability: tuple[int, int]) -> str:
    return f"{name} ({size(free_bytes)} of {size(total_bytes)} free, compute {capability[0]}.{capability[1]})"
