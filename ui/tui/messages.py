"""Messages of the dashboard. A newer reading replaces an older one that is not drawn yet."""

from typing import Any

from textual.message import Message

from llmbox.app.telemetry.snapshot import Tick


class TickReceived(Message):
    """The daemon sent its telemetry of one second."""

    def __init__(self, tick: Tick) -> None:
        super().__init__()
        self.tick = tick

    def can_replace(self, message: Message) -> bool:
        return isinstance(message, TickReceived)


class EventReceived(Message):
    """Any other event of the stream arrived."""

    def __init__(self, kind: str, data: dict[str, Any]) -> None:
        super().__init__()
        self.kind, self.data = kind, data


class Connected(Message):
    pass


class Lost(Message):
    """The connection to the daemon was lost, or there was none."""

    def __init__(self, reason: str) -> None:
        super().__init__()
        self.reason = reason

    def can_replace(self, message: Message) -> bool:
        return isinstance(message, Lost)


class Changed(Message, bubble=False):
    """Request to the visible screen to draw the state again."""

    def can_replace(self, message: Message) -> bool:
        return isinstance(message, Changed)


class ResponseReceived(Message):
    """Response of the admin API to a `Fetch`."""

    def __init__(self, name: str, answer: dict[str, Any]) -> None:
        super().__init__()
        self.name, self.answer = name, answer


class Fetch(Message):
    """Request for data of the admin API; the response goes into the state under `name`."""

    def __init__(self, name: str, path: str) -> None:
        super().__init__()
        self.name, self.path = name, path


class RunAction(Message):
    """Request to change something in the daemon. `question` asks the user first, before destructive
    actions.
    """

    def __init__(self, path: str, body: dict[str, Any], done: str, question: str = "") -> None:
        super().__init__()
        self.path, self.body, self.done, self.question = path, body, done, question


class PromptUser(Message):
    """Request for a line of text from the user, which then becomes an action."""

    def __init__(self, title: str, hint: str, path: str, field: str, done: str) -> None:
        super().__init__()
        self.title, self.hint, self.path, self.field, self.done = title, hint, path, field, done
