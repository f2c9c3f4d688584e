"""How loads went: predicted against measured memory, kept for `llmbox show`. One small JSON file."""

import json
import logging
from pathlib import Path
from typing import Any

from ..engines.loaded_model import LoadedModel

log = logging.getLogger("llmbox.daemon")

LOADS = 10
"""Kept of each model."""
MODELS = 200


def note_load(file: Path, model: LoadedModel) -> None:
    """Once for each load. A full disk costs the row, never the model."""
    info = model.supervisor.info
    if info is None:
        return
    known = read_loads(file)
    rows = known.pop(model.name, [])
    if any(row["at"] == model.loaded_at for row in rows):
        return
    rows.append(
        {
            "at": model.loaded_at,
            "device": info.device,
            "dtype": info.dtype,
            "context": info.context_window,
            "predicted_weights": info.weights_bytes,
            "measured_weights": info.measured_weights_bytes,
            "kv": info.kv_bytes,
            "workspace": info.workspace_bytes,
            "seconds": round(info.load_seconds, 3),
        }
    )
    known[model.name] = rows[-LOADS:]
    while len(known) > MODELS:
        del known[next(iter(known))]
    fresh = file.with_suffix(".new")
    try:
        fresh.write_text(json.dumps({"schema": 1, "models": known}) + "\n")
        fresh.replace(file)
    except OSError as error:
        fresh.unlink(missing_ok=True)
        log.warning("cannot note how %s was loaded: %s", model.name, error)


def read_loads(file: Path) -> dict[str, list[dict[str, Any]]]:
    """By model, oldest first; empty when there is nothing that can be read."""
    try:
        known = json.loads(file.read_bytes())["models"]
        if all(isinstance(row["at"], int | float) for rows in known.values() for row in rows):
            found: dict[str, list[dict[str, Any]]] = known
            return found
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    return {}
