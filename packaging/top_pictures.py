"""Draw SVG pictures of `llmbox top` from its demonstration data into docs/images; no daemon is needed.

make pictures            draws these, then every page of the panel
.venv/bin/python packaging/top_pictures.py --to FOLDER --themes nord
"""

import argparse
import asyncio
import os
import re
import time
from itertools import chain, repeat
from pathlib import Path

from llmbox.ui.tui.app import SCREENS, Dashboard
from llmbox.ui.tui.data.mock import MockApi
from llmbox.ui.tui.rendering import DARK

IMAGES = Path(__file__).parents[1] / "docs" / "images"
NOON = 1_800_014_400.0
SIZES = ((80, 24), (120, 40), (200, 60))
KEPT = (
    "overview-80x24",
    "overview-120x40",
    "overview-200x60",
    "requests-120x40",
    "chat-120x40",
    "alerts-120x40",
)
"""Pictures that docs/top.md and README.md show."""
QUESTION = "What is a KV cache?"


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw SVG pictures of llmbox top.")
    parser.add_argument("--to", type=Path, help="draw all screens at all sizes into a folder")
    parser.add_argument("--themes", nargs="*", default=[DARK.name])
    chosen = parser.parse_args()
    folder = chosen.to or IMAGES
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"{name}-{width}x{height}" for name in screen_names() for width, height in SIZES]
    for theme in chosen.themes:
        for name in names if chosen.to else KEPT:
            suffix = "" if theme == DARK.name else f"-{theme}"
            (folder / f"top-{name}{suffix}.svg").write_text(asyncio.run(draw(name, theme)), encoding="utf-8")


def screen_names() -> list[str]:
    return [screen.__name__.removesuffix("Screen").lower() for screen in SCREENS]


async def draw(name: str, theme: str = DARK.name) -> str:
    """Return the picture of a screen at a size, such as `overview-120x40`, at a fixed moment."""
    screen, _, size = name.partition("-")
    width, height = map(int, size.split("x"))
    dashboard = Dashboard(MockApi(start=NOON, live=False), source="demo", theme=theme)
    async with dashboard.run_test(size=(width, height)) as pilot:
        async with asyncio.timeout(60):
            while dashboard.state.tick is None or "past" not in dashboard.state.answers:
                await pilot.pause(0.02)
        await pilot.press(str(screen_names().index(screen) + 1))
        if screen == "chat":
            async with asyncio.timeout(60):
                while "models" not in dashboard.state.answers:
                    await pilot.pause(0.02)
            await pilot.press(*QUESTION)
            times = chain([0.0, 0.21], repeat(2.4))  # sent, first token, end
            dashboard.state.clock = lambda: next(times)
            await pilot.press("enter")
        await dashboard.workers.wait_for_complete()
        await pilot.pause(0.3)
        picture = dashboard.export_screenshot(title="llmbox top")
    # Rich names fonts on a server; a picture fetches nothing. Its ids differ in each run.
    picture = re.sub(r"@font-face \{.*?\}", "", picture, flags=re.DOTALL)
    return re.sub(r"terminal-\d+", "terminal", picture)


if __name__ == "__main__":
    os.environ |= {"TERM": "xterm-256color", "TZ": "UTC"}
    os.environ.pop("NO_COLOR", None)
    time.tzset()
    main()
