"""Files in memory that are read through huge pages where the system has them in such.

Weights that stream from memory want huge pages (weights.py). Linux keeps files of ext4 (from 6.16 on), XFS and
others in those, too: what was written in one piece as large and aligned as a huge page, and what is read from the disk
through a mapping that has asked for them. Such a file need not be copied: it is there once for all processes, and a
copy would take 0.1 ms per MB, or 1 to 3 where a virtual machine has to get fresh memory from its host. What came in
small pieces, from the network or by `cp`, lies in small pages until the system has dropped it.
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

_MOSTLY = 0.9  # of a file: where weights meet its ends, or what was written later, there may be small pages


class MappedFile(mmap.mmap):
    """A whole file, not to be written, whose content stays as it is while it is mapped."""

    @classmethod
    def of(cls, file: BinaryIO) -> MappedFile:
        """Raises OSError, and ValueError for an empty file. Of files of more than half of the memory only those pages
        are read that somebody wants, which are small."""
        result = cls(file.fileno(), 0, access=mmap.ACCESS_READ)
        if hasattr(mmap, "MADV_HUGEPAGE") and len(result) <= MEMORY_LIMIT // 2:
            with contextlib.suppress(OSError):  # a kernel without them
                result.madvise(mmap.MADV_HUGEPAGE)
        return result

    def is_in_huge_pages(self) -> bool:
        """Whether nearly all of it is. Reads what is not in memory yet from the disk."""
        if sys.platform != "linux":
            return False
        content = np.frombuffer(self, np.uint8)
        content[::HUGE_PAGE].max()  # a page has its place in the tables of this process when it was read
        try:
            regions = Path("/proc/self/smaps").read_text(errors="surrogateescape")
        except OSError:
            return False
        return huge_bytes(regions, content.ctypes.data) >= _MOSTLY * len(content)


def huge_bytes(regions: str, start: int) -> int:
    """Of the region of memory that begins at `start`, those of a file that huge pages map (proc_pid_smaps(5))."""
    match = re.search(rf"^0*{start:x}-.*\n(?:[A-Z].*\n)*?FilePmdMapped: *(\d+) kB", regions, re.MULTILINE)
    return 1024 * int(match[1]) if match is not None else 0
