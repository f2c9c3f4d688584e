"""Sparklines as SVG paths: they need no script, and no inline style, which the content security policy
forbids.
"""

from collections.abc import Sequence

WIDTH, HEIGHT = 240.0, 44.0


def path(values: Sequence[float | None]) -> str:
    """Return the path of a line over WIDTH x HEIGHT, from zero to the largest value, with gaps at missing
    values.

    A lone value is a dot: a line of no length with round ends.
    """
    known = [value for value in values if value is not None]
    if not known or len(values) < 2:
        return ""
    top = max(known) or 1.0
    step = WIDTH / (len(values) - 1)
    parts, pen_down = [], False
    for index, value in enumerate(values):
        if value is None:
            pen_down = False
            continue
        y = HEIGHT - 2 - (HEIGHT - 4) * value / top
        at = f"{index * step:.1f} {y:.1f}"
        parts.append(f"L{at}" if pen_down else f"M{at}L{at}")
        pen_down = True
    return "".join(parts)


def downsample(values: Sequence[float | None], most: int) -> list[float | None]:
    """Downsample by means of neighbors, so that a day fits into a few hundred points."""
    if len(values) <= most:
        return list(values)
    width = len(values) / most
    groups = [values[int(i * width) : int((i + 1) * width)] for i in range(most)]
    means: list[float | None] = []
    for group in groups:
        known = [value for value in group if value is not None]
        means.append(sum(known) / len(known) if known else None)
    return means
