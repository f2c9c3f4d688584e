"""Rows dealt out to the ranks of a stage: each has a run of them, as equal as can be."""


def dealt(rows: int, tp: int, rank: int) -> slice:
    """Those of `rank`. The first ones have one size, the rest what is left, which may be nothing."""
    size = -(-rows // tp)
    return slice(min(rows, rank * size), min(rows, (rank + 1) * size))
