"""Write the parts of docs/ that are made from the code: `make docs`. A test holds that they are current.

Each part stands between `<!-- begin NAME -->` and `<!-- end -->`; everything else is written by hand.
"""

import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import click
import msgspec
from litestar import Litestar, Router
from litestar.routes import HTTPRoute

from llmbox.app.cli.root import COMMANDS, cli
from llmbox.app.config.settings import schema
from llmbox.app.http.app import DIALECTS
from llmbox.app.http.openai.request_types import (
    ChatCompletionRequest,
    CompletionRequest,
    Later,
    Never,
    NoEffect,
)
from llmbox.app.http.openai.unsupported import HARMLESS
from llmbox.app.http.server.request import StrictRequest
from llmbox.app.text.output.format_table import OUTPUT_FORMATS

DOCS = Path(__file__).parents[1] / "docs"
EVERY_COMMAND = re.compile(r"^  (?:--data-dir DIR|--config FILE|-h, --help) .*\n(?:   .*\n)*", re.MULTILINE)
SETTINGS = re.compile(r"^(Network|Model):\n((?:  .*\n?)+)", re.MULTILINE)
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


def output_formats() -> str:
    """A row for each format of tool calls."""
    lines = ["| format | families | a call begins with |", "| --- | --- | --- |"]
    for each in OUTPUT_FORMATS:
        assert each.tools is not None
        opener = f"`{each.tools.opener}`".replace("|", "\\|")
        bare = ", or the call alone" if each.tools.bare else ""
        lines.append(f"| `{each.name}` | {each.families} | {opener}{bare} |")
    return "\n".join(lines) + "\n"


def dialect_fields() -> str:
    """A row for each route that takes a body, and for each object in it that has a field without effect."""
    pieces: dict[str, str] = {}
    for router in DIALECTS:
        tag = router.tags[0]
        heading = f"| {tag}: route | honored | without effect | 400 |\n| --- | --- | --- | --- |\n"
        rows = (f"| {name} | {fields_of(kind)} |\n" for name, kind in rows_of(router))
        pieces[tag] = pieces.get(tag, heading) + "".join(rows)
    return "\n".join(pieces.values())


def rows_of(router: Router) -> Iterator[tuple[str, type[msgspec.Struct]]]:
    app = Litestar([router], openapi_config=None, request_class=StrictRequest, logging_config=None)
    for route in app.routes:
        for handler in route.route_handlers if isinstance(route, HTTPRoute) else ():
            body = handler.parsed_data_field
            if body is None or not handler.resolve_include_in_schema() or not is_struct(body.annotation):
                continue
            (method,) = handler.http_methods - {"OPTIONS"}
            name = f"`{method} {route.path}`"
            if body.annotation not in (ChatCompletionRequest, CompletionRequest):  # they have their own table
                yield name, body.annotation
            for field, kind in inner_structs(body.annotation):
                yield f"{name}: `{field}`", kind


def inner_structs(kind: type[msgspec.Struct]) -> Iterator[tuple[str, type[msgspec.Struct]]]:
    for name, hint in get_type_hints(kind, include_extras=True).items():
        for inner in filter(is_struct, inner_types(hint)):
            if any(is_refused(each) or each is NoEffect for each in hints_of(inner).values()):
                yield name, inner


def inner_types(hint: Any) -> Iterator[Any]:
    yield hint
    for inner in get_args(hint):
        yield from inner_types(inner)


def is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def is_refused(hint: Any) -> bool:
    return hint in (Later, Never)


def hints_of(kind: type[msgspec.Struct]) -> dict[str, Any]:
    hints = get_type_hints(kind, include_extras=True)
    names = zip(kind.__struct_encode_fields__, kind.__struct_fields__, strict=True)
    return {encoded: hints[name] for encoded, name in names}


def fields_of(kind: type[msgspec.Struct]) -> str:
    """Names in three columns, with bounds, and with the values of refused fields that ask for nothing."""
    columns: tuple[list[str], list[str], list[str]] = ([], [], [])
    for name, hint in hints_of(kind).items():
        if is_refused(hint):
            columns[2].append(f"`{name}`" + harmless(name))
        else:
            columns[1 if hint is NoEffect else 0].append(f"`{name}`" + bounds_of(hint))
    return " | ".join(", ".join(names) for names in columns)


def harmless(name: str) -> str:
    values = [f"`{msgspec.json.encode(value).decode()}`" for value in HARMLESS.get(name, ())]
    return f" (but {', '.join(values)})" if values else ""


def bounds_of(hint: Any) -> str:
    bounds = [text for part in parts_of(hint) if isinstance(part, msgspec.Meta) for text in ranges(part)]
    return f" ({', '.join(bounds)})" if bounds else ""


def support(hint: Any) -> str:
    if hint is None:
        return "not there"
    return "400" if is_refused(hint) else "yes" + bounds_of(hint)


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
        bound = (meta.extra or {}).get(name, getattr(meta, name))
        if bound is not None and abs(bound) < 2**31 - 1:
            yield f"{sign} {in_full(bound)}"


def in_full(number: float) -> str:
    """Format a bound: 1,048,576, 0.5."""
    return f"{int(number):,}" if number == int(number) else f"{number:g}"


def settings() -> str:
    lines = ["| key | default | meaning |", "| --- | --- | --- |"]
    for row in schema().values():
        default = "auto" if row.default is None else f"`{shown(row.default)}`"
        limits = (
            f" {in_full(row.low)} to {in_full(row.high)}."
            if row.low is not None and row.high is not None
            else ""
        )
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
        return shorten(command.get_help(context), name)


def shorten(text: str, name: str) -> str:
    """Leave out the options of every command and, but for `up`, what `up` says of settings."""
    text = EVERY_COMMAND.sub("", text + "\n")
    if name != "up":
        text = SETTINGS.sub(lambda match: f"{match[1]}, as for llmbox up:\n{names_of(match[2])}\n", text)
    return re.sub(r"\n\nOptions:\n(?=\n|$)", "\n", text).rstrip()


def names_of(options: str) -> str:
    names = re.findall(r"^  (--\S+(?: / --\S+)?)", options, re.MULTILINE)
    return textwrap.indent(textwrap.fill(", ".join(names), 94, break_on_hyphens=False), "  ")


PARTS: dict[str, Callable[[], str]] = {
    "request_fields": request_fields,
    "dialect_fields": dialect_fields,
    "output_formats": output_formats,
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
