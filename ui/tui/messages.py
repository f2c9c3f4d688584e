"""What flows through the dashboard. A newer reading replaces an older one that nobody has drawn yet."""

from typing import Any

from textual.message import Message

from llmbox.app.telemetry.snapshot import Tick


class Ticked(Message):
    """A second has passed on the daemon's side."""

    def __init__(self, tick: Tick) -> None:
        super().__init__()
        self.tick = tick

    def can_replace(self, message: Message) -> bool:
        return isinstance(message, Ticked)


class Happened(Message):
    """Any other event of the stream."""

    def __init__(self, kind: str, data: dict[str, Any]) -> None:
        super().__init__()
        self.kind, self.data = kind, data


class Connected(Message):
    pass


class Lost(Message):
    """The daemon does not answer (any more)."""

    def __init__(self, reason: str) -> None:
        super().__init__()
        self.reason = reason

    def can_replace(self, message: Message) -> bool:
        return isinstance(message, Lost)


class Changed(Message, bubble=False):
    """To the screen that is shown: draw the state again."""

    def can_replace(self, message: Message) -> bool:
        return isinstance(message, Changed)


class Fetched(Message):
    """An answer of the admin API to a `Fetch`."""

    def __init__(self, name: str, answer: dict[str, Any]) -> None:
        super().__init__()
        self.name, self.answer = name, answer


class Fetch(Message):
    """A screen wants this of the admin API; the answer goes into the state under `name`."""

    def __init__(self, name: str, path: str) -> None:
        super().__init__()
        self.name, self.path = name, path


class Act(Message):
    """A screen wants the daemon to do something. `question` is asked first where it destroys."""

    def __init__(self, path: str, body: dict[str, Any], done: str, question: str = "") -> None:
        super().__init__()
        self.path, self.body, self.done, self.question = path, body, done, question


class Ask(Message):
    """A screen needs a line of text to go on with an `Act`."""

    def __init__(self, title: str, hint: str, path: str, field: str, done: str) -> None:
        super().__init__()
        self.title, self.hint, self.path, self.field, self.done = title, hint, path, field, done
