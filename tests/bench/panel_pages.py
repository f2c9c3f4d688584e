"""`make bench`: what a browser fetches for each page of the panel, and how soon it paints.

    python tests/bench/panel_pages.py [--loads 7] [--write]

Starts a daemon of its own with the built-in model, and chromium. Every load begins with an empty cache. The
size of a page is that of the page itself and of all files that it needs, compressed as sent; data that its
charts fetch afterwards stands beside it. First paint is the browser's own first-contentful-paint, from the
click on. The exit code is 1 where a page is larger than 60 kB; times are reported only. `--write` puts the
table into docs/notes/dashboards.md.
"""

import argparse
import datetime as dt
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "packaging"), str(ROOT / "tests"), str(Path(__file__).parent)]

from burst import llmbox
from panel_pictures import FLAGS, PAGES
from scenarios import renew

from support.browser import CHROMIUM

LARGEST = 60_000
"""Bytes of a page."""
PATIENCE_MS = 60_000
SETTLE_MS = 500
"""Time after the load event in which charts fetch their data."""
PAINT = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? null"


@dataclass(frozen=True, slots=True)
class PageRow:
    """Measurements of one page: bytes, and milliseconds to the first paint of each load."""

    path: str
    size: int
    data: int
    paints: list[float]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loads", type=int, default=7)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    if CHROMIUM is None:
        print("Chromium is not installed: the panel's pages are not measured.")
        return 0
    with tempfile.TemporaryDirectory(prefix="llmbox-pages-") as folder:
        where = ["--data-dir", folder]
        link = json.loads(llmbox("up", "--port", "0", "builtin", "--json", *where))["sign_in"]
        try:
            rows = measure(link, options.loads)
        finally:
            llmbox("down", "--now", *where)
    text = table(options, rows)
    print(text)
    if options.write:
        renew("panel", text)
    return int(any(row.size > LARGEST for row in rows))


def measure(link: str, loads: int) -> list[PageRow]:
    """Return a row for each page."""
    from playwright.sync_api import sync_playwright

    base = link.partition("/admin")[0]
    rows = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        try:
            context = browser.new_context(viewport={"width": 1280, "height": 860})
            context.set_default_timeout(PATIENCE_MS)
            page = context.new_page()
            page.goto(link)
            page.get_by_role("button", name="Sign in").click()
            page.get_by_role("heading", name="Overview").wait_for()
            page.close()
            for path in (*PAGES.values(), "/admin/chat"):
                found = [load(context, base + path) for _ in range(loads)]
                sizes, data, paints = zip(*found, strict=True)
                rows.append(PageRow(path, max(sizes), max(data), list(paints)))
        finally:
            browser.close()
    return rows


def load(context: Any, url: str) -> tuple[int, int, float]:
    """Load a page with an empty cache: bytes of its files, bytes of data, milliseconds to the first paint."""
    page = context.new_page()
    end = time.monotonic() + PATIENCE_MS / 1000
    try:
        devtools = context.new_cdp_session(page)
        devtools.send("Network.enable")
        devtools.send("Network.setCacheDisabled", {"cacheDisabled": True})
        kinds: dict[str, tuple[str, int]] = {}
        sizes = {"file": 0, "data": 0}

        def begun(event: dict[str, Any]) -> None:
            kind = "data" if event["type"] in {"Fetch", "XHR", "EventSource"} else "file"
            kinds[event["requestId"]] = kind, int(event["response"]["encodedDataLength"])

        def ended(event: dict[str, Any]) -> None:
            kind, headers = kinds.get(event["requestId"], ("file", 0))
            sizes[kind] += int(event["encodedDataLength"]) - headers

        devtools.on("Network.responseReceived", begun)
        devtools.on("Network.loadingFinished", ended)
        page.goto(url, wait_until="load")
        page.wait_for_timeout(SETTLE_MS)
        while (paint := page.evaluate(PAINT)) is None:  # the content policy forbids wait_for_function
            if time.monotonic() > end:
                sys.exit(f"{url} painted nothing")
            page.wait_for_timeout(SETTLE_MS)
        return sizes["file"], sizes["data"], paint
    finally:
        page.close()


def table(options: argparse.Namespace, rows: list[PageRow]) -> str:
    cores, busy = os.cpu_count(), os.getloadavg()[0]
    where = f"{cores} cores, shared with the browser; load average {busy:.1f}"
    command = f"python tests/bench/panel_pages.py --loads {options.loads}"
    lines = [
        f"\n{where}; {dt.datetime.now(dt.UTC).date()}; `{command}`\n",
        "| page | page and files, kB | data, kB | first paint, ms: median | least | most |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        times = f"{statistics.median(row.paints):.0f} | {min(row.paints):.0f} | {max(row.paints):.0f}"
        lines.append(f"| `{row.path}` | {row.size / 1000:.1f} | {row.data / 1000:.1f} | {times} |")
    return "\n".join([*lines, "\n"])


if __name__ == "__main__":
    sys.exit(main())
