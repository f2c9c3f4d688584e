"""`llmbox why` and `llmbox replay`: where the time of one request went, and the scheduling of many computed
again with other limits.
"""

import re
import sqlite3
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import click
import msgspec

from ...errors import CliError
from ...lifecycle.program import Command, Program, json_option, pass_program
from ...store.database_file import read_schedules
from ...util import formatting
from .. import output
from ..models.convert import run_job
from .requests import SinceParam

_BAR: Final = 24
"""Characters of a bar of 100 %."""


@click.command(cls=Command)
@click.argument("request_id", metavar="[ID]", required=False)
@json_option
@pass_program
def why(program: Program, *, request_id: str | None, as_json: bool) -> None:
    """Show where the time of a finished request went: waiting, its prompt, its answer, other requests in its
    steps, the client.

    ID is the id of the answer, as in llmbox requests; default: the last request.
    """
    name = request_id or _last(program)
    answer = program.client.get(f"/admin/api/requests/{quote(name, safe='')}/why")
    if as_json:
        output.write_json("why", answer)
    else:
        _print_split(answer)


def _last(program: Program) -> str:
    answer = program.client.get("/admin/api/requests?limit=1")
    if answer["problem"]:
        raise CliError("no request can be looked up", answer["problem"], log=program.client.log_file)
    if not (rows := answer["requests"]):
        raise CliError("no finished request is in the log", fix="llmbox run MODEL, or any request to the API")
    return str(rows[0]["id"])


def _print_split(answer: Mapping[str, Any]) -> None:
    output.write(
        formatting.printable(f"{answer['id']}  {answer['model']}  {formatting.span(answer['total_s'])}")
    )
    if answer["trace_id"]:
        output.write(f"trace {answer['trace_id']}")
    if answer["sequences"] > 1:
        output.say(f"Of {answer['sequences']} sequences this is the one that ended last.")
    output.write("")
    rows = [
        (
            row["title"],
            formatting.span(row["seconds"]),
            f"{row['percent']:.1f} %",
            _bar(row["percent"]),
            row["note"],
        )
        for row in answer["rows"]
    ]
    output.table(("WHERE", "TIME", "SHARE", "", "NOTE"), rows, right=(1, 2))


def _bar(percent: float) -> str:
    return "█" * max(0, round(_BAR * percent / 100))


_JOB: Final = "llmbox.engine.process.replay_job"
_ENDED_SAME: Final = 0.999
"""Share of sequences that end in their recorded step from which on a replay counts as the same."""


class BlocksParam(click.ParamType[str]):
    """Number of KV blocks, or a multiple of the recorded one as `2x`."""

    name = "blocks"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(value)
        is_number = re.fullmatch(r"[1-9]\d{0,8}|(?=.*[1-9])\d{1,4}(\.\d{1,4})?x", text)
        if is_number is None:
            self.fail(f"{text!r} is neither a number of blocks nor a multiple such as 2x", param, ctx)
        return text


@click.command(cls=Command)
@click.option("--model", metavar="NAME", help="Only engines that served this model.")
@click.option(
    "--since",
    type=SinceParam(),
    default="24h",
    show_default=True,
    metavar="AGE",
    help="Only requests newer than this, such as 90s, 15m, 2h or 7d.",
)
@click.option("--until", type=SinceParam(), metavar="AGE", help="Only requests older than this.")
@click.option(
    "--kv-blocks",
    type=BlocksParam(),
    metavar="N",
    help="What if: this many KV blocks, or a multiple such as 2x.",
)
@click.option(
    "--max-num-seqs",
    type=click.IntRange(1, 100_000),
    metavar="N",
    help="What if: this many sequences at once.",
)
@click.option(
    "--max-batched-tokens",
    type=click.IntRange(1, 10_000_000),
    metavar="N",
    help="What if: this many tokens per step.",
)
@click.option("--no-prefix-cache", is_flag=True, help="What if: no prefix cache.")
@click.option("--no-priorities", is_flag=True, help="What if: all priorities equal.")
@json_option
@pass_program
def replay(
    program: Program,
    /,
    *,
    model: str | None,
    since: float,
    until: float | None,
    as_json: bool,
    **what_if: Any,
) -> None:
    """Simulate the scheduling of past requests: steps, preemptions, evictions, waits.

    Reads the request log, whether or not a daemon runs. It needs no prompts or answers and sends no request.
    With a "What if" option, it compares the original with the changed schedule.
    """
    if not program.paths.request_db.exists():
        raise CliError("there is no request log", str(program.paths.request_db), "llmbox up")
    try:
        records, models = read_schedules(program.paths.request_db, since, until or time.time(), model)
    except sqlite3.DatabaseError as error:
        raise CliError("the request log cannot be read", str(error), "llmbox db check") from error
    if not records:
        raise CliError(
            "no request of this time can be replayed",
            "no finished request with the times of an engine" + (f" of {model}" if model else ""),
            "llmbox requests --since 7d",
        )
    with tempfile.TemporaryDirectory(prefix="llmbox-replay-") as folder:
        file = Path(folder) / "records"
        file.write_bytes(msgspec.msgpack.encode(records))
        arguments = [str(file), *_options(what_if)]
        report = run_job(program, _JOB, arguments, failed="the replay failed", words=_progress)
    for run in report["runs"]:
        run["models"] = models[run["run"]]
    if as_json:
        output.write_json("replay", report)
    else:
        _print(report)


def _options(what_if: Mapping[str, Any]) -> list[str]:
    given = []
    for name, value in what_if.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            given.append(flag)
        elif value:
            given += [flag, str(value)]
    return given


def _progress(_: str, done: int, total: int) -> str:
    return f"replaying engine {done + 1} of {total}"


def _print(report: Mapping[str, Any]) -> None:
    for place, run in enumerate(report["runs"]):
        if place:
            output.write("")
        _print_run(run)
    span = sum(run["recorded"]["span_s"] for run in report["runs"])
    faster = f", {span / report['seconds']:,.0f} times as fast as it was" if report["seconds"] else ""
    output.say(f"Replayed {report['sequences']:,} sequences in {formatting.span(report['seconds'])}{faster}.")


def _print_run(run: Mapping[str, Any]) -> None:
    limits, recorded = run["limits"], run["recorded"]
    output.write(
        formatting.printable(
            f"{', '.join(run['models'])}  {recorded['requests']:,} sequences in "
            f"{formatting.span(recorded['span_s'])}, {limits['num_blocks']:,} blocks of "
            f"{limits['block_size']} tokens, {limits['max_running']} at once, "
            f"{limits['token_budget']:,} tokens a step"
        )
    )
    output.write("")
    shown = [recorded, run["as_it_was"], run["what_if"]]
    columns = [each for each in shown if each is not None]
    headers = ("", "RECORDED", "SIMULATED", "WHAT IF")[: len(columns) + 1]
    rows = [(title, *(value(each) for each in columns)) for title, value in _ROWS]
    output.table(headers, rows, right=tuple(range(1, len(headers))))
    for note in _notes(run):
        output.write(note)


def _notes(run: Mapping[str, Any]) -> list[str]:
    ends, same = run["ends"], run["same_ends"]
    notes = []
    if ends:
        word = "the recorded steps" if same / ends >= _ENDED_SAME else "not all recorded steps"
        notes.append(f"RECORDED has {word}: {same:,} of {ends:,} answers end in the step they ended in.")
    error = run["cost"]["error"]
    notes.append(f"SIMULATED takes the time of steps from a fit, wrong by {100 * error:.1f} % on average.")
    if run["what_if"] is not None:
        notes.append("Compare WHAT IF with SIMULATED.")
        if refused := run["what_if"]["refused"]:
            notes.append(f"{refused:,} sequences are longer than these limits allow, and are left out.")
    if run["missing"] or run["begun_before"]:
        absent = run["missing"] + run["begun_before"]
        notes.append(f"{absent:,} sequences of this engine are not in the log of this time.")
    notes += [f"Not replayed: {name} ({count:,} sequences)." for name, count in run["inexact"].items()]
    return notes


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def _spans(values: Sequence[float]) -> str:
    return " / ".join(formatting.span(value) for value in values[:2]) if values else "-"


_ROWS: Final[tuple[tuple[str, Callable[[Mapping[str, Any]], str]], ...]] = (
    ("Steps", lambda it: f"{it['steps']:,}"),
    ("Sequences in a step", lambda it: f"{it['rows'] / it['steps']:.1f}" if it["steps"] else "-"),
    ("Tokens computed", lambda it: f"{it['tokens']:,}"),
    ("Tokens of answers", lambda it: f"{it['output_tokens']:,}"),
    ("Prompts from the prefix cache", lambda it: _share(it["prefix_hits"], it["prefix_queries"])),
    ("Preemptions", lambda it: f"{it['preemptions']:,}"),
    ("Evicted blocks", lambda it: f"{it['evictions']:,}"),
    ("Most blocks in use", lambda it: f"{it['most_blocks']:,}"),
    ("Most sequences waiting", lambda it: f"{it['most_waiting']:,}"),
    ("Wait, p50 / p95", lambda it: _spans(it["queue_s"])),
    ("First token, p50 / p95", lambda it: _spans(it["first_token_s"])),
    ("Whole answer, p50 / p95", lambda it: _spans(it["end_s"])),
)
