"""`llmbox pull`: view of a download that runs in the daemon."""

import json
import shlex
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from ...config.entries import Scalar
from ...errors import CliError, Exit
from ...lifecycle.instance import find_running
from ...lifecycle.program import Command, Program, pass_program
from ...models.catalog import HUB_ID, likely_id
from ...models.registry import full_name, short_names
from ...util import formatting
from .. import output
from ..output import require_consent

LOOK = 0.25
"""Seconds between two looks at the download."""
BAR = 24
USUAL_RATE = 10e6
"""Bytes a second of a usual connection, for the time that a question names."""


@click.command(cls=Command)
@click.argument("ref", required=False)
@click.option(
    "--anyway", is_flag=True, help="Download it even if it does not fit or cannot be served by this version."
)
@click.option("--wait/--no-wait", default=True, help="Wait until the download ends (default).")
@click.option("--list", "show_list", is_flag=True, help="Show all downloads instead.")
@click.option("--pause", "act", flag_value="pause", help="Pause the download of REF.")
@click.option("--resume", "act", flag_value="resume", help="Resume the download of REF.")
@click.option("--cancel", "act", flag_value="cancel", help="Cancel the download of REF and delete its files.")
@click.option(
    "--dismiss", "act", flag_value="dismiss", help="Remove a failed or finished download from the list."
)
@click.option("--json", "as_json", is_flag=True, help="Print events as JSON, one per line.")
@click.option("-q", "--quiet", is_flag=True, help="With --list: names only.")
@pass_program
def pull(
    program: Program,
    *,
    ref: str | None,
    anyway: bool,
    wait: bool,
    show_list: bool,
    act: str | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Download a model from the hub: REF is org/name, org/name@revision, or a short name such as qwen3:4b.

    First llmbox checks that the model fits in memory and on the disk. The daemon downloads it: Ctrl-C
    only stops showing it, and an interrupted download resumes where it stopped, even after a restart.
    """
    if show_list:
        _list(program, as_json=as_json, quiet=quiet)
        return
    if ref is None:
        raise CliError("which model?", "REF is missing", "llmbox search TEXT", Exit.USAGE)
    if act is not None:
        found = program.client.post(f"/admin/api/downloads/{act}", {"model": ref}, timeout=60.0)["download"]
        if act == "dismiss" and not as_json:
            output.say(f"{ref} was removed from the list.")
        else:
            _print_result(found, as_json=as_json)
        if act != "resume":
            return
    else:
        _check_name(ref)  # a typo needs no daemon
        _start_daemon_if_needed(program, {})
        found = program.client.post("/admin/api/downloads", {"model": ref, "anyway": anyway})["download"]
    if not wait:
        _print_result(found, as_json=as_json)
        return
    try:
        _follow(program, found, as_json=as_json)
    except KeyboardInterrupt:
        output.say(f"\nThe download continues in the daemon. Stop it: llmbox pull --cancel {ref}")
        raise


def _check_name(ref: str) -> None:
    if HUB_ID.fullmatch(full_name(ref)) is not None:
        return
    fix = likely_id(ref) or formatting.did_you_mean(ref[:100].lower(), short_names())
    if Path(ref[:200]).exists():
        fix = f"it is on this disk: llmbox load {shlex.quote(ref)}; "
    raise CliError(
        f"{ref[:200]!r} is not a model of the hub",
        "a model is org/name, org/name@revision or, of GGUF files, org/name:Q4_K_M; or a short name",
        fix + "short names: llmbox search",
        Exit.USAGE if "/" in ref else Exit.NOT_FOUND,
    )


def fetch_missing(program: Program, models: Sequence[str], flags: Mapping[str, Scalar], *, yes: bool) -> None:
    """Pull those of `models` that are on the hub only, after asking with size and time; `yes` answers.

    `flags` are those of a daemon that has to be started. Raises CliError: as `Program.resolve` for names that
    are not on the hub, and where nobody can be asked.
    """
    for text in models:
        try:
            program.resolve(text)
        except CliError as error:
            name = full_name(text)
            on_hub = error.exit == Exit.NOT_FOUND and HUB_ID.fullmatch(name) is not None
            if not on_hub or not (yes or sys.stdin.isatty()):
                raise
            _fetch(program, name, flags, yes=yes)


def _fetch(program: Program, name: str, flags: Mapping[str, Scalar], *, yes: bool) -> None:
    from ...hub.model_info import find_facts
    from .fit import slow_here

    facts, _ = find_facts(name, program.environ, program.names)
    if slow := slow_here(program, facts):
        output.say(f"Note: {slow}")
    size = formatting.size(facts.missing_bytes)
    wait = fetch_time(facts.missing_bytes)
    said = f"{name} is not on this disk. Fetch {size}, {wait}?"
    require_consent(said, f"{name} was not fetched", yes=yes)
    if yes:
        output.say(f"Fetching {name}: {size}, {wait}.")
    _start_daemon_if_needed(program, flags)
    found = program.client.post("/admin/api/downloads", {"model": name})["download"]
    _follow(program, found, as_json=False)


def fetch_time(size: int) -> str:
    """Return the time that a download of `size` bytes takes on a usual connection."""
    return f"about {formatting.span(max(1.0, size / USUAL_RATE))} at {formatting.size(USUAL_RATE)}/s"


def _start_daemon_if_needed(program: Program, flags: Mapping[str, Scalar]) -> None:
    from ..server.daemon_starter import start_daemon

    if find_running(program.paths) is None:
        output.say("Starting the daemon…")
        start_daemon(program, [], None, flags)


def _follow(program: Program, found: dict[str, Any], *, as_json: bool) -> None:
    view: JsonView | ProgressBars = JsonView() if as_json else ProgressBars()
    text = ""
    try:
        while True:
            view.show(found)
            if found["message"] and found["message"] != text:
                text = found["message"]
                view.note(text)
            if found["state"] not in {"checking", "downloading"}:
                break
            time.sleep(LOOK)
            found = _look_again(program, found)
    finally:
        view.close()
    finish(program, found, as_json=as_json)


def _look_again(program: Program, found: dict[str, Any]) -> dict[str, Any]:
    """Return the download as it is now, or `found` where a daemon that is alive has no time to answer."""
    try:
        return find(program, found["model"])
    except CliError as error:
        if error.exit != Exit.UNREACHABLE or find_running(program.paths) is None:
            raise
        return found


def finish(program: Program, found: Mapping[str, Any], *, as_json: bool) -> None:
    if found["state"] == "failed":
        error = found["error"]
        log_file = str(program.paths.log_file)
        raise CliError(error["what"], error["why"], error["fix"], Exit(error["exit"]), log_file)
    if not as_json:
        _print_result(found, as_json=False)
    if found["state"] != "ready":
        raise CliError(
            f"{found['model']} is not downloaded yet",
            f"its download is {found['state']}",
            f"llmbox pull --resume {found['model']}",
        )


def find(program: Program, model: str) -> dict[str, Any]:
    rows: list[dict[str, Any]] = program.client.get("/admin/api/downloads")["downloads"]
    for row in rows:
        if row["model"] == model:
            return row
    raise CliError(f"the download of {model} is gone", "the daemon was restarted", f"llmbox pull {model}")


def _print_result(found: Mapping[str, Any], *, as_json: bool) -> None:
    if as_json:
        output.write_json("pull", {"download": found})
    elif found["state"] == "ready":
        output.say(f"{found['model']} is here ({formatting.size(found['total'])}, every file checked).")
        output.say(f"Load it: llmbox load {found['model']}")
    else:
        output.say(f"{found['model']}: {summary(found)}")


def _list(program: Program, *, as_json: bool, quiet: bool) -> None:
    rows = program.client.get("/admin/api/downloads")["downloads"]
    if as_json:
        output.write_json("downloads", {"downloads": rows})
        return
    if quiet:
        for row in rows:
            output.write(row["model"])
        return
    if not rows:
        output.say("No downloads. Begin one: llmbox pull ORG/NAME")
        return
    output.table(
        ("MODEL", "STATE", "DONE", "SIZE", "RATE", ""),
        [
            (
                row["model"],
                row["state"],
                f"{row['done'] / row['total']:.0%}" if row["total"] else "-",
                formatting.size(row["total"] or None),
                f"{formatting.size(row['rate'])}/s" if row["rate"] and row["state"] == "downloading" else "-",
                reason(row) or row["message"],
            )
            for row in rows
        ],
        right=(2, 3, 4),
    )
    if failed := [row["model"] for row in rows if row["state"] == "failed"]:
        output.say(
            f"Try again: llmbox pull {failed[0]}; remove it from the list: llmbox pull --dismiss {failed[0]}"
        )


def reason(found: Mapping[str, Any]) -> str:
    """Return the cause of a failure; empty where there is none."""
    error = found["error"]
    return f"{error['what']}: {error['why']}" if error else ""


def summary(found: Mapping[str, Any]) -> str:
    if found["state"] == "failed":
        return f"failed: {reason(found)}"
    if not found["total"]:
        return str(found["state"])
    text = f"{found['state']} {found['done'] / found['total']:.0%} of {formatting.size(found['total'])}"
    if found["state"] == "downloading" and found["rate"]:
        text += f", {formatting.size(found['rate'])}/s"
        if found["eta_s"] is not None:
            text += f", {formatting.span(found['eta_s'])} left"
    return text


class JsonView:
    """View that writes one line of JSON for every change."""

    def __init__(self) -> None:
        self._last: dict[str, Any] = {}

    def show(self, found: dict[str, Any]) -> None:
        if found != self._last:
            output.write(json.dumps({"schema": "llmbox.pull/1", **found}, ensure_ascii=False))
            self._last = found

    def note(self, text: str) -> None:
        """Ignore the text: it is part of the object."""

    def close(self) -> None:
        return


class ProgressBars:
    """View with a bar for each file on a terminal, else plain lines ever more rarely."""

    def __init__(self) -> None:
        self._live = output.is_live()
        self._line = output.ProgressLine()
        self._height = 0

    def show(self, found: dict[str, Any]) -> None:
        if not self._live:
            self._line.update(f"{found['model']}: {summary(found)}")
            return
        columns, rows = shutil.get_terminal_size()
        open_files = [file for file in found["files"] if file["state"] not in {"done", "waiting"}]
        lines = [f"{found['model']}  {summary(found)}"]
        lines += [bar_line(file, columns) for file in open_files[: max(0, rows - 3)]]
        self._clear()
        sys.stderr.write("".join(f"{formatting.printable(line)[: columns - 1]}\n" for line in lines))
        sys.stderr.flush()
        self._height = len(lines)

    def note(self, text: str) -> None:
        self._clear()
        output.say(f"  {formatting.printable(text)}")

    def close(self) -> None:
        self._clear()
        self._line.close()

    def _clear(self) -> None:
        if self._live and self._height:
            sys.stderr.write(f"\x1b[{self._height}A\x1b[J")
            self._height = 0


def bar_line(file: Mapping[str, Any], columns: int) -> str:
    share = file["done"] / file["size"] if file["size"] else 1.0
    filled = int(share * BAR)
    name = file["name"]
    room = max(12, columns - BAR - 24)
    name = name if len(name) <= room else "…" + name[1 - room :]
    what = " checking" if file["state"] == "checking" else ""
    bar = "#" * filled + "-" * (BAR - filled)
    return f"  {name:{min(room, 40)}} [{bar}] {share:4.0%} {formatting.size(file['size']):>9}{what}"
