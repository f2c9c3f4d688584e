"""Numbers in words, and pieces of the Overview over made-up readings."""

from types import SimpleNamespace

import pytest

from llmbox.app.config.loader import SettingOrigin
from llmbox.app.config.settings import SECTIONS, schema
from llmbox.app.telemetry.snapshot import NA, Totals
from llmbox.engine.ipc.messages import DraftCounts
from llmbox.ui.web.pages.overview import _trend
from llmbox.ui.web.pages.settings import SECTION_TITLES, TITLES, SettingChange, SettingsRow
from llmbox.ui.web.render import NONE, ago, environment, percent
from support.snapshots import blocks, engine, idle_tick, tick


def piece(name: str, **values) -> str:
    return environment().get_template(f"live/{name}.html").render(csrf="", **values)


@pytest.mark.parametrize(
    ("share", "said"),
    [
        (None, NONE),
        (NA, NONE),
        (0.0, "0 %"),
        (4e-4, "under 1 %"),
        (0.01, "1 %"),
        (0.626, "63 %"),
        (1.0, "100 %"),
    ],
)
def test_a_small_share_is_not_called_nothing(share, said):
    assert percent(share) == said


@pytest.mark.parametrize(
    ("seconds", "said"), [(0, "1 s ago"), (55, "55 s ago"), (65, "1 min 5 s ago"), (4000, "1 h 6 min ago")]
)
def test_times_past_are_whole_seconds(seconds, said, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("time.time", lambda: 10_000.0)
    assert ago(10_000.0 - seconds) == said


def test_a_box_without_work_is_idle_instead_of_slow():
    assert "No requests since" in piece("now", tick=idle_tick())
    rest = piece("now", tick=idle_tick(totals=Totals(requests=9, tokens_in=0.0, tokens_out=0.0)))
    assert rest.count("idle") == 1
    assert "tokens/s" not in rest
    slow = Totals(requests=9, open_requests=1, tokens_in=0.0, tokens_out=0.0)
    assert "idle" not in piece("now", tick=idle_tick(totals=slow))


def test_each_bar_of_memory_says_what_it_shows():
    page = piece("boxes", tick=tick())
    assert "Memory in use: 16 %" in page
    assert "Memory: llmbox 61 %, others 3 %" in page


def test_each_setting_and_section_has_a_plain_name():
    assert TITLES.keys() == schema().keys()
    assert SECTION_TITLES.keys() == SECTIONS.keys()
    assert len(set(TITLES.values())) == len(TITLES)


def test_a_setting_without_a_plain_name_is_shown_by_its_key(monkeypatch):
    monkeypatch.delitem(TITLES, "limits.queue")
    key = schema()["limits.queue"]
    row = SettingsRow(key, "5", "512", SettingOrigin("default", ""), waits=False)
    assert row.title == "limits.queue"
    change = SettingChange(key, "512", "5", 5)
    page = environment().get_template("settings/settings_review.html")
    body = page.blocks["main"](page.new_context({"changes": [change], "csrf": ""}))
    assert "limits.queue <code>limits.queue</code>" in "".join(body)


def test_the_panel_has_the_acceptance_of_each_method():
    counts = {
        "ngram": DraftCounts(draft_tokens=30, accepted_tokens=15),
        "draft_model": DraftCounts(draft_tokens=10),
    }
    state = engine(draft_tokens=40, accepted_tokens=15, draft_methods=counts)
    shown = SimpleNamespace(**blocks())
    drawn = SimpleNamespace(blocks=shown, width=10, height=10, cells="", paths={})
    page = (
        environment()
        .get_template("live/maps.html")
        .render(maps=[drawn], engines={shown.model: state}, most_prefixes=5)
    )
    assert "15 of 40 draft tokens were accepted (ngram 15 of 30, draft_model 0 of 10)" in page


@pytest.mark.parametrize("libraries", [True, False])
def test_a_build_without_browser_libraries_shows_no_empty_charts(libraries):
    plots = [SimpleNamespace(title="Load", unit="", series=[("cpu", "CPU")], lines=[], note="")]
    template = environment().get_template("overview/plots.html")
    html = template.render(plots=plots, libraries=libraries, chosen=600)
    assert ('<figure class="tile plot"' in html) is libraries
    assert ("llmbox top" in html) is not libraries


def test_a_trend_is_as_wide_as_its_picture():
    points = [
        (1_000_000 - 700, {"kv_used": 1.0}),
        (1_000_000 - 600, {"kv_used": 0.5}),
        (1_000_000 - 300, {"cpu": 1.0}),
    ]
    assert _trend(points, "kv_used", 1.0, 1_000_000) == "", "one value of the last ten minutes is no line"
    assert _trend([(999_990, {"cpu": 0.0}), (1_000_000, {"cpu": 0.0})], "cpu", 1.0, 1_000_000) == "", (
        "all are 0"
    )
    points.append((1_000_000, {"kv_used": 1.0}))
    assert _trend(points, "kv_used", 1.0, 1_000_000) == "M-9 37L0 15L600 3h9V37"
    assert _trend(points, "kv_used", 2.0, 1_000_000) == "M-9 37L0 22L600 15h9V37"
