"""`llmbox requests`: the request log, what is in flight, and cancelling."""

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote, urlencode

import click

from . import output
from .lazy import Command, Group
from .program import Program, pass_program

FOLLOW_INTERVAL = 0.5
HEADERS = ("TIME", "ID", "MODEL", "STATUS", "PROMPT", "CACHED", "OUTPUT", "TTFT", "TOTAL", "END")
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


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
@click.option("--status", type=click.IntRange(100, 599), metavar="N", help="Only with this HTTP status.")
@click.option("--errors", is_flag=True, help="Only those that ended with an error.")
@click.option("--since", type=Since(), metavar="AGE", help="Only newer than 90s, 15m, 2h or 7d.")
@click.option("--limit", type=click.IntRange(1, 1000), default=20, show_default=True, help="Most rows.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object; with -f one for each request.")
@click.option("-q", "--quiet", is_flag=True, help="Ids only.")
@click.pass_context
def requests(context: click.Context, /, *, follow: bool, as_json: bool, quiet: bool, **filters: Any) -> None:
    """Read the request log, follow it, cancel a request.

    Rows hold metadata only, never what was asked or answered.
    """
    if context.invoked_subcommand is not None:
        return
    program: Program = context.ensure_object(Program)
    path = "/admin/api/requests?" + urlencode({k: v for k, v in filters.items() if v not in {None, False}})
    answer = program.client.get(path)
    rows = list(reversed(answer["requests"]))
    if follow:
        _follow(program, path, rows, as_json=as_json, quiet=quiet)
    elif as_json:
        output.write_json("requests", answer)
    elif quiet:
        for row in rows:
            output.write(row["id"])
    else:
        _print_live(answer["in_flight"])
        if rows:
            output.table(HEADERS, [_row(row) for row in rows], right=(4, 5, 6, 7, 8))
        elif not answer["in_flight"]:
            output.say("Served nothing yet that matches.")
        if answer["dropped"]:
            output.say(f"{answer['dropped']} rows were lost to a full disk or queue; see llmbox logs.")


@requests.command(cls=Command)
@click.argument("request_id", metavar="ID")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@pass_program
def show(program: Program, request_id: str, *, as_json: bool) -> None:
    """Show one request, running or ended."""
    answer = program.client.get(f"/admin/api/requests/{quote(request_id, safe='')}")
    if as_json:
        output.write_json("request", answer)
        return
    row = answer["request"] or answer["in_flight"]
    for key, value in row.items():
        text = output.clock(value) if key == "created" else _seconds(value) if key.endswith("_s") else value
        if text not in {None, ""}:
            output.write(f"{key:15} {output.printable(str(text))}")


@requests.command(cls=Command)
@click.argument("request_id", metavar="ID")
@pass_program
def cancel(program: Program, request_id: str) -> None:
    """End a running request; its client gets what there is so far."""
    program.client.post(f"/admin/api/requests/{quote(request_id, safe='')}/cancel", {})
    output.say(f"{request_id} is cancelled.")


def _follow(program: Program, path: str, rows: list[dict[str, Any]], *, as_json: bool, quiet: bool) -> None:
    seen = 0
    while True:
        for row in rows:
            if row["seq"] <= seen:
                continue
            seen = row["seq"]
            if as_json:
                output.write_json("request", {"request": row})
            else:
                output.write(row["id"] if quiet else _line(row))
        time.sleep(FOLLOW_INTERVAL)
        rows = list(reversed(program.client.get(path)["requests"]))


def _row(row: Mapping[str, Any]) -> Sequence[object]:
    return (
        output.clock(row["created"]),
        row["id"],
        row["model"],
        row["http_status"],
        row["prompt_tokens"],
        row["cached_tokens"],
        row["output_tokens"],
        _seconds(row["ttft_s"]),
        _seconds(row["e2e_s"]),
        row["error_code"] or row["finish_reasons"],
    )


def _line(row: Mapping[str, Any]) -> str:
    when, name, model, status, prompt, cached, out, ttft, total, end = _row(row)
    tokens = f"{prompt} ({cached} cached) -> {out} tokens"
    return output.printable(f"{when}  {name}  {model}  {status}  {tokens}  {ttft} / {total}  {end}")


def _print_live(live: Sequence[Mapping[str, Any]]) -> None:
    if not live:
        return
    headers = ("RUNNING", "MODEL", "AGE", "PROMPT", "OUTPUT")
    rows = [
        (item["id"], item["model"], output.span(item["age"]), item["prompt_tokens"], item["output_tokens"])
        for item in live
    ]
    output.table(headers, rows, right=(2, 3, 4))
    output.write("")


def _seconds(value: float | None) -> str:
    return output.span(value)
