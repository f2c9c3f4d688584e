"""A real browser on the panel: Debian's chromium, driven by Playwright. Skipped, loudly, where one lacks."""

import importlib.util
import json
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.cli_box import PATIENCE
from support.panel_box import Panel

ROOT = Path(__file__).parents[2]
WIDTHS = {"desktop": 1280, "tablet": 820, "phone": 360}
CHROMIUM = shutil.which("chromium")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
MISSING = [
    *([] if CHROMIUM else ["chromium (apt-get install chromium)"]),
    *([] if importlib.util.find_spec("playwright") else ["playwright (pip install playwright)"]),
    *([] if (ROOT / "ui/web/static/vendor/htmx.min.js").exists() else ["python packaging/hatch_build.py"]),
]
if MISSING:
    warnings.warn(f"THE PANEL IS NOT TESTED IN A BROWSER: missing {', '.join(MISSING)}", stacklevel=1)
needs_browser = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"NO BROWSER TESTS: missing {', '.join(MISSING)}"),
]


class Window:
    """A page of a signed-in browser, with what went wrong in it."""

    def __init__(self, panel: Panel, page) -> None:
        self.panel, self.page = panel, page
        self.problems: list[str] = []
        self.strangers: list[str] = []
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("request", self._request)

    def open(self, path: str) -> None:
        self.page.goto(self.panel.url + path)

    def _console(self, message) -> None:
        if message.type in {"error", "warning"}:
            self.problems.append(message.text)

    def _request(self, request) -> None:
        if not request.url.startswith(self.panel.url + "/"):
            self.strangers.append(request.url)


@pytest.fixture(scope="module")
def browser() -> Iterator:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def context(panel: Panel, browser) -> Iterator:
    """Pages of one context share its processes: each in one of its own would take twice the time."""
    opened = browser.new_context(viewport={"width": 1280, "height": 860})
    opened.set_default_timeout(PATIENCE * 1000)
    yield opened
    opened.close()


@pytest.fixture
def window(panel: Panel, context) -> Iterator[Window]:
    """A page that has nothing of earlier ones but the sign-in."""
    page = context.new_page()
    protocol = context.new_cdp_session(page)
    protocol.send("Storage.clearDataForOrigin", {"origin": panel.url, "storageTypes": "all"})
    protocol.detach()
    context.add_cookies([panel.cookie])
    opened = Window(panel, page)
    yield opened
    page.close()
    assert opened.problems == []
    assert opened.strangers == []


@pytest.fixture(scope="module")
def axe() -> str:
    """axe-core, of the version and hash in the lock file; kept under build."""
    version = json.loads((ROOT / "ui/web/package.json").read_text())["devDependencies"]["axe-core"]
    kept = ROOT / "build" / f"axe-{version}.js"
    if not kept.exists():
        sys.path.append(str(ROOT / "packaging"))
        from hatch_build import install

        with tempfile.TemporaryDirectory() as folder:
            modules, why = install(Path(folder), dev=True)
            if why:
                pytest.skip(f"NO ACCESSIBILITY CHECK: axe-core cannot be fetched ({why})")
            kept.parent.mkdir(exist_ok=True)
            shutil.copyfile(modules / "axe-core" / "axe.min.js", kept)
    return kept.read_text()


def serious_problems(page, axe: str) -> list[tuple[str, str, str]]:
    """List what axe-core finds: (color scheme, rule, the first place).

    Every rule in the light scheme; contrast, the one rule that colors can break, in the dark one too.
    """
    page.evaluate(axe)  # by the protocol: the content policy would refuse a script element
    found = []
    for scheme, rules in (("light", ""), ("dark", ", runOnly: ['color-contrast']")):
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        result = page.evaluate(f"axe.run(document, {{ resultTypes: ['violations']{rules} }})")
        found += [
            (scheme, each["id"], each["nodes"][0]["html"][:200])
            for each in result["violations"]
            if each["impact"] in {"serious", "critical"}
        ]
    return found


FOCUS = """() => {
  const at = document.activeElement;
  if (!at || at === document.body) return null;
  const hasRing = (each) => {
    const style = each && getComputedStyle(each);
    return style && style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) > 0;
  };
  const isOver = (x, y) => {
    const top = document.elementFromPoint(x, y);
    return top && (at.contains(top) || top.contains(at));
  };
  const box = at.getBoundingClientRect();
  const [x, y] = [box.x + box.width / 2, box.y + box.height / 2];
  const isThere = isOver(x, y) || isOver(box.x + 3, box.y + 3) || isOver(box.right - 3, box.bottom - 3);
  const isMarked = hasRing(at) || hasRing(at.closest('.compose, .button'));
  return [at.outerHTML.slice(0, 160), isMarked && isThere];
}"""
"""What has the focus, and whether one sees it: with a ring, in the window and not below another part."""


def unseen_focus(page) -> list[str]:
    """Go through the page by Tab. List what gets the focus and does not show it."""
    found: list[str] = []
    first = None
    for _ in range(200):
        page.keyboard.press("Tab")
        at = page.evaluate(FOCUS)
        if at is None or at[0] == first:
            return found
        first = first or at[0]
        found += [] if at[1] else [at[0]]
    return [*found, "Tab has no end"]


def misfits(page) -> list[tuple[str, int]]:
    """List the windows in which the page must be scrolled sideways: (name, width)."""
    found = []
    for name, width in WIDTHS.items():
        page.set_viewport_size({"width": width, "height": 860})
        if page.evaluate("document.documentElement.scrollWidth > innerWidth"):
            found.append((name, width))
    return found
