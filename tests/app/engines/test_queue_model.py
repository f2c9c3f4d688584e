"""Forecasts over the real scheduler, with steps that take a known time by a clock of the test's own."""

import random
import sys
from dataclasses import dataclass, field, replace

import pytest

from llmbox.app.config.entries import LatencyTarget
from llmbox.app.engines.queue_model import QueueModel
from llmbox.app.engines.step_times import ForecastError
from llmbox.engine.ipc.messages import AddRequest, EngineStats
from llmbox.engine.ipc.sequence_times import StepWork
from llmbox.engine.sampling_params import SamplingParams
from support.clock import Clock
from support.lanes import slow
from support.scheduling import INFO, FakeEngine, unique_prompt

STEP, TOKEN = 0.010, 0.0005
"""Seconds of a step, and of each of its tokens."""
BUDGET, RUNNING = 64, 8


@dataclass
class Sent:
    request: AddRequest
    at: float
    forecast: object
    tokens: list[float] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        return self.tokens[0] - self.at

    @property
    def tpot(self) -> float:
        return (self.tokens[-1] - self.tokens[0]) / (len(self.tokens) - 1)


class Box:
    """An engine, and the queue model that a daemon keeps of it."""

    def __init__(self, **options) -> None:
        self.clock = Clock()
        settings = {"token_budget": BUDGET, "max_running": RUNNING, "num_blocks": 4000, **options}
        self.fake = FakeEngine(clock=self.clock, **settings)
        self.fake.engine._clock = self.clock
        execute = self.fake.runner.execute

        def timed(plan):
            self.clock.now += STEP + TOKEN * plan.num_tokens
            return execute(plan)

        self.fake.runner.execute = timed
        self.queue = QueueModel(self.clock)
        self.queue.begin(
            replace(
                INFO,
                block_size=4,
                num_blocks=settings["num_blocks"],
                max_running=settings["max_running"],
                token_budget=settings["token_budget"],
                mixed_budget=settings.get("mixed_budget", 0),
            )
        )
        self.sent: dict[str, Sent] = {}

    def forecast(self, prompt, output=16, *, at=None, **changes):
        name = f"r{len(self.sent)}"
        ids = unique_prompt(name, prompt) if isinstance(prompt, int) else prompt
        params = SamplingParams(max_tokens=output, min_tokens=output)
        request = AddRequest(request_id=name, prompt_ids=ids, params=params, **changes)
        return Sent(request, at or self.clock.now, self.queue.forecast([request]))

    def send(self, prompt, output=16, **changes) -> Sent:
        sent = self.forecast(prompt, output, **changes)
        self.submit(sent)
        return sent

    def submit(self, sent: Sent) -> None:
        self.sent[sent.request.request_id] = sent
        self.queue.enter(sent.request, sent.tokens)
        assert self.fake.engine.add(sent.request) is None

    def step(self, arrive=lambda: None) -> None:
        """Run a step. `arrive` is called when it is over, before the daemon knows what came of it."""
        made = self.fake.engine.step()
        arrive()
        self.queue.observe(made.stats)
        for output in made.outputs:
            sent = self.sent[output.request_id]
            if output.cached_tokens is not None:
                self.queue.note_first(sent.request, sent.at, output.cached_tokens)
            sent.tokens += [self.clock.now] * len(output.token_ids)
            if output.finish_reason:
                self.queue.leave(output.request_id, len(sent.tokens))

    def run(self) -> None:
        while self.fake.engine.has_work:
            self.step()

    def learn(self) -> None:
        """Steps of all sizes, with answers of the usual length."""
        for together in (1, 2, 4, RUNNING):
            for prompt in (1, 5, 20, 200):
                for _ in range(together):
                    self.send(prompt)
                self.run()


@pytest.fixture
def box():
    box = Box()
    box.learn()
    return box


def test_nothing_is_forecast_before_a_step_was_measured():
    box = Box()
    assert box.forecast(10).forecast is None
    box.send(10)
    box.run()
    assert box.forecast(10).forecast is not None


def test_few_steps_are_learned_from_until_a_request_is_judged():
    box = Box()
    for name in ("a", "b"):  # no forecast is asked for
        request = AddRequest(
            request_id=name, prompt_ids=unique_prompt(name, 4), params=SamplingParams(max_tokens=401)
        )
        box.submit(Sent(request, box.clock.now, None))
        box.run()
    learned = box.queue.times.interference.steps
    assert 0 < learned <= 2 * 400 / 8 + 16
    box.send(4, 401)
    box.run()
    assert box.queue.times.interference.steps == learned + 400


@pytest.mark.parametrize("prompt", [1, 40, 64, 65, 500])
def test_a_request_alone_takes_what_was_forecast(box, prompt):
    sent = box.send(prompt)
    box.run()
    assert 0.99 * sent.ttft <= sent.forecast.ttft <= 1.25 * sent.ttft
    assert sent.forecast.tpot >= sent.tpot * 0.99
    assert sent.forecast.is_first


def test_prompts_ahead_are_waited_for(box):
    alone = box.forecast(100).forecast.ttft
    for _ in range(3):
        box.send(200)
    waiting = box.send(100)
    box.run()
    assert waiting.forecast.ttft > alone + 600 * TOKEN
    assert waiting.ttft <= waiting.forecast.ttft <= 1.5 * waiting.ttft


def test_a_prompt_beside_streams_is_forecast_in_steps_of_the_mixed_budget():
    box = Box(mixed_budget=16)
    box.learn()
    for _ in range(4):
        box.send(4, 400)
    for _ in range(8):
        box.step()
    sent = box.send(200)
    box.run()
    assert sent.ttft > 200 / 12 * STEP
    assert sent.ttft <= sent.forecast.ttft <= 1.5 * sent.ttft


def test_what_is_computed_of_a_prompt_is_no_longer_waited_for(box):
    box.send(600)
    before = box.forecast(10).forecast.ttft
    for _ in range(5):
        box.step()
    after = box.forecast(10).forecast.ttft
    assert before - after == pytest.approx(5 * (STEP + BUDGET * TOKEN), rel=0.2)


def test_a_premium_request_waits_for_none_of_a_worse_class(box):
    for _ in range(5):
        box.send(300)
    premium = box.forecast(20, priority=-1)
    standard = box.forecast(20)
    background = box.forecast(20, priority=5)
    assert premium.forecast.ttft < standard.forecast.ttft / 4
    assert background.forecast.ttft == pytest.approx(standard.forecast.ttft)
    assert premium.forecast.is_first
    assert not standard.forecast.is_first
    box.submit(premium)
    box.run()
    assert premium.ttft <= premium.forecast.ttft


def test_running_requests_make_tokens_slower(box):
    alone = box.forecast(5).forecast.tpot
    for _ in range(RUNNING - 1):
        box.send(5, 200)
    for _ in range(10):
        box.step()
    crowded = box.forecast(5).forecast.tpot
    assert crowded - alone >= (RUNNING - 2) * TOKEN
    assert crowded == pytest.approx(STEP + RUNNING * TOKEN, rel=0.15)


def test_a_place_is_waited_for(box):
    for _ in range(RUNNING):
        box.send(5)
    for _ in range(3):
        box.step()
    waiting = box.send(5)
    box.run()
    assert waiting.forecast.ttft > 0.02
    assert waiting.ttft == pytest.approx(waiting.forecast.ttft, rel=1.0)


def test_blocks_are_waited_for():
    box = Box(num_blocks=110)
    box.send(5)
    box.run()
    few = box.forecast(60).forecast.ttft
    box.send(390, 24)
    while not box.sent["r1"].tokens:
        box.step()
    assert box.forecast(60).forecast.ttft > few + 0.05


def test_a_prompt_that_was_computed_before_is_short(box):
    ids = list(range(5_000_000, 5_000_400))
    first = box.forecast(ids).forecast.ttft
    box.send(ids)
    box.run()
    again = box.send([*ids, 1, 2, 3])
    box.run()
    assert again.forecast.ttft < first / 4
    assert again.ttft <= again.forecast.ttft
    other = box.forecast(ids, cache_namespace="another key")
    assert other.forecast.ttft == pytest.approx(first, rel=0.01)
    told = replace(other.request, cache_namespace="", params=replace(other.request.params, prompt_logprobs=1))
    assert box.queue.forecast([told]).ttft == pytest.approx(first, rel=0.01)


def test_choices_of_one_call_share_a_prompt(box):
    params = SamplingParams(max_tokens=16)
    ids = unique_prompt("n", 200)
    calls = [
        AddRequest(request_id=f"n{i}", prompt_ids=ids, params=params, fork_of="n0" if i else None)
        for i in range(4)
    ]
    assert box.queue.forecast(calls).ttft < 1.2 * box.queue.forecast(calls[:1]).ttft
    assert box.queue.forecast(calls).tpot > box.queue.forecast(calls[:1]).tpot


def test_nothing_is_left_of_requests_that_ended(box):
    box.queue.forget([box.forecast(50).request])
    box.send(50)
    box.run()
    aborted = box.send(50)
    box.fake.engine.abort(aborted.request.request_id)
    box.queue.leave(aborted.request.request_id, 0)
    assert not box.queue._open
    assert not box.queue._estimates
    assert box.queue._prompts.total() == box.queue._requests.total() == 0


def test_a_restarted_engine_counts_from_zero(box):
    before = box.forecast(50).forecast
    box.queue.begin(box.queue._info)
    box.queue.observe(EngineStats(work=StepWork(steps=1, seconds=5.0, decode_rows=1)))
    after = box.forecast(50).forecast
    assert after.idle_ttft == before.idle_ttft
    assert after.tpot > before.tpot  # that first step counts


def test_another_engines_prompts_are_timed_by_their_first_tokens():
    """With `--disaggregate` no step of the engine has the prompts."""
    clock = Clock()
    queue = QueueModel(clock)
    queue.begin(replace(INFO, block_size=4, max_running=8, disaggregate=(1, 1), token_budget=64))
    params = SamplingParams(max_tokens=4)
    requests = [
        AddRequest(request_id=f"r{i}", prompt_ids=unique_prompt(str(i), 100), params=params) for i in range(4)
    ]
    queue.observe(EngineStats(work=StepWork(steps=1, seconds=0.01, decode_rows=1)))
    assert queue.forecast(requests[:1]) is None
    began = clock.now
    for each in requests[:3]:
        queue.enter(each, [])
    for each in requests[:2]:
        clock.now += 1.0  # one after another
        queue.note_first(each, began, 0)
    assert queue.forecast(requests[3:]).ttft == pytest.approx(2.0, rel=0.05)


TARGET = LatencyTarget(0.25, 0.040)


@pytest.mark.parametrize("seed", [0, *slow(range(1, 6))])
def test_no_admitted_request_misses_a_target_where_steps_take_what_they_took(seed):
    """Arrivals in bursts, at more than the engine's rate: many are refused, and no other one is late."""
    box, draw = Box(), random.Random(seed)
    box.learn()
    admitted, refused = [], 0

    def arrive() -> None:
        nonlocal refused
        if draw.random() < 0.2:
            for _ in range(draw.choice((1, 1, 2, 10))):
                sent = box.forecast(draw.choice((3, 20, 60, 200)), at=box.clock.now - STEP * draw.random())
                if sent.forecast.missed(TARGET) and not sent.forecast.is_first:
                    box.queue.forget([sent.request])
                    refused += 1
                else:
                    box.submit(sent)
                    admitted.append(sent)

    for _ in range(1500):
        if not box.fake.engine.has_work:
            box.clock.now += 0.01
            arrive()
        else:
            box.step(arrive)
    box.run()
    assert len(admitted) > 100
    assert refused > 100
    late = [each for each in admitted if each.ttft > TARGET.ttft or each.tpot > TARGET.tpot]
    assert not late, [(each.forecast, each.ttft, each.tpot) for each in late]


def burst(box, draw, count=26):
    """So many requests at the same moment to an idle engine; those that would be late are refused."""
    admitted = []
    for _ in range(count):
        sent = box.forecast(draw.choice((20, 20, 20, 80)))
        if sent.forecast.missed(TARGET) and not sent.forecast.is_first:
            box.queue.refuse([sent.request])
        else:
            box.submit(sent)
            admitted.append(sent)
    box.run()
    for sent in admitted:
        box.queue.settle(sent.forecast, TARGET, sent.ttft, sent.tpot)
    return [sent for sent in admitted if sent.ttft > TARGET.ttft or sent.tpot > TARGET.tpot], len(admitted)


@pytest.mark.parametrize("idle", [0.0, 300.0, 10_000.0])
@pytest.mark.parametrize("seed", range(3))
def test_what_was_measured_before_a_long_pause_holds_for_the_burst_after_it(box, idle, seed):
    box.clock.now += idle
    late, admitted = burst(box, random.Random(seed))
    assert not late
    assert 1 < admitted < 26


@pytest.mark.parametrize("seed", [0, *slow(range(1, 4))])
def test_of_a_burst_as_many_are_admitted_as_would_be_in_time(monkeypatch, seed):
    """Nearly: those that come first, until the next one would be late."""
    monkeypatch.setattr(sys.modules[__name__], "TOKEN", TOKEN / 5)
    sizes = random.Random(seed).choices((64, 64, 64, 256), k=60)
    loose, tight = (Box(max_running=64, token_budget=512) for _ in range(2))
    sent, admitted = [], []
    for box in (loose, tight):
        for _ in range(2):
            for prompt in (64, 200, 800, 2000):
                for _ in range(4):
                    box.send(prompt)
                box.run()
        box.send(800)  # its steps are under way
        box.step()
    for size in sizes:
        sent.append(loose.send(size))
        each = tight.forecast(size)
        if not each.forecast.missed(replace(TARGET, tpot=1.0)):
            tight.submit(each)
            admitted.append(each)
    loose.run()
    tight.run()
    could = [each for each in sent if each.ttft <= TARGET.ttft]
    assert 10 < len(could) < 60
    assert len(admitted) >= 0.85 * len(could)
    assert all(each.ttft <= TARGET.ttft for each in admitted)


def test_the_step_under_way_is_waited_for_once(box):
    for _ in range(3):
        box.send(200)
    box.step()
    begun = box.forecast(20).forecast.ttft
    box.clock.now += STEP  # it goes on
    assert box.forecast(20).forecast.ttft == pytest.approx(begun - STEP)
    box.clock.now += 10.0  # the daemon has not heard of its end yet
    whole = STEP + BUDGET * TOKEN
    assert box.forecast(20).forecast.ttft == pytest.approx(begun - whole, rel=0.05)


def test_a_burst_whose_steps_are_slower_teaches_the_next_one_and_no_request_alone(box, monkeypatch):
    draw = random.Random(1)
    alone = box.forecast(20).forecast.ttft
    monkeypatch.setattr(sys.modules[__name__], "STEP", 1.6 * STEP)
    monkeypatch.setattr(sys.modules[__name__], "TOKEN", 1.6 * TOKEN)
    first, _ = burst(box, draw)
    assert first, "nobody could know"
    for _ in range(3):
        late, admitted = burst(box, draw)
        assert admitted > 1
    assert not late
    assert box.queue.errors[True].ttft.factor > 1.2
    assert box.queue.errors[False].ttft.factor == 1.0
    assert box.forecast(20).forecast.ttft < 2 * alone


def test_steps_that_become_slower_all_at_once_are_noticed_in_the_same_burst(box, monkeypatch):
    def forecast_behind_others():
        for _ in range(4):
            box.send(200)
        for _ in range(6):
            box.step()
        found = box.forecast(20).forecast.measured_ttft
        box.run()
        return found

    usual = forecast_behind_others()
    monkeypatch.setattr(sys.modules[__name__], "STEP", 2 * STEP)
    monkeypatch.setattr(sys.modules[__name__], "TOKEN", 2 * TOKEN)
    assert forecast_behind_others() > 1.6 * usual
    assert box.queue.times.pace == 1.0, "nothing is open"


def test_only_refusals_make_old_times_count_for_less(box):
    asked = box.forecast(200)
    before = asked.forecast.ttft
    box.clock.now += 10_000
    assert box.forecast(200).forecast.ttft == before
    for _ in range(40):
        box.queue.refuse([asked.request])
        box.clock.now += 10.0
    assert box.forecast(200).forecast.ttft == pytest.approx(before / 2)


def test_errors_of_forecasts_widen_the_next_ones():
    error = ForecastError()
    for _ in range(7):
        error.add(1.0, 2.0)
    assert error.factor == 1.0  # too few say nothing
    error.add(1.0, 2.0)
    assert error.factor == 2.0
    for _ in range(64):
        error.add(1.0, 0.5)
    assert error.factor == 1.0
    for _ in range(64):
        error.add(1.0, 50.0)
    assert error.factor == 3.0
