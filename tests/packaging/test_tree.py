"""Tests stand in the folders of what they test, and no folder of them grows into a heap."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MIRRORED = ("app", "engine", "kernels", "ui")


def folders(top: Path) -> list[Path]:
    return [top, *(folder for folder in top.rglob("*") if folder.is_dir() and folder.name != "__pycache__")]


@pytest.mark.parametrize("name", MIRRORED)
def test_folders_of_tests_are_folders_of_the_product(name):
    wanted = {folder.relative_to(ROOT) for folder in folders(ROOT / name)}
    found = {folder.relative_to(ROOT / "tests") for folder in folders(ROOT / "tests" / name)}
    assert sorted(map(str, found - wanted)) == []


@pytest.mark.parametrize("name", [*MIRRORED, "e2e", "faults", "docs", "packaging"])
def test_no_folder_has_more_than_15_tests(name):
    counts = {str(folder): len(list(folder.glob("test_*.py"))) for folder in folders(ROOT / "tests" / name)}
    assert {folder: count for folder, count in counts.items() if count > 15} == {}
