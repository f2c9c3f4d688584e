"""`llmbox stats`, `doctor` and `db`: load and throughput, state of this installation, and care of the request
log's file.
"""

import json
import math
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...errors import CliError, Exit
from ...lifecycle.instance import find_running
from ...lifecycle.program import Command, Program, json_option, pass_program
from ...store.database_file import DatabaseState, back_up, examine, open_file, schema_of, size_on_disk
from ...util import formatting
from .. import output
from ..root import CommandGroup

if TYPE_CHECKING:
    from ...diagnostics.checks import Finding


@click.command(cls=Command)
@click.option("--watch", is_flag=True, help="Print one line each interval until Ctrl-C.")
@click.option(
    "--interval",
    type=click.FloatRange(0.1),
    default=1.0,
    show_default=True,
    metavar="S",
    help="Seconds between lines of --watch; the daemon samples once a second.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
@pass_program
def stats(program: Program, *, watch: bool, interval: float, as_json: bool) -> None:
    """Show current load and throughput."""
    if watch:
        _watch(program, interval, as_json=as_json)
        return
    now = program.client.get("/admin/api/stats")
    output.write(json.dumps({"schema": "llmbox.stats/1", **now}) if as_json else _line(now))


def _watch(program: Program, interval: float, *, as_json: bool) -> None:
    due = -math.inf
    with program.client.stream("GET", "/admin/api/events") as stream:
        for kind, data in stream.events():
            # Ticks come a second apart, give or take: a tenth early is in time.
            if kind != "tick" or time.monotonic() < due - 0.1:
                continue
            due = time.monotonic() + interval
            tick = json.loads(data)
            output.write(json.dumps({"schema": "llmbox.tick/1", **tick}) if as_json else _tick_line(tick))


def _tick_line(tick: Mapping[str, Any]) -> str:
    total, host = tick["totals"], tick["host"]
    state = "ready" if tick["ready"] else f"not ready: {tick['cause']}"
    speed = f"{_number(total['tokens_in'])} tok/s in, {_number(total['tokens_out'])} tok/s out"
    parts = [
        state,
        f"models {len(tick['engines'])}",
        f"running {total['running']}, waiting {total['waiting']}",
        f"KV {_percent(total['kv_used'])}",
        speed if total["requests"] or total["open_requests"] else "no requests yet",
        f"CPU {_percent(host['cpu'])}",
        *(f"GPU{gpu['index']} {_percent(gpu['utilisation'])}" for gpu in tick["gpus"]["devices"]),
        *(each["text"] for each in tick["attention"]),
    ]
    return formatting.printable(" | ".join(parts))


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.0f}"


def _percent(share: float | str) -> str:
    return share if isinstance(share, str) else f"{share:.0%}"


def _line(now: Mapping[str, Any]) -> str:
    total = now["total"]
    if total["output_tokens"]:
        speed = f"{total['prompt_tokens']} tokens in, {total['output_tokens']} out so far"
    else:
        speed = "no requests yet"
    state = "ready" if now["ready"] else f"not ready: {now['cause']}"
    hits = (
        f", prefix hits {total['prefix_hits'] / total['prefix_queries']:.0%}"
        if total["prefix_queries"]
        else ""
    )
    right = (
        f", drafts accepted {total['accepted_tokens'] / total['draft_tokens']:.0%}{_by_method(now)}"
        if total["draft_tokens"]
        else ""
    )
    return (
        f"{state} | models {len(now['models'])} | running {total['running']}, waiting {total['waiting']} | "
        f"KV {_share(total):.0%}{hits} | {speed}{right} | restarts {total['restarts']}"
    )


def _by_method(now: Mapping[str, Any]) -> str:
    """Return the acceptance of each method of proposing draft tokens, over all models."""
    counts: dict[str, list[int]] = {}
    for model in now["models"]:
        for method, each in model["stats"].get("draft_methods", {}).items():
            of_method = counts.setdefault(method, [0, 0])
            of_method[0] += each["accepted_tokens"]
            of_method[1] += each["draft_tokens"]
    shares = ", ".join(
        f"{method} {right / tokens:.0%}" for method, (right, tokens) in counts.items() if tokens
    )
    return f" ({shares})" if shares else ""


def _share(total: Mapping[str, Any]) -> float:
    blocks = total["blocks_total"]
    return total["blocks_used"] / blocks if blocks else 0.0


MARKS = {"ok": "ok    ", "note": "note  ", "failed": "FAILED"}


@click.command(cls=Command)
@json_option
@click.option("-q", "--quiet", is_flag=True, help="Show only findings that need attention.")
@click.option(
    "--bundle",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Also write a zip for support: versions, settings, log; no keys, prompts or answers.",
)
@pass_program
def doctor(program: Program, *, as_json: bool, quiet: bool, bundle: Path | None) -> int:
    """Check this machine; every finding comes with a fix. Exit 10 when something is broken."""
    from ...diagnostics.checks import run_checks

    findings = run_checks(program)
    failed = [finding for finding in findings if finding.status == "failed"]
    if bundle is not None:
        from ...diagnostics.bundle import write_bundle

        parts = write_bundle(program, findings, bundle)
        output.say(f"{bundle} holds {', '.join(parts)}. Review it before you share it.")
    if as_json:
        data = {"ok": not failed, "findings": [asdict(each) for each in findings]}
        output.write_json("doctor", {**data, "bundle": None if bundle is None else str(bundle)})
        return Exit.DOCTOR if failed else Exit.OK
    output.write_lines(
        [line for each in findings if not quiet or each.status != "ok" for line in _lines(each)]
    )
    if failed:
        output.say(f"{len(failed)} of {len(findings)} checks failed.")
        return Exit.DOCTOR
    output.say(f"All {len(findings)} checks passed.")
    return Exit.OK


def _lines(finding: "Finding") -> list[str]:
    lines = [formatting.printable(f"{MARKS[finding.status]}  {finding.name}: {finding.message}")]
    return [*lines, formatting.printable(f"          fix: {finding.fix}")] if finding.fix else lines


@click.group(cls=CommandGroup)
def db() -> None:
    """Maintain the database of the request log and the telemetry history.

    Serving does not depend on it: while it is damaged or locked, requests are answered and their rows are
    lost.
    """


@db.command()
@json_option
@click.option("-q", "--quiet", is_flag=True, help="Print nothing; only set the exit code.")
@pass_program
def check(program: Program, *, as_json: bool, quiet: bool) -> int:
    """Check the whole file for damage; exit 8 when it is damaged."""
    state = examine(_present(program))
    if as_json:
        fields = asdict(state)
        output.write_json("db", {"revision": fields.pop("schema"), **fields})
    elif not quiet:
        _print(state)
    return Exit.OK if state.sound else Exit.INTEGRITY


def _print(state: DatabaseState) -> None:
    output.write(f"{state.path}: {'sound' if state.sound else 'DAMAGED'}, {formatting.size(state.size)}")
    for name, count in state.rows.items():
        output.write(f"  {name}: {count} row{'' if count == 1 else 's'}")
    for finding in state.findings:
        output.write(f"  {formatting.printable(finding)}")
    if not state.sound:
        output.say("A daemon that starts moves a damaged file aside and begins a new one: llmbox restart")
    elif state.schema is not None and state.schema > (state.newest_schema or ""):
        output.say("A newer llmbox wrote it: update llmbox, or move the file away to begin a new log.")
    elif state.schema != state.newest_schema:
        output.say("Its schema is older than this version's: llmbox db migrate, or start the daemon.")


@db.command()
@pass_program
def vacuum(program: Program) -> None:
    """Give the space of deleted rows back to the disk."""
    path = _present(program)
    before = size_on_disk(path)
    with open_file(path, write=True) as connection:
        connection.execute("VACUUM")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    output.say(f"{formatting.size(before)} before, {formatting.size(size_on_disk(path))} now.")


@db.command()
@click.argument("file", required=False, type=click.Path(path_type=Path, dir_okay=False))
@pass_program
def backup(program: Program, file: Path | None) -> None:
    """Copy the database to FILE as it is now, even while the daemon writes. Prints FILE."""
    path = _present(program)
    target = file or path.with_name(f"{path.stem}-{time.strftime('%Y%m%d-%H%M%S')}.db")
    if target.exists():
        raise CliError(f"{target} exists", "a backup replaces no file", "name another FILE", Exit.CONFLICT)
    back_up(path, target)
    output.write(str(target))


@db.command()
@pass_program
def migrate(program: Program) -> None:
    """Migrate it to this version's schema in one transaction. Every start of the daemon does so too."""
    from ...store.database import open_database
    from ...store.record import StoreError

    path = _present(program)
    running = find_running(program.paths)
    if running is not None:
        raise CliError(
            "the daemon uses the file",
            f"pid {running.pid} has brought it to the schema of its own version",
            "llmbox restart migrates it, or llmbox down first",
            Exit.CONFLICT,
        )
    with open_file(path) as connection:
        before = schema_of(connection)
    try:
        open_database(path).dispose()
    except StoreError as error:
        raise CliError("the database was not migrated", str(error), "update llmbox", Exit.CONFLICT) from error
    with open_file(path) as connection:
        after = schema_of(connection)
    output.say(f"The schema is {after}" + (" already." if before == after else f"; it was {before}."))


def _present(program: Program) -> Path:
    path = program.paths.request_db
    if not path.is_file():
        raise CliError(
            f"there is no {path}", "the daemon makes it at its first start", "llmbox up", Exit.NOT_FOUND
        )
    return path
