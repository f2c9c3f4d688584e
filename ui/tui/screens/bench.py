"""Screen 6: recent benchmark runs, a comparison of two of them, and the doctor's findings."""

import time
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from textual import on
from textual.binding import Binding, BindingType
from textual.types import CSSPathType
from textual.widget import Widget

from ..messages import FetchData
from ..rendering import DASH, Line, clean, count, heading, seconds
from ..widgets.lines import Column, FixedTable, Lines, Row, cut
from .base import DashboardScreen

RUNS = (
    Column("", 2),
    Column("WHEN", 16),
    Column("MODEL", 0, middle=True),
    Column("STREAMS", 12, rank=1),
    Column("BEST OUT TOK/S", 14, right=True),
    Column("TTFT P50", 9, right=True, rank=2),
)
FINDINGS = (Column("", 6), Column("CHECK", 22), Column("FOUND", 0))
MARKS = {"ok": ("ok", "good"), "note": ("note", "muted"), "failed": ("FAILED", "bad")}
FIGURES = (
    ("output_tokens_per_s", "out tok/s", 1),
    ("ttft_p50", "TTFT p50", -1),
    ("ttft_p95", "TTFT p95", -1),
    ("tpot_p50", "TPOT p50", -1),
)


class BenchScreen(DashboardScreen):
    TITLE = "Bench & Doctor"
    CSS_PATH: ClassVar[CSSPathType | None] = ["../view.tcss", "bench.tcss"]
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("m", "mark", "Mark to compare"),
        Binding("r", "again", "Check again"),
        Binding("tab", "app.focus_next", "Other list", show=False),
    ]

    def __init__(self) -> None:
        super().__init__()
        self.marked: list[str] = []

    def body(self) -> Iterable[Widget]:
        yield Lines(id="title", classes="line")
        yield FixedTable(RUNS, "No runs are stored yet. Start one with: llmbox bench", id="runs")
        yield Lines(id="compared")
        yield Lines(id="doctor-title", classes="line")
        yield FixedTable(FINDINGS, "", id="findings")

    def wants(self) -> Iterable[FetchData]:
        yield FetchData("bench", "bench")
        if "doctor" not in self.state.answers:
            yield FetchData("doctor", "doctor")

    def draw(self) -> None:
        width = self.size.width - 1
        runs = self._runs()
        title = heading(" Bench", width, self.glyphs, "press m on two runs to compare them")
        self.query_one("#title", Lines).show([title])
        self.query_one("#runs", FixedTable).show(
            [_run_row(run, str(run["time"]) in self.marked) for run in runs]
        )
        chosen = [run for key in self.marked for run in runs if str(run["time"]) == key]
        compared = [cut(line, width, self.glyphs) for line in comparison(*chosen)] if len(chosen) == 2 else []
        lines = self.query_one("#compared", Lines)
        lines.styles.height = len(compared)
        lines.show(compared)
        findings = self.state.answers.get("doctor", {}).get("findings", [])
        order = {"failed": 0, "note": 1, "ok": 2}
        rows = [
            _finding(number, each)
            for number, each in enumerate(sorted(findings, key=lambda e: order[e["status"]]))
        ]
        failed = sum(each["status"] == "failed" for each in findings)
        note = f"{failed} failed" if failed else f"all {len(findings)} passed" if findings else ""
        self.query_one("#doctor-title", Lines).show([heading(" Doctor", width, self.glyphs, note)])
        refused = self.state.refused.get("doctor")
        self.query_one("#findings", FixedTable).show(rows, empty=refused or "Running the checks ...")

    def _runs(self) -> list[Mapping[str, Any]]:
        return list(self.state.answers.get("bench", {}).get("runs", []))

    # ------------------------------------------------------------------ keys

    def action_mark(self) -> None:
        chosen = self.query_one("#runs", FixedTable).selected
        if chosen is None:
            return
        if chosen in self.marked:
            self.marked.remove(chosen)
        else:
            self.marked = [*self.marked, chosen][-2:]
        self.redraw()

    def action_again(self) -> None:
        self.state.answers.pop("doctor", None)
        self.redraw()
        self.post_message(FetchData("doctor", "doctor"))

    @on(FixedTable.Chosen)
    def _detail(self, event: FixedTable.Chosen) -> None:
        if event.grid.id == "runs":
            run = next(run for run in self._runs() if str(run["time"]) == event.key)
            facts = {f"{level['concurrency']} streams": _figures(level) for level in run["levels"]}
            self.dashboard.show_facts(
                f"run of {_when(run)}", {"model": run["model"], "url": run["url"], **facts}
            )


def comparison(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[Line]:
    """Compare the concurrency levels that both runs have: change from the first to the second run; better is
    green.
    """
    later = {level["concurrency"]: level for level in second["levels"]}
    lines: list[Line] = [((f" {_when(first)}  against  {_when(second)}", "strong"),)]
    for level in first["levels"]:
        other = later.get(level["concurrency"])
        if other is None:
            continue
        spans = [(f"  {level['concurrency']:>3} streams ", "muted")]
        for name, label, better in FIGURES:
            before, after = level.get(name), other.get(name)
            if before and after:
                change = after / before - 1
                tone = "muted" if abs(change) < 0.03 else "good" if change * better > 0 else "bad"
                spans += [(f"  {label} ", "muted"), (f"{change:+.0%}", tone)]
        lines.append(tuple(spans))
    if len(lines) == 1:
        lines.append((("  the runs have no concurrency level in common", "muted"),))
    return lines


def _run_row(run: Mapping[str, Any], marked: bool) -> Row:
    levels = run["levels"]
    best = max((level.get("output_tokens_per_s") or 0.0 for level in levels), default=0.0)
    first = levels[0].get("ttft_p50") if levels else None
    streams = ",".join(str(level["concurrency"]) for level in levels)
    return Row(
        str(run["time"]),
        (
            ("*" if marked else "", "accent"),
            (_when(run), "muted"),
            (clean(str(run["model"])), ""),
            (streams, "muted"),
            (count(best), "strong"),
            (seconds(first), "muted"),
        ),
        (marked, run["time"], run["model"], streams, best, first),
    )


def _finding(number: int, finding: Mapping[str, Any]) -> Row:
    fix = f"   fix: {finding['fix']}" if finding["fix"] else ""
    tone = "" if finding["status"] == "failed" else "muted"
    mark = MARKS[finding["status"]]
    return Row(f"{number}", (mark, (clean(finding["name"]), ""), (clean(finding["message"] + fix), tone)))


def _figures(level: Mapping[str, Any]) -> str:
    ttft, tpot = seconds(level.get("ttft_p50")), seconds(level.get("tpot_p50"))
    return f"{level.get('output_tokens_per_s') or 0:.1f} tok/s, TTFT p50 {ttft}, TPOT p50 {tpot}"


def _when(run: Mapping[str, Any]) -> str:
    return time.strftime("%d %b %H:%M", time.localtime(run["time"])) if run.get("time") else DASH
