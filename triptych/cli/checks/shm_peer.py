"""The other process of the shared memory check: maps the segment it is told of, writes, and waits.

python -m triptych.cli.checks.shm_peer NAME NUM_BYTES MAPPING_ID DIRECTORY
"""

from __future__ import annotations

import sys
from pathlib import Path

from triptych.transport.shm import SharedSegment

PATTERN = bytes(range(256))


def main() -> None:
    name, num_bytes, mapping_id, directory = sys.argv[1:]
    segment = SharedSegment.open(name, int(num_bytes), mapping_id=int(mapping_id), directory=Path(directory))
    segment.buffer[:] = PATTERN * (int(num_bytes) // len(PATTERN))
    print("written", flush=True)
    sys.stdin.read()  # keeps the mapping until the other side closes the pipe


if __name__ == "__main__":
    main()
