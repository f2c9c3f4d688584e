"""Made-up data of `--mock`, what `--once` makes of it, and the pictures that are drawn from it."""

import importlib.util
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import msgspec
import pytest
from rich.cells import cell_len

from llmbox.app.errors import CliError
from llmbox.app.telemetry.snapshot import Tick
from llmbox.ui.tui.data.mock import MockApi
from llmbox.ui.tui.snapshot import read_snapshot, snapshot_json, snapshot_lines

ROOT = Path(__file__).parents[3]
NOON = 1_800_014_400.0


@pytest.fixture(scope="module")
def mock():
    return MockApi(start=NOON, live=False)


def test_a_seed_gives_one_course_of_events(mock):
    again, other = MockApi(start=NOON, live=False), MockApi(8, start=NOON, live=False)
    assert again.get("tick") == mock.get("tick")
    assert again.get("requests?limit=300") == mock.get("requests?limit=300")
    assert other.get("tick") != mock.get("tick")


def test_its_numbers_agree_with_each_other(mock):
    tick = msgspec.convert(mock.get("tick"), Tick)
    assert tick.totals.open_requests == len(tick.requests) == tick.totals.running + tick.totals.waiting
    for engine in tick.engines:
        assert engine.blocks_live + engine.blocks_cached + engine.blocks_free == engine.blocks_total
    for blocks in mock.get("blocks?cells=1024")["models"]:
        assert sum(each[0] for each in blocks["cells"]) == 512
    assert all(row["e2e_s"] >= (row["ttft_s"] or 0) for row in mock.get("requests?limit=500")["requests"])


def test_nothing_can_be_changed(mock):
    with pytest.raises(CliError, match="demonstration"):
        mock.post("models/load", {})
    with pytest.raises(CliError, match="demonstration has no"):
        mock.get("nothing")
    with pytest.raises(CliError, match="is known"):
        mock.get("requests/none")
    for row in (mock.get("requests?limit=1")["requests"][0], mock.get("tick")["requests"][0]):
        assert mock.get(f"requests/{row['id']}")


def test_once_is_plain_text_of_the_terminals_width(mock, monkeypatch):
    for columns, width in ((40, 72), (100, 100), (300, 120)):
        monkeypatch.setenv("COLUMNS", str(columns))
        lines = snapshot_lines(read_snapshot(mock))
        assert max(map(cell_len, lines)) <= width or any("do: " in line for line in lines)
        assert not any("\x1b" in line for line in lines)
    text = "\n".join(lines)
    for word in ("in flight", "Alerts", "Devices", "Models", "Tokens/s", "TTFT", "Errors and events"):
        assert word in text
    assert re.search(r"Qwen/Qwen3-30B-A3B-Instruct-2507\s+\S", text)
    assert all(
        line.isascii() for line in snapshot_lines(read_snapshot(mock), ascii_only=True) if "°" not in line
    )


def test_once_as_json_has_the_documented_fields(mock):
    answer = json.loads(snapshot_json(read_snapshot(mock)))
    documented = re.findall(
        r"^- `(\w+)`",
        (ROOT / "docs" / "top.md").read_text().split("## Scripts")[1].split("## ")[0],
        re.MULTILINE,
    )
    assert list(answer) == documented
    counts = answer["requests"]
    assert counts["in_flight"] == counts["running"] + counts["queued"] == len(counts["live"])
    assert (
        counts["running"] == answer["totals"]["running"] == sum(each["running"] for each in answer["models"])
    )
    assert len(answer["history"]["series"]["tokens_out"]) == 600


# ------------------------------------------------------------------ pictures


def pictures():
    path = ROOT / "packaging" / "top_pictures.py"
    spec = importlib.util.spec_from_file_location("top_pictures", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def words(picture: str) -> set[str]:
    """Words of a picture without those that hold digits: names and labels."""
    texts = ET.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")
    found = " ".join("".join(each.itertext()).replace("\xa0", " ") for each in texts)
    return set(re.findall(r"[A-Za-z][A-Za-z/&-]+", found))


async def test_the_pictures_show_the_screens_of_today():
    module = pictures()
    kept = {path.stem.removeprefix("top-"): path for path in module.IMAGES.glob("top-*.svg")}
    assert set(kept) == set(module.KEPT), "make pictures"
    for path in kept.values():
        assert not re.search(r"(url\(|href=|src=).{0,2}http", path.read_text()), "a picture fetches nothing"
    today = words(await module.draw("overview-120x40"))
    old = words(kept["overview-120x40"].read_text())
    assert len(today & old) > 0.8 * len(today | old), "they look different: make pictures, and look at them"


def test_the_pictures_are_shown():
    shown = (ROOT / "docs" / "top.md").read_text() + (ROOT / "README.md").read_text()
    for name in pictures().KEPT:
        assert f"images/top-{name}.svg" in shown
