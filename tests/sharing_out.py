"""Which tests go together to one process, as `make test` runs several at once.

A file stays whole, so that what its tests share is made once. And files that see the whole machine's shared memory stay
together, one test after the other: whoever starts or ends a cluster removes what the dead left in /dev/shm, and others
count what is there. They are known by what they name.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]

SEES_THE_WHOLE_MACHINE = re.compile(
    r"\blaunched\(|\bmedia_cluster\(|\bcluster_url\b|\bcluster_ready\b|\bmono_url\b|\bsweep_dead_segments\(\)|\btake_over\(|\bSHM_DIRECTORY\b"
)


@functools.cache
def group_of(path: str) -> str:
    """The name of what a file's tests belong to; `path` is relative to the repository."""
    return "the whole machine" if SEES_THE_WHOLE_MACHINE.search((REPOSITORY / path).read_text()) else path
