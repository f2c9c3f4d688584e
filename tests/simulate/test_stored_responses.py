"""Responses that are stored, or made in the background, in virtual time."""

from collections import Counter

import pytest

from llmbox.app.http.openai_responses import stored as stored_routes
from llmbox.app.http.openai_responses.stored import LiveResponse
from llmbox.app.http.openai_responses.writer import ResponseEventWriter
from llmbox.app.lifecycle.drain import BackgroundTasks
from llmbox.app.store.database import StoredRow
from llmbox.app.store.queries import stored_answers as queries
from llmbox.app.store.stored_answers import StoredAnswers
from simulate.scenario import MachineEvent, Scenario, draw_scenario
from simulate.simulation import simulate
from simulate.small_runs import make_model, make_request, run
from simulate.stored_clients import StoredPlan
from simulate.world import World
from support.lanes import examples

SEEDS = examples(40)
"""A quarter in the suite."""


def ask(number, at=0.0, *, streams=False, **options):
    names = ("max_tokens", "preparing", "leaves_after", "leaves_at")
    fields = {name: options.pop(name) for name in names if name in options}
    plan = StoredPlan(**{"is_background": True, "pause": 0.3, **options})
    return make_request(number, at, dialect="responses", streams=streams, stored=plan, **fields)


def test_seeds_with_stored_responses_keep_the_pass_rule(monkeypatch):
    """In every run, and with daemons that begin over what these leave."""
    monkeypatch.setattr("simulate.scenario.STORED_SHARE", 1.0)
    ends = Counter()
    for seed in range(700, 700 + SEEDS):
        world = World(draw_scenario(seed))
        report = simulate(seed, world.scenario, world)
        assert (seed, report.broken) == (seed, "")
        ends["next daemons"] += len(world.legacies)
        for client in world.clients.stored.values():
            ends[client.is_background, world.clients.outcomes[client.request.id].status] += 1
    assert ends["next daemons"] > SEEDS
    assert ends[True, "done"] > SEEDS
    assert ends[False, "done"]
    for how in ("cancelled", "error", "forgotten"):
        assert ends[True, how], f"no background response was {how}"


def test_nobody_goes_on_from_a_response_whose_end_was_lost(monkeypatch):
    """Found by this seed: the next turn's prompt had the question before it, without its answer."""
    monkeypatch.setattr("simulate.scenario.STORED_SHARE", 1.0)
    world = World(draw_scenario(1216))
    assert simulate(1216, world.scenario, world).broken == ""
    refusals = {
        outcome.error.code for outcome in world.clients.outcomes.values() if outcome.error is not None
    }
    assert "previous_response_lost" in refusals


def run_leaving_clients(*, streams=True, follows=True):
    """One client leaves in the middle of its stream and comes back for the rest of the events."""
    requests = [
        ask(number, 0.1 * number, max_tokens=20, streams=streams, follows=follows, leaves_after=leaves)
        for number, leaves in enumerate([None, 2, 0])
    ]
    kills = [MachineEvent(at=at, kind="kill", model="m0") for at in (3.0, 6.0)]
    return run(requests, kills, model=make_model(step_seconds=0.5), writes_log=True)


@pytest.mark.parametrize("follows", [True, False])
@pytest.mark.parametrize("streams", [True, False])
def test_background_responses_survive_deaths_and_clients_that_leave(streams, follows):
    report = run_leaving_clients(streams=streams, follows=follows)
    assert (report.broken, report.outcomes, report.deaths) == ("", {"done": 4}, 2)


def run_killed_daemons():
    """A daemon is killed at 24 moments; the last ones are after the end of all responses."""
    moments = [0.0005 * 1.5**number for number in range(24)]
    requests = [
        ask(0, max_tokens=12),
        ask(1, 0.2, deletes_after=2.0),
        ask(2, is_background=False, streams=True),
        ask(3, max_tokens=20, is_background=False, leaves_at=0.7),
    ]
    scenario = Scenario(
        seed=1,
        weather="storm",
        models=[make_model(step_seconds=0.1)],
        requests=requests,
        events=[MachineEvent(at=at, kind="daemon") for at in moments],
        writes_log=True,
    )
    world = World(scenario)
    return simulate(1, scenario, world), world


def test_a_daemon_killed_at_any_moment_leaves_no_response_half():
    """The next daemon has each response as it ended, or failed, or not at all: never one that goes on."""
    report, world = run_killed_daemons()
    assert (report.broken, report.outcomes) == ("", {"done": 4, "left": 1})
    assert len(world.legacies) > 15


def run_cancelled_as_taken(act, *, streams):
    """A response is cancelled or deleted at the moment that it is taken, and shortly after."""
    reports = []
    for late in (0.0, 0.001, 0.002, 0.1):
        plan = {act: 0.01 + late}
        reports.append(run([ask(0, preparing=0.01, streams=streams, max_tokens=20, **plan)], writes_log=True))
    return reports


@pytest.mark.parametrize("act", ["cancels_after", "deletes_after"])
@pytest.mark.parametrize("streams", [True, False])
def test_a_response_that_is_cancelled_as_it_is_taken_runs_no_further(act, streams):
    """Found by seed 21: the task was cancelled before its first step, and the engine went on for nobody."""
    reports = run_cancelled_as_taken(act, streams=streams)
    assert [report.broken for report in reports] == [""] * 4
    assert any(set(report.outcomes) & {"cancelled", "deleted"} for report in reports)


def test_a_drain_ends_responses_that_nobody_waits_for():
    forgotten = [ask(0, max_tokens=30, forgets=True), ask(1, 0.5, max_tokens=3, forgets=True)]
    drain = MachineEvent(at=1.0, kind="drain", value=4.0)
    model = make_model(step_seconds=0.5)
    report = run([*forgotten, make_request(2, max_tokens=30)], [drain], model=model, writes_log=True)
    assert (report.broken, report.outcomes) == ("", {"forgotten": 2, "server_shutdown": 1})


# ---------------------------------------------------------------------- the rule itself


async def find_nothing_to_cancel(*_):
    return


async def say_deleted(*_):
    return True


async def follow_from_the_start(self, starting_after=-1):
    del starting_after
    async for data in follow(self):
        yield data


follow = LiveResponse.follow


@pytest.mark.parametrize(
    ("owner", "name", "wrong"),
    [
        (BackgroundTasks, "cancel", find_nothing_to_cancel),
        (StoredAnswers, "delete", say_deleted),
        (LiveResponse, "follow", follow_from_the_start),
        (ResponseEventWriter, "break_off", lambda *_: iter(())),
        (stored_routes, "_require_ended", lambda found: found.answer),
        (queries, "_is", lambda _, __, id_: StoredRow.id == id_),
    ],
)
def test_the_rule_notices(monkeypatch, owner, name, wrong):
    monkeypatch.setattr(owner, name, wrong)
    reports = [run_leaving_clients(), run_killed_daemons()[0]]
    reports += run_cancelled_as_taken("cancels_after", streams=True)
    reports += run_cancelled_as_taken("deletes_after", streams=False)
    assert any(report.broken for report in reports)
