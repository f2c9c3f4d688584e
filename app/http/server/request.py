"""Route handlers and the class of their requests: strict JSON, an id, and the connection it came over."""

import asyncio
import json
import re
from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast
from urllib.parse import parse_qsl

import msgspec
from litestar import Request
from litestar.connection import ASGIConnection
from litestar.datastructures import State
from litestar.handlers import HTTPRouteHandler
from litestar.types import Scope
from msgspec import inspect

from ...errors import ApiError, missing_parameter

if TYPE_CHECKING:
    from ...services import Services

T = TypeVar("T")


def handlers_of(*modules: ModuleType) -> list[HTTPRouteHandler]:
    """Return the route handlers that these modules define."""
    found = (each for module in modules for each in vars(module).values())
    names = {module.__name__ for module in modules}
    return [each for each in found if isinstance(each, HTTPRouteHandler) and each.fn.__module__ in names]


_MAX_KEYS, _MAX_VALUES = 50_000, 300_000
"""Bounds of a whole body: one call of the parser holds the interpreter lock (measured: 1 s per 1,000,000
keys).
"""
_NOT_STRUCTURE = bytes(set(range(256)) - set(b'"[]{}:,'))
_OPENING = frozenset(b"[{")
_MAYBE_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_PLACE = re.compile(r" - at (?:`key` in )?`\$(?P<path>.*)`$", re.DOTALL)
_STEP = re.compile(r"([^.\[\]]+)|(\[[^\]]*\])")
_MOST_NAMED = 30
"""Maximum number of permitted values that an error lists."""
_MISSING = re.compile(r"missing required field `(?P<name>[^`]+)`")


def load(body: bytes, max_depth: int = 32) -> Any:
    """Decode the body to plain Python values."""
    if body.startswith(b"\xef\xbb\xbf"):
        raise _malformed("it begins with a byte order mark")
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise _malformed(f"it is not UTF-8 (byte {error.start})") from None
    if not text.strip():
        raise _malformed("it is empty")
    _screen(body, max_depth)
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_refuse_constant)
        if _MAYBE_SURROGATE.search(body):
            msgspec.json.encode(value)
    except json.JSONDecodeError as error:
        raise _malformed(f"{error.msg} at line {error.lineno}, column {error.colno}") from None
    except UnicodeEncodeError:
        raise _malformed("it holds half a surrogate pair") from None
    except RecursionError:
        raise _malformed("it is nested too deep") from None
    except ValueError:  # int() of thousands of digits
        raise _malformed("it holds a number that is too long") from None
    return value


def decode(body: bytes, kind: type[T], max_depth: int = 32) -> tuple[T, Any]:
    """Decode the body to `kind`, and to plain values (which still hold fields that `kind` does not have)."""
    plain = load(body, max_depth)
    try:
        typed: T = _decoder(cast("Any", kind)).decode(body)
    except msgspec.ValidationError as error:
        raise invalid(str(error), kind) from None
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        raise _malformed("it cannot be decoded") from None
    return typed, plain


def convert(plain: Any, kind: type[T]) -> T:
    """Convert plain values that another dialect's request was translated to. Raises ApiError 400."""
    try:
        return msgspec.convert(plain, kind)
    except msgspec.ValidationError as error:  # bounds of `kind` alone
        raise invalid(str(error)) from None


def invalid(message: str, kind: Any = Any) -> ApiError:
    """Build the error for msgspec's validation message, with `param` as a path such as
    `messages[0].content`. Where a field of `kind` takes some values alone, the message lists them.
    """
    place = _PLACE.search(message)
    param = place["path"].lstrip(".").removesuffix("[...]") if place else ""
    text = message[: place.start()] if place else message
    if missing := _MISSING.search(text):
        param = f"{param}.{missing['name']}" if param else missing["name"]
        return missing_parameter(param)
    text = text.replace("`", "")
    where = f"'{param}'" if param else "the body"
    code = "invalid_type" if ", got " in text else "invalid_value"
    if text.startswith(("Invalid value ", "Invalid enum value ")):
        text += name_permitted(kind, place["path"] if place else "")
    return ApiError(400, f"Invalid value for {where}: {text[:1].lower()}{text[1:]}.", code, param or None)


def name_permitted(kind: Any, path: str = "") -> str:
    """Return `; it must be 'a' or 'b'` for the field at `path` of `kind`; empty if any value may do."""
    kinds = _alternatives(_type_info(kind))
    for name, _ in _STEP.findall(path):
        kinds = [inner for each in kinds for inner in _inside(each, name)]
    words = dict.fromkeys(repr(value) for each in kinds for value in _listed(each))
    if not words or len(words) > _MOST_NAMED:
        return ""
    *first, last = words
    return f"; it must be {', '.join(first)} or {last}" if first else f"; it must be {last}"


def _alternatives(kind: inspect.Type) -> list[inspect.Type]:
    """List the types of a union; of another type, itself."""
    return list(kind.types) if isinstance(kind, inspect.UnionType) else [kind]


def _inside(kind: inspect.Type, name: str) -> list[inspect.Type]:
    """List the types of a field of an object, or of the elements of an array (an empty `name`)."""
    match kind:
        case inspect.StructType() if name and name == kind.tag_field:
            return [inspect.LiteralType((kind.tag,))]
        case inspect.StructType() | inspect.TypedDictType():
            found = (each for each in kind.fields if each.encode_name == name)
            return [inner for each in found for inner in _alternatives(each.type)]
        case inspect.DictType():
            return _alternatives(kind.value_type)
        case inspect.ListType() | inspect.VarTupleType() | inspect.SetType() if not name:
            return _alternatives(kind.item_type)
    return []


def _listed(kind: inspect.Type) -> Sequence[Any]:
    if isinstance(kind, inspect.EnumType):
        return [each.value for each in kind.cls]
    return kind.values if isinstance(kind, inspect.LiteralType) else ()


@cache
def _type_info(kind: Any) -> inspect.Type:
    return inspect.type_info(kind)


@cache
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def _malformed(why: str) -> ApiError:
    return ApiError(400, f"The body is not valid JSON: {why}.", "invalid_json")


def _screen(body: bytes, max_depth: int) -> None:
    """Bound nesting and size of objects before anything recursive or slow sees the body."""
    marks = body.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _NOT_STRUCTURE)
    # Two quotes side by side end one string and begin the next, or enclose nothing: both may go.
    structure = b"".join(marks.replace(b'""', b"").split(b'"')[::2])
    if structure.count(b":") > _MAX_KEYS or structure.count(b",") > _MAX_VALUES:
        limits = f"{_MAX_KEYS} keys or {_MAX_VALUES} values"
        raise ApiError(400, f"The JSON body has more than {limits}.", "json_too_large")
    depth = 0
    for mark in structure.translate(None, b":,"):
        depth += 1 if mark in _OPENING else -1
        if depth > max_depth:
            raise ApiError(400, f"The JSON body is nested deeper than {max_depth} levels.", "json_too_deep")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) == len(pairs):
        return result
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            raise _duplicate(name)
        seen.add(name)
    raise AssertionError("unreachable")


def _duplicate(name: str) -> ApiError:
    shown = name[:64].encode(errors="replace").decode()
    return ApiError(400, f"The JSON body holds the key {shown!r} twice.", "duplicate_key", shown)


def _refuse_constant(name: str) -> NoReturn:
    raise _malformed(f"{name} is not a JSON number")


LOCAL = "llmbox.local"
"""Key in `scope["extensions"]`: the connection came over our unix socket from our own user."""

WRITER = "llmbox.writer"
"""Key there, and in the state of a request once its answer has begun: a function that writes a part of it."""

CALLER = "llmbox.caller"
"""Key in `scope["extensions"]`: the identity for which the daemon itself asks (`app.py`)."""

_BIG_BODY = 128 * 1024


class StrictRequest(Request[Any, Any, State]):
    """Request that decodes the body into the type of the handler's `data` parameter, strictly, for every
    route.
    """

    @property
    def services(self) -> "Services":
        """The daemon's parts."""
        services: Services = self.app.state.services
        return services

    async def json(self) -> Any:
        return (await self._decoded())[0]

    async def plain_json(self) -> Any:
        """Return the body as plain values, which still hold fields that the handler's type does not have.

        An empty body (of a GET) is `{}`.
        """
        return (await self._decoded())[1]

    async def _decoded(self) -> tuple[Any, Any]:
        if isinstance(self._json, tuple):
            known: tuple[Any, Any] = self._json
            return known
        body = await self.body()
        if not body:
            return None, {}
        field = self.route_handler.parsed_data_field
        kind = field.annotation if field else Any
        depth: int = self.app.state.json_depth
        if len(body) > _BIG_BODY:  # the loop must turn for everybody else
            decoded = await asyncio.to_thread(decode, body, kind, depth)
        else:
            decoded = decode(body, kind, depth)
        self._json = decoded
        return decoded


def is_local_socket(connection: ASGIConnection[Any, Any, Any, Any] | Scope) -> bool:
    """Return True if the request came over the unix socket (the server marks it; headers cannot)."""
    scope = connection if isinstance(connection, dict) else connection.scope
    return LOCAL in (scope.get("extensions") or {})


def request_id(connection: ASGIConnection[Any, Any, Any, Any]) -> str:
    """Return the `x-request-id` of this exchange: the client's if it was well formed, else ours."""
    value: str = connection.scope["state"]["request_id"]
    return value


CLOCK = "exchange_clock"
"""Name of the `ExchangeClock` in a request's state."""
FORM = "form"
"""Key in the scope's state, set by the shell."""
_MOST_FIELDS = 500


def is_form(connection: ASGIConnection[Any, Any, Any, Any]) -> bool:
    return bool(connection.scope["state"].get(FORM))


async def form_of(connection: ASGIConnection[Any, Any, Any, Any]) -> dict[str, str]:
    """Return a form's fields by name. Raises ApiError 400; a repeated name is an error."""
    assert isinstance(connection, Request)
    try:
        text = (await connection.body()).decode("ascii")
        pairs = parse_qsl(
            text,
            keep_blank_values=True,
            strict_parsing=bool(text),
            errors="strict",
            max_num_fields=_MOST_FIELDS,
        )
    except ValueError as error:
        raise ApiError(400, "The form cannot be read.", "invalid_form") from error
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ApiError(400, "The form holds a field twice.", "invalid_form")
    return fields
