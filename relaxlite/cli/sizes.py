"""Numbers as a person reads them."""

from __future__ import annotations


def bytes_text(count: int) -> str:
    """ "512 bytes", "97.0 kB", "1.2 MB": decimal units, as file managers and disks count."""
    size, unit = float(count), "bytes"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 999.95:
            break
        size, unit = size / 1000, larger
    return f"{count} bytes" if unit == "bytes" else f"{size:.1f} {unit}"
