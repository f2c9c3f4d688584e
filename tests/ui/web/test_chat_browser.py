"""The chat in a real browser: asked, kept, branched, found again, deleted; Markdown that runs nothing."""

from support.browser import Window, needs_browser

pytestmark = needs_browser

SHOW = """async (text) => {
  const { showMarkdown } = await import("/admin/static/chat/chat-markdown.js");
  const shown = document.createElement("div");
  document.getElementById("messages").append(shown);
  await showMarkdown(shown, text, true);
  return shown.innerHTML;
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
    page.get_by_text("Ask something. Conversations stay on this box.").wait_for()


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
