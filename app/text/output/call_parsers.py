"""Tool calls out of the text between their marks, in each notation of `output_formats.py`.

Everything here returns None for text that is not calls and nothing else: the caller then shows it as it is.
"""

import ast
import json
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from .output_formats import ATTRIBUTE, CallStyle, ToolSyntax

Schemas = Mapping[str, dict[str, Any]]
"""JSON schemas of the arguments, by names of the offered tools."""
_DECODER = json.JSONDecoder(strict=False)  # models write line breaks into strings
_BETWEEN: Final = " \t\r\n;,"
_MOST_PYTHON: Final = 100_000
"""Characters of Python calls: the parser's memory grows with them."""
_NAMED: Final = {"true": True, "false": False, "null": None}
_JSON_TYPES: Final = {"True": True, "False": False, "None": None}


@dataclass(frozen=True, slots=True)
class ParsedToolCall:
    name: str
    arguments: str
    """JSON object as text."""


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
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    f"{name}{text}".encode()  # half a surrogate pair could not be sent
    return ParsedToolCall(name, text)


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
    head, tail = _pattern(syntax.head), _pattern(syntax.tail)
    calls: list[ParsedToolCall] = []
    at = 0
    while rest := written[at:].lstrip(_BETWEEN):
        at = len(written) - len(rest)
        begin = head.match(written, at)
        if begin is None:
            return None
        at = begin.end()
        at += len(written[at:]) - len(written[at:].lstrip())
        value, at = _DECODER.raw_decode(written, at)
        end = tail.match(written, at)
        call = make_call(begin[1], value)
        if end is None or call is None:
            return None
        at = end.end()
        calls.append(call)
    return calls


def _parse_xml(syntax: ToolSyntax, written: str, schemas: Schemas) -> list[ParsedToolCall] | None:
    """Parse names with marked parameters, typed by the tool's schema."""
    head, tail, parameter = _pattern(syntax.head), _pattern(rf"\s*{syntax.tail}"), _parameter(syntax)
    calls: list[ParsedToolCall] = []
    at = 0
    while rest := written[at:].lstrip():
        at = len(written) - len(rest)
        begin = head.match(written, at)
        if begin is None:
            return None
        at = begin.end()
        values: dict[str, Any] = {}
        schema = schemas.get(begin[1]) or {}
        while found := parameter.match(written, at):
            name = found[1].strip()
            values[name] = _typed(found[2], property_schema(schema, name))
            at = found.end()
        end = tail.match(written, at)
        call = make_call(begin[1], values)
        if end is None or call is None:
            return None
        at = end.end()
        calls.append(call)
    return calls


def _parameter(syntax: ToolSyntax) -> re.Pattern[str]:
    """Return the pattern of one parameter: its name, its value. White space between marks is free."""
    before, middle, after = (each.strip() for each in syntax.parameter)
    middle = r"\s*".join(map(re.escape, middle.replace("><", ">\n<").split("\n")))
    middle = middle.replace(re.escape(ATTRIBUTE), "[a-z]*")
    return _pattern(rf"\s*{re.escape(before)}([^<>\"]+?){middle}(.*?){re.escape(after)}")


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
    with warnings.catch_warnings():  # a model's output must not reach the daemon's log
        warnings.simplefilter("ignore", SyntaxWarning)
        try:
            tree = ast.parse(text)
        except SyntaxError:
            tree = ast.parse(text.replace("\n", "\\n"))  # line breaks inside strings
    calls: list[ParsedToolCall] = []
    for statement in tree.body:
        if not isinstance(statement, ast.Expr):
            return None
        value = statement.value
        for each in value.elts if isinstance(value, ast.List | ast.Tuple) else [value]:
            call = _python_call(each, hidden)
            if call is None:
                return None
            calls.append(call)
    return calls


def _python_call(node: ast.expr, hidden: Mapping[str, str]) -> ParsedToolCall | None:
    if not isinstance(node, ast.Call) or node.args or not isinstance(node.func, ast.Name | ast.Attribute):
        return None
    values = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            return None
        values[keyword.arg] = _literal(keyword.value)
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
    if begin is None:
        return None
    pieces = written[begin.end() :].split(syntax.quote)
    if len(pieces) % 2 == 0:
        return None
    for number, piece in enumerate(pieces):
        if number % 2:
            pieces[number] = json.dumps(piece)
        else:
            pieces[number] = re.sub(r"([{,]\s*)([^\s{}\[\],:\"]+)\s*:", r'\1"\2":', piece)
    call = make_call(begin[1], json.loads("".join(pieces)))
    return None if call is None else [call]


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
