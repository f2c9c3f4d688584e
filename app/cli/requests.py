"""`llmbox requests`: the request log and what is in flight."""

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

import click

from . import output
from .lazy import Group
from .program import Program
from .request_actions import cancel, purge, replay, show, stored

HEADERS = (
    "TIME", "ID", "KEY", "TIER", "MODEL", "STATUS", "PROMPT", "CACHED", "OUTPUT", "TTFT", "TOTAL", "END",
)  # fmt: skip
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
ENDS = {"request.finished", "request.refused"}
Row = Mapping[str, Any]


class Since(click.ParamType[float]):
    """`90s`, `15m`, `2h`, `7d` ago, as Unix time."""

    name = "since"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", str(value))
        if match is None:
            self.fail(f"{value!r} is not a time such as 90s, 15m, 2h or 7d", param, ctx)
        return time.time() - float(match[1]) * UNITS[match[2]]


@click.group(cls=Group, invoke_without_command=True)
@click.option("-f", "--follow", is_flag=True, help="Go on with new requests as they end.")
@click.option("--model", metavar="NAME", help="Only of this model.")
@click.option("--key", metavar="NAME", help="Only of the key of this name.")
@click.option("--status", type=click.IntRange(100, 599), metavar="N", help="Only with this HTTP status.")
@click.option("--errors", is_flag=True, help="Only those that ended with an error.")
@click.option("--since", type=Since(), metavar="AGE", help="Only newer than 90s, 15m, 2h or 7d.")
@click.option("--limit", type=click.IntRange(1, 1000), default=20, show_default=True, help="Most rows.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object; with -f one for each request.")
@click.option("-q", "--quiet", is_flag=True, help="Ids only.")
@click.pass_context
def requests(context: click.Context, /, *, follow: bool, as_json: bool, quiet: bool, **filters: Any) -> None:
    """Read the request log, follow it, look at one request, send it again, cancel it, erase.

    Rows hold metadata. What was asked and answered is kept only for keys made with --log-content (see show).
    """
    if context.invoked_subcommand is not None:
        return
    program: Program = context.ensure_object(Program)
    path = "/admin/api/requests?" + urlencode({k: v for k, v in filters.items() if v not in {None, False}})
    if follow:
        for row in _followed(program, path, filters):
            _print_followed(row, as_json=as_json, quiet=quiet)
        return
    answer = program.client.get(path)
    if as_json:
        output.write_json("requests", answer)
    elif quiet:
        for row in reversed(answer["requests"]):
            output.write(row["id"])
    else:
        _print(answer)


def _followed(program: Program, path: str, filters: Mapping[str, Any]) -> Iterator[Row]:
    """Rows so far, then those that end from now on. The stream is opened first: none falls between."""
    with program.client.stream("GET", "/admin/api/events") as stream:
        rows = program.client.get(path)["requests"]
        seen = {(row["id"], row["created"]) for row in rows}
        for row in reversed(rows):
            yield {name: value for name, value in row.items() if name != "seq"}
        for kind, data in stream.events():
            if kind not in ENDS:
                continue
            row = json.loads(data)
            if (row["id"], row["created"]) not in seen and _matches(row, filters):
                yield row


def _matches(row: Row, filters: Mapping[str, Any]) -> bool:
    """What the daemon does with rows, for those that come as events."""
    same = {"model": "model", "key": "key", "status": "http_status"}
    return (
        all(filters[name] in {None, row[field]} for name, field in same.items())
        and (not filters["errors"] or bool(row["error_code"]))
        and (filters["since"] is None or row["created"] >= filters["since"])
    )


def _print_followed(row: Row, *, as_json: bool, quiet: bool) -> None:
    if as_json:
        output.write_json("request", {"request": row})
    else:
        output.write(output.printable(row["id"]) if quiet else _line(row))


def _print(answer: Mapping[str, Any]) -> None:
    rows = answer["requests"][::-1]
    _print_live(answer["in_flight"])
    if rows:
        output.table(HEADERS, [_row(row) for row in rows], right=(6, 7, 8, 9, 10))
    elif answer["problem"]:
        output.say(answer["problem"])
    elif not answer["in_flight"]:
        output.say("Served nothing yet that matches.")
    if answer["dropped"]:
        output.say(f"{answer['dropped']} rows were lost to a full disk or queue; see llmbox logs.")


def _row(row: Row) -> Sequence[object]:
    return (
        output.clock(row["created"]),
        row["id"],
        row["key"] or "-",
        row["tier"] or "-",
        row["model"],
        row["http_status"],
        row["prompt_tokens"],
        row["cached_tokens"],
        row["output_tokens"],
        output.span(row["ttft_s"]),
        output.span(row["e2e_s"]),
        row["error_code"] or row["finish_reasons"],
    )


def _line(row: Row) -> str:
    when, name, key, tier, model, status, prompt, cached, out, ttft, total, end = _row(row)
    tokens = f"{prompt} ({cached} cached) -> {out} tokens"
    who = f"{name}  {key}  {tier}  {model}"
    return output.printable(f"{when}  {who}  {status}  {tokens}  {ttft} / {total}  {end}")


def _print_live(live: Sequence[Row]) -> None:
    if not live:
        return
    headers = ("RUNNING", "MODEL", "AGE", "PROMPT", "OUTPUT")
    rows = [
        (item["id"], item["model"], output.span(item["age"]), item["prompt_tokens"], item["output_tokens"])
        for item in live
    ]
    output.table(headers, rows, right=(2, 3, 4))
    output.write("")


for each in (show, replay, cancel, stored, purge):
    requests.add_command(each)
