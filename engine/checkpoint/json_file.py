"""JSON files of a model's folder, parsed with limits on size and depth, because they are not trusted."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from ..errors import ModelError
from .regular_file import read_regular

MAX_BYTES: Final = 256 << 20
"""Maximum file size; the tokenizer of a vocabulary of 260,000 tokens has 35 MB."""
MAX_DEPTH: Final = 64

PairsHook = Callable[[list[tuple[str, Any]]], Any]


def parse_json(data: bytes | str, pairs_hook: PairsHook | None = None) -> Any:
    """Parse JSON. Raises ValueError if it is invalid or nested deeper than `MAX_DEPTH`."""
    try:
        value = json.loads(data, object_pairs_hook=pairs_hook)
    except RecursionError:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels") from None
    if _is_deeper(value, MAX_DEPTH):
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")
    return value


def read_value(file: Path) -> Any:
    """Read a JSON file. Raises ModelError."""
    try:
        return parse_json(read_regular(file, MAX_BYTES))
    except FileNotFoundError:
        raise ModelError(f"{file} is missing: is this a Hugging Face model directory?") from None
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ModelError(f"{file} is not valid JSON ({error}): fetch it again") from None


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object. Raises ModelError."""
    raw = read_value(file)
    if not isinstance(raw, dict):
        raise ModelError(f"{file} must hold a JSON object")
    return raw


def _is_deeper(value: Any, levels: int) -> bool:
    """Return True if objects and lists are nested in more than `levels` levels."""
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(levels):
        inner = (item for each in level for item in (each.values() if isinstance(each, dict) else each))
        level = [item for item in inner if isinstance(item, (dict, list))]
        if not level:
            return False
    return True
