"""A model whose engine is ready and fails every request, wherever a person may look."""

import json

import httpx
import pytest

from support.browser import Window, misfits, needs_browser, serious_problems
from support.cli_box import until

pytestmark = needs_browser
REASON = "The model gave NaN or infinite logits."


@pytest.fixture(scope="module")
def failing(panel) -> str:
    folder = panel.box.model("failing", fail=REASON, vocab_size=480)
    assert panel.box.run("load", str(folder)).code == 0
    body = {"model": "failing", "prompt": "hello", "max_tokens": 4}
    assert [httpx.post(f"{panel.url}/v1/completions", json=body).status_code for _ in range(3)] == [500] * 3
    assert httpx.post(f"{panel.url}/v1/completions", json=body | {"max_tokens": -1}).status_code == 400
    panel.complete()
    return "3 of 3 requests of the last 5 minutes failed (The model gave NaN or infinite logits)"


def test_the_overview_and_the_charts(window: Window, failing):
    window.open("/admin")
    page = window.page
    page.get_by_text("live", exact=True).wait_for()
    alerts = page.locator(".attention")
    alerts.get_by_text(failing).wait_for()
    alerts.get_by_text("llmbox requests --errors --model failing").wait_for()
    assert page.get_by_text("Nothing needs attention.").count() == 0
    page.locator(".stats .tile").filter(has_text="Failed").get_by_text("75 %").wait_for()
    row = page.locator("li.model").filter(has=page.get_by_role("heading", name="failing"))
    row.get_by_role("link", name="3 of 3").click()
    page.get_by_text("engine_error").first.wait_for()
    window.open("/admin/telemetry")
    page.get_by_text("Failed requests, over five minutes").wait_for()
    page.locator('[data-series="error_rate"] canvas').wait_for()


def test_the_command_line_metrics_and_the_admin_api(panel, failing):
    told = panel.box.run("status").out
    assert "failing: 3 of 3 requests of the last 5 minutes" in told
    assert REASON in told
    rates = json.loads(panel.box.run("status", "--json").out)["error_rates"]
    assert [(each["model"], each["failed"], each["finished"]) for each in rates] == [
        ("failing", 3, 3),
        ("tiny", 0, 1),
    ]
    until(lambda: failing in panel.box.api("tick")["attention"][0]["text"])
    assert 0.75 in panel.box.api("telemetry?series=error_rate&step=1")["series"]["error_rate"]
    counted = httpx.get(f"{panel.url}/metrics").text
    assert 'llmbox_requests_failed_total{code="engine_error",model_name="failing"} 3.0' in counted
    assert 'llmbox_requests_failed_total{code="engine_error",model_name="tiny"}' not in counted


def test_a_failed_download_says_why_and_is_dismissed(window: Window, axe: str):
    window.panel.box.client.post("/admin/api/downloads", {"model": "org/typo"})
    window.open("/admin/models/activity")
    page = window.page
    page.get_by_text("org/typo was not found").wait_for()
    assert [*serious_problems(page, axe), *misfits(page)] == []
    page.once("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Dismiss").click()
    page.get_by_text("Removed from the list: org/typo.").wait_for()
    page.get_by_text("org/typo was not found").wait_for(state="detached")
