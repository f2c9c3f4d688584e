"""Typed access to a parsed JSON object, with errors that name the file and the key."""

import math
from collections.abc import Mapping
from typing import Any

from .errors import ModelError


class Fields:
    """`where` names the object in errors. A key that is null counts as absent."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw = raw
        self.where = where

    def error(self, problem: str) -> ModelError:
        return ModelError(f"{self.where}: {problem}")

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive whole number (0 only where it is the default)."""
        value = self._value(key, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or (value < 1 and value != default):
            raise self.error(f"{key} must be a positive whole number, not {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        if not is_number(value):
            raise self.error(f"{key} must be a number, not {value!r}")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        return None if self.raw.get(key) is None else self.number(key)

    def numbers(self, key: str) -> tuple[float, ...]:
        value = self._value(key, ())
        if not isinstance(value, (list, tuple)) or not all(is_number(x) for x in value):
            raise self.error(f"{key} must be a list of numbers")
        return tuple(float(x) for x in value)

    def flag(self, key: str, *, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.error(f"{key} must be true or false, not {value!r}")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.error(f"{key} must be a string, not {value!r}")
        return value

    def mapping(self, key: str) -> dict[str, Any] | None:
        value = self.raw.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.error(f"{key} must be an object, not {value!r}")
        return value

    def _value(self, key: str, default: Any) -> Any:
        value = self.raw.get(key)
        value = default if value is None else value
        if value is None:
            raise self.error(f"{key} is missing")
        return value


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
