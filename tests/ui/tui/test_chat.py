"""The chat screen over a made-up API: streaming, folded thoughts, stop, clear, copy."""

import pytest
from textual.widgets import Collapsible, Input, Markdown

from llmbox.ui.tui.screens.chat import Answer
from llmbox.ui.tui.widgets.dialogs import ChoiceDialog
from support.snapshots import answers


def table(*models):
    made = answers()
    made["models"] = {
        "models": [
            {"name": name, "state": state, "cause": "", "ref": name, "chat": is_chat, "info": info}
            for name, state, is_chat, info in models
        ]
    }
    return made


TWO = table(
    ("alpha", "ready", True, None),
    ("beta", "ready", False, None),
    ("late", "loading", True, None),
    ("vectors", "ready", False, {"generates": False}),
)


async def open_chat(scene, models=TWO):
    scene.api.table = models
    await scene.press("7")
    await scene.until(lambda: "models" in scene.app.state.answers)
    await scene.settled()


async def ask(scene, text):
    before = len(scene.api.asked)
    await scene.press(*text, "enter")
    await scene.until(lambda: len(scene.api.asked) > before)


def is_over(scene):
    return scene.app.screen._answer is None


async def test_an_answer_streams_with_folded_thoughts_and_is_copied(stage):
    async with stage((100, 30)) as scene:
        scene.api.pieces = [
            (True, "I think "),
            (True, "hard."),
            (False, "**Two** \x1b[31m"),
            (False, "words"),
        ]
        await open_chat(scene)
        await ask(scene, "hi")
        await scene.until(lambda: is_over(scene))
        assert scene.api.asked == [{"model": "alpha", "messages": [{"role": "user", "content": "hi"}]}]
        fold = scene.app.screen.query_one(Collapsible)
        assert fold.collapsed
        assert fold.title.startswith("Thoughts, ")
        await scene.settled()
        assert "Two \\x1b[31mwords" in scene.text
        assert "I think" not in scene.text
        await scene.press("ctrl+t")
        await scene.until(lambda: "I think hard." in scene.text)
        await scene.press("ctrl+y")
        assert scene.app.clipboard == "**Two** \\x1b[31mwords"
        await ask(scene, "more")
        await scene.until(lambda: is_over(scene))
        assert [each["role"] for each in scene.api.asked[1]["messages"]] == ["user", "assistant", "user"]


async def test_stop_keeps_the_text_so_far(stage):
    async with stage((100, 30)) as scene:
        scene.api.pieces = [(False, "one "), None, (False, "two")]
        await open_chat(scene)
        await ask(scene, "hi")
        await scene.until(lambda: scene.app.screen.query(Answer) and scene.app.screen.query_one(Answer).text)
        await scene.press("ctrl+l")
        assert not is_over(scene), "an answer in progress is not cleared away"
        await scene.press("escape")
        await scene.until(lambda: is_over(scene))
        assert scene.app.screen.query_one(Answer).text == "one "
        assert "Stopped." in scene.text
        await scene.press("ctrl+l")
        await scene.until(lambda: not scene.app.screen.query(Answer))
        assert "Enter sends" in scene.text


async def test_another_model_without_a_chat_template_continues_text(stage):
    async with stage((100, 30)) as scene:
        scene.api.pieces = [(False, "and on")]
        await open_chat(scene)
        await scene.press("ctrl+o")
        await scene.until(lambda: isinstance(scene.app.screen, ChoiceDialog))
        assert scene.app.screen.names == ["alpha", "beta"], "models that are ready and generate text"
        await scene.press("down", "enter")
        await scene.until(lambda: getattr(scene.app.screen, "model", "") == "beta")
        await ask(scene, "so")
        assert scene.api.asked == [{"model": "beta", "prompt": "so"}]
        await scene.until(lambda: is_over(scene))


async def test_a_refusal_is_shown_and_the_question_is_not_kept(stage):
    async with stage((100, 30)) as scene:
        await open_chat(scene)
        scene.api.refusal = "the queue is full"
        await ask(scene, "hi")
        await scene.until(lambda: is_over(scene))
        await scene.until(lambda: "the queue is full" in scene.text)
        scene.api.refusal, scene.api.pieces = "", [(False, "yes")]
        await ask(scene, "again")
        await scene.until(lambda: is_over(scene))
        assert [each["content"] for each in scene.api.asked[1]["messages"]] == ["again"]


@pytest.mark.parametrize(
    ("models", "options", "words"),
    [(table(), {}, "No model is loaded"), (TWO, {"read_only": True}, "nothing was sent")],
)
async def test_what_cannot_be_asked(stage, models, options, words):
    async with stage((100, 30), **options) as scene:
        await open_chat(scene, models)
        await scene.press(*"hi", "enter")
        await scene.until(lambda: words in scene.text)
        assert scene.api.asked == []
        await scene.press("ctrl+y")


async def test_digits_are_typed_until_the_line_is_left(stage):
    async with stage((100, 30)) as scene:
        await open_chat(scene)
        await scene.press("1")
        assert scene.app.screen.query_one("#line", Input).value == "1"
        await scene.press("escape", "1")
        assert scene.app.screen.TITLE == "Overview"


async def test_links_of_an_answer_open_nothing(stage, monkeypatch):
    async with stage((100, 30)) as scene:
        opened = []
        monkeypatch.setattr(scene.app, "open_url", lambda *a, **k: opened.append(a))
        scene.api.pieces = [(False, "[here](https://example.com)")]
        await open_chat(scene)
        await ask(scene, "hi")
        await scene.until(lambda: is_over(scene))
        await scene.settled()
        await scene.pilot.click(Markdown, offset=(2, 0))
        await scene.settled()
        assert opened == []
