"""Results of `llmbox bench`, kept so that a later run can be compared with an earlier one."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

from ..paths import Paths

KEPT: Final = 50


class Run(Struct, frozen=True, kw_only=True):
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
    run = Run(time=now, model=model, url=url, levels=[dict(level) for level in levels])
    (folder / f"{int(now * 1000)}.json").write_bytes(msgspec.json.encode(run))
    for old in sorted(folder.glob("*.json"))[:-KEPT]:
        old.unlink(missing_ok=True)


def read_runs(folder: Path) -> list[Run]:
    """Newest first; files that are no runs are passed over."""
    runs = []
    for path in sorted(folder.glob("*.json"), reverse=True)[:KEPT]:
        try:
            runs.append(msgspec.json.decode(path.read_bytes(), type=Run))
        except (OSError, msgspec.DecodeError):
            continue
    return runs
