"""`llmbox why`: where the time of one request went."""

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import quote

import click

from ...errors import CliError
from ...lifecycle.program import Command, Program, pass_program
from ...util import formatting
from .. import output

_BAR: Final = 24
"""Characters of a bar of 100 %."""


@click.command(cls=Command)
@click.argument("request_id", metavar="[ID]", required=False)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@pass_program
def why(program: Program, *, request_id: str | None, as_json: bool) -> None:
    """Show where the time of a finished request went: waiting, prompt, answer, others in its steps, client.

    ID is the id of the answer, as in llmbox requests; without it the last request.
    """
    name = request_id or _last(program)
    answer = program.client.get(f"/admin/api/requests/{quote(name, safe='')}/why")
    if as_json:
        output.write_json("why", answer)
    else:
        _print(answer)


def _last(program: Program) -> str:
    rows = program.client.get("/admin/api/requests?limit=1")["requests"]
    if not rows:
        raise CliError("no finished request is in the log", fix="llmbox run MODEL, or any request to the API")
    return str(rows[0]["id"])


def _print(answer: Mapping[str, Any]) -> None:
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
