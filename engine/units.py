"""Formatting of byte counts."""


def show_bytes(count: int, *, up: bool = False) -> str:
    """Format `count` bytes in GB (10^9 bytes), or in MB below 1 GB. `up` rounds up, so that the text never
    states less than `count`.
    """
    unit, name = (10**9, "GB") if count >= 10**9 else (10**6, "MB")
    tenths = -(-count * 10 // unit) if up else round(count * 10 / unit)
    return f"{tenths / 10:.1f} {name}"
