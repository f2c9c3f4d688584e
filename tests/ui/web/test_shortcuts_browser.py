"""The keyboard, the palette of commands and the theme, in a real browser."""

from support.browser import Window, needs_browser, serious_problems

pytestmark = needs_browser


def test_the_keyboard_reaches_pages_commands_and_models(window: Window, axe: str):
    window.open("/admin")
    page = window.page
    page.locator(".tools").wait_for()  # the script runs
    page.keyboard.type("gr")
    page.get_by_role("heading", name="Requests", exact=True).wait_for()
    page.locator(".tools").wait_for()
    page.keyboard.press("?")
    page.get_by_role("heading", name="Keyboard shortcuts").wait_for()
    assert page.locator(".keys-help kbd").count() >= 20
    assert serious_problems(page, axe) == []
    page.keyboard.press("Escape")
    page.keyboard.press("Control+k")
    page.keyboard.type("unl")
    page.get_by_role("option", name="Unload tiny").wait_for()
    page.get_by_role("combobox", name="Command").fill("load built")
    page.get_by_role("option", name="Load builtin").wait_for()
    assert serious_problems(page, axe) == []
    page.keyboard.press("Enter")
    page.get_by_text("Loading builtin").wait_for()
    page.keyboard.press("Control+k")
    page.keyboard.type("latency")
    page.keyboard.press("Enter")
    page.get_by_label("Token prices").wait_for()
    assert page.evaluate("document.activeElement.id") == "usage.prices"
    page.get_by_role("heading", name="Settings").click()
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "search"


def test_a_theme_is_chosen_and_kept(window: Window):
    page = window.page
    page.emulate_media(color_scheme="light")
    window.open("/admin/telemetry")
    ground = "getComputedStyle(document.documentElement).backgroundColor"
    light = page.evaluate(ground)
    page.get_by_role("button", name="Theme: system").click()
    page.get_by_role("button", name="Theme: light").click()
    page.get_by_role("button", name="Theme: dark").wait_for()
    dark = page.evaluate(ground)
    assert dark != light
    window.open("/admin/keys")  # the server writes it into the page
    assert page.locator("html").get_attribute("data-theme") == "dark"
    assert page.evaluate(ground) == dark
    page.get_by_role("button", name="Theme: dark").click()
    assert page.evaluate(ground) == light
