"""Memory, plans and what a phone must be able to do, in a real browser."""

import json
import threading
from pathlib import Path

import httpx
import pytest

from llmbox.app.models.catalog import BUILTIN_DIR
from support.adapters import plain_tensors, write_adapter
from support.browser import Window, misfits, needs_browser, serious_problems

pytestmark = needs_browser


@pytest.fixture
def busy(panel):
    """A request in flight for as long as the test runs."""
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 3000, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{panel.url}/v1/completions", json=body, timeout=300) as answer:
        reader = threading.Thread(target=lambda: list(answer.iter_raw()), daemon=True)
        reader.start()
        yield
        running = panel.box.api("requests?limit=1")["in_flight"]
        for each in running:
            panel.box.run("requests", "cancel", each["id"])
        reader.join(60)


def test_the_block_map_tells_what_a_square_holds(window: Window, busy):
    window.open("/admin/memory")
    page = window.page
    page.get_by_text("live", exact=True).wait_for()
    told = page.locator(".say").first
    page.locator(".map").first.focus()
    page.keyboard.press("ArrowRight")
    page.get_by_text("held by cmpl-").wait_for()
    page.wait_for_timeout(1500)  # swaps later it still says so
    assert "held by cmpl-" in told.text_content()
    page.keyboard.press("ArrowDown")
    page.get_by_text("6401: 66 free.").wait_for()
    page.locator(".map").first.hover(position={"x": 2, "y": 2})
    page.get_by_text("held by cmpl-").wait_for()


def test_a_plan_follows_the_sliders(window: Window):
    window.open("/admin/models/show?ref=builtin")
    page = window.page
    page.get_by_label("Context", exact=True).fill("1024")  # the slider writes into the field
    page.get_by_text("a context of 1,024 tokens").wait_for()
    assert page.locator("#ctx").input_value() == "1024"
    page.locator("select[name=quant]").select_option("int8")
    page.get_by_text("as int8").wait_for()
    page.locator("#prompt").wait_for()
    assert "<|im_start|>assistant" in page.locator("#prompt").text_content()


def test_an_adapter_is_added_chatted_with_and_removed(window: Window, tmp_path: Path, axe: str):
    config = json.loads((BUILTIN_DIR / "config.json").read_text())
    hidden, outputs = config["hidden_size"], config["num_attention_heads"] * config["head_dim"]
    good = write_adapter(tmp_path / "good", plain_tensors(hidden, outputs))
    wrong = write_adapter(tmp_path / "wrong", plain_tensors(hidden + 1, outputs))
    window.open("/admin/models/adapters")
    page = window.page
    page.get_by_text("There are no LoRA adapters.").wait_for()
    page.get_by_label("Name", exact=True).fill("pirate")
    page.get_by_label("Base").select_option("builtin")
    for source, told in (
        ("lora", "neither a name of the hub"),
        ("org/nowhere", "was not found"),
        (str(wrong), "the adapter is of another base"),
        (str(good), "pirate is builtin with an adapter of rank 4."),
    ):
        page.get_by_label("Folder, or").fill(source)
        page.get_by_role("button", name="Add", exact=True).click()
        page.get_by_text(told).wait_for()
    window.problems.clear()  # the browser's lines about the refusals
    row = page.get_by_role("row").filter(has_text="pirate")
    row.get_by_text("base not loaded").wait_for()
    assert [cell.text_content().strip() for cell in row.get_by_role("cell").all()][:2] == ["builtin", "4"]
    window.open("/admin/chat")
    assert "pirate" in page.locator("#model option").all_text_contents()
    window.open("/admin/models/adapters")
    page.get_by_text("live", exact=True).wait_for()
    assert [*serious_problems(page, axe), *misfits(page)] == []
    page.once("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Remove").click()
    page.get_by_text("pirate is no longer an adapter.").wait_for()
    page.get_by_text("There are no LoRA adapters.").wait_for()


def test_a_page_whose_stream_is_gone_turns_gray_and_comes_back(window: Window):
    page = window.page
    page.route("**/admin/live/**", lambda route: route.abort())
    window.open("/admin/models")
    page.get_by_text("no answer since").wait_for()
    rows = page.locator('section[aria-label="Installed"]')
    assert rows.evaluate("each => getComputedStyle(each).filter") == "grayscale(1)"
    page.unroute("**/admin/live/**")
    page.get_by_text("live", exact=True).wait_for()
    assert rows.evaluate("each => getComputedStyle(each).filter") == "none"
    window.problems.clear()  # the browser's lines about the refused streams


def test_a_page_whose_session_is_gone_goes_to_the_sign_in(window: Window):
    page = window.page
    page.route("**/admin/api/events", lambda route: route.fulfill(status=401))
    window.open("/admin/telemetry")
    page.get_by_text("no answer since").wait_for()
    page.context.clear_cookies()
    page.wait_for_url("**/admin/signin*")
    window.problems.clear()


def test_live_figures_move_nothing_on_the_page(window: Window):
    window.panel.complete(20)
    window.open("/admin")
    page = window.page
    page.get_by_text("live", exact=True).wait_for()
    page.locator(".stats .tile").first.wait_for()
    page.wait_for_timeout(1000)  # charts have their data
    page.evaluate("""() => {
      window.moved = [];
      new PerformanceObserver((list) => window.moved.push(...list.getEntries().map((each) => each.value)))
        .observe({ type: 'layout-shift' });
    }""")
    before = page.locator(".stats").text_content()
    for _ in range(3):
        window.panel.complete(20)
        page.wait_for_timeout(700)
    assert page.locator(".stats").text_content() != before, "figures came"
    assert sum(page.evaluate("window.moved")) < 0.01


def test_a_name_that_is_cut_is_told_in_full(window: Window):
    name = "n" * 90
    body = {"model": name, "prompt": "hello"}
    assert httpx.post(f"{window.panel.url}/v1/completions", json=body).status_code == 404
    window.open("/admin/requests")
    cell = window.page.get_by_role("cell", name=name).first
    cell.hover()
    assert cell.get_attribute("title") == name
    assert cell.bounding_box()["width"] < 300


def test_loads_are_marks_in_the_charts(window: Window):
    window.open("/admin/telemetry")
    page = window.page
    page.get_by_text("live", exact=True).wait_for()
    assert page.get_by_role("row").filter(has_text="tiny").get_by_text("load").count() >= 1


def test_a_phone_cancels_unloads_and_revokes(window: Window, busy):
    page = window.page
    page.set_viewport_size({"width": 390, "height": 780})
    window.open("/admin")
    page.get_by_text("Nothing needs attention.").wait_for()
    window.open("/admin/requests")
    page.get_by_role("button", name="Cancel").first.click()
    page.get_by_text("Cancelled cmpl-").wait_for()
    window.panel.box.run("key", "add", "lost")
    window.open("/admin/keys")
    page.once("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Revoke lost").click()
    page.get_by_text("There are no keys.").wait_for()
    window.open("/admin/models")
    row = page.locator("li.model").filter(has=page.get_by_role("heading", name="tiny"))
    page.get_by_text("live", exact=True).wait_for()
    row.get_by_role("button", name="Unload").click()
    page.get_by_text("Unloaded tiny.").wait_for()
