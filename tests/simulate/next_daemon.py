"""Daemons that begin over what another one has left on its disk, killed at some moment or ended.

A daemon that is killed leaves its files as they are. They are copied at that moment and the run goes on, so
that the next daemon's answers can be compared with what came of each response.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from llmbox.app.lifecycle.drain import BackgroundTasks
from llmbox.app.store import RequestLog
from llmbox.app.store.stored_answers import StoredAnswers

from .clients import Outcome
from .http_clients import application
from .rules import check_tokens
from .step_rules import BrokenRuleError
from .stored_clients import StoredClient, StoredState, is_lost, take_end

if TYPE_CHECKING:
    from .world import World

_LAG_S = 5.0
"""Seconds within which what was queued for the disk is on it, while nothing holds the disk up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonLegacy:
    """Files of a daemon that has ended, and what was known of its stored responses then."""

    at: float
    was_killed: bool
    folder: Path
    states: dict[str, StoredState]


def copy_legacy(world: "World", *, was_killed: bool) -> DaemonLegacy:
    """Take what the daemon leaves if it is killed now, or now that it has ended."""
    folder = world.machine.folder / f"legacy-{len(world.legacies)}"
    folder.mkdir()
    for file in world.machine.folder.glob("requests.db*"):
        if not file.name.endswith("-shm"):  # SQLite makes it anew
            shutil.copyfile(file, folder / file.name)
    states = {name: client.state for name, client in world.clients.stored.items()}
    return DaemonLegacy(at=world.loop.time(), was_killed=was_killed, folder=folder, states=states)


async def check_next_daemon(world: "World", legacy: DaemonLegacy) -> None:
    """Ask the next daemon for each response, follow its events, and delete it."""
    log = RequestLog(legacy.folder / "requests.db")
    log.start()
    app = application()
    own = {"request_log": log, "stored": StoredAnswers(log), "background": BackgroundTasks()}
    app.state["services"] = SimpleNamespace(**{**vars(app.state["services"]), **own})
    try:
        for name, state in legacy.states.items():
            await _check_response(world, world.clients.stored[name], state, legacy)
    finally:
        log.close()


async def _check_response(
    world: "World", client: StoredClient, state: StoredState, legacy: DaemonLegacy
) -> None:
    request, outcome = client.request, Outcome(client.request)
    visitor = StoredClient(world, request, outcome)
    written_by = legacy.at - _LAG_S if legacy.was_killed else legacy.at
    is_opened = state.opened_at is not None and state.opened_at <= written_by
    is_ended = state.end is not None and state.ended_at <= written_by
    status, told = await visitor.call("GET")
    if status == 404:
        is_written = (is_opened and client.is_background) or is_ended
        if is_written and not state.deletion and not client.is_lenient:
            raise BrokenRuleError(f"{client.id} is gone with the daemon that stored it")
        return
    if status != 200 or state.deletion == "done":
        raise BrokenRuleError(f"{client.id}, deletion {state.deletion!r}: {status} from the next daemon")
    visitor.see(told)
    if visitor.state.end is None:
        raise BrokenRuleError(f"{client.id} is {told['status']} in the next daemon")
    if is_lost(told):
        if not client.is_lenient and (is_ended or not client.is_background or not legacy.was_killed):
            raise BrokenRuleError(f"{client.id} lost its end with its daemon, which knew it")
    else:
        if client.state.end is not None and told != client.state.end and not is_lost(client.state.end):
            raise BrokenRuleError(f"{client.id} was {client.state.end}, and is {told} in the next daemon")
        take_end(outcome, told, world)
        check_tokens(world, outcome)
        visitor.remember(client)
    if world.chance.random() < 0.5:
        await visitor.follow(world.chance.choice((-1, client.latest)) if is_lost(told) else -1)
    if world.chance.random() < 0.3:
        await _delete(visitor)


async def _delete(visitor: StoredClient) -> None:
    answers: list[Any] = [await visitor.call(method) for method in ("DELETE", "GET", "DELETE")]
    if [status for status, _ in answers] != [200, 404, 404]:
        raise BrokenRuleError(f"{visitor.id} is deleted in the next daemon: {answers}")
