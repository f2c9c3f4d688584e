"""Dashboard application: receives messages, keeps the state, sends actions to the daemon."""

import asyncio
import signal
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar
from urllib.parse import quote

from textual import on, work
from textual.app import App, SystemCommand
from textual.binding import Binding, BindingType
from textual.screen import Screen

from llmbox.app.errors import CliError

from .data.api import Api, EventFeed
from .messages import (
    MODEL_CHANGES,
    Connected,
    ConnectionLost,
    DashboardState,
    EventReceived,
    FetchData,
    PromptUser,
    ResponseReceived,
    RunAction,
    StateChanged,
    TickReceived,
)
from .rendering import ASCII, DARK, NAMES, OWN, UNICODE, wrap
from .screens.alerts import AlertsScreen
from .screens.base import DashboardScreen
from .screens.bench import BenchScreen
from .screens.chat import ChatScreen
from .screens.logs import LogsScreen
from .screens.memory import MemoryScreen
from .screens.models import ModelsScreen
from .screens.overview import OverviewScreen
from .screens.requests import RequestsScreen, fact_lines, fit_lines, request_lines
from .widgets.dialogs import ChoiceDialog, ConfirmDialog, HelpDialog, InputDialog, KeyValueDialog, key_lines
from .widgets.lines import FixedTable, LineWidget

SCREENS: tuple[type[DashboardScreen], ...] = (
    OverviewScreen,
    RequestsScreen,
    ModelsScreen,
    MemoryScreen,
    LogsScreen,
    BenchScreen,
    ChatScreen,
    AlertsScreen,
)


class Dashboard(App[None]):
    """The Textual application: eight screens over one `DashboardState`."""

    TITLE = "llmbox"
    ENABLE_COMMAND_PALETTE = True
    CSS_PATH = "view.tcss"
    MODES: ClassVar[dict[str, str | Callable[[], Screen[Any]]]] = {screen.TITLE: screen for screen in SCREENS}
    DEFAULT_MODE = OverviewScreen.TITLE
    BINDINGS: ClassVar[list[BindingType]] = [
        *(
            Binding(str(number), f"switch_mode('{screen.TITLE}')", screen.TITLE, show=False)
            for number, screen in enumerate(SCREENS, 1)
        ),
        Binding("space", "pause", "Pause"),
        Binding("t", "themes", "Theme"),
        Binding("question_mark", "help", "Help", key_display="?"),
        Binding("q", "quit", "Quit"),
        Binding("ctrl+c", "quit", "Quit", show=False, system=True),
    ]

    def __init__(
        self,
        api: Api,
        *,
        read_only: bool = False,
        ascii_only: bool = False,
        source: str = "",
        url: str = "",
        once: bool = False,
        theme: str = DARK.name,
        remember: Callable[[str], object] = lambda _: None,
    ) -> None:
        """Create the dashboard.

        `source`: a word for the top bar, if this is not the live daemon. `once`: a replay, which ends.
        `remember` gets the name of a theme that the user chooses.
        """
        super().__init__()
        self.api = api
        self.state = DashboardState()
        self.read_only, self.source, self.url = read_only, source, url
        self.paused = False
        self.glyphs = ASCII if ascii_only else UNICODE
        self._feed = EventFeed(api, self.post_message, once=once)
        for each in OWN:
            self.register_theme(each)
        self.theme = theme
        self._remember = remember
        self.set_class(ascii_only, "-ascii")

    @property
    def is_stale(self) -> bool:
        return bool(self.state.lost)

    def on_mount(self) -> None:
        for number in (signal.SIGTERM, signal.SIGHUP):  # else the terminal keeps the dashboard's modes
            asyncio.get_running_loop().add_signal_handler(number, self.exit, None, 128 + number)
        self._feed.start()
        self.set_interval(1.0, self._refresh_age)

    def on_unmount(self) -> None:
        self._feed.stop()

    # ------------------------------------------------------------------ incoming messages

    @on(TickReceived)
    def _ticked(self, message: TickReceived) -> None:
        was_lost, first = self.is_stale, self.state.tick is None
        self.state.take_tick(message.tick)
        if first and isinstance(self.screen, DashboardScreen):
            self.screen.ask()  # some requests depend on a first tick
        self._redraw(everything=was_lost)

    @on(EventReceived)
    def _happened(self, message: EventReceived) -> None:
        self.state.take_event(message.kind, message.data)
        if (
            message.kind.startswith((MODEL_CHANGES, "download."))
            and message.kind != "download.progress"
            and isinstance(self.screen, DashboardScreen)
        ):
            self.screen.ask()
        elif message.kind.startswith("download.") or (
            message.kind == "log" and isinstance(self.screen, LogsScreen)
        ):
            self._redraw()
        # Requests are drawn with the next tick: there may be hundreds in a second.

    @on(Connected)
    def _connected(self) -> None:
        self.state.lost = ""
        self.post_message(FetchData("downloads", "downloads"))  # all screens show alerts, and failed ones are
        if isinstance(self.screen, DashboardScreen):
            self.screen.ask()

    @on(ConnectionLost)
    def _lost(self, message: ConnectionLost) -> None:
        first = not self.is_stale
        self.state.lost = message.reason
        self._redraw(everything=first)

    @on(ResponseReceived)
    def _fetched(self, message: ResponseReceived) -> None:
        self.state.take_answer(message.name, message.answer)
        self._redraw()

    def _refresh_age(self) -> None:
        """Redraw while the daemon is gone: nothing is received, but the age of the data grows."""
        if self.is_stale:
            self._redraw()

    def _redraw(self, *, everything: bool = False) -> None:
        if self.paused:
            return
        for screen in self.screen_stack:
            if isinstance(screen, DashboardScreen):
                screen.post_message(StateChanged())
                if everything:
                    for widget in screen.walk_children(LineWidget):
                        widget.refresh()

    # ------------------------------------------------------------------ outgoing requests

    @on(FetchData)
    def _fetch(self, message: FetchData) -> None:
        self._get(message.name, message.path)

    @work(thread=True, group="fetch")
    def _get(self, name: str, path: str) -> None:
        try:
            self.post_message(ResponseReceived(name, self.api.get(path)))
        except CliError as error:
            self.state.refused[name] = error.what

    @on(RunAction)
    @work
    async def _act(self, message: RunAction) -> None:
        if self.read_only:
            self.notify("Read-only (--read-only): nothing was changed.", severity="warning")
            return
        if message.question and not await self.push_screen_wait(ConfirmDialog(message.question)):
            return
        try:
            await asyncio.to_thread(self.api.post, message.path, message.body)
        except CliError as error:
            self.notify(error.what, title="Refused", severity="error", markup=False)
            return
        self.notify(message.done, markup=False)
        if isinstance(self.screen, DashboardScreen):
            self.screen.ask()

    @on(PromptUser)
    @work
    async def _ask(self, message: PromptUser) -> None:
        if self.read_only:
            self.notify("Read-only (--read-only): nothing was changed.", severity="warning")
            return
        typed = await self.push_screen_wait(InputDialog(message.title, message.hint))
        if typed:
            self.post_message(RunAction(message.path, {message.field: typed}, message.done))

    # ------------------------------------------------------------------ details

    def show_request(self, request_id: str) -> None:
        """Open a dialog with all details of a request."""
        self._show_request(request_id)

    @work
    async def _show_request(self, request_id: str) -> None:
        answer = await self._detail(request_id)
        if answer is not None:
            self.push_screen(KeyValueDialog(request_id, request_lines(answer, 68, self.glyphs)))

    @work
    async def copy_request(self, request_id: str) -> None:
        """Copy an ended request to the clipboard as a curl command."""
        answer = await self._detail(request_id)
        if answer is None:
            return
        if not answer.get("curl"):
            self.notify("It can be copied once it has ended.", severity="warning")
            return
        self.copy_to_clipboard(answer["curl"])
        kept = answer["content"] is not None
        self.notify("Copied as curl." if kept else "Copied as curl; its prompt was not stored: fill it in.")

    async def _detail(self, request_id: str) -> Mapping[str, Any] | None:
        try:
            answer = await asyncio.to_thread(self.api.get, f"requests/{quote(request_id, safe='')}")
        except CliError as error:
            found = next((row for row in self.state.ended if row["id"] == request_id), None)
            if found is not None:
                return {"request": found}
            self.notify(error.what, severity="warning", markup=False)
            return None
        return answer

    def show_texts(self, title: str, texts: Mapping[str, str]) -> None:
        """Open a dialog with texts under their names."""
        lines = [
            line for name, text in texts.items() if text
            for line in (((name, "muted"),), *wrap(text, 68), ())
        ]  # fmt: skip
        self.push_screen(KeyValueDialog(title, lines[:-1]))

    def show_model(self, name: str) -> None:
        """Go to the screen of models, with the cursor on this one."""
        self.switch_mode(ModelsScreen.TITLE)
        self.call_later(self._select_model, name)

    def _select_model(self, name: str) -> None:
        if isinstance(self.screen, ModelsScreen):
            self.screen.query_one(FixedTable).select(name)

    def show_facts(self, title: str, facts: Mapping[str, Any]) -> None:
        """Open a dialog with nested facts."""
        self.push_screen(KeyValueDialog(title, fact_lines(facts)))

    @work
    async def show_fit(self, ref: str) -> None:
        """Open a dialog that says whether a model fits on this machine."""
        try:
            answer = await asyncio.to_thread(self.api.get, f"fit?model={quote(ref, safe='')}")
        except CliError as error:
            self.notify(f"{error.what} Try: llmbox fit {ref}", severity="warning", markup=False)
            return
        self.push_screen(KeyValueDialog(f"fit of {ref}", fit_lines(answer, 68)))

    # ------------------------------------------------------------------ keys

    def action_pause(self) -> None:
        self.paused = not self.paused
        for screen in self.screen_stack:
            if isinstance(screen, DashboardScreen):
                screen.redraw()

    @work
    async def action_themes(self) -> None:
        """Choose a theme: each one is shown while the cursor is on it."""
        before = self.theme
        chosen = await self.push_screen_wait(ChoiceDialog("Theme", NAMES, before, self._show_theme))
        self._show_theme(chosen or before)
        if chosen is not None:
            self._remember(chosen)

    def _show_theme(self, name: str) -> None:
        self.theme = name
        for screen in self.screen_stack:
            screen.refresh(layout=True)
            for widget in screen.walk_children(LineWidget):
                widget.refresh()

    def action_help(self) -> None:
        lines = key_lines(self.screen.active_bindings.values(), self.get_key_display)
        self.push_screen(HelpDialog("Keys", lines))

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        """Yield the entries of the command palette: screens and the active keys."""
        for number, view in enumerate(SCREENS, 1):
            mode = view.TITLE
            yield SystemCommand(mode, f"Screen {number}", lambda mode=mode: self.switch_mode(mode))
        for active in screen.active_bindings.values():
            if active.binding.show and active.binding.description:
                yield SystemCommand(
                    active.binding.description,
                    f"Key {self.get_key_display(active.binding)}",
                    lambda action=active.binding.action, node=active.node: self.call_later(
                        self.run_action, action, node
                    ),
                )
