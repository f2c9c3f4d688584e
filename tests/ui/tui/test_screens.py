"""Every screen at three sizes, text and colors, against `screens/*.txt`.

`LLMBOX_WRITE_SCREENS=1 pytest tests/ui/tui/test_screens.py` writes them anew: look at the difference.
"""

import os
from itertools import groupby
from pathlib import Path

import pytest
from rich.style import Style

from llmbox.ui.tui.app import SCREENS
from support.lanes import nightly
from support.snapshots import erring_tick, failing_tick, idle_tick, tick

FOLDER = Path(__file__).parent / "screens"
SIZES = ((80, 24), nightly((120, 40)), (200, 60))
"""The middle one each night: other tests draw screens of that size too."""


def told(style: Style | None) -> str:
    if style is None:
        return "-"
    fore = style.color.name if style.color else "-"
    back = style.bgcolor.name if style.bgcolor else "-"
    return f"{fore}/{back}{' bold' if style.bold else ''}"


def picture(stage) -> str:
    """The text of the screen, then which colors each line has, from left to right."""
    strips = stage.app.screen._compositor.render_strips()
    colors = []
    for number, strip in enumerate(strips):
        cells = [told(segment.style) for segment in strip for _ in segment.text]
        runs = [f"{len(list(run))}x {name}" for name, run in groupby(cells)]
        colors.append(f"{number:>2}: {', '.join(runs)}")
    return "\n".join([*(strip.text.rstrip() for strip in strips), "=" * 40, *colors]) + "\n"


def check(name: str, stage) -> None:
    file, now = FOLDER / f"{name}.txt", picture(stage)
    if os.environ.get("LLMBOX_WRITE_SCREENS"):
        file.write_text(now, encoding="utf-8")
    assert now == file.read_text(encoding="utf-8"), "the screen changed; see this file's docstring"


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("number", range(1, 9))
async def test_screen(stage, number, size):
    name = SCREENS[number - 1].__name__.removesuffix("Screen").lower()
    async with stage(size, ticks=tuple(tick(second) for second in range(5))) as scene:
        await scene.press(str(number))
        await scene.settled()
        check(f"{name}-{size[0]}x{size[1]}", scene)


@pytest.mark.parametrize(
    ("name", "size", "options"),
    [
        ("small", (40, 12), {}),
        ("ascii", (80, 24), {"ascii_only": True}),
        ("idle", (80, 24), {"ticks": (idle_tick(),)}),
        ("failing", (80, 24), {"ticks": (failing_tick(),)}),
        ("erring", (120, 40), {"ticks": (erring_tick(),)}),
    ],
)
async def test_overview_in_other_circumstances(stage, name, size, options):
    async with stage(size, **options) as scene:
        await scene.settled()
        check(name, scene)


async def test_models_say_how_many_requests_fail(stage):
    async with stage((120, 40), ticks=(erring_tick(),)) as scene:
        await scene.press("3")
        await scene.settled()
        assert "ready, 75 % fail" in scene.text


async def test_request_detail(stage):
    async with stage((80, 24)) as scene:
        await scene.press("2")
        await scene.settled()
        await scene.press("end", "up", "up", "enter")
        await scene.until(lambda: "decode" in scene.text and "old-1" in scene.text)
        await scene.settled()
        check("request-detail", scene)


async def test_light_theme(stage):
    async with stage((80, 24)) as scene:
        scene.app.theme = "llmbox-light"
        await scene.settled()
        check("light", scene)
