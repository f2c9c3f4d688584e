"""MCP servers in the chat, in a real browser: added, each call confirmed or trusted, stopped, failed."""

import json
import os
import signal
import sys
from collections.abc import Iterator

import pytest

from support import mcp_server
from support.browser import Window, needs_browser
from support.cli_box import until
from support.fake_engine import write_model
from support.tokenizers_zoo import CHATML, byte_level, write_text_files

pytestmark = needs_browser
TEMPLATE = CHATML + "{# <tool_call> #}{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
CALLS = "**/v1/chat/completions"


@pytest.fixture(scope="module", autouse=True)
def caller(panel) -> None:
    """A model that can call tools, and a box that allows programs as servers."""
    box = panel.box
    folder = box.folder / "models" / "caller"
    write_text_files(folder, byte_level(), TEMPLATE)
    write_model(folder, declared_vocab=480, vocab_size=480, script=[72, 101, 108, 108, 111] * 4)
    box.client.post("/admin/api/models/load", {"model": str(folder)})
    until(lambda: {each["state"] for each in box.api("models")["models"]} == {"ready"})
    assert box.run("config", "set", "server.mcp_commands", "true").code == 0
    os.kill(box.running.pid, signal.SIGHUP)
    until(lambda: box.api("chat/servers")["commands_allowed"])


@pytest.fixture
def echo(panel) -> Iterator[None]:
    """The echo server as an allowed program, without a trusted tool."""
    body = {"command": [sys.executable, mcp_server.__file__], "allowed": True, "confirmed": True}
    panel.box.client.call("PUT", "/admin/api/chat/servers/box", body, 60)
    yield
    panel.box.client.call("DELETE", "/admin/api/chat/servers/box", None, 60)


def says(*deltas: dict) -> str:
    """A streamed answer of the API."""
    events = [{"id": "chatcmpl-1", "choices": [{"index": 0, "delta": each}]} for each in deltas]
    return "".join(f"data: {json.dumps(each)}\n\n" for each in events) + "data: [DONE]\n\n"


def calling(tool: str, arguments: str = "{}") -> str:
    function = {"name": f"box__{tool}", "arguments": ""}
    first = {"tool_calls": [{"index": 0, "id": "call_1", "type": "function", "function": function}]}
    return says(
        {"content": "I call it."},
        first,
        {"tool_calls": [{"index": 0, "function": {"arguments": arguments}}]},
    )


def ask(window: Window, text: str, *answers: str) -> list[dict]:
    """Ask; the model's first turns are `answers`, and the later ones its own. Returns the bodies sent."""
    bodies: list[dict] = []

    def handle(route) -> None:
        bodies.append(json.loads(route.request.post_data))
        if len(bodies) <= len(answers):
            stream = {"Content-Type": "text/event-stream"}
            route.fulfill(status=200, headers=stream, body=answers[len(bodies) - 1])
        else:
            route.continue_()

    window.page.unroute(CALLS)
    window.page.route(CALLS, handle)
    window.page.get_by_label("Message", exact=True).fill(text)
    window.page.keyboard.press("Enter")
    return bodies


def open_chat(window: Window) -> None:
    window.open("/admin/chat")
    window.page.locator("#model").select_option("caller")


def test_a_program_is_added_with_a_yes_and_its_calls_are_confirmed_then_trusted(window: Window):
    open_chat(window)
    page = window.page
    page.get_by_text("Tools", exact=True).click()
    form = page.locator("#add-server")
    form.get_by_text("A program on this box").click()
    form.get_by_label("Name", exact=True).fill("box")
    form.get_by_label("Program", exact=True).fill(sys.executable)
    form.get_by_label("Arguments, one per line").fill(mcp_server.__file__)
    form.get_by_role("button", name="Add and allow").click()
    page.get_by_text("Confirm that").wait_for()
    window.problems.clear()  # the browser's line about the status 400
    form.get_by_label("It runs as").check()
    form.get_by_role("button", name="Add and allow").click()
    page.get_by_text("Tools: 1 MCP server allowed").wait_for()
    assert mcp_server.__file__ in page.locator(".where").text_content()

    bodies = ask(window, "Say hä", calling("echo", '{"text": "hä"}'))
    page.get_by_text("Runs on this box as").last.wait_for()
    page.get_by_role("button", name="Always allow", exact=True).click()
    page.locator(".message.assistant span.measure").wait_for()
    assert bodies[0]["tools"][0]["function"]["name"] == "box__echo"
    result = bodies[1]["messages"][-1]
    assert result["role"] == "tool"
    assert '{"text": "h\\u00e4"}' in result["content"]
    assert page.locator(".message.assistant > .what").text_content().strip()

    ask(window, "Again", calling("echo"))
    page.wait_for_function("() => document.querySelectorAll('.message.assistant span.measure').length === 2")
    page.reload()
    page.get_by_role("button", name="Say hä", exact=True).click()
    calls = page.locator(".tool-call")
    calls.first.wait_for()
    assert [each.get_attribute("data-state") for each in calls.all()] == ["done", "done"]
    page.once("dialog", lambda dialog: dialog.accept())
    page.locator("#tools-summary").click()
    page.get_by_title("Remove box").click()
    page.get_by_text("No MCP server yet.").wait_for()


def test_a_call_is_refused_stopped_or_fails_and_the_chat_goes_on(window: Window, echo):
    open_chat(window)
    page = window.page
    page.get_by_text("Tools: 1 MCP server allowed").wait_for()
    bodies = ask(window, "One", calling("echo"))
    page.get_by_role("button", name="Refuse").click()
    page.locator(".message.assistant span.measure").wait_for()
    assert bodies[1]["messages"][-1]["content"] == "The user refused this call."

    bodies = ask(window, "Two", calling("die"))
    page.get_by_role("button", name="Allow once").click()
    page.locator(".tool-call[data-state='failed']").wait_for()
    page.wait_for_function("() => document.querySelectorAll('.message.assistant span.measure').length === 2")
    assert "ended with exit code 3: out of luck" in bodies[1]["messages"][-1]["content"]
    window.problems.clear()  # the browser's line about the status 502

    ask(window, "Three", calling("hang"))
    page.get_by_role("button", name="Allow once").click()
    page.get_by_text("runs …").wait_for()
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Send").wait_for()
    assert page.locator(".tool-call").count() == 3
    assert page.locator(".failure").count() == 0


def test_a_model_that_calls_without_end_is_stopped(window: Window, echo, panel):
    panel.box.client.call("POST", "/admin/api/chat/servers/box", {"trust": {"echo": True}}, 60)
    open_chat(window)
    window.page.get_by_text("Tools: 1 MCP server allowed").wait_for()
    bodies = ask(window, "On and on", *[calling("echo")] * 20)
    window.page.get_by_text("called tools 12 times without an answer").wait_for()
    assert len(bodies) == 13


def test_a_model_without_tools_is_not_offered_any(window: Window, echo):
    open_chat(window)
    page = window.page
    page.locator("#model").select_option("tiny")
    page.get_by_text("Tools: 1 MCP server allowed").click()
    page.get_by_text("tiny cannot call tools.").wait_for()
    bodies = ask(window, "Hello")
    page.locator(".message.assistant span.measure").wait_for()
    assert "tools" not in bodies[0]
