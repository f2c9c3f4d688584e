"""Output of the command line: data to stdout, messages and questions to stderr.

JSON is one object with a `schema` field, never colored. Without a terminal there are no spinners, and
progress lines come ever more rarely.
"""

import contextlib
import json
import os
import select
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import click

from ..errors import CliError, Exit
from ..util.formatting import printable

_GAP = 2
_LEAST = 12
"""Characters that a shortened column keeps."""
PLAIN_INTERVAL, LONGEST_INTERVAL = 5.0, 60.0
"""Seconds between progress lines without a live terminal: the first, which doubles, and the maximum."""


def write(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def require_reader() -> None:
    """Raise BrokenPipeError if nobody reads stdout any more: without output a follower would not notice."""
    poll = select.poll()
    try:
        poll.register(sys.stdout, 0)
    except ValueError:  # stdout is not a file
        return
    if any(event & select.POLLERR for _, event in poll.poll(0)):
        raise BrokenPipeError


def write_lines(lines: Sequence[str]) -> None:
    """Write lines. On a terminal that is too small for them use the pager (PAGER, else less)."""
    pager = _pager() if is_live(sys.stdout) and len(lines) >= shutil.get_terminal_size().lines else None
    if pager is None:
        for line in lines:
            write(line)
        return
    import subprocess

    # Git's setting: colors pass, and text that fits stays on the screen.
    environ = {"LESS": "FRX", **os.environ}
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):  # q before the end
        subprocess.run(  # noqa: S603 - the user's own pager
            pager, input="\n".join(lines) + "\n", text=True, check=False, env=environ
        )


def _pager() -> list[str] | None:
    """Return the pager's command. None where there is none, or PAGER is empty or cat."""
    import shlex

    try:
        words = shlex.split(os.environ.get("PAGER", "less"))
    except ValueError:
        return None
    if not words or words == ["cat"] or shutil.which(words[0]) is None:
        return None
    return words


def write_json(schema: str, data: Mapping[str, Any]) -> None:
    """Write one JSON object. `schema` is a name with a version, such as `llmbox.ps/1`, raised when a field
    changes its meaning.
    """
    assert "schema" not in data, f"{schema}: the field names the kind of object"
    write(json.dumps({"schema": f"llmbox.{schema}/1", **data}, ensure_ascii=False))


def is_live(stream: Any = None) -> bool:
    """Return True if lines may be redrawn: the stream is a terminal that can do so."""
    stream = stream or sys.stderr
    return bool(stream.isatty()) and os.environ.get("TERM") != "dumb"


def has_color(stream: Any = None) -> bool:
    return is_live(stream) and not os.environ.get("NO_COLOR")


def bold(text: str) -> str:
    return f"\x1b[1m{text}\x1b[0m" if has_color(sys.stdout) else text


def width() -> int:
    """Return the columns of the terminal; COLUMNS wins. Unlimited in a pipe, so that scripts get
    whole lines.
    """
    if os.environ.get("COLUMNS", "").isdigit() or sys.stdout.isatty():
        return max(20, shutil.get_terminal_size().columns)
    return 10_000


def print_error(error: CliError) -> None:
    """Print four lines: what failed, why, what to run next, where the log is."""
    prefix = "\x1b[31mError:\x1b[0m" if has_color() else "Error:"
    say(f"{prefix} {printable(error.what)}")
    for label, text in (("Why", error.why), ("Try", error.fix), ("Log", error.log)):
        if text:
            say(f"  {label}: {printable(text)}")


def table(headers: Sequence[str], rows: Sequence[Sequence[object]], *, right: Sequence[int] = ()) -> None:
    """Print aligned columns. Where the terminal is too narrow, long texts lose their middle, then lines are
    cut. `right` are indexes of right-aligned columns, which are never shortened.
    """
    cells = [[printable(str(cell)) for cell in row] for row in rows]
    sizes = [max(len(line[index]) for line in [list(headers), *cells]) for index in range(len(headers))]
    limit = width()
    sizes = narrow_columns(sizes, limit, fixed=right)
    shown = []
    for number, line in enumerate([list(headers), *cells]):
        padded = [
            cell.rjust(size) if index in right else elide(cell, size).ljust(size)
            for index, (cell, size) in enumerate(zip(line, sizes, strict=True))
        ]
        text = "  ".join(padded).rstrip()
        text = text if len(text) <= limit else text[: limit - 1] + "…"
        shown.append(bold(text) if number == 0 else text)
    write_lines(shown)


def narrow_columns(sizes: Sequence[int], limit: int, *, fixed: Sequence[int] = ()) -> list[int]:
    """Take the characters that are too many for a line off the widest columns, down to `_LEAST` each."""
    result = list(sizes)
    over = sum(result) + _GAP * (len(result) - 1) - limit
    for _ in range(max(0, over)):
        widest = max((i for i in range(len(result)) if i not in fixed), key=result.__getitem__, default=None)
        if widest is None or result[widest] <= _LEAST:
            break
        result[widest] -= 1
    return result


def elide(text: str, size: int) -> str:
    """Return text of at most `size` characters: ids and paths of one kind differ at their ends."""
    if len(text) <= size:
        return text
    tail = (size - 1) // 2
    return f"{text[: size - 1 - tail]}…{text[len(text) - tail :]}"


class ProgressLine:
    """One line of progress on stderr: redrawn on a terminal, else new lines after 5, 10, 20 … s, so that a
    load of minutes does not fill a log.
    """

    def __init__(self) -> None:
        self._live = is_live()
        self._last = ""
        self._next, self._interval = 0.0, PLAIN_INTERVAL
        self._open = False

    def update(self, text: str) -> None:
        if text == self._last:
            return
        now = time.monotonic()
        if self._live:
            sys.stderr.write(f"\r\x1b[2K{printable(text)[: shutil.get_terminal_size().columns - 1]}")
            sys.stderr.flush()
            self._open = True
        elif now >= self._next:
            say(text)
            self._next, self._interval = now + self._interval, min(2 * self._interval, LONGEST_INTERVAL)
        else:
            return
        self._last = text

    def close(self) -> None:
        if self._open:
            sys.stderr.write("\r\x1b[2K")
            sys.stderr.flush()
            self._open = False


def require_consent(question: str, nothing: str, *, yes: bool, as_json: bool = False) -> None:
    """Ask on a terminal, unless `yes` answers already; refuse where nobody can be asked.

    `nothing` says what was left undone. Raises CliError, click.Abort.
    """
    if yes:
        return
    if as_json or not sys.stdin.isatty():
        raise CliError(
            nothing, f"cannot ask without a terminal: {question}", "confirm with --yes", Exit.USAGE
        )
    click.confirm(question, abort=True, err=True)
