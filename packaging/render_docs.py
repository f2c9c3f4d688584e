"""Write the parts of docs/ that are made from the code: `make docs`. A test holds that they are current.

Each part stands between `<!-- begin NAME -->` and `<!-- end -->`; everything else is written by hand.
"""

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import click
import msgspec

from llmbox.app.cli.commands import COMMANDS
from llmbox.app.http.openai.fields import ChatCompletionRequest, CompletionRequest, Later, Never
from llmbox.app.main import cli
from llmbox.app.settings import schema

DOCS = Path(__file__).parents[1] / "docs"
PART = re.compile(r"(<!-- begin (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def render(text: str) -> str:
    """`text` with every generated part renewed."""
    return PART.sub(lambda match: match[1] + PARTS[match[2]]() + match[3], text)


def request_fields() -> str:
    chat, completion = (
        get_type_hints(kind, include_extras=True) for kind in (ChatCompletionRequest, CompletionRequest)
    )
    lines = ["| field | chat | completions |", "| --- | --- | --- |"]
    names = [*ChatCompletionRequest.__struct_fields__, *CompletionRequest.__struct_fields__]
    lines += [
        f"| `{name}` | {support(chat.get(name))} | {support(completion.get(name))} |"
        for name in dict.fromkeys(names)
    ]
    return "\n".join(lines) + "\n"


def support(hint: Any) -> str:
    if hint is None:
        return "not there"
    if hint in (Later, Never):
        return "400"
    bounds = [text for part in parts_of(hint) if isinstance(part, msgspec.Meta) for text in ranges(part)]
    return "yes" + (f" ({', '.join(bounds)})" if bounds else "")


def parts_of(hint: Any) -> Iterator[Any]:
    """The hint's own metadata, not that of what a list or mapping holds."""
    if get_origin(hint) is Annotated:
        yield from hint.__metadata__
    elif get_origin(hint) not in (list, dict):
        for part in get_args(hint):
            yield from parts_of(part)


def ranges(meta: msgspec.Meta) -> Iterator[str]:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    for name, sign in signs.items():
        bound = getattr(meta, name)
        if bound is not None and abs(bound) < 2**31 - 1:
            yield f"{sign} {bound:g}"


def settings() -> str:
    lines = ["| key | default | meaning |", "| --- | --- | --- |"]
    for row in schema().values():
        default = "auto" if row.default is None else f"`{shown(row.default)}`"
        limits = f" {row.low:g} to {row.high:g}." if row.low is not None and row.high is not None else ""
        choices = f" One of {', '.join(row.choices)}." if row.choices else ""
        live = " Takes effect on reload." if row.live else ""
        lines.append(f"| `{row.name}` | {default} | {row.doc}{choices}{limits}{live} |")
    return "\n".join(lines) + "\n"


def shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(list(value)) if isinstance(value, tuple) else str(value)


def commands() -> str:
    pieces = []
    for name in COMMANDS:
        command = cli.get_command(click.Context(cli, **cli.context_settings), name)
        assert command is not None
        pieces += [f"### `llmbox {name}`\n\n```\n{help_of(command, name)}\n```\n"]
        for inner in sorted(getattr(command, "commands", {})):
            text = help_of(command.commands[inner], f"{name} {inner}")  # type: ignore[attr-defined]
            pieces += [f"```\n{text}\n```\n"]
    return "\n".join(pieces)


def help_of(command: click.Command, name: str) -> str:
    # As if called through the program, whose settings (`-h`) commands inherit.
    program = click.Context(cli, info_name="llmbox", **cli.context_settings)
    with click.Context(command, info_name=name, parent=program, terminal_width=100) as context:
        return command.get_help(context)


PARTS: dict[str, Callable[[], str]] = {
    "request_fields": request_fields,
    "settings": settings,
    "commands": commands,
}


def main() -> int:
    for path in sorted(DOCS.glob("*.md")):
        old = path.read_text("utf-8")
        new = render(old)
        if new != old:
            path.write_text(new, "utf-8")
            print(f"renewed {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
