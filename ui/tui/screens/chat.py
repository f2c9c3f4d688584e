"""Screen 7: a chat with a loaded model. It is kept in memory only and ends with the program."""

import asyncio
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, ClassVar

from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.types import CSSPathType
from textual.widget import Widget
from textual.widgets import Collapsible, Input, Markdown, Static

from llmbox.app.admin_client import AnswerPiece
from llmbox.app.errors import CliError
from llmbox.app.util.formatting import printable

from ..messages import FetchData, NewestMessage
from ..rendering import clean, heading, seconds
from ..widgets.dialogs import ChoiceDialog
from ..widgets.lines import Lines
from .base import DashboardScreen

HINT = (
    "Ask the model something. Enter sends, esc stops an answer. The conversation is not stored: clearing it "
    "or quitting deletes it. Requests are logged like those of other callers."
)


class AnswerGrew(NewestMessage, bubble=False):
    """Pieces of the answer arrived, or it ended."""


class Answer(Vertical):
    """One answer: folded thoughts, Markdown, and how long it took."""

    def __init__(self, model: str, clock: Callable[[], float]) -> None:
        super().__init__(classes="answer")
        self.model, self.clock = model, clock
        self.thoughts = self.text = ""
        self.begun = clock()
        self.first: float | None = None

    def compose(self) -> ComposeResult:
        yield Static(Content(clean(self.model)), classes="who")
        yield Collapsible(Static(classes="thought"), title="Thinking ...")
        yield Markdown(open_links=False)
        yield Static(classes="took")

    def on_mount(self) -> None:
        self.query_one(Collapsible).display = False

    async def add(self, pieces: list[AnswerPiece]) -> None:
        if pieces and self.first is None:
            self.first = self.clock()
        thoughts = "".join(printable(piece.text) for piece in pieces if piece.is_thought)
        text = "".join(printable(piece.text) for piece in pieces if not piece.is_thought)
        folded = self.query_one(Collapsible)
        if thoughts:
            folded.display = True
            self.thoughts += thoughts
            self.query_one(".thought", Static).update(Content(self.thoughts))
        if text:
            if not self.text and self.thoughts:
                folded.title = f"Thoughts, {seconds(self.clock() - self.begun)}"
            self.text += text
            await self.query_one(Markdown).append(text)

    def end(self, note: str) -> None:
        took = f"TTFT {seconds(None if self.first is None else self.first - self.begun)}"
        took += f", {seconds(self.clock() - self.begun)} in all"
        if self.thoughts and not self.text:
            self.query_one(Collapsible).title = "Thoughts"
        self.query_one(".took", Static).update(Content(f"{took}{f'. {note}' if note else ''}"))


class ChatScreen(DashboardScreen):
    TITLE = "Chat"
    CSS_PATH: ClassVar[CSSPathType | None] = ["../view.tcss", "chat.tcss"]
    AUTO_FOCUS = "#line"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "write", "Send", key_display="enter"),
        Binding("escape", "stop", "Stop / other screens", key_display="esc"),
        Binding("ctrl+o", "choose", "Model"),
        Binding("ctrl+y", "copy", "Copy answer"),
        Binding("ctrl+t", "thoughts", "Thoughts"),
        Binding("ctrl+l", "clear", "Clear"),
    ]

    def __init__(self) -> None:
        super().__init__()
        self.model = ""
        self._models: dict[str, Any] = {}
        """Answer of the admin API to a question that was quicker than the first `FetchData`."""
        self._messages: list[dict[str, str]] = []
        self._answer: Answer | None = None
        """Answer that is being streamed."""
        self._pieces: list[AnswerPiece] = []
        self._lock = threading.Lock()
        self._end: str | None = None
        """Why the stream ended: empty if it is complete, None while it runs."""
        self._stopping = False

    def body(self) -> Iterable[Widget]:
        yield Lines(id="title", classes="line")
        with VerticalScroll(id="talk", can_focus=False):
            yield Static(Content(HINT), id="hint")
        line = Input(placeholder="Message", id="line", compact=True)
        line.cursor_blink = False  # an idle screen draws nothing
        yield line

    def wants(self) -> Iterable[FetchData]:
        yield FetchData("models", "models")

    def draw(self) -> None:
        names = self._names()
        if self.model not in names:
            self.model = next((name for name, is_chat in names.items() if is_chat), next(iter(names), ""))
        number = len(self._messages)
        note = f"{self.model}, {number} message{'s' if number > 1 else ''}" if number else self.model
        text = note if names else "no model is loaded: press esc, then 3 to load one"
        self.query_one("#title", Lines).show(
            [heading(" Chat", self.size.width - 1, self.glyphs, clean(text))]
        )

    def _names(self) -> dict[str, bool]:
        """Return the models that generate text, and whether each has a chat template."""
        models = self.state.answers.get("models", self._models).get("models", [])
        return {
            str(each["name"]): bool(each.get("chat"))
            for each in models
            if each["state"] == "ready" and (each.get("info") or {}).get("generates", True)
        }

    # ------------------------------------------------------------------ asking

    @on(Input.Submitted, "#line")
    async def _send(self, event: Input.Submitted) -> None:
        question = event.value.strip()
        if not question or self._answer is not None:
            return
        if self.dashboard.read_only:
            self.notify("Read-only (--read-only): nothing was sent.", severity="warning")
            return
        if "models" not in self.state.answers:
            with suppress(CliError):
                self._models = await asyncio.to_thread(self.dashboard.api.get, "models")
            self.draw()
        if not self.model:
            self.notify("No model is loaded. Press esc, then 3 to load one.", severity="warning")
            return
        event.input.value = ""
        self.query_one("#hint").display = False
        self._messages.append({"role": "user", "content": question})
        answer = self._answer = Answer(self.model, self.state.clock)
        talk = self.query_one("#talk", VerticalScroll)
        asked = Vertical(Static("you", classes="who"), Static(Content(printable(question))), classes="asked")
        await talk.mount(asked, answer)
        talk.scroll_end(animate=False)
        is_chat = self._names().get(self.model, False)
        texts: dict[str, Any] = {"messages": list(self._messages)} if is_chat else {"prompt": question}
        self._pieces, self._end, self._stopping = [], None, False
        self._stream({"model": self.model, **texts})
        self.redraw()

    @work(thread=True, group="answer")
    def _stream(self, body: dict[str, Any]) -> None:
        end = ""
        try:
            for piece in self.dashboard.api.ask(body):
                if self._stopping:
                    break
                with self._lock:
                    self._pieces.append(piece)
                self.post_message(AnswerGrew())
        except CliError as error:
            end = f"{error.what}: {error.why}" if error.why else error.what
        except (OSError, ValueError, AttributeError) as error:
            end = str(error) or type(error).__name__  # the connection was closed from the other thread
        self._end = "Stopped." if self._stopping else end
        self.post_message(AnswerGrew())

    @on(AnswerGrew)
    async def _grow(self) -> None:
        answer, end = self._answer, self._end
        if answer is None:
            return
        with self._lock:
            pieces, self._pieces = self._pieces, []
        talk = self.query_one("#talk", VerticalScroll)
        is_at_end = talk.is_vertical_scroll_end
        await answer.add(pieces)
        if is_at_end:
            talk.scroll_end(animate=False)
        if end is None:
            return
        answer.end(clean(end))
        self._answer = None
        if answer.text or self._stopping:
            self._messages.append({"role": "assistant", "content": answer.text})
        else:
            self._messages.pop()
            if end:
                self.notify(end, title="No answer", severity="error", markup=False)
        self.redraw()

    # ------------------------------------------------------------------ keys

    def action_write(self) -> None:
        self.query_one("#line", Input).focus()

    def action_stop(self) -> None:
        """Stop the answer that is being streamed; without one, leave the line."""
        if self._answer is None:
            self.set_focus(None)
            return
        self._stopping = True
        self.dashboard.api.stop()

    @work
    async def action_choose(self) -> None:
        names = list(self._names())
        if not names:
            self.notify("No model is loaded. Press esc, then 3 to load one.", severity="warning")
            return
        chosen = await self.app.push_screen_wait(ChoiceDialog("Model", names, self.model))
        if chosen is not None:
            self.model = chosen
            self.redraw()

    def action_copy(self) -> None:
        """Copy the last answer."""
        answers = [answer.text for answer in self.query(Answer) if answer.text]
        if answers:
            self.dashboard.copy_to_clipboard(answers[-1])
            self.notify("The answer is copied.")
        else:
            self.notify("There is no answer to copy.", severity="warning")

    def action_thoughts(self) -> None:
        """Unfold the thoughts of all answers, or fold them."""
        folds = list(self.query(Collapsible))
        is_folded = any(each.collapsed for each in folds)
        for each in folds:
            each.collapsed = not is_folded

    async def action_clear(self) -> None:
        if self._answer is not None:
            self.notify("Stop the answer first: esc.", severity="warning")
            return
        self._messages.clear()
        await self.query(".asked, .answer").remove()
        self.query_one("#hint").display = True
        self.redraw()
