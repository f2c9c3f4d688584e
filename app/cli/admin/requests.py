"""`llmbox requests`: the request log and requests in flight."""

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote, urlencode

import click

from ...errors import CliError, Exit
from ...lifecycle.program import Command, Program, json_option, pass_program
from ...util import formatting
from .. import output
from ..output import require_consent
from ..root import CommandGroup

MARGIN = 20
"""Characters shown on both sides of the place where two answers part."""
_NAMED = {
    "requests": "requests and stored answers",
    "content": "prompts and answers",
    "stored": "stored answers",
}
_HIDDEN = {"prefix_end", "looked_up_tokens", "output_hash", "fingerprint", "content", "params", "seq"}
"""Fields that are shown in other words, or of no use to people."""


@click.command(cls=Command)
@click.argument("request_id", metavar="ID")
@click.option("--curl", "as_curl", is_flag=True, help="Print it as a curl command.")
@click.option("--python", "as_python", is_flag=True, help="Print it as a Python program.")
@json_option
@pass_program
def show(program: Program, request_id: str, *, as_curl: bool, as_python: bool, as_json: bool) -> None:
    """Show one request, running or ended: its numbers, its cached tokens, and prompt and answer
    if they are kept.
    """
    answer = program.client.get(_path(request_id))
    if as_json:
        output.write_json("request", answer)
    elif as_curl or as_python:
        _print_call(answer["curl" if as_curl else "python"])
    else:
        _print_replay(answer)


@click.command(cls=Command)
@click.argument("request_id", metavar="ID")
@json_option
@click.pass_context
def replay(context: click.Context, /, request_id: str, *, as_json: bool) -> None:
    """Send a request again with its seed, and compare the tokens.

    Needs the request's content, which is kept for keys created with --log-content. Exit code 1: they differ.
    """
    program: Program = context.ensure_object(Program)
    answer = program.client.post(f"{_path(request_id)}/replay", {}, timeout=None)
    if as_json:
        output.write_json("replay", answer)
    else:
        output.write(answer["verdict"])
        for line in _show_difference(answer):
            output.write(line)
        output.say(f"It is in the log as {answer['id']}.")
    if answer["equal"] is False:
        context.exit(Exit.FAILED)


@click.command(cls=Command)
@click.argument("request_id", metavar="ID")
@pass_program
def cancel(program: Program, request_id: str) -> None:
    """Cancel a running request; its client gets the tokens so far."""
    program.client.post(f"{_path(request_id)}/cancel", {})
    output.say(f"{request_id} is cancelled.")


@click.command(cls=Command)
@json_option
@pass_program
def stored(program: Program, *, as_json: bool) -> None:
    """Show how many answers each key has stored (store: true). Only that key can read them."""
    answer = program.client.get("/admin/api/stored")
    if as_json:
        output.write_json("stored", answer)
    elif answer["stored"]:
        rows = [
            (
                row["key"] or "-",
                row["kind"],
                row["answers"],
                formatting.size(row["size"]),
                formatting.clock(row["oldest_at"]),
                formatting.clock(row["newest_at"]),
            )
            for row in answer["stored"]
        ]
        output.table(("KEY", "KIND", "ANSWERS", "SIZE", "OLDEST", "NEWEST"), rows, right=(2, 3))
    else:
        output.say("Nothing is stored.")


@click.command(cls=Command)
@click.option(
    "--older-than",
    type=click.FloatRange(0, 36_500),
    default=0,
    metavar="DAYS",
    help="Erase only what is older than this many days; default: everything.",
)
@click.option(
    "--content",
    "what",
    flag_value="content",
    help="Erase only prompts and answers, also stored ones; the rows stay.",
)
@click.option("--stored", "what", flag_value="stored", help="Erase only stored answers.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; needs --yes.")
@pass_program
def purge(program: Program, *, older_than: float, what: str | None, yes: bool, as_json: bool) -> None:
    """Erase the request log and stored answers for good: their bytes are overwritten, not just unlinked."""
    what = what or "requests"
    named = _NAMED[what]
    which = f"{named} older than {older_than:g} days" if older_than else f"all {named}"
    question = f"Erase {which}? This cannot be undone"
    require_consent(question, "nothing was erased", yes=yes, as_json=as_json)
    body = {"before": time.time() - older_than * 86_400, "what": what}
    answer = program.client.post("/admin/api/requests/purge", body, timeout=90.0)
    if as_json:
        output.write_json("purge", answer)
    else:
        output.say(f"Erased {answer['purged']}: {named}.")


def _path(request_id: str) -> str:
    if not request_id.strip("/"):
        raise CliError(
            f"{request_id!r} is not a request",
            "an id has letters and digits",
            "llmbox requests -q",
            Exit.NOT_FOUND,
        )
    return f"/admin/api/requests/{quote(request_id, safe='')}"


def _print_call(text: str) -> None:
    if not text:
        raise CliError(
            "the request is still running", "its details are available once it has ended", "try again"
        )
    output.write(formatting.printable(text))


def _print_replay(answer: Mapping[str, Any]) -> None:
    row = answer["request"] or answer["in_flight"]
    shown = {name: value for name, value in row.items() if name not in _HIDDEN}
    facts = shown | {"params": row.get("params", ""), "prefix cache": answer["prefix_note"]}
    lines = [f"{name:17}  {text}" for name, value in facts.items() if (text := _format_value(name, value))]
    if answer["content"] is not None:
        lines += _texts("Prompt as sent to the model", answer["content"]["prompts"])
        lines += _texts("Answer", answer["content"]["outputs"])
    if answer["content_note"]:
        lines += ["", answer["content_note"]]
    output.write_lines([formatting.printable(each) for line in lines for each in line.split("\n")])


def _texts(title: str, texts: Sequence[str]) -> list[str]:
    lines = []
    for number, text in enumerate(texts, 1):
        lines += ["", title if len(texts) == 1 else f"{title} {number}", text]
    return lines


def _format_value(name: str, value: object) -> str:
    """Format a field's value; empty for an empty value."""
    if value in (None, "", "{}"):
        return ""
    if isinstance(value, float):
        if name == "created":
            return formatting.clock(value)
        seconds = name.endswith("_s") or name in {"age", "ttft"}
        return formatting.span(value) if seconds else f"{value:.4g}"
    return str(value)


def _show_difference(answer: Mapping[str, Any]) -> list[str]:
    """Show the first two texts that differ around their first difference."""
    at = answer["first_difference"]
    if at is None:
        return []
    then, now = next(
        pair for pair in zip(answer["kept"], answer["outputs"], strict=False) if len({*pair}) > 1
    )
    around = slice(max(0, at - MARGIN), at + MARGIN)
    return [f"From character {at} on:", f"  then  {then[around]!r}", f"  now   {now[around]!r}"]


HEADERS = (
    "TIME", "ID", "KEY", "TIER", "MODEL", "STATUS", "PROMPT", "CACHED", "OUTPUT", "TTFT", "TOTAL", "END",
)  # fmt: skip
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
ENDS = {"request.finished", "request.refused"}
Row = Mapping[str, Any]


class SinceParam(click.ParamType[float]):
    """`90s`, `15m`, `2h`, `7d` ago, as Unix time."""

    name = "since"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", str(value))
        if match is None:
            self.fail(f"{value!r} is not a time such as 90s, 15m, 2h or 7d", param, ctx)
        return time.time() - float(match[1]) * UNITS[match[2]]


@click.group(cls=CommandGroup, invoke_without_command=True)
@click.option("-f", "--follow", is_flag=True, help="Follow: print new requests as they end.")
@click.option("--model", metavar="NAME", help="Only requests of this model.")
@click.option("--key", metavar="NAME", help="Only requests of the key with this name.")
@click.option(
    "--status", type=click.IntRange(100, 599), metavar="N", help="Only requests with this HTTP status."
)
@click.option("--errors", is_flag=True, help="Only requests that ended with an error.")
@click.option(
    "--since",
    type=SinceParam(),
    metavar="AGE",
    help="Only requests newer than this, such as 90s, 15m, 2h or 7d.",
)
@click.option(
    "-n",
    "--limit",
    metavar="N",
    type=click.IntRange(1, 1000),
    default=20,
    show_default=True,
    help="Maximum number of rows.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object; with -f one for each request.")
@click.option("-q", "--quiet", is_flag=True, help="Print ids only.")
@click.pass_context
def requests(context: click.Context, /, *, follow: bool, as_json: bool, quiet: bool, **filters: Any) -> Exit:
    """Read and follow the request log; show, replay, cancel or erase requests.

    Exit 1 where the log cannot be read. Rows hold metadata. Prompts and answers
    are kept only for keys created with --log-content (see show).
    """
    if context.invoked_subcommand is not None:
        return Exit.OK
    program: Program = context.ensure_object(Program)
    path = "/admin/api/requests?" + urlencode({k: v for k, v in filters.items() if v not in {None, False}})
    if follow:
        for row in _follow_rows(program, path, filters):
            _print_followed(row, as_json=as_json, quiet=quiet)
        return Exit.OK
    answer = program.client.get(path)
    if as_json:
        output.write_json("requests", answer)
    elif quiet:
        for row in reversed(answer["requests"]):
            output.write(row["id"])
    else:
        _print(answer)
    if answer["problem"]:
        output.say(answer["problem"])
        return Exit.FAILED
    return Exit.OK


def _follow_rows(program: Program, path: str, filters: Mapping[str, Any]) -> Iterator[Row]:
    """Yield the rows so far, then those that end from now on. The stream is opened first: none
    falls between.
    """
    with program.client.stream("GET", "/admin/api/events") as stream:
        rows = program.client.get(path)["requests"]
        seen = {(row["id"], row["created"]) for row in rows}
        for row in reversed(rows):
            yield {name: value for name, value in row.items() if name != "seq"}
        for kind, data in stream.events():
            output.require_reader()
            if kind not in ENDS:
                continue
            row = json.loads(data)
            if (row["id"], row["created"]) not in seen and _matches(row, filters):
                yield row


def _matches(row: Row, filters: Mapping[str, Any]) -> bool:
    """Apply the daemon's filters to a row that comes as an event."""
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
        output.write(formatting.printable(row["id"]) if quiet else _line(row))


def _print(answer: Mapping[str, Any]) -> None:
    rows = answer["requests"][::-1]
    _print_live(answer["in_flight"])
    if rows:
        output.table(HEADERS, [_row(row) for row in rows], right=(6, 7, 8, 9, 10))
    elif not answer["in_flight"] and not answer["problem"]:
        output.say("No finished request matches.")
    if answer["dropped"]:
        lost = "1 row was" if answer["dropped"] == 1 else f"{answer['dropped']} rows were"
        output.say(f"{lost} lost to a full disk or queue; see llmbox logs.")


def _row(row: Row) -> Sequence[object]:
    return (
        formatting.clock(row["created"]),
        row["id"],
        row["key"] or "-",
        row["tier"] or "-",
        row["model"],
        row["http_status"],
        row["prompt_tokens"],
        row["cached_tokens"],
        row["output_tokens"],
        formatting.span(row["ttft_s"]),
        formatting.span(row["e2e_s"]),
        row["error_code"] or row["finish_reasons"],
    )


def _line(row: Row) -> str:
    when, name, key, tier, model, status, prompt, cached, out, ttft, total, end = _row(row)
    tokens = f"{prompt} ({cached} cached) -> {out} tokens"
    who = f"{name}  {key}  {tier}  {model}"
    return formatting.printable(f"{when}  {who}  {status}  {tokens}  {ttft} / {total}  {end}")


def _print_live(live: Sequence[Row]) -> None:
    if not live:
        return
    headers = ("RUNNING", "MODEL", "AGE", "PROMPT", "OUTPUT")
    rows = [
        (
            item["id"],
            item["model"],
            formatting.span(item["age"]),
            item["prompt_tokens"],
            item["output_tokens"],
        )
        for item in live
    ]
    output.table(headers, rows, right=(2, 3, 4))
    output.write("")


for each in (show, replay, cancel, stored, purge):
    requests.add_command(each)
