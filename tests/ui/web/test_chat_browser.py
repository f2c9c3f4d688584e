"""The chat in a real browser: asked, kept, branched, found again, deleted; Markdown that runs nothing."""

import ast
import base64
import os
import re
import signal

from support.browser import Window, needs_browser
from support.cli_box import until
from support.pdf_files import pdf

pytestmark = needs_browser

SHOW = """async (text) => {
  const { showMarkdown } = await import("/admin/static/chat/chat-markdown.js");
  const shown = document.createElement("div");
  document.getElementById("messages").append(shown);
  await showMarkdown(shown, text, true);
  return shown.innerHTML;
}"""
AS_PYTHON = """async (body) => {
  const { asPython } = await import("/admin/static/playground/playground-calls.js");
  return asPython("http://here", "/v1/chat/completions", body);
}"""
DRAW = """([width, height]) => {
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [width, height];
  return canvas.toDataURL("image/png");
}"""
SHRINK_NOISE = """async () => {
  const { Attachments } = await import("/admin/static/chat/chat-attach.js");
  const pixels = new ImageData(1024, 1024);
  const { data } = pixels;
  for (let at = 0; at < data.length; at += 16384) crypto.getRandomValues(data.subarray(at, at + 16384));
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [1024, 1024];
  canvas.getContext("2d").putImageData(pixels, 0, 0);
  const file = await new Promise((done) => canvas.toBlob(done, "image/png"));
  return (await new Attachments("", () => "").image(file)).image.length;
}"""
TEXT = """# Heading

| left | right |
|---|--:|
| 1 | 2 |

Inline \\(a^2\\) and $x_1$, but $5 and $6.

$$\\int_0^1 x\\,dx$$

```python
def double(x):
    return 2 * x
```

![picture](https://elsewhere.example/a.png) <img src=x onerror="document.title='run'">

[bad](javascript:alert(1))
"""


def ask(window: Window, text: str) -> None:
    answers = window.page.locator(".message.assistant .measure")
    before = answers.count()
    window.page.get_by_label("Message", exact=True).fill(text)
    window.page.keyboard.press("Enter")
    window.page.wait_for_function(
        "count => document.querySelectorAll('.message.assistant span.measure').length > count",
        arg=window.page.locator(".message.assistant span.measure").count(),
    )
    assert answers.count() > before


def test_a_conversation_is_kept_edited_branched_and_deleted(window: Window):
    window.open("/admin/chat")
    page = window.page
    ask(window, "First question")
    ask(window, "Second question")
    assert page.locator(".message").count() == 4
    first = page.locator(".message.user").first
    first.get_by_role("button", name="Edit").click()
    first.locator("textarea").fill("Another question")
    first.get_by_role("button", name="Send").click()
    page.get_by_text("2 of 2").wait_for()
    page.locator(".message.assistant span.measure").wait_for()
    assert page.locator(".message").count() == 2
    page.get_by_title("Answer again").click()
    page.locator(".message.assistant").get_by_text("2 of 2").wait_for()
    page.locator(".message.assistant span.measure").wait_for()

    window.open("/admin/chat")
    page.get_by_label("Search conversations").fill("Second question")
    page.get_by_role("button", name="First question", exact=True).click()
    page.locator(".message.user").get_by_text("Another question").wait_for()
    page.locator(".message.user").first.get_by_title("Previous version").click()
    page.locator(".message.user").get_by_text("Second question").wait_for()
    assert page.locator(".message").count() == 4

    page.once("dialog", lambda dialog: dialog.accept())
    page.locator("#conversations li").first.hover()
    page.get_by_role("button", name="Delete").first.click()
    page.get_by_text("Nothing found.").wait_for()
    page.get_by_text("Conversations stay on this box.").wait_for()


def test_an_empty_conversation_offers_first_questions(window: Window):
    window.open("/admin/chat")
    page = window.page
    starter = page.locator(".starters button").first
    starter.click()
    prompt = page.get_by_label("Message", exact=True)
    assert prompt.input_value() == starter.text_content()
    assert prompt.evaluate("(field) => field === document.activeElement")
    assert page.locator(".message").count() == 0  # nothing was sent


def test_menus_close_by_a_click_beside_them_and_by_escape(window: Window):
    window.open("/admin/chat")
    page = window.page
    page.locator(".welcome").wait_for()
    field = page.get_by_label("System prompt", exact=True)
    page.get_by_text("System prompt and sampling").click()
    field.click()
    assert field.is_visible(), "a click inside leaves it open"
    page.get_by_role("heading", name="Chat", exact=True).click()
    assert field.is_hidden()
    page.get_by_text("System prompt and sampling").click()
    field.wait_for()
    page.keyboard.press("Escape")
    assert field.is_hidden()


def test_the_field_stays_below_a_long_conversation(window: Window):
    window.open("/admin/chat")
    page = window.page
    page.locator(".welcome").wait_for()
    page.evaluate("document.querySelector('.welcome').style.height = '4000px'")
    field = page.locator("#compose").bounding_box()
    assert field["y"] + field["height"] <= page.viewport_size["height"]
    assert page.evaluate("document.documentElement.scrollHeight <= innerHeight"), "the messages alone scroll"


def test_an_answer_is_stopped_and_what_came_is_kept(window: Window):
    window.open("/admin/chat")
    page = window.page
    page.get_by_text("System prompt and sampling").click()
    page.get_by_label("Max tokens").fill("3000")
    page.get_by_label("Message", exact=True).fill("A long one")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Stop").wait_for()
    page.wait_for_function("() => document.querySelector('.message.assistant .what')?.textContent.length > 5")
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Send").wait_for()
    assert len(page.locator(".message.assistant .what").text_content()) > 5


def test_an_error_leaves_the_question_to_be_sent_again(window: Window):
    window.open("/admin/chat")
    page = window.page
    page.get_by_text("System prompt and sampling").click()
    page.get_by_label("Temperature").fill("99")
    page.get_by_label("Message", exact=True).fill("Too hot")
    page.keyboard.press("Enter")
    page.locator(".failure").get_by_text("temperature").wait_for()
    page.locator(".message.user").get_by_text("Too hot").wait_for()
    window.problems.clear()  # the browser's line about the status 400


def test_markdown_has_tables_code_and_formulas_and_loads_nothing_from_elsewhere(window: Window):
    window.open("/admin/chat")
    html = window.page.evaluate(SHOW, TEXT)
    assert '<td class="right">2</td>' in html
    assert 'class="hljs-keyword"' in html
    assert html.count("<math") == 3
    assert "$5 and $6" in html
    assert "<img" not in html
    assert "javascript:" not in html.replace("[bad](javascript:alert(1))", "")
    assert window.page.title() != "run"
    assert window.strangers == []


def test_an_answer_is_shown_as_code_for_a_terminal_python_and_javascript(window: Window):
    window.open("/admin/chat")
    page = window.page
    ask(window, "True or false?")
    page.get_by_role("button", name="As code").click()
    shown = page.locator(".message .call")
    assert shown.locator(".who").all_text_contents() == ["curl", "Python", "JavaScript"]
    curl, python, javascript = shown.locator("pre").all_text_contents()
    assert all("True or false?" in text for text in (curl, python, javascript))
    assert "await client.chat.completions.create({" in javascript
    extra = {"strict": True, "none": None, "text": 'true "null" \\'}
    written = page.evaluate(AS_PYTHON, {"model": "m", "messages": [], **extra})
    compile(written, "shown", "exec")
    assert ast.literal_eval(written.partition("extra_body=")[2].partition(",\n    stream")[0]) == extra


def test_a_preset_brings_prompt_sampling_and_schema_back(window: Window):
    window.open("/admin/chat")
    page = window.page
    page.get_by_text("System prompt and sampling").click()
    page.get_by_label("System prompt", exact=True).fill("Be brief.")
    page.get_by_label("Temperature").fill("0.2")
    page.get_by_label("JSON schema of the answer").fill('{"type": ')
    page.get_by_text("The JSON schema is not valid JSON").wait_for()
    page.get_by_label("JSON schema of the answer").fill('{"type": "object"}')
    page.once("dialog", lambda dialog: dialog.accept("Short"))
    page.get_by_role("button", name="Save as preset").click()
    page.wait_for_function("() => document.getElementById('preset').value === 'Short'")

    window.open("/admin/chat")
    page.get_by_text("System prompt and sampling").click()
    page.locator("#preset option").nth(1).wait_for(state="attached")
    page.locator("#preset").select_option("Short")
    sent: list[dict] = []

    def handle(route) -> None:
        sent.append(route.request.post_data_json)
        route.fulfill(status=200, headers={"Content-Type": "text/event-stream"}, body="data: [DONE]\n\n")

    page.route("**/v1/chat/completions", handle)
    page.get_by_label("Message", exact=True).fill("Who?")
    page.keyboard.press("Enter")
    page.get_by_title("Answer again").wait_for()
    assert sent[0]["messages"][0] == {"role": "system", "content": "Be brief."}
    assert sent[0]["temperature"] == 0.2
    assert sent[0]["response_format"]["json_schema"]["schema"] == {"type": "object"}
    page.once("dialog", lambda dialog: dialog.accept())
    page.get_by_text("System prompt and sampling").click()  # asking has closed the menu
    page.get_by_role("button", name="Delete preset").click()
    page.wait_for_function("() => document.getElementById('preset').options.length === 1")


def test_two_answers_stand_side_by_side_with_their_cost_and_one_is_gone_on_with(window: Window):
    box = window.panel.box
    assert box.run("config", "set", "usage.prices", "tiny=1000/2000").code == 0
    os.kill(box.running.pid, signal.SIGHUP)
    until(lambda: box.api("config")["settings"]["usage.prices"]["value"])
    window.open("/admin/chat")
    page = window.page
    page.locator("#other").select_option("tiny")
    page.get_by_label("Message", exact=True).fill("Which is better?")
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.querySelectorAll('.pair span.measure').length === 2")
    for measure in page.locator(".pair span.measure").all():
        assert re.search(r"0\.\d{4} USD", measure.text_content())
    page.get_by_role("button", name="Continue with this").click()
    page.locator(".pair .message").nth(1).get_by_text("Chosen").wait_for()
    page.locator("#other").select_option("nothing")
    ask(window, "And then?")
    page.reload()
    page.get_by_role("button", name="Which is better?", exact=True).click()
    page.locator(".pair .message").nth(1).get_by_text("Chosen").wait_for()
    assert page.locator(".message").count() == 5


def test_texts_and_pdfs_are_attached_and_other_files_say_why_not(window: Window):
    window.open("/admin/chat")
    page = window.page
    files = [
        {"name": "notes.txt", "mimeType": "text/plain", "buffer": b"plain words"},
        {"name": "paper.pdf", "mimeType": "application/pdf", "buffer": pdf("printed words")},
        {"name": "odd.bin", "mimeType": "application/octet-stream", "buffer": b"\x00\xff"},
    ]
    page.locator("#files").set_input_files(files)
    page.get_by_text("paper.pdf (1 of 1 pages)").wait_for()
    page.get_by_text("odd.bin: not a text").wait_for()
    ask(window, "What do they say?")
    said = page.locator(".message.user .what").text_content()
    assert "plain words" in said
    assert "printed words" in said
    assert "odd.bin" not in said


def test_a_picture_of_many_details_is_small_enough_to_be_kept(window: Window):
    window.open("/admin/chat")
    assert window.page.evaluate(SHRINK_NOISE) <= 700_000


def test_a_picture_is_made_small_kept_and_sent_to_models_that_see(window: Window):
    box, page = window.panel.box, window.page
    assert box.run("load", box.model("seeing", vocab_size=480, image_problem="")).code == 0
    window.open("/admin/chat?model=seeing")
    drawn = page.evaluate(DRAW, [2000, 1000]).partition(",")[2]
    picture = {"name": "photo.png", "mimeType": "image/png", "buffer": base64.b64decode(drawn)}
    sent: list[dict] = []

    def handle(route) -> None:
        sent.append(route.request.post_data_json)
        route.fulfill(status=200, headers={"Content-Type": "text/event-stream"}, body="data: [DONE]\n\n")

    page.route("**/v1/chat/completions", handle)
    page.locator("#files").set_input_files([picture])
    page.get_by_text(re.compile(r"photo\.png \(1024 . 512\)")).wait_for()
    page.get_by_label("Message", exact=True).fill("What is it?")
    page.keyboard.press("Enter")
    page.get_by_title("Answer again").wait_for()
    image, text = sent[0]["messages"][-1]["content"]
    assert image["image_url"]["url"].startswith("data:image/jpeg;base64,")
    assert text == {"type": "text", "text": "What is it?"}
    page.locator("#model").select_option("tiny")  # it gets the text, and says why it takes no picture
    page.get_by_title("Answer again").click()
    until(lambda: len(sent) == 2)
    assert sent[1]["messages"][-1]["content"] == "What is it?"
    page.locator("#files").set_input_files([picture])
    page.get_by_text("photo.png: tiny cannot read images").wait_for()
    page.reload()
    page.locator("#conversations button").first.click()
    shown = page.get_by_alt_text("Attached image 1")
    shown.wait_for()
    assert shown.evaluate("(image) => image.naturalWidth") == 1024
    assert box.run("unload", "seeing").code == 0
