"""How numbers are said, in every line that people read."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """`1 worker`, `2 workers`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def clock(seconds: float) -> str:
    """`0:41`, `1:02:03`, `2 d 3 h`: as short as it can be read."""
    whole = max(0, round(seconds))
    minutes, hours, days = whole // 60 % 60, whole // 3600 % 24, whole // 86400
    if days:
        return f"{days:,} d {hours} h"
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def amount(size_bytes: float) -> str:
    """`512 B`, `1.5 GiB`: powers of 1024."""
    power = 0
    while size_bytes >= 1024 and power < 4:
        size_bytes, power = size_bytes / 1024, power + 1
    unit = ("B", "KiB", "MiB", "GiB", "TiB")[power]
    return f"{size_bytes:,.0f} {unit}" if power == 0 or size_bytes >= 100 else f"{size_bytes:.1f} {unit}"


def rate(per_second: float) -> str:
    """Three digits at least, however slow it is: `1,573`, `12.3`, `0.05`."""
    if per_second >= 100:
        return f"{per_second:,.0f}"
    return f"{per_second:.1f}" if per_second >= 10 else f"{per_second:.2f}"
