"""Memory-mapped files with huge pages of the page cache.

Weights that stream from memory profit from huge pages (weights.py). Linux caches files in huge pages too (ext4 from
6.16 on, XFS and others): parts written in one aligned piece of that size, and parts read through a mapping with
MADV_HUGEPAGE. Such a file need not be copied to anonymous memory (docs/measurements/backend.md), and processes share
it. Files written in small pieces, from the network or by `cp`, stay in small pages until they are evicted.
"""

from __future__ import annotations

import contextlib
import mmap
import re
import sys
from pathlib import Path
from typing import BinaryIO

import numpy as np

from relaxlite.runtime.memory import HUGE_PAGE, MEMORY_LIMIT

_MIN_HUGE_FRACTION = 0.9  # of a file: its ends, and parts written later, may be in small pages


class MappedFile(mmap.mmap):
    """A read-only mapping of a whole file, which must not change while it is mapped."""

    @classmethod
    def of(cls, file: BinaryIO) -> MappedFile:
        """Map a file. Files of more than half of the machine's memory are mapped without huge pages.

        Raises OSError, and ValueError for an empty file.
        """
        mapped = cls(file.fileno(), 0, access=mmap.ACCESS_READ)
        if hasattr(mmap, "MADV_HUGEPAGE") and len(mapped) <= MEMORY_LIMIT // 2:
            with contextlib.suppress(OSError):  # a kernel without huge pages
                mapped.madvise(mmap.MADV_HUGEPAGE)
        return mapped

    def is_in_huge_pages(self) -> bool:
        """Whether nearly all of the file is in huge pages. Reads pages that are not in memory from the disk."""
        if sys.platform != "linux":
            return False
        content = np.frombuffer(self, np.uint8)
        content[::HUGE_PAGE].max()  # reading a page enters it into this process's page tables
        try:
            regions = Path("/proc/self/smaps").read_text(errors="surrogateescape")
        except OSError:
            return False
        return huge_bytes(regions, content.ctypes.data) >= _MIN_HUGE_FRACTION * len(content)


def huge_bytes(regions: str, start: int) -> int:
    """Bytes of the file mapping at address `start` that huge pages map, from the text of smaps (proc_pid_smaps(5))."""
    match = re.search(rf"^0*{start:x}-.*\n(?:[A-Z].*\n)*?FilePmdMapped: *(\d+) kB", regions, re.MULTILINE)
    return 1024 * int(match[1]) if match is not None else 0
