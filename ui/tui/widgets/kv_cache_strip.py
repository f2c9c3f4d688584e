"""KV cache of one model: a strip that maps its blocks, and the most used prefixes."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from ..rendering import Glyphs, Line, Span, clean, count

MOST_PREFIXES = 5
Cell = tuple[int, int]
"""Number of (live, cached) blocks."""


def strip_lines(blocks: Mapping[str, Any], width: int, rows: int, glyphs: Glyphs) -> list[Line]:
    """Draw the blocks in the order of their numbers, row by row. A cell with any live block is drawn as
    live.
    """
    cells = [(live, cached) for number, live, cached, *_ in blocks["cells"] for _ in range(number)]
    groups = _merge_cells(cells, width * rows)
    each = -(-int(blocks["num_blocks"]) // max(1, len(groups)))
    lines: list[Line] = [
        ((" ", ""), *_spans(groups[start : start + width], glyphs)) for start in range(0, len(groups), width)
    ]
    holders = len(blocks["holders"])
    held = f", held by {holders} request{'' if holders == 1 else 's'}" if holders else ""
    evicted = (
        f"; {count(blocks['evictions'])} cached blocks made room for others" if blocks["evictions"] else ""
    )
    lines.append(((f"   {each} block{'' if each == 1 else 's'} a cell, by number{held}{evicted}", "muted"),))
    return lines


def prefix_lines(blocks: Mapping[str, Any], most: int = MOST_PREFIXES) -> list[Line]:
    return [
        (
            (f"   {use['prefix']}  ", ""),
            (f"{count(use['tokens']):>7} tokens {count(use['blocks']):>5} blocks  found ", "muted"),
            (f"{count(use['hits']):>5}x", "strong"),
            (f"  saved {count(use['hits'] * use['tokens'])} tokens", "muted"),
            (f", last {clean(use['last_request'])}", "muted"),
        )
        for use in blocks["prefixes"][:most]
    ]


def _merge_cells(cells: Sequence[Cell], most: int) -> list[Cell]:
    """Merge neighboring cells to at most `most`, each the sum of its part."""
    if len(cells) <= most:
        return list(cells)
    edges = [len(cells) * number // most for number in range(most + 1)]
    parts = (cells[first:last] for first, last in pairwise(edges))
    return [(sum(live for live, _ in part), sum(cached for _, cached in part)) for part in parts]


def _spans(cells: Sequence[Cell], glyphs: Glyphs) -> list[Span]:
    spans: list[Span] = []
    for live, cached in cells:
        mark, tone = (
            (glyphs.bar, "kv") if live else (glyphs.half, "cached") if cached else (glyphs.rest, "rule")
        )
        if spans and spans[-1][1] == tone:
            spans[-1] = (spans[-1][0] + mark, tone)
        else:
            spans.append((mark, tone))
    return spans
