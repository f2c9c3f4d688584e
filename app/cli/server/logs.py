"""`llmbox logs`: reads the file itself, so that it also works when the daemon does not."""

import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from ...errors import CliError, Exit
from ...lifecycle.program import Command, Program, pass_program
from ...util import formatting
from ...util.formatting import clock, printable
from .. import output

LEVEL_WORDS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True)
class Line:
    text: str
    component: str
    level: str


def parse(raw: str) -> Line:
    try:
        entry = json.loads(raw)
        text = f"{clock(entry['time'])} {entry['level']:7} {entry['component']:8} {entry['message']}"
        if trace := entry.get("trace"):
            text += "\n" + trace
        return Line(printable(text), entry["component"], entry["level"])
    except (ValueError, KeyError, TypeError):
        return Line(printable(raw), "stderr", "error")


def last_lines(path: Path, offset: int, count: int) -> list[str]:
    """Return the last lines written after `offset`; from the start when the file was rotated since."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(offset if offset <= file.tell() else 0)
            raw = file.read(1 << 20).decode("utf-8", "replace")
    except OSError:
        return []
    lines = [part for line in raw.splitlines() if line.strip() for part in parse(line).text.splitlines()]
    return lines[-count:]


def error_in(lines: Sequence[str]) -> CliError | None:
    """Return the last error that `print_error` wrote."""
    starts = [index for index, line in enumerate(lines) if line.startswith("Error: ")]
    if not starts:
        return None
    what, *rest = lines[starts[-1] :]
    parts = {"Why": "", "Try": ""}
    for line in rest:
        label, _, text = line.strip().partition(": ")
        if label in parts:
            parts[label] = text
    return CliError(what.removeprefix("Error: "), parts["Why"], parts["Try"])


FOLLOW_INTERVAL = 0.2


@click.command(cls=Command)
@click.option("-f", "--follow", is_flag=True, help="Follow: print new lines.")
@click.option(
    "-n",
    "--lines",
    type=click.IntRange(0, 1_000_000),
    metavar="N",
    default=100,
    show_default=True,
    help="Number of last lines to show.",
)
@click.option(
    "--component", metavar="NAME", help="Only one component: daemon, engines, http, gateway, store…"
)
@click.option("--level", type=click.Choice(LEVEL_WORDS), default="debug", help="Only this level and above.")
@click.option("--json", "as_json", is_flag=True, help="Print the lines as stored: JSON objects.")
@pass_program
def logs(
    program: Program, *, follow: bool, lines: int, component: str | None, level: str, as_json: bool
) -> None:
    """Read the daemon's log."""
    path = program.paths.log_file
    if not path.exists() and not follow:
        raise CliError("there is no log yet", f"{path} does not exist", "llmbox up", Exit.NOT_FOUND)
    wanted = LEVEL_WORDS[LEVEL_WORDS.index(level) :]

    def select(raw: str) -> str | None:
        line = parse(raw)
        if line.level not in wanted or component not in {None, line.component}:
            return None
        return formatting.printable(raw) if as_json else line.text

    tail, offset = _tail(path, lines, select)
    if not follow:
        output.write_lines(tail)
        if not tail and component is not None:
            output.say(f"No line of {formatting.printable(component)}. All components: llmbox logs")
        return
    for text in tail:
        output.write(text)
    for raw in _new_lines(path, offset):
        text_or_none = select(raw)
        if text_or_none is not None:
            output.write(text_or_none)


def _tail(path: Path, count: int, select: Callable[[str], str | None]) -> tuple[deque[str], int]:
    """Return the last `count` selected lines, the previous rotated file included, and where the
    file ended.
    """
    kept: deque[str] = deque(maxlen=count)
    end = 0
    for part in (path.with_name(path.name + ".1"), path):
        if not part.exists():
            continue
        with part.open(encoding="utf-8", errors="replace") as file:
            for raw in file:
                text = select(raw.rstrip("\n")) if raw.strip() else None
                if text is not None:
                    kept.append(text)
            end = file.tell()
    return kept, end if path.exists() else 0


def _new_lines(path: Path, offset: int) -> Iterator[str]:
    """Yield lines after `offset`; continue with the new file when the log is rotated."""
    file = None
    rest = ""
    while True:
        if file is None and path.exists():
            file = path.open(encoding="utf-8", errors="replace")
            file.seek(offset)
            offset = 0
        if file is not None:
            text = rest + file.read()
            *whole, rest = text.split("\n")
            yield from (line for line in whole if line.strip())
            if not whole and _rotated(path, file.fileno()):
                file.close()
                file = None
                continue
        output.require_reader()
        time.sleep(FOLLOW_INTERVAL)


def _rotated(path: Path, handle: int) -> bool:
    try:
        return path.stat().st_ino != os.fstat(handle).st_ino
    except FileNotFoundError:
        return False
