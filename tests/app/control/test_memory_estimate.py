"""Predicted against measured memory of loads: kept, bounded, never in the way."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from llmbox.app.control import residency as load_history
from llmbox.app.control.residency import LOADS, note_load, read_loads


def loaded(name: str, at: float) -> Any:
    info = SimpleNamespace(
        device="cpu", dtype="float32", context_window=64, weights_bytes=100, measured_weights_bytes=101,
        kv_bytes=10, workspace_bytes=5, load_seconds=0.5,
    )  # fmt: skip
    return cast("Any", SimpleNamespace(name=name, loaded_at=at, supervisor=SimpleNamespace(info=info)))


def test_the_last_loads_of_each_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "loads.json"
    for at in range(LOADS + 3):
        note_load(file, loaded("a", at))
        note_load(file, loaded("a", at))
    rows = read_loads(file)["a"]
    assert [row["at"] for row in rows] == list(range(3, LOADS + 3))
    assert (rows[-1]["predicted_weights"], rows[-1]["measured_weights"]) == (100, 101)
    monkeypatch.setattr(load_history, "MODELS", 2)
    for name in "bc":
        note_load(file, loaded(name, 1))
    assert list(read_loads(file)) == ["b", "c"]


def test_loads_noted_in_several_threads_at_once_are_all_kept(tmp_path: Path):
    file = tmp_path / "loads.json"
    names = [f"m{number}" for number in range(24)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: note_load(file, loaded(name, 1)), names))
    assert sorted(read_loads(file)) == sorted(names)


def test_broken_files_and_full_disks_cost_the_rows_only(tmp_path: Path):
    file = tmp_path / "loads.json"
    for text in ("", "[]", '{"models": 3}', '{"models": {"a": [{}]}}'):
        file.write_text(text)
        assert read_loads(file) == {}
    note_load(file, loaded("a", 1))
    assert list(read_loads(file)) == ["a"]
    note_load(tmp_path / "absent" / "loads.json", loaded("a", 1))
