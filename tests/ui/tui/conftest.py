"""Dashboards over a made-up box: frozen time zone and environment, a fake API instead of a daemon."""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from textual.css.stylesheet import Stylesheet
from textual.message import Message
from textual.pilot import Pilot

from llmbox.app.telemetry.snapshot import Tick
from llmbox.ui.tui.app import Dashboard
from llmbox.ui.tui.widgets.lines import Lines
from support.snapshots import FakeApi
from support.snapshots import tick as busy

_parsed: dict[Any, Any] = {}
_parse_rules = Stylesheet._parse_rules


def _parse_once(self: Stylesheet, *css: Any, **options: Any) -> Any:
    """Parse what a widget looks like once a process: Textual does so for each of the tests' dashboards."""
    key = (frozenset(self._variables.items()), css, frozenset(options.items()))
    if key not in _parsed:
        _parsed[key] = _parse_rules(self, *css, **options)
    return _parsed[key]


@pytest.fixture(autouse=True)
def _frozen(monkeypatch):
    monkeypatch.setattr(Stylesheet, "_parse_rules", _parse_once)
    monkeypatch.setenv("TZ", "UTC")
    for name in ("NO_COLOR", "TEXTUAL_ANIMATIONS", "COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@dataclass
class Stage:
    app: Dashboard
    api: FakeApi
    pilot: Pilot[None]
    messages: list[Message]

    async def until(self, condition: Callable[[], object]) -> None:
        for _ in range(3000):
            await self.pilot.pause()
            if condition():
                return
            await self.pilot.pause(0.01)
        raise AssertionError(f"the awaited did not happen; the screen shows\n{self.text}")

    async def ticks(self, *ticks: Tick) -> None:
        """Delivers each of them; replacing queued ones would make tests depend on speed."""
        for each in ticks:
            self.api.push("tick", each)
            await self.until(lambda each=each: self.app.state.tick == each)
        await self.pilot.pause()

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)
        await self.pilot.pause()

    async def settled(self) -> None:
        await self.app.workers.wait_for_complete()
        await self.pilot.pause()
        await self.pilot.pause()

    @property
    def text(self) -> str:
        strips = self.app.screen._compositor.render_strips()
        return "\n".join(strip.text.rstrip() for strip in strips)

    def shown(self, name: str) -> str:
        return "\n".join(self.app.screen.query_one(name, Lines).plain)


Opening = Callable[..., AbstractAsyncContextManager[Stage]]


@pytest.fixture
def stage() -> Opening:
    @asynccontextmanager
    async def opened(
        size: tuple[int, int] = (120, 40), *, ticks: tuple[Tick, ...] | None = None, **options: Any
    ) -> AsyncIterator[Stage]:
        api = FakeApi()
        app = Dashboard(api, url="http://127.0.0.1:7411", **options)
        messages: list[Message] = []
        async with app.run_test(size=size, message_hook=messages.append, notifications=True) as pilot:
            subject = Stage(app, api, pilot, messages)
            await subject.ticks(*((busy(0),) if ticks is None else ticks))
            yield subject
            api.close()

    return opened
