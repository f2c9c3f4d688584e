"""Tool calls out of the text between their marks, in each notation of `output_formats.py`.

Everything here returns None for text that is not calls and nothing else: the caller then shows it as it is.
"""

import ast
import contextlib
import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from .output_formats import ATTRIBUTE, NUMBER, CallStyle, ToolSyntax, beginning_length

Schemas = Mapping[str, dict[str, Any]]
"""JSON schemas of the arguments, by names of the offered tools."""
_DECODER = json.JSONDecoder(strict=False)  # models write line breaks into strings
_BETWEEN: Final = " \t\r\n;,"
_MOST_PYTHON: Final = 100_000
"""Characters of Python calls: the parser's memory grows with them."""
_MOST_TRIES: Final = 64
"""Places at which the last complete part of a cut call is looked for."""
_NAMED: Final = {"true": True, "false": False, "null": None}
_JSON_TYPES: Final = {"True": True, "False": False, "None": None}


@dataclass(frozen=True, slots=True)
class ParsedToolCall:
    name: str
    arguments: str
    """JSON object as text; its beginning where the call was cut off."""
    is_cut: bool = False


def parse_calls(
    syntax: ToolSyntax, written: str, schemas: Schemas | None = None
) -> list[ParsedToolCall] | None:
    """Parse text that is calls and nothing else, None for other text. In a format whose calls need no mark,
    those of tools without a schema do not count.
    """
    try:
        calls = _PARSERS[syntax.style](syntax, written, schemas or {})
    except (ValueError, RecursionError, MemoryError, SyntaxError):
        return None
    if syntax.bare and schemas is not None and any(call.name not in schemas for call in calls or ()):
        return None
    return calls or None


def is_inside_value(syntax: ToolSyntax, written: str) -> bool:
    """Return True if a call that was written so far ends inside a string, so that a mark there is text."""
    match syntax.style:
        case "xml":
            opener, _, closer = syntax.parameter
            return written.rfind(opener.rstrip()) > written.rfind(closer.strip())
        case "gemma":
            return bool(written.count(syntax.quote) % 2)
        case "python":
            return bool(re.search(r"""["']""", _PYTHON_STRING.sub("", written)))
    return '"' in _JSON_STRING.sub("", written)


_JSON_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_PYTHON_STRING = re.compile(r""""(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'""", re.DOTALL)


def make_call(name: Any, arguments: Any) -> ParsedToolCall | None:
    if not isinstance(name, str) or not name:
        return None
    if isinstance(arguments, str):
        arguments = json.loads(arguments or "{}", strict=False)
    if not isinstance(arguments, dict):
        return None
    name.encode()
    return ParsedToolCall(name, _to_json(arguments))


def _to_json(value: Any) -> str:
    """Return `value` as JSON. Raises ValueError for what could not be sent: NaN, half a surrogate pair."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    text.encode()
    return text


def _parse_json(syntax: ToolSyntax, written: str, _schemas: Schemas) -> list[ParsedToolCall] | None:
    """Parse objects with name and arguments, or lists of them."""
    calls: list[ParsedToolCall] = []
    at = 0
    while rest := written[at:].lstrip(_BETWEEN):
        at = len(written) - len(rest)
        value, at = _DECODER.raw_decode(written, at)
        for each in value if isinstance(value, list) else [value]:
            call = _json_call(syntax, each)
            if call is None:
                return None
            calls.append(call)
    return calls


def _json_call(syntax: ToolSyntax, value: Any) -> ParsedToolCall | None:
    if not isinstance(value, dict):
        return None
    keys = (syntax.arguments_key, "arguments", "parameters")
    arguments: Any = next((value[key] for key in keys if key in value), {})
    return make_call(value.get(syntax.name_key, value.get("name")), arguments)


def _parse_named_json(syntax: ToolSyntax, written: str, _schemas: Schemas) -> list[ParsedToolCall] | None:
    """Parse names, each with one object after it."""

    def read(_name: str, at: int) -> tuple[Any, int]:
        return _DECODER.raw_decode(written, len(written) - len(written[at:].lstrip()))

    return _parse_named(syntax, written, read, between=_BETWEEN, tail=syntax.tail)


def _parse_xml(syntax: ToolSyntax, written: str, schemas: Schemas) -> list[ParsedToolCall] | None:
    """Parse names with marked parameters, typed by the tool's schema."""

    def read(name: str, at: int) -> tuple[Any, int]:
        return _parse_parameters(syntax, written, at, schemas.get(name) or {})

    return _parse_named(syntax, written, read, between=None, tail=rf"\s*{syntax.tail}")


def _parse_named(
    syntax: ToolSyntax,
    written: str,
    read: Callable[[str, int], tuple[Any, int]],
    *,
    between: str | None,
    tail: str,
) -> list[ParsedToolCall] | None:
    """Parse names with arguments. `read` returns the arguments of a tool from a place on, and where they end;
    `between`: characters that may stand between calls, None for white space; `tail`: pattern after arguments.
    """
    calls: list[ParsedToolCall] = []
    at = 0
    while rest := written[at:].lstrip(between):
        head = _pattern(syntax.head).match(written, len(written) - len(rest))
        if head is None:
            return None
        arguments, at = read(head[1], head.end())
        end = _pattern(tail).match(written, at)
        call = make_call(head[1], arguments)
        if end is None or call is None:
            return None
        at = end.end()
        calls.append(call)
    return calls


def _parse_parameters(
    syntax: ToolSyntax, written: str, at: int, schema: Mapping[str, Any]
) -> tuple[dict[str, Any], int]:
    """Parse marked parameters from `at` on. Returns their values by name, and where they end."""
    values, parameter = {}, _parameter(syntax, re.escape(syntax.parameter[2].strip()))
    while found := parameter.match(written, at):
        name = found[1].strip()
        values[name] = _typed(found[2], property_schema(schema, name))
        at = found.end()
    return values, at


def _parameter(syntax: ToolSyntax, end: str) -> re.Pattern[str]:
    """Return the pattern of a parameter: its name, its value up to `end`. White space at marks is free."""
    before, middle, _ = (each.strip() for each in syntax.parameter)
    middle = r"\s*".join(map(re.escape, middle.replace("><", ">\n<").split("\n")))
    middle = middle.replace(re.escape(ATTRIBUTE), "[a-z]*")
    return _pattern(rf"\s*{re.escape(before)}([^<>\"]+?){middle}(.*?){end}")


def property_schema(schema: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the schema of one argument; empty where there is none."""
    properties = schema.get("properties")
    found = properties.get(name) if isinstance(properties, dict) else None
    return found if isinstance(found, dict) else {}


def schema_types(schema: Mapping[str, Any]) -> set[str]:
    """Return the JSON types that a schema allows; empty where it does not say."""
    kind = schema.get("type")
    if isinstance(kind, str):
        return {kind}
    if isinstance(kind, list):
        return {each for each in kind if isinstance(each, str)}
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            return {
                each for one in schema[key] if isinstance(one, dict) for each in schema_types(one) or {"any"}
            }
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list) and values and all(isinstance(each, str) for each in values):
        return {"string"}
    return set()


def _typed(text: str, schema: Mapping[str, Any]) -> Any:
    """Return a parameter's value. Strings stand without quotes, other types as JSON."""
    text = text.removeprefix("\n").removesuffix("\n")
    types = schema_types(schema)
    if "string" in types:
        return None if "null" in types and text.strip() == "null" else text
    plain = text.strip()
    if plain in _JSON_TYPES:
        return _JSON_TYPES[plain]
    try:
        value, end = _DECODER.raw_decode(plain)
    except (ValueError, RecursionError):
        return text
    return value if end == len(plain) else text


def _parse_python(_syntax: ToolSyntax, written: str, schemas: Schemas) -> list[ParsedToolCall] | None:
    """Parse Python calls with keyword arguments that are literals, in a list or one a line."""
    if len(written) > _MOST_PYTHON:
        return None
    hidden = {f"tool_{number}_": name for number, name in enumerate(schemas) if not name.isidentifier()}
    text = written.strip()
    for stand_in, name in hidden.items():
        text = text.replace(f"{name}(", f"{stand_in}(")
    calls: list[ParsedToolCall] = []
    for statement in _python_statements(text):
        if not isinstance(statement, ast.Expr):
            return None
        value = statement.value
        for each in value.elts if isinstance(value, ast.List | ast.Tuple) else [value]:
            call = _python_call(each, hidden)
            if call is None:
                return None
            calls.append(call)
    return calls


def _python_statements(text: str) -> list[ast.stmt]:
    """Parse Python. Raises SyntaxError, and ValueError for null bytes."""
    with warnings.catch_warnings():  # a model's output must not reach the daemon's log
        warnings.simplefilter("ignore", SyntaxWarning)
        try:
            return ast.parse(text).body
        except SyntaxError:
            return ast.parse(text.replace("\n", "\\n")).body  # line breaks inside strings


def _python_call(node: ast.expr, hidden: Mapping[str, str]) -> ParsedToolCall | None:
    if not isinstance(node, ast.Call) or node.args or not isinstance(node.func, ast.Name | ast.Attribute):
        return None
    if any(keyword.arg is None for keyword in node.keywords):
        return None
    values = {keyword.arg: _literal(keyword.value) for keyword in node.keywords}
    name = ast.unparse(node.func)
    return make_call(hidden.get(name, name), values)


def _literal(node: ast.expr) -> Any:
    """Return the value of a literal. Raises ValueError for any other expression."""
    match node:
        case ast.Constant(value=str() | bool() | int() | float() | None as value):
            return value
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [_literal(each) for each in elements]
        case ast.Dict(keys=keys, values=values):
            names = [None if key is None else _literal(key) for key in keys]
            if all(isinstance(name, str) for name in names):
                return dict(zip(names, map(_literal, values), strict=True))
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.Name(id=name) if name in _NAMED:
            return _NAMED[name]
    raise ValueError("an argument is not a literal")


def _parse_gemma(syntax: ToolSyntax, written: str, _schemas: Schemas) -> list[ParsedToolCall] | None:
    """Parse `call:name{key:value}` with strings between the format's quote marks."""
    begin = re.match(r"\s*call:([^\s{]+)\s*", written)
    if begin is None or written.count(syntax.quote, begin.end()) % 2:
        return None
    pieces = written[begin.end() :].split(syntax.quote)
    call = make_call(begin[1], json.loads("".join(_gemma_json(pieces))))
    return None if call is None else [call]


def _gemma_json(pieces: Sequence[str]) -> list[str]:
    """Convert Gemma's notation, split at its quote marks, to JSON: every second piece is a string."""
    return [
        json.dumps(piece) if number % 2 else re.sub(r"([{,]\s*)([^\s{}\[\],:\"]+)\s*:", r'\1"\2":', piece)
        for number, piece in enumerate(pieces)
    ]


def _parse_harmony(_syntax: ToolSyntax, written: str, _schemas: Schemas) -> list[ParsedToolCall] | None:
    """Parse a message whose header names a function."""
    header, _, body = written.partition("<|message|>")
    name = re.search(r"to=functions\.([^\s<]+)", header)
    call = None if name is None else make_call(name[1], body.strip())
    return None if call is None else [call]


_PARSERS: Final[Mapping[CallStyle, Callable[[ToolSyntax, str, Schemas], list[ParsedToolCall] | None]]] = {
    "json": _parse_json,
    "named_json": _parse_named_json,
    "xml": _parse_xml,
    "python": _parse_python,
    "gemma": _parse_gemma,
    "harmony": _parse_harmony,
}


@lru_cache(maxsize=256)
def _pattern(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.DOTALL)


def parse_cut_calls(syntax: ToolSyntax, written: str, schemas: Schemas) -> list[ParsedToolCall] | None:
    """Parse calls of which the last may be cut off. Returns an empty list where the name of the first is not
    known yet, and None for text that does not begin as calls of these tools do.
    """
    has_end = syntax.style != "xml" or bool(syntax.tail)  # without one, parameters may be missing
    if has_end and (calls := parse_calls(syntax, written, schemas)) is not None:
        return calls
    heads = _cut_head(syntax, schemas).finditer(written)
    named = [head for head in heads if head[1] in schemas and (has_end or head.end() < len(written))]
    for head in named[: -_MOST_TRIES - 1 : -1]:  # a name may also stand inside a value
        before = written[: head.start()].strip(f"{_BETWEEN}[]")
        earlier = parse_calls(syntax, before, schemas) if before else []
        if earlier is not None:
            arguments = _arguments_so_far(syntax, written[head.end() :], schemas[head[1]])
            return [*earlier, ParsedToolCall(head[1], arguments, is_cut=True)]
    begun = re.sub(r"\s|\A\s*\[", "", written)
    beginnings = [re.sub(r"\s", "", syntax.text_before_arguments(name)) for name in schemas]
    is_begun = any(text.startswith(begun) or begun.startswith(text.split(NUMBER)[0]) for text in beginnings)
    return [] if is_begun else None


def _cut_head(syntax: ToolSyntax, schemas: Schemas) -> re.Pattern[str]:
    """Return the pattern before the arguments of a call. Its group is the tool's name."""
    names = "|".join(map(re.escape, schemas))
    match syntax.style:
        case "json":
            pattern = rf'\{{\s*"(?:{syntax.name_key}|name)"\s*:\s*"({names})"\s*(?:,\s*"\w+"\s*:)?'
        case "python":
            pattern = rf"(?<![\w.-])({names})\("
        case "gemma":
            pattern = rf"\s*call:({names})\s*(?=\{{)"
        case "harmony":
            pattern = rf"\A.*?to=functions\.({names})(?=[\s<]).*?<\|message\|>"
        case _:
            pattern = syntax.head
    return re.compile(pattern, re.DOTALL)


def _arguments_so_far(syntax: ToolSyntax, written: str, schema: Mapping[str, Any]) -> str:
    """Return the beginning of a JSON object for a beginning of arguments."""
    written = written.lstrip()
    with contextlib.suppress(ValueError, RecursionError, MemoryError, SyntaxError):
        match syntax.style:
            case "xml":
                return _parameters_so_far(syntax, written, schema)
            case "python":
                return _keywords_so_far(written)
            case "gemma":
                written = _gemma_so_far(syntax, written)
        return _to_json(_DECODER.raw_decode(written)[0])
    return "" if syntax.style in {"xml", "python"} or not written.startswith(("{", '"')) else written


def _parameters_so_far(syntax: ToolSyntax, written: str, schema: Mapping[str, Any]) -> str:
    values, at = _parse_parameters(syntax, written, 0, schema)
    whole = _to_json(values)
    if last := _parameter(syntax, r"\Z").match(written, at):
        name, closer = last[1].strip(), syntax.parameter[2].strip()
        text = last[2][: len(last[2]) - beginning_length(closer, last[2])]
        types = schema_types(property_schema(schema, name))
        is_text = not types or "string" in types
        value = _to_json(text.removeprefix("\n").removesuffix("\n"))[:-1] if is_text else text.strip()
        return f"{whole[:-1]}{', ' if values else ''}{_to_json(name)}: {value}"
    if syntax.tail and _pattern(rf"\s*{syntax.tail}").match(written, at):
        return whole
    return whole[:-1] if values else ""


def _keywords_so_far(written: str) -> str:
    ends = [*(each.start() for each in re.finditer(",", written)), len(written)]
    for end in ends[: -_MOST_TRIES - 1 : -1] if len(written) <= _MOST_PYTHON else ():
        with contextlib.suppress(ValueError, RecursionError, MemoryError, SyntaxError):
            match _python_statements(f"f({written[:end]})"):
                case [ast.Expr(value=node)] if (call := _python_call(node, {})) is not None:
                    return call.arguments[:-1].removesuffix("{")
    return ""


def _gemma_so_far(syntax: ToolSyntax, written: str) -> str:
    written = written[: len(written) - beginning_length(syntax.quote, written)]
    *before, last = _gemma_json(written.split(syntax.quote))
    last = last[:-1] if len(before) % 2 else re.sub(r"([{,]\s*)[^\s{}\[\],:\"]+\Z", r"\1", last)
    return "".join([*before, last])
