"""Mouse, themes, alerts, and what all screens have: counts of one source, footers with their keys."""

import json

import msgspec
import pytest
from textual.color import Color
from textual.widgets import OptionList

from llmbox.app.telemetry.snapshot import Alert, Tick, find_alerts
from llmbox.ui.tui.app import SCREENS
from llmbox.ui.tui.messages import DashboardState
from llmbox.ui.tui.rendering import DARK, NAMES, OWN, TONES, read_choice, remember_choice, styles
from llmbox.ui.tui.screens.base import TITLES
from llmbox.ui.tui.screens.logs import TONES as LOG_TONES
from llmbox.ui.tui.screens.logs import split_model
from llmbox.ui.tui.widgets.dialogs import ChoiceDialog, KeyValueDialog
from llmbox.ui.tui.widgets.lines import FixedTable
from support.snapshots import engine, failing_tick, live_request, tick


async def test_a_click_on_a_tab_opens_its_screen(stage):
    for size in ((80, 24), (120, 40)):
        async with stage(size) as scene:
            for screen, word in zip(SCREENS[1:4], ("2 Req", "3 Mod", "4 Mem"), strict=True):
                await scene.pilot.click("#bar", offset=(scene.text.splitlines()[0].index(word) + 1, 0))
                await scene.pilot.pause()
                assert isinstance(scene.app.screen, screen)
            await scene.pilot.click("#alert", offset=(3, 0))
            await scene.pilot.pause()
            assert scene.app.screen.TITLE == "Alerts"


async def test_a_narrow_terminal_shows_the_keys_of_all_screens_and_whole_words(stage):
    async with stage((60, 18)) as scene:
        await scene.press("3")
        await scene.settled()
        first, *_, footer = scene.text.splitlines()
        assert "1  2  3 Models  4  5  6  7  8  " in first
        assert footer.rstrip().endswith("f Fit ? Help")
    async with stage((72, 20)) as scene:
        await scene.settled()
        assert " 12:00:00" in scene.text.splitlines()[0]


async def test_a_click_on_a_row_opens_it(stage):
    async with stage((120, 40)) as scene:
        await scene.press("2")
        await scene.settled()
        await scene.pilot.click(FixedTable, offset=(5, 1))
        await scene.until(lambda: isinstance(scene.app.screen, KeyValueDialog))
        assert scene.app.screen.heading == "req-1"


async def test_a_click_on_a_model_of_the_overview_goes_to_it(stage):
    async with stage((120, 40)) as scene:
        await scene.pilot.click("#models", offset=(5, 1))
        await scene.until(lambda: scene.app.screen.TITLE == "Models")
        await scene.settled()
        assert scene.app.screen.query_one(FixedTable).selected == "qwen3-8b"


async def test_a_click_on_a_header_sorts_turns_and_ends(stage):
    async with stage((120, 40)) as scene:
        await scene.press("2")
        await scene.settled()
        grid = scene.app.screen.query_one(FixedTable)
        given = [row.key for row in grid.rows]
        at = next(line for line in scene.text.splitlines() if "OUTPUT" in line).index("OUTPUT")

        async def outputs() -> list[int]:
            await scene.pilot.click(FixedTable, offset=(at, 0))
            await scene.pilot.pause()
            return [row.values[6] for row in grid.rows[:15]]

        assert (found := await outputs()) == sorted(found, reverse=True)
        assert "▾OUTPUT" in scene.text
        assert (found := await outputs()) == sorted(found)
        assert [row.group for row in grid.rows] == sorted(row.group for row in grid.rows)
        await outputs()
        assert [row.key for row in grid.rows] == given


async def test_every_footer_shows_the_keys_of_its_screen(stage):
    words = {
        "Overview": "Time range", "Requests": "Cancel", "Models": "Pull", "Memory": "Down", "Logs": "Level",
        "Bench & Doctor": "Mark", "Chat": "Model", "Alerts": "Copy",
    }  # fmt: skip
    async with stage((80, 24)) as scene:
        for number, title in enumerate(TITLES, 1):
            await scene.press("escape", str(number))
            await scene.until(lambda title=title: words[title] in scene.text.splitlines()[-1])
            assert title == "Chat" or "Help" in scene.text.splitlines()[-1]


async def test_all_screens_count_the_same_requests(stage):
    requests = tuple(live_request(n, state="queued" if n > 2 else "decode", n=4) for n in range(1, 6))
    one = tick(0, requests=requests)
    busy = msgspec.structs.replace(one, totals=msgspec.structs.replace(one.totals, open_requests=5))
    async with stage((120, 40), ticks=(busy,)) as scene:
        assert scene.text.count("5 in flight: 2 running, 3 queued") == 1
        assert "running 2 queued 3" in scene.text
        await scene.press("2")
        assert "5 in flight: 2 running, 3 queued" in scene.text
        await scene.press("3")
        await scene.settled()
        assert scene.app.screen.query_one(FixedTable).rows[0].cells[6][0] == "5"


# ------------------------------------------------------------------ themes


async def test_a_theme_is_chosen_with_a_preview_and_remembered(stage, tmp_path):
    remembered: list[str] = []
    async with stage((80, 24), remember=remembered.append) as scene:
        await scene.press("t")
        await scene.until(lambda: isinstance(scene.app.screen, ChoiceDialog))
        await scene.press("down")
        await scene.until(lambda: scene.app.theme == NAMES[1])
        await scene.press("escape")
        await scene.until(lambda: scene.app.theme == NAMES[0])
        assert remembered == []
        await scene.press("t")
        await scene.until(lambda: isinstance(scene.app.screen, ChoiceDialog))
        scene.app.screen.query_one(OptionList).highlighted = NAMES.index("nord")
        await scene.press("enter")
        await scene.until(lambda: remembered == ["nord"])
        assert scene.app.theme == "nord"
        for name in NAMES:
            assert styles(scene.app.get_theme(name)).keys() == set(TONES)
            assert styles(scene.app.get_theme(name), stale=True).keys() == set(TONES)


def light(color: Color) -> float:
    """Relative luminance as WCAG defines it."""
    red, green, blue = (
        part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in color.normalized
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(fore, back) -> float:
    lights = sorted(light(Color.from_rich_color(each)) + 0.05 for each in (fore, back))
    return lights[1] / lights[0]


@pytest.mark.parametrize("theme", OWN, ids=lambda theme: theme.name)
def test_texts_of_our_themes_can_be_read(theme):
    made = styles(theme)
    texts = {
        "",
        "title",
        "strong",
        "muted",
        "good",
        "warn",
        "bad",
        "accent",
        "tab",
        "header",
        *LOG_TONES.values(),
    }
    low = {name: round(contrast(made[name].color, made[name].bgcolor), 2) for name in texts}
    assert {name: value for name, value in low.items() if value < 4.5} == {}
    assert contrast(made["selected"].color, made["selected"].bgcolor) > 7
    assert made["frame"].bgcolor != made[""].bgcolor, "the first line stands out"


def test_the_remembered_theme_survives_what_is_not_one(tmp_path):
    file = tmp_path / "top.json"
    assert read_choice(file) == DARK.name
    remember_choice(file, "dracula")
    assert read_choice(file) == "dracula"
    for text in ('{"theme": "none such"}', "[]", "{", '{"theme": 3}'):
        file.write_text(text)
        assert read_choice(file) == DARK.name
    remember_choice(tmp_path / "new" / "top.json", "nord")
    assert read_choice(tmp_path / "new" / "top.json") == "nord"
    remember_choice(file / "top.json", "nord")  # below a file: it is lost


# ------------------------------------------------------------------ alerts and logs


async def test_alerts_are_listed_with_what_to_do(stage):
    async with stage((120, 40), ticks=(failing_tick(),)) as scene:
        error = {"what": "org/typo was not found", "why": "", "fix": ""}
        failed = {"model": "org/typo", "state": "failed", "done": 0, "total": 0, "error": error}
        scene.api.table["downloads"] = {"downloads": [failed]}
        await scene.press("8")
        await scene.settled()
        await scene.until(lambda: "2 failures, 1 warning" in scene.text)
        assert "llmbox unload qwen3-8b" in scene.text
        assert "llmbox pull org/typo" in scene.text
        await scene.press("y")
        assert scene.app.clipboard == "llmbox unload qwen3-8b"
        await scene.press("down", "enter")
        await scene.until(lambda: isinstance(scene.app.screen, KeyValueDialog))
        await scene.settled()
        assert "what to do" in scene.text


def test_an_alert_keeps_its_time_while_its_numbers_change():
    state = DashboardState()
    for at, number in ((100.0, 3), (200.0, 5)):
        state.take_tick(Tick(time=at, attention=(Alert(level="warning", text=f"m: {number} of 9 failed"),)))
    assert list(state.alerts_since.values()) == [100.0]
    state.take_tick(Tick(time=300.0))
    assert state.alerts_since == {}


@pytest.mark.parametrize(
    ("facts", "found"),
    [
        ({"ttft_target": 0.5}, ["qwen3-8b: TTFT p95 is 930 ms, its target 500 ms"]),
        ({"tpot_p95": 0.03, "tpot_target": 0.02}, ["qwen3-8b: TPOT p95 is 30 ms, its target 20 ms"]),
        ({"ttft_target": 1.0}, []),
        ({}, []),
    ],
)
def test_a_missed_target_is_an_alert(facts, found):
    alerts = find_alerts(Tick(time=0.0, engines=(engine(**facts),)))
    assert [each.text for each in alerts] == found
    assert all("llmbox requests --model qwen3-8b" in each.fix for each in alerts)


@pytest.mark.parametrize(
    ("message", "split"),
    [
        ("qwen3 | ready after 9 s", ("qwen3", "ready after 9 s")),
        ("qwen3 | qwen3 is ready", ("qwen3", "is ready")),
        ("qwen3 is ready", ("", "qwen3 is ready")),
        ("a b | c", ("", "a b | c")),
        (" | c", ("", " | c")),
    ],
)
def test_a_log_line_does_not_repeat_its_model(message, split):
    assert split_model(message) == split


def test_a_choice_file_is_small_json(tmp_path):
    remember_choice(tmp_path / "top.json", "nord")
    assert json.loads((tmp_path / "top.json").read_text()) == {"theme": "nord"}
