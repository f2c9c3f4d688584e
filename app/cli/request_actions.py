"""`llmbox requests show`, `replay`, `cancel`, `purge`."""

import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

import click

from ..errors import CliError, Exit
from . import output
from .confirm import require_consent
from .lazy import Command
from .program import Program, pass_program

MARGIN = 20
"""Characters shown on both sides of the place where two answers part."""
_NAMED = {
    "requests": "requests and stored answers",
    "content": "prompts and answers",
    "stored": "stored answers",
}
_HIDDEN = {"prefix_end", "looked_up_tokens", "output_hash", "fingerprint", "content", "params", "seq"}
"""Told in words, or of no use to people."""


@click.command(cls=Command)
@click.argument("request_id", metavar="ID")
@click.option("--curl", "as_curl", is_flag=True, help="Print it as a curl command.")
@click.option("--python", "as_python", is_flag=True, help="Print it as a Python program.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@pass_program
def show(program: Program, request_id: str, *, as_curl: bool, as_python: bool, as_json: bool) -> None:
    """Show one request, running or ended: its numbers, what the prefix cache had of it, and prompt and answer
    where they are kept.
    """
    answer = program.client.get(_path(request_id))
    if as_json:
        output.write_json("request", answer)
    elif as_curl or as_python:
        _print_call(answer["curl" if as_curl else "python"])
    else:
        _print(answer)


@click.command(cls=Command)
@click.argument("request_id", metavar="ID")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.pass_context
def replay(context: click.Context, /, request_id: str, *, as_json: bool) -> None:
    """Send a request again, with the seed of then, and say whether the tokens are the same.

    Needs the request's content, which is kept for keys made with --log-content. Exit code 1: they differ.
    """
    program: Program = context.ensure_object(Program)
    answer = program.client.post(f"{_path(request_id)}/replay", {}, timeout=None)
    if as_json:
        output.write_json("replay", answer)
    else:
        output.write(answer["verdict"])
        for line in _parting(answer):
            output.write(line)
        output.say(f"It is in the log as {answer['id']}.")
    if answer["equal"] is False:
        context.exit(Exit.FAILED)


@click.command(cls=Command)
@click.argument("request_id", metavar="ID")
@pass_program
def cancel(program: Program, request_id: str) -> None:
    """End a running request; its client gets what there is so far."""
    program.client.post(f"{_path(request_id)}/cancel", {})
    output.say(f"{request_id} is cancelled.")


@click.command(cls=Command)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@pass_program
def stored(program: Program, *, as_json: bool) -> None:
    """Show how many answers each key has stored (store: true). What is in them only that key reads."""
    answer = program.client.get("/admin/api/stored")
    if as_json:
        output.write_json("stored", answer)
    elif answer["stored"]:
        rows = [
            (
                row["key"] or "-",
                row["kind"],
                row["answers"],
                output.size(row["size"]),
                output.clock(row["oldest_at"]),
                output.clock(row["newest_at"]),
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
    help="Only what is older than so many days; everything without it.",
)
@click.option(
    "--content",
    "what",
    flag_value="content",
    help="Only prompts and answers, stored too; the rows stay.",
)
@click.option("--stored", "what", flag_value="stored", help="Only stored answers.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object; needs --yes.")
@pass_program
def purge(program: Program, *, older_than: float, what: str | None, yes: bool, as_json: bool) -> None:
    """Erase the request log and stored answers for good: overwritten, not just unlinked."""
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
    return f"/admin/api/requests/{quote(request_id, safe='')}"


def _print_call(text: str) -> None:
    if not text:
        raise CliError("the request is still running", "it can be told when it has ended", "try again")
    output.write(output.printable(text))


def _print(answer: Mapping[str, Any]) -> None:
    row = answer["request"] or answer["in_flight"]
    shown = {name: value for name, value in row.items() if name not in _HIDDEN}
    facts = shown | {"params": row.get("params", ""), "prefix cache": answer["prefix_note"]}
    lines = [f"{name:17}  {told}" for name, value in facts.items() if (told := _told(name, value))]
    if answer["content"] is not None:
        lines += _texts("Prompt, as the model read it", answer["content"]["prompts"])
        lines += _texts("Answer", answer["content"]["outputs"])
    if answer["content_note"]:
        lines += ["", answer["content_note"]]
    output.write_lines([output.printable(each) for line in lines for each in line.split("\n")])


def _texts(title: str, texts: Sequence[str]) -> list[str]:
    lines = []
    for number, text in enumerate(texts, 1):
        lines += ["", title if len(texts) == 1 else f"{title} {number}", text]
    return lines


def _told(name: str, value: object) -> str:
    """Empty for what says nothing."""
    if value in (None, "", "{}"):
        return ""
    if isinstance(value, float):
        if name == "created":
            return output.clock(value)
        seconds = name.endswith("_s") or name in {"age", "ttft"}
        return output.span(value) if seconds else f"{value:.4g}"
    return str(value)


def _parting(answer: Mapping[str, Any]) -> list[str]:
    """Where the first two texts that differ do so."""
    at = answer["first_difference"]
    if at is None:
        return []
    then, now = next(
        pair for pair in zip(answer["kept"], answer["outputs"], strict=False) if len({*pair}) > 1
    )
    around = slice(max(0, at - MARGIN), at + MARGIN)
    return [f"From character {at} on:", f"  then  {then[around]!r}", f"  now   {now[around]!r}"]
