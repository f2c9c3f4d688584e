"""Downloads that are not finished, in a file: the next daemon goes on with them."""

import json
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..catalog import HUB_ID
from .download import Download, State
from .errors import HubError

log = logging.getLogger("llmbox.hub")

_FIRST = ("model", "repo", "revision", "anyway", "commit", "etags", "state")
_FIELDS = (*_FIRST, "message", "started_at", "ended_at")
_ROW, _ROW_1 = {*_FIELDS, "error"}, set(_FIRST)
"""A row now, and as the first version wrote it: without reasons and times."""
_ERROR = ("code", "what", "why", "fix")


def read_kept(file: Path) -> list[tuple[Download, bool]]:
    """Downloads of an earlier daemon, paused or failed as they were, and whether each was under way.

    A broken file costs the resumption, never the start.
    """
    found = []
    for row in _rows(file):
        state: State = "failed" if row["state"] == "failed" else "paused"
        download = Download(row["model"], row["repo"], row["revision"], bool(row["anyway"]), state=state)
        download.commit, download.etags = row["commit"], list(row["etags"])
        if set(row) == _ROW:
            download.message = row["message"]
            download.started_at, download.ended_at = row["started_at"], row["ended_at"]
            download.error = HubError(**row["error"]) if row["error"] else None
        if state == "failed" and download.error is None:
            download.error = HubError("internal", f"the download of {download.model} failed", "see the log")
        found.append((download, row["state"] in {"checking", "downloading"}))
    return found


def write_kept(file: Path, downloads: Iterable[Download]) -> None:
    """Raises OSError. Without anything to go on with there is no file."""
    rows = [_row(each) for each in downloads if each.state not in {"ready", "cancelled"}]
    if not rows:
        file.unlink(missing_ok=True)
        return
    fresh = file.with_suffix(".new")
    with fresh.open("w") as out:
        json.dump({"schema": 2, "downloads": rows}, out)
        out.flush()
        os.fsync(out.fileno())
    fresh.replace(file)


def _row(download: Download) -> dict[str, Any]:
    error = download.error
    row = {name: getattr(download, name) for name in _FIELDS}
    return row | {"error": None if error is None else {name: getattr(error, name) for name in _ERROR}}


def _rows(file: Path) -> list[dict[str, Any]]:
    try:
        rows: list[dict[str, Any]] = json.loads(file.read_bytes())["downloads"]
        if all(_is_sound(row) for row in rows):
            return rows
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    log.warning("%s cannot be read: downloads that were under way have to be asked for again", file)
    return []


def _is_sound(row: Mapping[str, Any]) -> bool:
    error, times = row.get("error"), (row.get("started_at", 0.0), row.get("ended_at"))
    texts = [row.get("message", ""), *(error.values() if error else ())]
    return (
        set(row) in (_ROW, _ROW_1)
        and HUB_ID.fullmatch(row["model"]) is not None
        and (error is None or set(error) == set(_ERROR))
        and all(isinstance(text, str) for text in texts)
        and all(each is None or isinstance(each, int | float) for each in times)
    )
