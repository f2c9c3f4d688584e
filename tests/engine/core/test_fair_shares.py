"""Fair shares between callers and classes of priority, by a clock that the test turns. No tensors."""

from collections import Counter
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmbox.engine.core.kv_cache.manager import MAX_PREEMPTIONS
from llmbox.engine.core.preemption import MAX_DISPLACEMENTS
from llmbox.engine.core.request_queue import LIFTED_TOKENS, LOWEST_BAND, Flows, band_of
from llmbox.engine.core.scheduler import Scheduler
from llmbox.engine.core.step import ScheduledRequest
from support.clock import Clock
from support.lanes import examples
from support.scheduling import make_request, make_scheduler, play_model, scheduled, step

SIZES = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 30)), min_size=1, max_size=6)
"""Of a caller's requests, again and again: tokens of prompt and answer."""


class Callers:
    """Callers that always have requests waiting; counts the tokens computed for each, once."""

    def __init__(
        self, scheduler: Scheduler, sizes: dict[str, list[tuple[int, int]]], backlog: int = 3
    ) -> None:
        self.scheduler = scheduler
        self.sizes = sizes
        self.backlog = 3
        self.tokens: Counter[str] = Counter()
        self.computed: dict[str, int] = {}
        self.numbers = {tenant: count() for tenant in sizes}

    def step(self) -> None:
        present = Counter(request.tenant for request in self.scheduler._requests.values())
        for tenant, sizes in self.sizes.items():
            for _ in range(self.backlog - present[tenant]):
                number = next(self.numbers[tenant])
                prompt, answer = sizes[number % len(sizes)]
                request = make_request(f"{tenant}{number}", prompt, tenant=tenant, max_tokens=answer)
                self.scheduler.add(request)
        plan = self.scheduler.schedule()
        for row in plan.rows:
            known = self.computed.get(row.request.request_id, 0)
            self.tokens[row.request.tenant] += max(0, row.end - max(row.start, known))
            self.computed[row.request.request_id] = max(row.end, known)
        play_model(self.scheduler, plan)
        self.scheduler.check()


@settings(max_examples=examples(30))
@given(
    sizes=st.lists(SIZES, min_size=2, max_size=4),
    token_budget=st.integers(4, 40),
    max_running=st.integers(1, 4),
    cache=st.booleans(),
)
def test_equal_callers_get_equal_tokens_whatever_they_ask(sizes, token_budget, max_running, cache):
    """In the long run: the difference stays below what may be under way, however long that is."""
    scheduler = make_scheduler(token_budget=token_budget, max_running=max_running, cache=cache)
    callers = Callers(scheduler, {f"t{number}-": each for number, each in enumerate(sizes)})
    under_way = 2 * max_running * 90 + token_budget
    for steps in (300, 600):
        for _ in range(steps):
            callers.step()
        shares = [callers.tokens[tenant] for tenant in callers.sizes]
        assert max(shares) - min(shares) <= under_way


def flood(scheduler: Scheduler, number: int, *, prompt: int = 8, answer: int = 200, **fields: object) -> None:
    for each in range(number):
        scheduler.add(
            make_request(f"flood{each}", prompt, max_tokens=answer, **{"tenant": "flood", **fields})
        )


def steps_to_first_token(scheduler: Scheduler, request, most: int = 1000) -> int:
    scheduler.add(request)
    for number in range(1, most):
        step(scheduler)
        if request.num_output:
            return number
    raise AssertionError("no token")


@pytest.mark.parametrize("tenant", ["quiet", "flood"])
def test_a_quiet_caller_does_not_wait_for_anothers_long_answers(tenant: str):
    """As the next request of the flood does. It waits until the other is ahead by what taking a place
    costs."""
    scheduler = make_scheduler(num_blocks=2000, max_running=4)
    flood(scheduler, 16)
    for _ in range(30):
        step(scheduler)
    taken = steps_to_first_token(scheduler, make_request("small", 8, tenant=tenant))
    assert (taken <= 4) if tenant == "quiet" else (taken > 150)


def test_a_small_prompt_does_not_wait_for_anothers_long_ones():
    scheduler = make_scheduler(num_blocks=10_000, token_budget=16)
    flood(scheduler, 6, prompt=1000)
    step(scheduler)
    assert steps_to_first_token(scheduler, make_request("small", 8, tenant="quiet")) == 1


def test_a_flood_that_fills_the_kv_pool_gives_way_too():
    scheduler = make_scheduler(num_blocks=40, max_running=16)
    flood(scheduler, 20, prompt=16, answer=60)
    step(scheduler)
    small = make_request("small", 30, tenant="quiet", max_tokens=2)
    assert steps_to_first_token(scheduler, small) == 1


def test_places_are_taken_from_those_beyond_their_share_only_and_not_for_ever():
    scheduler = make_scheduler(num_blocks=2000, max_running=4)
    flood(scheduler, 4, answer=500)
    step(scheduler)
    for number in range(3 * MAX_DISPLACEMENTS + 4):
        scheduler.add(make_request(f"quiet{number}", 4, tenant="quiet", max_tokens=30))
        for _ in range(32):
            step(scheduler)
    flooding = [request for request in scheduler._requests.values() if request.tenant == "flood"]
    assert max(request.displacements for request in flooding) <= MAX_DISPLACEMENTS
    assert scheduler.active.preemptions <= 4 * MAX_DISPLACEMENTS


def test_who_comes_back_has_saved_nothing_and_owes_what_it_had():
    scheduler = make_scheduler(num_blocks=2000, max_running=4, token_budget=8)
    callers = Callers(scheduler, {"a": [(20, 4)], "b": [(20, 4)]})
    for _ in range(100):
        callers.step()
    del callers.sizes["b"]
    for _ in range(200):
        callers.step()
    before = dict(callers.tokens)
    callers.sizes["b"] = [(20, 4)]
    for _ in range(100):
        callers.step()
    gained = [callers.tokens[tenant] - before[tenant] for tenant in "ab"]
    assert abs(gained[0] - gained[1]) < 60


# ---------------------------------------------------------------------- classes of priority


def test_a_premium_request_takes_a_place_at_once():
    scheduler = make_scheduler(num_blocks=2000, max_running=4)
    flood(scheduler, 50)
    for _ in range(10):
        step(scheduler)
    for number in range(5):
        request = make_request(f"premium{number}", 8, tenant="vip", priority=-1, max_tokens=50)
        taken = steps_to_first_token(scheduler, request)
        assert taken == 1 if number < 4 else taken > 1, "its own class waits"
        if number == 3:
            assert {each.tenant for each in scheduler.running} == {"vip"}


def test_a_premium_prompt_has_a_step_without_the_streams_of_others():
    """And those have the next one, however many such prompts there are."""
    scheduler = make_scheduler(num_blocks=2000, max_running=4, token_budget=16)
    flood(scheduler, 2)
    for _ in range(3):
        step(scheduler)
    scheduler.add(make_request("long", 100, tenant="vip", priority=-1, max_tokens=4))
    found = [step(scheduler) for _ in range(4)]
    assert found == [{"long": 16}, {"flood0": 1, "flood1": 1, "long": 14}] * 2


def test_a_premium_request_takes_blocks_of_others():
    scheduler = make_scheduler(num_blocks=40, max_running=16)
    flood(scheduler, 20, prompt=16, answer=60)
    step(scheduler)
    request = make_request("premium", 120, tenant="flood", priority=-1, max_tokens=2)
    assert steps_to_first_token(scheduler, request, most=4) <= 2


def test_background_requests_give_way_to_all_others():
    scheduler = make_scheduler(num_blocks=2000, max_running=4)
    flood(scheduler, 8, priority=1000)
    step(scheduler)
    for number in range(4):
        scheduler.add(make_request(f"standard{number}", 8, tenant="flood", max_tokens=9))
    assert [name for name in step(scheduler) if name.startswith("standard")] == [
        f"standard{number}" for number in range(4)
    ]
    assert scheduler.active.preemptions == 4


def test_a_displaced_request_goes_on_with_its_tokens():
    scheduler = make_scheduler(num_blocks=2000, max_running=1)
    flood(scheduler, 1, answer=20)
    for _ in range(5):
        step(scheduler, token_id=3)
    (request,) = scheduler.running
    scheduler.add(make_request("premium", 8, priority=-1, max_tokens=2))
    assert list(step(scheduler)) == ["premium"]
    assert (request.num_output, request.displacements, request.preemptions) == (5, 1, 0)
    while scheduler.has_work:
        step(scheduler, token_id=7)
    assert request.token_ids[8:] == [3] * 5 + [7] * 15


def test_standard_requests_progress_under_any_load_of_premium_ones():
    """One for each ageing period, and what is lifted is not taken back before it got something."""
    clock = Clock()
    scheduler = make_scheduler(num_blocks=2000, max_running=2, clock=clock, ageing_seconds=10.0)
    standard = [make_request(f"standard{number}", 8, max_tokens=LIFTED_TOKENS) for number in range(3)]
    for request in standard:
        scheduler.add(request)
    premium = Callers(scheduler, {})
    ended: list[float] = []
    numbers = count()
    for _ in range(1200):
        clock.now += 0.05
        while sum(request.priority < 0 for request in scheduler._requests.values()) < 6:
            number = next(numbers)
            scheduler.add(make_request(f"p{number}", 8, tenant="vip", priority=-1, max_tokens=20))
        premium.step()
        done = [request for request in standard if request.num_output == LIFTED_TOKENS]
        ended += [clock.now - 1000.0] * (len(done) - len(ended))
    assert len(ended) == 3
    assert [round(at / 10) for at in ended] == [1, 2, 3]


def test_a_request_is_protected_where_its_age_was_the_reason_to_serve_it():
    """Not where it was first in line for a moment, and is served later because nobody else waits."""
    clock = Clock()
    scheduler = make_scheduler(max_running=1, clock=clock, ageing_seconds=10.0)
    scheduler.add(make_request("premium", 8, priority=-1, max_tokens=3))
    step(scheduler)
    scheduler.add(make_request("standard", 8, max_tokens=LIFTED_TOKENS))
    clock.now += 30.0
    scheduler.add(make_request("leaves", 8, priority=-1))
    step(scheduler)
    scheduler.abort("leaves")
    while "standard" not in step(scheduler):
        assert scheduler.has_work
    scheduler.add(make_request("urgent", 8, priority=-1, max_tokens=3))
    assert list(step(scheduler)) == ["urgent"]


def test_a_better_class_keeps_its_share_while_a_lower_one_ages():
    """Of ten thousand waiting requests one is lifted an ageing period, and not each that is old."""
    clock = Clock()
    scheduler = make_scheduler(num_blocks=2000, max_running=4, clock=clock, ageing_seconds=10.0)
    flood(scheduler, 200, answer=50)
    clock.now += 1000
    waits = []
    for number in range(40):
        clock.now += 0.2
        request = make_request(f"premium{number}", 8, tenant="vip", priority=-1, max_tokens=3)
        waits.append(steps_to_first_token(scheduler, request))
        while request.request_id in scheduler._requests:
            step(scheduler)
    assert sorted(waits)[-2] == 1


def test_forks_share_their_callers_flow():
    scheduler = make_scheduler(max_running=4)
    scheduler.add(make_request("a", 8, tenant="t"))
    scheduler.add(make_request("b", [*scheduler._requests["a"].prompt_ids], tenant="t", fork_of="a"))
    assert scheduler._requests["a"].flow is scheduler._requests["b"].flow
    while scheduler.has_work:
        step(scheduler)
    assert list(scheduler._flows.bands) == []


def test_a_large_request_that_has_starved_is_overtaken_by_nobody():
    """While better bands keep coming, the blocks that it needs would never be free at once."""
    clock = Clock()
    scheduler = make_scheduler(
        num_blocks=8, max_running=4, token_budget=32, context=32, ageing_seconds=1.0, clock=clock, cache=False
    )
    large = make_request("large", 24, priority=1, max_tokens=8)
    scheduler.add(make_request("first", 4, max_tokens=8))
    step(scheduler)
    scheduler.add(large)
    for number in range(60):
        clock.now += 0.5
        for twin in "ab":
            scheduler.add(make_request(f"small{number}{twin}", 6, max_tokens=3))
        step(scheduler)
        if large.scheduled_at is not None:
            break
    assert large.scheduled_at is not None
    assert clock.now - large.arrived_at > 8.0, "it did not starve: the test says nothing"


def entered(*tenants: str) -> tuple[Flows, list]:
    flows, requests = Flows(), [make_request(tenant, 8, tenant=tenant) for tenant in tenants]
    for request in requests:
        flows.enter(request)
    return flows, requests


def test_who_leaves_for_a_moment_keeps_a_debt_and_who_was_away_has_no_credit():
    flows, (ann, bob) = entered("ann", "bob")
    flows.pay(ann, 100)
    flows.leave(ann)
    again = make_request("again", 8, tenant="ann")
    flows.enter(again)
    assert again.flow.tokens == 100
    flows.pay(bob, 200)
    late = make_request("late", 8, tenant="cat")
    flows.enter(late)
    assert late.flow.tokens == 100


def test_tokens_are_charged_once_however_often_they_are_computed():
    flows, (ann, _) = entered("ann", "bob")
    for start, size in ((0, 5), (0, 5), (3, 5), (8, 1)):
        flows.charge([ScheduledRequest(ann, start, size, samples=False)])
    assert ann.flow.tokens == 9


def test_priorities_beyond_the_last_bands_are_those():
    priorities = (-1000, -LOWEST_BAND, -1, 0, LOWEST_BAND, 1000)
    bands = [band_of(make_request(priority=priority)) for priority in priorities]
    assert bands == [-LOWEST_BAND, -LOWEST_BAND, -1, 0, LOWEST_BAND, LOWEST_BAND]


def test_who_runs_something_displaces_nobody_of_his_band():
    scheduler = make_scheduler(max_running=4)
    scheduler.add(make_request("a0", 4, tenant="ann", max_tokens=50))
    for number in range(3):
        scheduler.add(make_request(f"b{number}", 40, tenant="bob", max_tokens=50))
    for _ in range(6):
        step(scheduler)
    assert scheduler.num_running == 4
    scheduler.add(make_request("a1", 4, tenant="ann"))
    step(scheduler)
    assert scheduler.active.preemptions == 0


def test_a_pinned_request_is_displaced_by_nobody():
    scheduler = make_scheduler(max_running=1)
    pinned = make_request("pinned", 4, priority=5)
    pinned.preemptions = MAX_PREEMPTIONS
    scheduler.add(pinned)
    step(scheduler)
    scheduler.add(make_request("premium", 4, priority=-5))
    step(scheduler)
    assert "pinned" in scheduled(scheduler.schedule())
