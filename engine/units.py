"""Sizes in words."""


def show_bytes(count: int, *, up: bool = False) -> str:
    """In GB (10^9 bytes), in MB below one. `up` never shows less than there is."""
    unit, name = (10**9, "GB") if count >= 10**9 else (10**6, "MB")
    tenths = -(-count * 10 // unit) if up else round(count * 10 / unit)
    return f"{tenths / 10:.1f} {name}"
