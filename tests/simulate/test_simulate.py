"""The daemon in virtual time: seeds whose runs keep the pass rule, and the rule itself."""

import asyncio
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from llmbox.app.engines.poison_detector import PoisonDetector
from llmbox.app.engines.request_journal import TokenStream
from llmbox.app.http.ollama.responder import AnswerWriter
from llmbox.app.http.openai_responses.writer import ItemWriter
from llmbox.app.http.server.sse import EventStream
from llmbox.app.text.output.output_parser import ParsedOutput
from llmbox.engine.core.kv_cache.block_pool import BlockPool
from simulate.dialects import DIALECTS_BY_NAME
from simulate.engine import POISON
from simulate.scenario import WEATHERS, MachineEvent, draw_scenario
from simulate.simulation import simulate
from simulate.small_runs import make_model, make_request, run
from simulate.world import World
from support.lanes import examples

SEEDS = examples(60)
"""Of each kind of run: a quarter in the suite."""


@pytest.mark.parametrize("weather", WEATHERS)
def test_seeds_keep_the_pass_rule(weather):
    reports = [simulate(seed, draw_scenario(seed, weather)) for seed in range(SEEDS)]
    assert [(report.seed, report.broken) for report in reports if report.broken] == []
    counts = [report.outcomes.get("done", 0) for report in reports]
    assert sum(counts) > 2 * SEEDS, "hardly a request was answered: the rule says nothing"
    assert (sum(report.deaths for report in reports) > 0) == (weather not in {"calm", "crowd"})


def test_requests_over_http_keep_the_pass_rule(monkeypatch):
    """Each dialect, whole and as a stream, beside requests without HTTP."""
    monkeypatch.setattr("simulate.scenario.HTTP_SHARE", 1.0)
    done = Counter()
    for seed in range(300, 300 + SEEDS):
        scenario = draw_scenario(seed)
        world = World(scenario)
        report = simulate(seed, scenario, world)
        assert (seed, report.broken) == (seed, "")
        for outcome in world.clients.outcomes.values():
            done[outcome.request.dialect, outcome.request.streams, outcome.status] += 1
    for dialect in DIALECTS_BY_NAME:
        assert done[dialect, True, "done"] > SEEDS // 2
        assert done[dialect, False, "done"] > SEEDS // 8
    assert sum(count for (dialect, _, how), count in done.items() if dialect and how == "left") > 3


@pytest.mark.parametrize("dialect", list(DIALECTS_BY_NAME))
@pytest.mark.parametrize("streams", [True, False])
def test_answers_over_http_survive_deaths_and_clients_that_leave(dialect, streams):
    """A client leaves with half of its request sent, one in the middle of its answer; one reads slowly."""
    how = [{}, {"preparing": 5.0, "leaves_at": 2.0}, {"leaves_at": 9.0}, {"read_pause": 4.0}, {}]
    requests = [
        make_request(number, at=0.1 * number, max_tokens=20, dialect=dialect, streams=streams, **options)
        for number, options in enumerate(how)
    ]
    kills = [MachineEvent(at=at, kind="kill", model="m0") for at in (3.0, 6.0)]
    report = run(requests, kills, model=make_model(step_seconds=0.5))
    assert (report.broken, report.outcomes, report.deaths) == ("", {"done": 4, "left": 2}, 2)


@pytest.mark.parametrize(
    ("seed", "weather"),
    [
        (2010912, None),  # a draft takes a block that the admission before it in the same step left free
        (2010913, None),  # a reader of a stream whose end was lost asks for the events after those it has
        (2021922, None),  # a place of a model that was unloaded is none of the one loaded after it
        (2022244, None),
        (291, "models"),  # a daemon that ends aborts requests at an engine that does not have them yet
        (7005652, "poison"),  # each choice of a request that kills cost deaths, until the model was given up
        (7005994, None),  # the caller of an unload leaves before the unload has begun
        (7001204, None),  # a slow stream has the end of a response whose end the disk lost
    ],
)
def test_seeds_that_found_mistakes_of_the_daemon_or_of_the_rules(seed, weather):
    assert simulate(seed, draw_scenario(seed, weather)).broken == ""


def test_a_seed_is_one_run_bit_for_bit():
    seeds = range(8)
    digests = [simulate(seed).digest for seed in seeds]
    assert [simulate(seed).digest for seed in seeds] == digests
    assert len(set(digests)) == len(digests)


@pytest.mark.process
def test_a_seed_is_the_same_run_in_another_process():
    """Whatever the order of its sets."""
    script = "from simulate.simulation import simulate; print([simulate(s).digest for s in range(100, 104)])"
    here = [simulate(seed).digest for seed in range(100, 104)]
    tests = Path(__file__).parents[1]
    env = os.environ | {"PYTHONHASHSEED": "7", "PYTHONPATH": f"{tests.parent / 'packaging/tree'}:{tests}"}
    told = subprocess.run(
        [sys.executable, "-P", "-c", script], env=env, capture_output=True, text=True, check=True
    )
    assert told.stdout.strip() == str(here)


@pytest.mark.parametrize("kind", ["memory", "after", "kill", "segv", "oom", "garble"])
def test_a_fault_at_every_step_of_a_run(kind):
    """An allocation that fails, before or after the KV was written; the engine killed; a byte changed."""
    requests = [make_request(number, at=0.01 * number) for number in range(3)]
    plain = make_model()
    assert run(requests, model=plain).outcomes == {"done": 4}  # one more is the control request
    steps = plain.client_steps
    assert steps > 8
    for step in range(1, steps + 1):
        report = run(requests, model=make_model(step_faults={step: kind}))
        assert (report.broken, report.outcomes) == ("", {"done": 4}), f"at step {step}"
        assert report.deaths == 1


@pytest.mark.parametrize("kind", ["raise", "memory", "segv", "oom", "hang"])
def test_requests_that_kill_their_engine_fail_alone(kind):
    poison = {2: [POISON, 1], 5: [1, 2, POISON]}
    requests = [make_request(n, prompt=poison.get(n, [n, 1])) for n in range(7)]
    report = run(requests, model=make_model(poison=kind, poison_after=1))
    assert (report.broken, report.outcomes) == ("", {"done": 6, "engine_error": 2})


@pytest.mark.parametrize(("kind", "times"), [("kill", (1.0, 3.5, 6.5)), ("stop", (1.0, 20.0))])
def test_deaths_from_outside_accuse_nobody(kind, times):
    """Not even the only request there, each time."""
    events = [MachineEvent(at=at, kind=kind, model="m0", value=1e6) for at in times]
    report = run([make_request(0, max_tokens=30)], events, model=make_model(step_seconds=0.5))
    assert (report.broken, report.outcomes, report.deaths) == ("", {"done": 2}, len(times))


def test_a_wall_clock_that_jumps_changes_nothing():
    def answers(jumps):
        requests = [make_request(n, at=0.5 * n, max_tokens=20, finish_after=60.0) for n in range(4)]
        events = [MachineEvent(at=at, kind="jump", value=by) for at, by in jumps]
        return run(requests, events, model=make_model(step_seconds=0.2), ttl=30.0)

    jumps = [(0.3, 1e7), (0.9, -2e7), (1.4, 3600.0), (2.2, -1.0)]
    still, jumping = answers([]), answers(jumps)
    assert (jumping.broken, jumping.outcomes) == ("", {"done": 5})
    assert jumping.virtual_s == still.virtual_s


def test_a_wall_clock_that_jumps_ahead_erases_no_row():
    """The request log forgets after thirty days; the clock goes ahead by a hundred and fifteen."""
    jump = MachineEvent(at=1.0, kind="jump", value=1e7)
    report = run([make_request(0), make_request(1, at=100.0)], [jump], writes_log=True)
    assert (report.broken, report.outcomes) == ("", {"done": 3})


def test_an_engine_with_hardly_any_processor_time_is_given_time():
    """For a minute everything takes 200 times as long: streams are slow, and no engine is killed."""
    starve = MachineEvent(at=0.05, kind="starve", value=60.0)
    report = run([make_request(number) for number in range(6)], [starve])
    assert (report.broken, report.outcomes, report.deaths) == ("", {"done": 7}, 0)


def test_a_load_that_fails_on_the_way_back_is_tried_again():
    """The memory does not suffice, the process cannot be started, the load raises or is killed."""
    model = make_model(step_faults={3: "oom"}, load_faults={2: "fit", 3: "raise", 4: "kill"})
    report = run([make_request(number) for number in range(3)], model=model)
    assert (report.broken, report.outcomes, report.deaths) == ("", {"done": 4}, 4)


# ---------------------------------------------------------------------- what the simulator has found


def test_suspects_that_have_left_hold_nobody_back():
    """Seed 3741: after two crashes whose suspects had all left, the next engine was sent no request."""
    model = make_model(step_seconds=0.5, step_faults={3: "raise", 6: "hang"})
    requests = [make_request(0, max_tokens=30, leaves_at=6.0), make_request(1, max_tokens=30, leaves_at=8.2)]
    oom = MachineEvent(at=8.0, kind="oom", model="m0")
    report = run([*requests, make_request(3, at=30.0)], [oom], model=model)
    assert (report.broken, report.outcomes) == ("", {"left": 2, "done": 2})


def test_a_model_that_came_back_is_unloaded_when_it_is_idle():
    """Seed 9: nobody looked at the time to live of a model that had been given up."""
    kills = [MachineEvent(at=at, kind="kill", model="m0") for at in (0.1, 1.5, 3.0, 5.0, 7.5)]
    requests = [make_request(number, max_tokens=30) for number in range(3)]
    report = run(requests, kills, model=make_model(step_seconds=0.5), ttl=5.0)
    assert report.broken == ""
    assert report.outcomes == {"engine_failed": 5, "done": 1}


def test_a_model_that_came_back_may_die_once_more():
    """The deaths before its cool-down are no reason to give it up again."""
    times = (0.1, 1.5, 3.0, 5.0, 7.5, 50.0)
    kills = [MachineEvent(at=at, kind="kill", model="m0") for at in times]
    requests = [make_request(0, max_tokens=30), make_request(1, at=48.0, max_tokens=30)]
    report = run(requests, kills, model=make_model(step_seconds=0.5))
    assert (report.broken, report.outcomes) == ("", {"engine_failed": 1, "done": 2})
    assert report.deaths == 6


def test_an_unload_that_its_caller_gives_up_leaves_no_process():
    """Seed 27: the engine hung, and the caller of the unload left before it was killed."""
    unload = MachineEvent(at=2.0, kind="unload", model="m0")
    report = run([make_request(0, max_tokens=30)], [unload], model=make_model(step_faults={4: "hang"}))
    assert (report.broken, report.outcomes) == ("", {"model_unloaded": 1})


def test_who_waits_for_a_load_that_is_ended_gets_an_answer():
    """Seed 62: it was cut off as if its client had left."""
    requests = [make_request(0, at=1.0), make_request(1, at=20.0), make_request(2, at=21.0)]
    unload = MachineEvent(at=22.0, kind="unload", model="m0")
    report = run(requests, [unload], model=make_model(load_seconds=5.0), ttl=5.0)
    assert (report.broken, report.outcomes) == ("", {"done": 1, "model_unloaded": 2})


def test_requests_that_kill_late_end_no_model():
    """Seed 40634: of three, one passed its trial and killed later; the client of another left meanwhile."""
    requests = [
        make_request(n, prompt=[n, POISON if n in {0, 2, 4} else 1], max_tokens=30, leaves_at=leaves)
        for n, leaves in enumerate([None, None, None, None, 1.6, None])
    ]
    model = make_model(poison="segv", poison_after=4, load_seconds=0.1, step_seconds=0.02)
    report = run(requests, model=model)
    assert (report.broken, report.outcomes) == ("", {"done": 4, "engine_error": 3})


def test_the_choices_of_a_request_that_kills_fail_with_it():
    requests = [make_request(0, prompt=[POISON, 1], n=3, read_pause=5.0), make_request(1)]
    report = run(requests, model=make_model(poison="raise", poison_after=1))
    assert (report.broken, report.outcomes) == ("", {"done": 2, "engine_error": 1})
    assert report.deaths <= 4, "as for one choice"


def test_many_requests_that_kill_end_no_model():
    """Nine of eighteen, each at its second token: each fails alone, within a minute."""
    requests = [make_request(n, prompt=[n, POISON if n % 2 else 1], max_tokens=20) for n in range(18)]
    model = make_model(poison="raise", poison_after=1, load_seconds=0.1, step_seconds=0.002)
    report = run(requests, model=model)
    assert (report.broken, report.outcomes) == ("", {"done": 10, "engine_error": 9})
    assert report.virtual_s < 60.0


# ---------------------------------------------------------------------- the rule itself


OVER_HTTP = {EventStream, ItemWriter, AnswerWriter}


def leak_blocks(pool, blocks):
    free(pool, list(blocks)[1:])


free = BlockPool.free


async def lose_the_end(_, send):
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def wait_for_ever(*_):
    await asyncio.Event().wait()


def lose_the_number(self, kind, /, **data):
    return {**count_event(self, kind, **data), "sequence_number": 0}


count_event = ItemWriter.event


def say_more(self, _):
    return end_answer(self, ParsedOutput(content="11"))


end_answer = AnswerWriter.end


@pytest.mark.parametrize(
    ("owner", "name", "wrong"),
    [
        (BlockPool, "free", leak_blocks),
        (TokenStream, "fail", lambda *_: None),
        (TokenStream, "note_sent", lambda stream: stream.output_ids.append(1)),
        (PoisonDetector, "record_crash", lambda *_: None),
        (EventStream, "_finish", lose_the_end),
        (EventStream, "_watch", wait_for_ever),
        (ItemWriter, "event", lose_the_number),
        (AnswerWriter, "end", say_more),
    ],
)
def test_the_rule_notices(monkeypatch, owner, name, wrong):
    monkeypatch.setattr(owner, name, wrong)
    monkeypatch.setattr("simulate.scenario.HTTP_SHARE", float(owner in OVER_HTTP))
    weather = "poison" if owner is PoisonDetector else "storm"
    assert any(simulate(seed, draw_scenario(seed, weather)).broken for seed in range(12))
