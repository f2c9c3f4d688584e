"""Write man pages from the commands' help: llmbox(1), and a page for each command, such as llmbox-pull(1).

By hand: `python packaging/man_pages.py FOLDER`.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from llmbox import __version__
from llmbox.app.cli.root import COMMANDS, cli

FILES = """\
.SH FILES
.TP
config.toml
Settings; \\fBllmbox config path\\fR prints where it is.
.SH EXIT STATUS
0 success, 1 failure, 2 wrong usage; docs/operations.md lists the others.
"""


def write_pages(folder: Path) -> list[Path]:
    """Write all pages into `folder` and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    pages = []
    with click.Context(cli, info_name="llmbox", **cli.context_settings) as root:
        for name, context in _contexts(root):
            path = folder / f"{name}.1"
            path.write_text(render_page(name, context), "utf-8")
            pages.append(path)
    return pages


def render_page(name: str, context: click.Context) -> str:
    """One page as man(7) source."""
    command = context.command
    summary = command.get_short_help_str(limit=200)
    text = command.help or ""
    usage = " ".join(command.collect_usage_pieces(context))
    lines = [
        f'.TH "{name.upper()}" "1" "" "llmbox {__version__}" "User Commands"',
        f".SH NAME\n{_escape(name)} \\- {_escape(summary.rstrip('.'))}",
        f".SH SYNOPSIS\n.B {_escape(context.command_path)}\n{_escape(usage)}",
        f".SH DESCRIPTION\n{_paragraphs(text)}",
    ]
    records = (each.get_help_record(context) for each in command.get_params(context))
    if options := [record for record in records if record and record[1]]:
        lines += [".SH OPTIONS", *(_entry(*option) for option in options)]
    if names := [other for other, each in _contexts(context) if each.parent is context]:
        lines += [".SH COMMANDS"]
        lines += [_entry(f"{other}(1)", _summary(context, other)) for other in names]
    if context.parent is None:
        lines.append(FILES.rstrip())
    else:
        lines.append(f".SH SEE ALSO\n.BR {_escape(context.parent.command_path.replace(' ', '-'))} (1)")
    return "\n".join(lines) + "\n"


def _contexts(context: click.Context) -> Iterator[tuple[str, click.Context]]:
    """(page name, context) of the command and of all below it."""
    yield context.command_path.replace(" ", "-"), context
    if isinstance(context.command, click.Group):
        for name in context.command.list_commands(context):
            command = context.command.get_command(context, name)
            assert command is not None
            yield from _contexts(click.Context(command, info_name=name, parent=context))


def _summary(context: click.Context, page: str) -> str:
    assert isinstance(context.command, click.Group)
    name = page.removeprefix(context.command_path.replace(" ", "-") + "-")
    if context.parent is None:
        return COMMANDS[name][1]
    command = context.command.get_command(context, name)
    assert command is not None
    return command.get_short_help_str(limit=200)


def _entry(term: str, text: str) -> str:
    return f".TP\n\\fB{_escape(term)}\\fR\n{_escape(text)}"


def _paragraphs(text: str) -> str:
    """Paragraphs filled by man; those that begin with click's mark for plain text stay as they are."""
    pieces = []
    for piece in re.split(r"\n\s*\n", text.strip()):
        if piece.startswith("\b"):
            pieces.append(f".nf\n{_escape(piece.lstrip(chr(8)).strip(chr(10)))}\n.fi")
        else:
            pieces.append(_escape(" ".join(piece.split())))
    return "\n.PP\n".join(pieces)


def _escape(text: str) -> str:
    """Text as man(7) takes it: backslashes, hyphens of options, and lines that would be requests."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return re.sub(r"^([.'])", r"\\&\1", text, flags=re.MULTILINE)


if __name__ == "__main__":
    for page in write_pages(Path(sys.argv[1])):
        print(page)
