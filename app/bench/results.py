"""Saved results of `llmbox bench`, and their comparison (`--compare`)."""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

from ..config.paths import Paths
from ..errors import CliError

FIGURES: Final = ("output_tokens_per_s", "ttft_p50", "tpot_p50", "inter_token_p99")

Levels = dict[int, dict[str, float | None]]
"""Figures by concurrency."""


def read_levels(path: Path) -> Levels:
    """Read a result file. Raises CliError for a file that is no result of `llmbox bench --json`."""
    try:
        saved = json.loads(path.read_text())
        return _by_concurrency(saved["levels"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CliError(
            f"cannot compare with {path}",
            f"it is not what `llmbox bench --json` prints ({type(error).__name__}: {error})",
            f"llmbox bench --json > {path}",
        ) from None


def ratios(now: Sequence[Mapping[str, Any]], earlier: Levels) -> dict[int, dict[str, float | None]]:
    """Divide this run by the earlier one, for the levels that both have; None where either has no such
    figure.
    """
    return {
        level: {name: _ratio(figures[name], earlier[level][name]) for name in FIGURES}
        for level, figures in _by_concurrency(now).items()
        if level in earlier
    }


def _by_concurrency(levels: Sequence[Mapping[str, Any]]) -> Levels:
    return {
        int(level["concurrency"]): {
            name: None if level.get(name) is None else float(level[name]) for name in FIGURES
        }
        for level in levels
    }


def _ratio(now: float | None, earlier: float | None) -> float | None:
    return now / earlier if now is not None and earlier else None


KEPT: Final = 50


class SavedRun(Struct, frozen=True, kw_only=True):
    """`levels` holds what `llmbox bench --json` prints for each concurrency."""

    time: float
    """Unix seconds."""
    model: str
    url: str
    levels: list[dict[str, Any]]


def bench_folder(paths: Paths) -> Path:
    return paths.state_dir / "bench"


def keep_run(folder: Path, model: str, url: str, levels: Sequence[Mapping[str, Any]]) -> None:
    """Write one run and drop the oldest beyond `KEPT`. Raises OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    now = time.time()
    run = SavedRun(time=now, model=model, url=url, levels=[dict(level) for level in levels])
    (folder / f"{int(now * 1000)}.json").write_bytes(msgspec.json.encode(run))
    for old in sorted(folder.glob("*.json"))[:-KEPT]:
        old.unlink(missing_ok=True)


def read_runs(folder: Path) -> list[SavedRun]:
    """Return saved runs, newest first; other files are skipped."""
    runs = []
    for path in sorted(folder.glob("*.json"), reverse=True)[:KEPT]:
        try:
            runs.append(msgspec.json.decode(path.read_bytes(), type=SavedRun))
        except (OSError, msgspec.DecodeError):
            continue
    return runs
