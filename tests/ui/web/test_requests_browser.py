"""Requests in detail and the playground, in a real browser."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from support.browser import Window, misfits, needs_browser, serious_problems
from support.cli_box import until
from support.panel_box import Panel

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route

pytestmark = needs_browser
SAID = "what-was-said"
HIDE = """(hidden) => {
  Object.defineProperty(document, 'hidden', { value: hidden, configurable: true });
  document.dispatchEvent(new Event('visibilitychange'));
}"""


@pytest.fixture(scope="module")
def keys(panel: Panel) -> dict[str, str]:
    add = panel.box.run
    return {"open": add("key", "add", "open", "--log-content").out, "quiet": add("key", "add", "quiet").out}


@pytest.fixture
def second(panel: Panel) -> Iterator[str]:
    """Another model, slow enough to be stopped."""
    model = panel.box.model("second", hold_at=20, vocab_size=480, script=[66, 121, 101, 32] * 30)
    assert panel.box.run("load", model).code == 0
    until(lambda: {each["state"] for each in panel.box.api("models")["models"]} == {"ready"})
    yield "second"
    panel.box.run("unload", "second")


def ask(panel: Panel, secret: str) -> str:
    body = {"model": "tiny", "prompt": SAID, "max_tokens": 8, "stop": ["zz"], "n": 2}
    headers = {"Authorization": f"Bearer {secret.strip()}"}
    answer = httpx.post(f"{panel.url}/v1/completions", json=body, headers=headers, timeout=300)
    request_id: str = answer.json()["id"]
    until(lambda: request_id in {row["id"] for row in panel.box.api("requests")["requests"]})
    return request_id


def test_what_a_key_lets_be_kept_is_shown_and_replayed(window: Window, keys):
    page = window.page
    window.open(f"/admin/requests/{ask(window.panel, keys['open'])}")
    assert page.locator("#prompt-1").text_content() == SAID
    assert page.locator("#output-1").text_content() == page.locator("#output-2").text_content() != ""
    assert SAID in page.locator("#curl").text_content()
    assert '"zz"' in page.locator("#python").text_content()
    page.get_by_role("button", name="Replay").click()
    page.get_by_text("Equal: the same 16 tokens.").wait_for()
    page.get_by_role("link", name="Its own row").click()
    page.get_by_text("replay", exact=True).wait_for()
    assert "Prompts and answers of callers without a key are not kept" in page.content()


def test_what_another_key_asked_is_nowhere(window: Window, keys):
    page = window.page
    window.open(f"/admin/requests/{ask(window.panel, keys['quiet'])}")
    page.get_by_text("The key quiet does not let prompts and answers be kept").wait_for()
    assert SAID not in page.content()
    assert page.get_by_role("button", name="Replay").count() == 0
    assert "…" in page.locator("#curl").text_content()


def test_filters_stay_in_the_address(window: Window, keys):
    mine, _ = ask(window.panel, keys["open"]), ask(window.panel, keys["quiet"])
    page = window.page
    window.open("/admin/requests")
    page.get_by_label("Key").select_option("open")
    page.get_by_role("button", name="Show").click()
    page.wait_for_url("**key=open**")
    shown = page.get_by_role("region", name="History of requests").get_by_role("rowheader")
    assert mine in shown.all_text_contents()
    assert page.get_by_role("region", name="History of requests").get_by_text("quiet").count() == 0
    with page.expect_download() as download:
        page.get_by_role("link", name="CSV").click()
    assert mine in download.value.path().read_text()


def test_the_history_follows_by_itself(window: Window, keys):
    page = window.page
    window.open("/admin/requests?key=open")
    page.get_by_text("live", exact=True).wait_for()
    history = page.get_by_role("region", name="History of requests")
    page.get_by_label("Answer").select_option("429")
    other, mine = ask(window.panel, keys["quiet"]), ask(window.panel, keys["open"])
    history.get_by_role("link", name=mine).wait_for()
    assert history.get_by_text(other).count() == 0, "the filter of the address holds"
    assert page.get_by_label("Answer").input_value() == "429"

    select = """(id) => getSelection().selectAllChildren(document.getElementById(`row-${id}`))"""
    page.evaluate(select, mine)
    later = ask(window.panel, keys["open"])
    page.wait_for_timeout(2500)  # two ticks and more
    assert page.evaluate("getSelection().toString()") == mine
    assert history.get_by_role("link", name=later).count() == 0
    page.evaluate("getSelection().removeAllRanges()")
    history.get_by_role("link", name=later).wait_for()

    page.evaluate(HIDE, True)
    page.get_by_text("paused", exact=True).wait_for()
    unseen = ask(window.panel, keys["open"])
    page.wait_for_timeout(2500)
    assert history.get_by_role("link", name=unseen).count() == 0
    page.evaluate(HIDE, False)
    history.get_by_role("link", name=unseen).wait_for()
    assert page.get_by_label("Answer").input_value() == "429"
    assert page.url.endswith("?key=open")


def test_an_older_page_stays_where_it_is(window: Window, keys):
    page = window.page
    seen = [ask(window.panel, keys["open"]) for _ in range(2)]
    rows = {row["id"]: row["seq"] for row in window.panel.box.api("requests")["requests"]}
    window.open(f"/admin/requests?before={rows[seen[1]]}")
    page.get_by_text("live", exact=True).wait_for()
    history = page.get_by_role("region", name="History of requests")
    newest = history.get_by_role("rowheader").first
    assert newest.text_content() == seen[0]
    ask(window.panel, keys["open"])
    page.wait_for_timeout(2500)
    assert newest.text_content() == seen[0]


def test_a_row_of_the_history_is_one_block_on_a_phone(window: Window, keys):
    for _ in range(2):
        ask(window.panel, keys["open"])
    window.page.set_viewport_size({"width": 390, "height": 780})
    window.open("/admin/requests")
    window.page.locator(".history tbody tr").nth(1).wait_for()
    looks = window.page.locator(".history tbody tr > *").evaluate_all(
        "cells => cells.map(cell => { const look = getComputedStyle(cell);"
        " return [look.borderTopWidth, look.paddingLeft]; })"
    )
    assert {tuple(look) for look in looks} == {("0px", "0px")}


@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_two_models_answer_side_by_side(window: Window, second: str, kind: str):
    window.open(f"/admin/playground?model=tiny&other={second}")
    page = window.page
    if kind == "completion":
        page.get_by_label("Kind").select_option(kind)
    page.get_by_label("Max tokens").fill("6")
    page.get_by_label("Seed").fill("5")
    page.get_by_label("Prompt", exact=True).fill("hello there")
    page.keyboard.press("Control+Enter")
    page.locator(".measure").nth(1).wait_for()
    panes = page.locator(".pane")
    texts = [panes.nth(i).locator(".turn.answer .what").text_content() for i in range(2)]
    assert all(texts)
    assert texts[0] != texts[1]
    for i in range(2):
        told = panes.nth(i).locator(".measure").text_content()
        assert "first token" in told
        assert "tokens/s" in told
        assert "6 out" in told
    page.get_by_text("View as API call").click()
    path = "/v1/completions" if kind == "completion" else "/v1/chat/completions"
    assert path in page.locator("#curl").text_content()
    assert "seed=5," in page.locator("#python").text_content()
    until(lambda: page.locator(".measure a").first.get_attribute("href"))
    page.locator(".measure a").first.click()
    page.get_by_role("heading", name="What happened").wait_for()


def test_an_answer_is_stopped_by_button_and_by_key(window: Window, second: str):
    window.open(f"/admin/playground?model={second}")
    page = window.page
    for stop in (
        lambda: page.get_by_role("button", name="Stop").click(),
        lambda: page.keyboard.press("Escape"),
    ):
        page.get_by_label("Prompt", exact=True).fill("go on")
        page.get_by_role("button", name="Send").click()
        until(page.locator(".turn.answer .what").last.text_content)
        stop()
        page.get_by_role("button", name="Send").wait_for()
        page.get_by_text("Stopped.").last.wait_for()
    until(lambda: not window.panel.box.api("requests")["in_flight"])

    def statuses() -> list[int]:
        return [row["http_status"] for row in window.panel.box.api("requests")["requests"][:2]]

    until(lambda: statuses() == [499, 499])


def stub_answers(page: "Page", *deltas: dict[str, Any]) -> list[dict[str, Any]]:
    """Answer each chat completion of the page with the next delta. Returns the list of bodies."""
    bodies: list[dict[str, Any]] = []

    def handle(route: "Route") -> None:
        bodies.append(route.request.post_data_json)
        event = {"id": "chatcmpl-1", "choices": [{"index": 0, "delta": deltas[len(bodies) - 1]}]}
        body = f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n"
        route.fulfill(status=200, headers={"Content-Type": "text/event-stream"}, body=body)

    page.route("**/v1/chat/completions", handle)
    return bodies


def test_a_tool_s_result_goes_with_the_next_message(window: Window):
    window.open("/admin/playground?model=tiny")
    page = window.page
    call = {
        "index": 0,
        "id": "call_7",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city":"Bern"}'},
    }
    bodies = stub_answers(page, {"content": "I ask.", "tool_calls": [call]}, {"content": "It rains."})
    page.get_by_label("JSON schema").fill('{"type": "object"}')
    page.get_by_label("Tools").fill('[{"name": "weather", "parameters": {"type": "object"}}]')
    page.get_by_label("Prompt", exact=True).fill("How is it?")
    page.get_by_role("button", name="Send").click()
    page.get_by_label("Result of weather").fill("rain")
    assert page.locator(".tool-call code").text_content() == 'weather({"city":"Bern"})'
    page.get_by_role("button", name="Send").click()
    page.get_by_text("It rains.", exact=True).wait_for()
    function = {"name": "weather", "parameters": {"type": "object"}}
    assert bodies[0]["tools"] == [{"type": "function", "function": function}]
    assert bodies[0]["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert [each["role"] for each in bodies[1]["messages"]] == ["user", "assistant", "tool"]
    assert bodies[1]["messages"][1]["tool_calls"][0]["function"]["name"] == "weather"
    assert bodies[1]["messages"][2] == {"role": "tool", "tool_call_id": "call_7", "content": "rain"}
    assert page.get_by_label("Result of weather").get_attribute("readonly") is not None
    assert "response_format={" in page.locator("#python").text_content()


def test_a_field_that_is_no_json_keeps_the_form(window: Window):
    window.open("/admin/playground?model=tiny")
    page = window.page
    bodies = stub_answers(page)
    page.get_by_label("Prompt", exact=True).fill("x")
    page.get_by_label("JSON schema").fill("{type")
    page.get_by_role("button", name="Send").click()
    said = page.get_by_label("JSON schema").evaluate("field => field.validationMessage")
    assert "not JSON" in said
    assert not bodies
    page.get_by_label("JSON schema").fill("")
    assert page.get_by_label("JSON schema").evaluate("field => field.checkValidity()")


def test_what_the_api_refuses_is_said_in_the_page(window: Window):
    window.open("/admin/playground")
    page = window.page
    page.get_by_label("Top p").fill("7")
    page.get_by_label("Prompt", exact=True).fill("x")
    page.get_by_role("button", name="Send").click()
    page.locator(".turn .failure").wait_for()
    assert "top_p" in page.locator(".turn .failure").text_content()
    assert page.get_by_label("Prompt", exact=True).input_value() == "x", "a refused prompt was lost"
    window.problems.clear()  # the browser tells of the 400


def test_a_request_s_page_fits_and_is_accessible(window: Window, keys, axe: str):
    page = window.page
    window.open(f"/admin/requests/{ask(window.panel, keys['open'])}")
    page.get_by_role("button", name="Replay").click()
    page.locator("#verdict").wait_for()
    assert serious_problems(page, axe) == []
    assert misfits(page) == []
