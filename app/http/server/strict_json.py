"""Strict JSON: one meaning for every body, or a 400 that names the place.

msgspec alone accepts duplicate keys and bad UTF-8 in keys, and answers some bad bodies with exceptions
that are not decode errors (measured: invalid UTF-8, nesting of 1,000).
"""

import json
import re
from functools import cache
from typing import Any, NoReturn, TypeVar, cast

import msgspec

from ...errors import ApiError

T = TypeVar("T")

_MAX_KEYS, _MAX_VALUES = 50_000, 300_000
"""Bounds of a whole body: one call of the parser holds the interpreter lock (measured: 1 s per 1,000,000
keys).
"""
_NOT_STRUCTURE = bytes(set(range(256)) - set(b'"[]{}:,'))
_OPENING = frozenset(b"[{")
_MAYBE_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_PLACE = re.compile(r" - at (?:`key` in )?`\$(?P<path>.*)`$", re.DOTALL)
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
        raise invalid(str(error)) from None
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        raise _malformed("it cannot be decoded") from None
    return typed, plain


def invalid(message: str) -> ApiError:
    """Build the error for msgspec's validation message, with `param` as a path such as
    `messages[0].content`.
    """
    place = _PLACE.search(message)
    param = place["path"].lstrip(".").removesuffix("[...]") if place else ""
    text = message[: place.start()] if place else message
    if missing := _MISSING.search(text):
        param = f"{param}.{missing['name']}" if param else missing["name"]
        return ApiError(400, f"Missing required parameter: '{param}'.", "missing_required_parameter", param)
    text = text.replace("`", "")
    where = f"'{param}'" if param else "the body"
    code = "invalid_type" if ", got " in text else "invalid_value"
    return ApiError(400, f"Invalid value for {where}: {text[:1].lower()}{text[1:]}.", code, param or None)


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
