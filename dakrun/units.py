"""Byte sizes in text form ("20GiB", "1.5 GB"), numbers with units or nouns, and ceil_div."""

import math
import re

from dakrun.errors import UsageError

_FACTORS = {
    "": 1, "b": 1,
    "k": 10**3, "kb": 10**3, "kib": 2**10,
    "m": 10**6, "mb": 10**6, "mib": 2**20,
    "g": 10**9, "gb": 10**9, "gib": 2**30,
    "t": 10**12, "tb": 10**12, "tib": 2**40,
}  # fmt: skip
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-zA-Z]*)\s*")


def parse_bytes(text: str) -> int:
    """Number of bytes in `text`, such as "20GiB", "1.5 GB" or "4096".

    Raises UsageError for anything else.
    """
    match = _SIZE.fullmatch(text)
    factor = _FACTORS.get(match[2].lower()) if match else None
    size = float(match[1]) * factor if match and factor else math.inf
    if size == math.inf:
        raise UsageError(f"{text!r} is not a size", hint="write it like 20GiB, 1.5GB or 4096")
    return int(size)


def format_bytes(n: float) -> str:
    """`n` bytes with a binary unit and three or four significant digits, as in "1.50 GiB"."""
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(n) >= factor:
            return f"{n / factor:.2f} {unit}"
    return f"{n:.0f} B"


def format_decimal(value: float, unit: str) -> str:
    """`value` with a decimal prefix and four significant digits, as in "4.45 TB/s"."""
    for prefix, factor in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= factor:
            return f"{value / factor:.4g} {prefix}{unit}"
    return f"{value:.4g} {unit}"


def format_rate(bytes_per_s: float) -> str:
    """Bytes per second as text, such as "1,492.2 GB/s"."""
    return f"{bytes_per_s / 1e9:,.1f} GB/s"


def format_seconds(s: float) -> str:
    """`s` seconds with a unit by magnitude: "12.3 us", "4.56 ms", "7.89 s"."""
    if s >= 1:
        return f"{s:.2f} s"
    return f"{s * 1e3:.2f} ms" if s >= 1e-3 else f"{s * 1e6:.1f} us"


def ceil_div(a: int, b: int) -> int:
    """`a` / `b`, rounded up."""
    return -(-a // b)


def counted(count: int, noun: str) -> str:
    """`count` and the noun in its number: "1 row", "2 rows"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
