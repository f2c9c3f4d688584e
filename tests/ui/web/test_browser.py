"""The panel in a real browser: Debian's chromium, driven by Playwright. Skipped where either lacks."""

import httpx

from support.browser import Window, misfits, needs_browser, serious_problems, unseen_focus
from support.cli_box import PATIENCE
from support.panel_box import Panel

PAGES = {
    "first-run": "/admin/first-run",
    "overview": "/admin",
    "models": "/admin/models",
    "discover": "/admin/models/discover",
    "activity": "/admin/models/activity",
    "adapters": "/admin/models/adapters",
    "model": "/admin/models/show?ref=builtin",
    "requests": "/admin/requests",
    "chat": "/admin/chat",
    "playground": "/admin/playground",
    "telemetry": "/admin/telemetry",
    "memory": "/admin/memory",
    "keys": "/admin/keys",
    "settings": "/admin/settings",
    "system": "/admin/system",
}
pytestmark = needs_browser


def test_the_printed_link_signs_in(panel: Panel, browser):
    context = browser.new_context()
    context.set_default_timeout(PATIENCE * 1000)
    page = context.new_page()
    page.goto(panel.sign_in_link())
    page.get_by_role("button", name="Sign in").click()
    page.get_by_role("heading", name="Overview").wait_for()
    (cookie,) = context.cookies()
    assert {name: panel.cookie[name] for name in ("name", "httpOnly", "sameSite")}.items() <= cookie.items()
    context.close()


def test_a_request_appears_by_itself_and_can_be_cancelled(window: Window):
    window.open("/admin/requests")
    page = window.page
    page.get_by_text("live", exact=True).wait_for()
    page.get_by_text("No requests in flight.").wait_for()
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 3000, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{window.panel.url}/v1/completions", json=body, timeout=300) as answer:
        page.get_by_role("button", name="Cancel").click()
        page.get_by_text("Cancelled cmpl-").wait_for()
        text = answer.read().decode()
    assert '"finish_reason":"abort"' in text or "error" in text
    page.get_by_text("No requests in flight.").wait_for()


def test_from_nothing_to_a_first_answer(window: Window):
    window.open("/admin/first-run")
    page = window.page
    page.get_by_text("checks pass").wait_for()
    assert page.locator("select[name=model]").input_value() == "tiny"
    page.get_by_label("Message", exact=True).fill("hello")
    page.get_by_role("button", name="Send").click()
    page.locator(".measure").wait_for()
    assert page.locator("#answer").text_content()
    assert "first token" in page.locator(".measure").text_content()


def test_a_model_is_unloaded_and_loaded(window: Window):
    window.open("/admin/models")
    page = window.page
    row = page.locator("li.model").filter(has=page.get_by_role("heading", name="builtin"))
    row.get_by_role("button", name="Load").click()
    page.get_by_text("Loading builtin").wait_for()
    row.get_by_role("button", name="Unload").wait_for()
    row.get_by_role("button", name="Unload").click()
    row.get_by_role("button", name="Load", exact=True).wait_for()


def test_a_model_is_found_downloaded_and_there(window: Window):
    window.panel.hub.hold_after = 16_384
    window.open("/admin/models/discover")
    page = window.page
    page.get_by_label("Search the hub").fill("little")
    page.get_by_role("button", name="Search").click()
    row = page.get_by_role("row").filter(has_text="org/little")
    row.get_by_text("yes", exact=True).wait_for()
    row.get_by_role("button", name="Download").click()
    page.get_by_text("Downloading org/little").wait_for()
    page.get_by_role("link", name="Activity").click()
    page.get_by_role("button", name="Pause").click()
    page.get_by_text("paused", exact=True).wait_for()
    page.get_by_role("button", name="Resume").click()
    window.panel.hub.go_on.set()
    page.locator(".state.ready").wait_for()
    assert page.locator("a.button").get_attribute("href") == "/admin/chat?model=org/little"
    page.get_by_role("link", name="Installed").click()
    page.get_by_role("link", name="org/little").wait_for()


def test_a_key_lives_and_ends(window: Window):
    window.open("/admin/keys")
    page = window.page
    page.get_by_label("Name", exact=True).fill("phone")
    page.get_by_role("button", name="Create key").click()
    secret = page.locator("#secret").text_content()
    auth = {"Authorization": f"Bearer {secret}"}
    models = f"{window.panel.url}/v1/models"
    assert httpx.get(models, headers=auth, timeout=PATIENCE).status_code == 200
    page.once("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Revoke phone").click()
    page.get_by_text("There are no keys.").wait_for()
    assert httpx.get(models, headers=auth, timeout=PATIENCE).status_code == 401


def test_settings_show_what_changes_before_it_does(window: Window):
    window.open("/admin/settings")
    page = window.page
    assert page.get_by_label("Port", exact=True).is_disabled()
    page.get_by_label("Search settings").fill("one more gets 429")
    page.get_by_text("1 setting matches").wait_for()
    assert page.get_by_label("Port", exact=True).is_hidden()
    page.get_by_label("Queue of a model", exact=True).fill("99")
    page.get_by_role("button", name="Review changes").click()
    assert page.locator("ins").all_text_contents() == ["99"]
    page.get_by_role("button", name="Save").click()
    page.get_by_text("After a restart: limits.queue").wait_for()
    page.get_by_label("changed from the default").check()
    assert page.get_by_label("Queue of a model", exact=True).is_visible()
    assert page.get_by_label("Listen address", exact=True).is_hidden()
    assert "queue = 99" in window.panel.box.paths.config_file.read_text()


def test_charts_draw_what_happened(window: Window):
    window.panel.complete(20)
    window.open("/admin/telemetry")
    page = window.page
    page.get_by_text("live", exact=True).wait_for()
    assert page.locator(".plot canvas").count() == page.locator(".plot").count() >= 6
    inked = """() => {
      const canvas = document.querySelector('[data-series="cpu"] canvas');
      return canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data.some((v) => v > 0);
    }"""
    page.wait_for_function(inked)


def test_a_hidden_tab_costs_nothing_and_comes_back(window: Window):
    window.open("/admin")
    page = window.page
    page.get_by_text("live", exact=True).wait_for()
    flip = """(hidden) => {
      Object.defineProperty(document, 'hidden', { value: hidden, configurable: true });
      document.dispatchEvent(new Event('visibilitychange'));
    }"""
    page.evaluate(flip, True)
    page.get_by_text("paused", exact=True).wait_for()
    page.evaluate(flip, False)
    page.get_by_text("live", exact=True).wait_for()
    assert page.locator(".plot canvas").count() == 6  # charts stay while the rest is fetched anew


def test_the_keyboard_reaches_the_page_first(window: Window):
    window.open("/admin")
    window.page.keyboard.press("Tab")
    assert window.page.evaluate("document.activeElement.textContent") == "Skip to content"


def test_the_focus_stays_where_it_is_while_the_list_changes(window: Window):
    window.open("/admin/models")
    page = window.page
    page.get_by_text("live", exact=True).wait_for()
    page.get_by_role("link", name="tiny", exact=True).focus()
    assert window.panel.box.run("pin", "tiny").code == 0
    page.get_by_role("button", name="Unpin").wait_for()
    assert page.evaluate("document.activeElement.textContent") == "tiny"
    assert window.panel.box.run("unpin", "tiny").code == 0


def test_pages_fit_are_accessible_and_show_the_focus(window: Window, axe: str):
    """axe-core finds nothing serious in light or dark, and no page is wider than the window.

    Nor at twice the size: a window of 1280 by 860 at 200 % is one of 640 by 430. There the focus is seen.
    """
    page = window.page
    found = []
    for name, path in PAGES.items():
        page.set_viewport_size({"width": 1280, "height": 860})
        window.open(path)
        page.locator("h1").wait_for()
        found += [(name, *each) for each in (*serious_problems(page, axe), *misfits(page))]
        page.emulate_media(color_scheme="light")
        page.set_viewport_size({"width": 640, "height": 430})
        if page.evaluate("document.documentElement.scrollWidth > innerWidth"):
            found.append((name, "is wider than the window"))
        found += [(name, each) for each in unseen_focus(page)]
    assert found == []


def test_the_sign_in_is_accessible_in_all_its_forms(panel: Panel, browser, axe: str):
    context = browser.new_context(viewport={"width": 360, "height": 640})
    context.set_default_timeout(PATIENCE * 1000)
    page = context.new_page()
    for form in ("", "?token=none"):
        page.goto(f"{panel.url}/admin/signin{form}")
        assert serious_problems(page, axe) == []
        assert page.evaluate("document.activeElement.matches('#key, button:focus-visible')")
    page.keyboard.press("Enter")
    page.get_by_role("alert").wait_for()
    assert serious_problems(page, axe) == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    context.close()
