"""Formatting of sizes for people."""

from __future__ import annotations


def bytes_text(count: int) -> str:
    """Format a number of bytes in decimal units: "512 bytes", "97.0 kB", "1.2 MB"."""
    size, unit = float(count), "bytes"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 999.95:
            break
        size, unit = size / 1000, larger
    return f"{count} bytes" if unit == "bytes" else f"{size:.1f} {unit}"
