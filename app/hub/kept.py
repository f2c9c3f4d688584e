"""Downloads that are not finished, in a file: the next daemon goes on with them."""

import json
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..catalog import HUB_ID
from .download import Download

log = logging.getLogger("llmbox.hub")

_ROW = {"model", "repo", "revision", "anyway", "commit", "etags", "state"}


def read_kept(file: Path) -> list[tuple[Download, bool]]:
    """Paused downloads of an earlier daemon, and whether each was under way.

    A broken file costs the resumption, never the start.
    """
    found = []
    for row in _rows(file):
        download = Download(row["model"], row["repo"], row["revision"], bool(row["anyway"]), state="paused")
        download.commit, download.etags = row["commit"], list(row["etags"])
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
        json.dump({"schema": 1, "downloads": rows}, out)
        out.flush()
        os.fsync(out.fileno())
    fresh.replace(file)


def _row(download: Download) -> dict[str, Any]:
    return {name: getattr(download, name) for name in sorted(_ROW)}


def _rows(file: Path) -> list[dict[str, Any]]:
    try:
        rows: list[dict[str, Any]] = json.loads(file.read_bytes())["downloads"]
        if all(set(row) == _ROW and HUB_ID.fullmatch(row["model"]) for row in rows):
            return rows
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError):
        pass
    log.warning("%s cannot be read: downloads that were under way have to be asked for again", file)
    return []
