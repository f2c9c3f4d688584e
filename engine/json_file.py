"""JSON files of a model's folder."""

import json
from pathlib import Path
from typing import Any

from .errors import ModelError


def read_value(file: Path) -> Any:
    """Raises ModelError."""
    try:
        return json.loads(file.read_bytes())
    except FileNotFoundError:
        raise ModelError(f"{file} is missing: is this a Hugging Face model directory?") from None
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file} is not valid JSON ({error}): fetch it again") from None


def read_json(file: Path) -> dict[str, Any]:
    """An object. Raises ModelError."""
    raw = read_value(file)
    if not isinstance(raw, dict):
        raise ModelError(f"{file} must hold a JSON object")
    return raw
