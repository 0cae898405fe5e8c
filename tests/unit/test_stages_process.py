"""What a worker's process does before it serves."""

from __future__ import annotations

import subprocess
import sys


def test_a_worker_stands_back_as_a_process_and_as_a_session() -> None:
    code = (
        "import os\nfrom triptych.stages.process import _stand_back\nbefore = os.nice(0)\n_stand_back(3)\n"
        "print(os.nice(0) - before)\n"
        "print(open('/proc/self/autogroup').read() if os.path.exists('/proc/self/autogroup') else 'nice 3')"
    )
    command = [sys.executable, "-c", code]
    told = subprocess.run(command, capture_output=True, text=True, check=True, start_new_session=True).stdout
    assert told.splitlines()[0] == "3"
    assert told.rstrip().endswith("nice 3")
