"""Versions below these have known holes: what is installed and what is pinned must be at least as new."""

import re
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LEAST = {
    "h11": (0, 16),
    "jinja2": (3, 1, 6),
    "litestar": (2, 23),
    "safetensors": (0, 8),
    "torch": (2, 9, 1),
}


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.match(r"[\d.]+", text)[0].strip(".").split("."))


@pytest.mark.parametrize("name", LEAST)
def test_installed_and_pinned_versions_are_safe(name):
    pins = dict(
        line.lower().split("==")
        for line in (ROOT / "packaging/constraints.txt").read_text().split()
        if "==" in line
    )
    assert numbers(version(name)) >= LEAST[name]
    assert numbers(pins[name]) >= LEAST[name]


def test_every_dependency_is_pinned():
    text = (ROOT / "pyproject.toml").read_text()
    block = re.search(r"^dependencies = \[\n(.*?)^\]", text, re.DOTALL | re.MULTILINE)[1]
    wanted = {name.lower().replace("_", "-") for name in re.findall(r'^  "([\w-]+)', block, re.MULTILINE)}
    wanted |= set((ROOT / "packaging/dev-requirements.txt").read_text().lower().split("\n"))
    wanted = {name for name in wanted if name and not name.startswith("#")}
    pinned = {
        line.split("==")[0].lower().replace("_", "-")
        for line in (ROOT / "packaging/constraints.txt").read_text().split()
    }
    assert wanted <= pinned, wanted - pinned
