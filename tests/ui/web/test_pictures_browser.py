"""Pages look as they did: rough pictures, compared loosely with those in `pictures.json`.

A picture is the brightness of 40 by 24 fields, so that fonts, times and numbers hardly count, and a lost
style sheet, menu or theme does. LLMBOX_RENEW_PICTURES=1 writes the file anew; `make pictures` draws the pages
for the eye.
"""

import base64
import json
import os
from pathlib import Path

from support.browser import Window, needs_browser

pytestmark = needs_browser

FILE = Path(__file__).with_name("pictures.json")
PAGES = {
    "overview": "/admin",
    "models": "/admin/models",
    "discover": "/admin/models/discover",
    "adapters": "/admin/models/adapters",
    "requests": "/admin/requests",
    "telemetry": "/admin/telemetry",
    "memory": "/admin/memory",
    "keys": "/admin/keys",
    "settings": "/admin/settings",
    "system": "/admin/system",
}
AFTER = {"system": "section .well, section .failure", "overview": ".plot canvas", "telemetry": ".plot canvas"}
"""Parts that scripts bring, by page."""
OF_THE_MACHINE = {"discover": ".models, details"}
"""Parts that depend on the memory and the speed of the machine: they are left out."""
REMOVE = "parts => document.querySelectorAll(parts).forEach(each => each.remove())"
LOOKS = {"desktop-light": (1280, 768, "light"), "phone-dark": (390, 780, "dark")}
MOST = 0.03
"""Mean difference of brightness, 0 to 1, up to which two pictures are alike: another font makes
up to 0.022, a missing style sheet 0.038 and more.
"""
SHRINK = """async (url) => {
  const size = { resizeWidth: 40, resizeHeight: 24, resizeQuality: 'high' };
  const picture = await createImageBitmap(await (await fetch(url)).blob(), size);
  const canvas = new OffscreenCanvas(40, 24).getContext('2d');
  canvas.drawImage(picture, 0, 0);
  const { data } = canvas.getImageData(0, 0, 40, 24);
  const mean = (at) => Math.round((data[at] + data[at + 1] + data[at + 2]) / 3);
  return Array.from({ length: 960 }, (_, i) => mean(4 * i));
}"""


def rough(page, studio) -> list[int]:
    shot = base64.b64encode(page.screenshot()).decode()
    return studio.evaluate(SHRINK, f"data:image/png;base64,{shot}")


def difference(one: list[int], other: list[int]) -> float:
    return sum(abs(a - b) for a, b in zip(one, other, strict=True)) / len(one) / 255


def test_pages_look_as_they_did(window: Window):
    page = window.page
    studio = page.context.browser.new_page()  # the content policy of the panel's pages forbids data URLs
    seen = {}
    for look, (width, height, scheme) in reversed(LOOKS.items()):
        page.set_viewport_size({"width": width, "height": height})
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        for name, path in PAGES.items():
            window.open(path)
            page.locator(".tools").wait_for()
            page.locator(AFTER.get(name, "h1")).first.wait_for()
            if name in OF_THE_MACHINE:
                page.evaluate(REMOVE, OF_THE_MACHINE[name])
            seen[f"{name}-{look}"] = rough(page, studio)
    page.evaluate("for (const sheet of document.styleSheets) sheet.disabled = true")
    bare = rough(page, studio)
    studio.close()
    if os.environ.get("LLMBOX_RENEW_PICTURES"):
        FILE.write_text(json.dumps({name: bytes(each).hex() for name, each in seen.items()}, indent=1) + "\n")
    known = {name: list(bytes.fromhex(text)) for name, text in json.loads(FILE.read_text()).items()}
    assert known.keys() == seen.keys()
    changed = {name: round(difference(known[name], seen[name]), 3) for name in seen}
    print(changed)  # shown where the test fails
    assert difference(bare, known["system-desktop-light"]) > 1.5 * MOST, (
        "a page without its styles would be seen"
    )
    assert {name: each for name, each in changed.items() if each > MOST} == {}, (
        "they look different: make pictures shows them; LLMBOX_RENEW_PICTURES=1 takes them as they are"
    )
