"""Charts with axes over seconds, drawn in Braille dots: two samples a cell, four levels a row."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llmbox.app.telemetry.snapshot import NA, Number, Tick

from ..messages import DashboardState, count_requests
from ..rendering import Glyphs, Line, Span, count, fit, line_width, percent, seconds

AXIS = 7
"""Cells of the labels of the vertical axis, with its line."""
_DOTS = ((0x40, 0x04, 0x02, 0x01), (0x80, 0x20, 0x10, 0x08))
"""Dots of the left and the right column of a Braille cell, from the bottom up."""
_STEPS = (1.0, 2.0, 4.0, 10.0)
"""Round tops of an axis; their halves are round too."""


@dataclass(frozen=True, slots=True)
class Series:
    """Values, one a dot, newest last; below zero where there is none."""

    values: Sequence[float]
    tone: str


@dataclass(frozen=True, slots=True)
class AxisChart:
    """Chart of one unit: the first series is filled, others are lines."""

    title: str
    legend: Line
    series: tuple[Series, ...]
    form: Callable[[float], str]
    """Formats a value of the vertical axis in at most five cells."""
    least: float = 1.0
    """Smallest top of the vertical axis."""
    top: float | None = None
    target: float | None = None
    """Value of a horizontal line, such as a latency target."""


def samples(width: int, glyphs: Glyphs) -> int:
    """Return how many samples a chart of that width shows."""
    return max(1, width - AXIS) * (1 if glyphs.bar == "#" else 2)


def thin(values: Sequence[float], step: int, now: int) -> list[float]:
    """Average `step` values at a time, newest last. Intervals start at multiples of `step` seconds, so that
    a chart moves without flicker.
    """
    if step <= 1:
        return list(values)
    groups: dict[int, list[float]] = {}
    for at, value in enumerate(values, now - len(values) + 1):
        groups.setdefault(at // step, []).append(value)
    return [_mean([value for value in group if value >= 0]) for group in groups.values()]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else -1.0


def draw_chart(chart: AxisChart, width: int, height: int, glyphs: Glyphs, step: int = 1) -> list[Line]:
    """Draw `height` lines: a heading, the plot, the axis. `step`: seconds a sample."""
    number, rows = samples(width, glyphs), max(1, height - 2)
    shown = [list(each.values)[-number:] for each in chart.series]
    high = chart.top or nice_top(max((value for each in shown for value in each), default=0.0), chart.least)
    dots = 2 if glyphs.bar == "#" else 4
    levels = [_levels(values, number, rows * dots, high) for values in shown]
    tail = line_width(chart.legend)
    room = max(0, width - len(chart.title) - 3 - tail)
    lines: list[Line] = [
        ((" " + chart.title, "title"), (" " + glyphs.rule * room + " ", "rule"), *chart.legend)
    ]
    target = None if chart.target is None or chart.target > high else int(chart.target / high * rows * 0.9999)
    for row in reversed(range(rows)):
        is_labelled = row == rows - 1 or (rows >= 4 and 2 * (row + 1) == rows)
        text = chart.form(high * (row + 1) / rows) if is_labelled else ""
        label = fit(text, AXIS - 1, glyphs, right=True) + (glyphs.tick if is_labelled else glyphs.side)
        drawn = [_cells(each, row * dots, glyphs, is_line=at > 0) for at, each in enumerate(levels)]
        lines.append(((label, "muted"), *_plot_row(chart, drawn, glyphs, is_target=row == target)))
    return [*lines, _time_axis(width, step, glyphs)]


def _plot_row(chart: AxisChart, drawn: Sequence[str], glyphs: Glyphs, *, is_target: bool) -> Line:
    """Draw a row from the cells of all series."""
    tones = [series.tone for series in chart.series]
    blank = (glyphs.rule if glyphs.bar == "#" else "╌", "warn") if is_target else (" ", "")
    spans: list[Span] = []
    for marks in zip(*drawn, strict=True):
        mark, tone = _merge(marks, tones) or blank
        if spans and spans[-1][1] == tone:
            spans[-1] = (spans[-1][0] + mark, tone)
        else:
            spans.append((mark, tone))
    return tuple(spans)


def _merge(marks: Sequence[str], tones: Sequence[str]) -> Span | None:
    """Put the cells of all series into one, which has the tone of the first series drawn in it."""
    drawn = [(mark, tone) for mark, tone in zip(marks, tones, strict=True) if mark != " "]
    if len(drawn) < 2 or drawn[0][0] < "\u2800":
        return drawn[0] if drawn else None
    dots = 0
    for mark, _ in drawn:
        dots |= ord(mark) - 0x2800
    return chr(0x2800 + dots), drawn[0][1]


def _levels(values: Sequence[float], number: int, levels: int, high: float) -> list[int]:
    """Return the number of filled dots of each sample. A value above zero has at least one."""
    filled = [max(1, round(min(1.0, value / high) * levels)) if value > 0 and high else 0 for value in values]
    return [0] * (number - len(filled)) + filled


def _cells(levels: Sequence[int], below: int, glyphs: Glyphs, *, is_line: bool) -> str:
    """Draw one row of a series. `below`: dots in the rows below it."""
    if glyphs.bar == "#":
        full, half = ("-", "-") if is_line else ("#", ".")
        marks = [full if each >= below + 2 else half if each > below else " " for each in levels]
        return "".join(
            " " if is_line and each > below + 2 else mark for each, mark in zip(levels, marks, strict=True)
        )
    made = []
    for at in range(0, len(levels), 2):
        dots = 0
        for side in (0, 1):
            top = levels[at + side]
            before = levels[at + side - 1] if at + side else top
            first = (min(top, before + 1) if before else top) if is_line else 1
            last = max(top, before - 1) if is_line and top else top
            for dot in range(max(first, below + 1), min(last, below + 4) + 1):
                dots |= _DOTS[side][dot - below - 1]
        made.append(chr(0x2800 + dots) if dots else " ")
    return "".join(made)


def _time_axis(width: int, step: int, glyphs: Glyphs) -> Line:
    """Draw the horizontal axis: the age of the samples, at round times."""
    cells = max(1, width - AXIS)
    seconds = step * (1 if glyphs.bar == "#" else 2)
    axis = [glyphs.rule] * cells
    every = next((each for each in (15, 30, 60, 120, 300) if each / seconds >= 14), 600)
    for age in range(0, cells * seconds, every):
        label = "now" if not age else f"-{age // 60}:{age % 60:02d}"
        if glyphs.bar == "#":
            label = f" {label} "
        end = cells - age // seconds
        begin = end - len(label)
        if begin >= 1:
            axis[begin:end] = label
    return ((" " * (AXIS - 1) + glyphs.corner, "muted"), ("".join(axis), "muted"))


def nice_top(value: float, least: float) -> float:
    """Return a round number that is not below the value."""
    value = max(value, least)
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in _STEPS if step * power >= value * 0.999)


def beside(left: Sequence[Line], right: Sequence[Line], width: int) -> list[Line]:
    """Put two blocks of lines beside each other; `width`: cells of the left one with the gap."""
    lines: list[Line] = []
    for index in range(max(len(left), len(right))):
        first = left[index] if index < len(left) else ()
        second = right[index] if index < len(right) else ()
        lines.append((*first, (" " * max(0, width - line_width(first)), ""), *second))
    return lines


# ------------------------------------------------------------------ charts of the overview


def chart_rows(room: int) -> tuple[int, int]:
    """Return (rows of charts, height of each) for that many lines, of which requests take at least half."""
    if room < 20:
        return 1, max(4, min(5, room - 7))
    height = (room - 12) // 2 if room < 40 else room // 4 + 1
    return 2, max(4, min(12, height // 2 * 2))  # an even number has a label at the half


def chart_lines(
    state: DashboardState, width: int, rows: int, height: int, glyphs: Glyphs, step: int
) -> list[Line]:
    """Draw the charts beside and below each other, as many as there is room for."""
    if state.tick is None:
        return []
    across = 3 if width >= 160 else 2
    cells = (width - 1) // across
    charts = overview_charts(state, cells - 2, glyphs, step)
    lines: list[Line] = []
    for row in range(rows):
        block: list[Line] = []
        for index, chart in enumerate(charts[row * across : (row + 1) * across]):
            drawn = draw_chart(chart, cells - (1 if index == across - 1 else 2), height, glyphs, step)
            block = beside(block, drawn, index * cells) if block else drawn
        lines += block
    return lines


@dataclass(frozen=True, slots=True)
class _ChartData:
    """State that charts are made of. `number`: seconds that fit into one."""

    state: DashboardState
    tick: Tick
    number: int
    step: int

    def series(self, name: str, tone: str) -> Series:
        values = list(self.state.sparks[name])[-self.number :]
        return Series(thin(values, self.step, int(self.tick.time)), tone)

    def target(self, name: str) -> float | None:
        values = [getattr(engine, name) for engine in self.tick.engines]
        return min((float(value) for value in values if value is not NA), default=None)

    def pair(self, *series: tuple[str, str, str], unit: Callable[[Number], str]) -> Line:
        """Return a legend: the last value of each series, given by name, label and tone."""
        spans: list[Span] = []
        for name, label, tone in series:
            spans += [(f" {label} ", tone), (unit(getattr(self.tick.totals, name)), "strong")]
        return tuple(spans)


def overview_charts(state: DashboardState, width: int, glyphs: Glyphs, step: int) -> list[AxisChart]:
    """Return the charts, most important first."""
    assert state.tick is not None
    data = _ChartData(state, state.tick, samples(width, glyphs) * step, step)
    return [
        _throughput_chart(data),
        _latency_chart(data, "TTFT", "ttft", 0.01),
        _in_flight_chart(data),
        _failures_chart(data),
        _latency_chart(data, "TPOT", "tpot", 0.001),
        _cache_chart(data),
    ]


def _throughput_chart(data: _ChartData) -> AxisChart:
    legend = data.pair(("tokens_out", "output", "kv"), ("tokens_in", "input", "muted"), unit=count)
    return AxisChart("Tokens/s", legend, (data.series("tokens_out", "kv"),), _short_count, 10.0)


def _latency_chart(data: _ChartData, title: str, name: str, least: float) -> AxisChart:
    median, tail = f"{name}_p50", f"{name}_p95"
    legend = data.pair((median, "p50", "accent"), (tail, "p95", ""), unit=seconds)
    series = data.series(median, "accent"), data.series(tail, "")
    return AxisChart(title, legend, series, _short_time, least, target=data.target(f"{name}_target"))


def _in_flight_chart(data: _ChartData) -> AxisChart:
    counts = count_requests(data.tick)
    legend: Line = (
        (" running ", "good"), (str(counts.running), "strong"),
        (" queued ", "warn"), (str(counts.queued), "strong"),
    )  # fmt: skip
    series = data.series("running", "good"), data.series("waiting", "warn")
    return AxisChart("In flight", legend, series, _short_count, 4.0)


def _failures_chart(data: _ChartData) -> AxisChart:
    rate = data.tick.totals.error_rate
    legend: Line = ((" of the last 5 min ", "muted"), (percent(rate), _error_tone(rate)))
    return AxisChart("Failed", legend, (data.series("error_rate", "bad"),), _short_share, 0.01)


def _cache_chart(data: _ChartData) -> AxisChart:
    legend = data.pair(("kv_used", "in use", "kv"), ("prefix_hit", "prefix hits", ""), unit=percent)
    series = data.series("kv_used", "kv"), data.series("prefix_hit", "")
    return AxisChart("KV cache", legend, series, _short_share, top=1.0)


def _error_tone(value: Number) -> str:
    return "bad" if value is not NA and value > 0 else "strong"


def _short_count(value: float) -> str:
    return f"{value / 1000:g}k" if value >= 1000 else f"{value:g}"


def _short_time(value: float) -> str:
    return f"{value:g} s" if value >= 1 else f"{value * 1000:g}ms"


def _short_share(value: float) -> str:
    return f"{value * 100:g} %"
