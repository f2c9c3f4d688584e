"""Numbers in words, and pieces of the Overview over made-up readings."""

import pytest

from llmbox.app.config.schema import SECTIONS, schema
from llmbox.app.telemetry.snapshot import NA, Totals
from llmbox.ui.web.pages.settings import SECTION_TITLES, TITLES
from llmbox.ui.web.render import NONE, environment, percent
from support.snapshots import idle_tick, tick


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
    assert "Memory: ours 61 %, others 3 %" in page


def test_each_setting_and_section_has_a_plain_name():
    assert TITLES.keys() == schema().keys()
    assert SECTION_TITLES.keys() == SECTIONS.keys()
    assert len(set(TITLES.values())) == len(TITLES)
