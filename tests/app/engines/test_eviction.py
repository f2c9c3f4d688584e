"""Who leaves for whom: the decisions alone."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmbox.app.engines.eviction import (
    HOST,
    AllocationFailure,
    MemoryAllocation,
    MemoryRequest,
    ResidentModel,
    choose_placement,
    expired,
    next_look,
    plan_evictions,
)


def model(name: str, takes: int | dict[int, int], idle_since: float = 0.0, **facts) -> ResidentModel:
    takes = takes if isinstance(takes, dict) else {0: takes}
    return ResidentModel(name, takes, **{"busy": False, "pinned": False, "idle_since": idle_since, **facts})


def room(evict: tuple[str, ...], free: int, *places: int) -> MemoryAllocation:
    return MemoryAllocation(places or (0,), evict, free)


def wish(need: int, *places: int, want: int | None = None) -> MemoryRequest:
    return MemoryRequest(places or (0,), need, want or need)


@pytest.mark.parametrize(
    ("need", "residents", "wanted"),
    [
        (100, [], room((), 100)),
        (60, [model("a", 40)], room((), 60)),
        (61, [model("a", 40)], room(("a",), 100)),
        (40, [model("new", 40, 9), model("old", 40, 1)], room(("old",), 60)),
        (80, [model("new", 40, 9), model("old", 40, 1)], room(("old", "new"), 100)),
        (40, [model("old", 40, busy=True), model("new", 40, 9)], room(("new",), 60)),
        (40, [model("old", 40, pinned=True), model("new", 40, 9)], room(("new",), 60)),
        # The older of the two need not leave when the one after it frees enough.
        (70, [model("small", 10, 1), model("large", 70, 2)], room(("large",), 90)),
        (70, [model("a", 80, busy=True)], AllocationFailure(70, 20, ("a",))),
        (70, [model("a", 40, busy=True), model("b", 40, pinned=True)], AllocationFailure(70, 20, ("a", "b"))),
        (70, [model("a", 40, busy=True), model("b", 40)], AllocationFailure(70, 60, ("a",))),
        (101, [], AllocationFailure(101, 100, ())),
        (101, [model("a", 50, busy=True)], AllocationFailure(101, 50, ())),
    ],
)
def test_one_decision(
    need: int, residents: list[ResidentModel], wanted: MemoryAllocation | AllocationFailure
):
    assert plan_evictions(wish(need), [100], residents) == wanted


@pytest.mark.parametrize(
    ("residents", "wanted"),
    [
        ([model("cpu", {HOST: 20})], room((), 100)),
        ([model("cpu", {HOST: 21})], room(("cpu",), 100)),
        # Both of what is needed are freed, by no more models than that takes.
        ([model("card", 80, 1), model("both", {0: 20, HOST: 50}, 2)], room(("card", "both"), 100)),
        ([model("tier", {0: 20, HOST: 50}, busy=True)], AllocationFailure(80, 50, ("tier",), of_host=True)),
        ([model("card", 60, busy=True)], AllocationFailure(50, 40, ("card",))),
    ],
)
def test_main_memory_beside_a_gpu_is_freed_too(
    residents: list[ResidentModel], wanted: MemoryAllocation | AllocationFailure
):
    needs = MemoryRequest((0,), 50, 50, host=80, host_want=80)
    assert plan_evictions(needs, {0: 100, HOST: 100}, residents) == wanted


def test_without_need_of_it_main_memory_moves_nobody():
    others = [model("cpu", {HOST: 100}), model("tier", {0: 20, HOST: 50})]
    assert plan_evictions(wish(80), {0: 100, HOST: 100}, others) == room((), 80)


def test_whatever_is_there():
    for seed in range(200):
        try:
            check_draw(random.Random(seed))
        except AssertionError as error:
            error.add_note(f"seed {seed}")
            raise


def check_draw(draw: random.Random):
    residents = [
        model(
            str(n),
            draw.randint(1, 40),
            draw.random(),
            busy=draw.random() < 0.3,
            pinned=draw.random() < 0.2,
        )
        for n in range(draw.randint(0, 6))
    ]
    need, budget = draw.randint(1, 120), 100
    by_name = {each.name: each for each in residents}
    outcome = plan_evictions(wish(need), [budget], residents)
    if isinstance(outcome, AllocationFailure):
        stuck = sum(each.size for each in residents if each.busy or each.pinned)
        assert budget - stuck < need
        return
    leaving = [by_name[name] for name in outcome.evict]
    assert not any(each.busy or each.pinned for each in leaving)
    free = budget - sum(each.size for each in residents if each not in leaving)
    assert free == outcome.free >= need
    assert all(free - each.size < need for each in leaving)


@pytest.mark.parametrize(
    ("wishes", "residents", "wanted"),
    [
        # The first that is free; one that has room enough only for the least comes after one that has more.
        ([wish(60, 0), wish(60, 1)], [], room((), 100, 0)),
        ([wish(60, 0), wish(60, 1)], [model("a", {0: 50})], room((), 100, 1)),
        ([wish(30, 0, want=80), wish(30, 1, want=80)], [model("a", {0: 50})], room((), 100, 1)),
        ([wish(30, 0, want=80)], [model("a", {0: 50})], room((), 50, 0)),
        # What stands on one GPU frees nothing on another.
        ([wish(60, 1)], [model("a", {0: 90}, 1), model("b", {1: 90}, 9)], room(("b",), 100, 1)),
        (
            [wish(60, 1)],
            [model("a", {0: 90}), model("b", {1: 90}, busy=True)],
            AllocationFailure(60, 10, ("b",)),
        ),
        # Where somebody has to leave, it is who was not used for longest.
        ([wish(60, 0), wish(60, 1)], [model("a", {0: 90}, 9), model("b", {1: 90}, 1)], room(("b",), 100, 1)),
        # A model on two GPUs takes from both, and gives back to both.
        ([wish(40, 0, 1)], [model("a", {0: 70}, 1), model("b", {1: 70}, 2)], room(("a", "b"), 100, 0, 1)),
        ([wish(40, 0, 1)], [model("a", {1: 70})], room(("a",), 100, 0, 1)),
        ([wish(40, 0, 1), wish(40, 2, 3)], [model("a", {1: 70})], room((), 100, 2, 3)),
        ([wish(40, 0)], [model("both", {0: 70, 1: 70})], room(("both",), 100, 0)),
        ([wish(101, 0), wish(101, 1)], [model("a", {0: 5}, busy=True)], AllocationFailure(101, 100, ())),
    ],
)
def test_gpus_are_ledgers_of_their_own(wishes, residents, wanted):
    assert choose_placement(wishes, [100] * 4, residents) == wanted


@st.composite
def crowds(draw):
    gpus = draw(st.integers(1, 4))
    sets = st.sets(st.integers(0, gpus - 1), min_size=1)
    residents = [
        model(
            f"m{number}",
            dict.fromkeys(draw(sets), draw(st.integers(1, 60))),
            draw(st.floats(0, 9)),
            busy=draw(st.booleans()),
            pinned=draw(st.booleans()),
        )
        for number in range(draw(st.integers(0, 6)))
    ]
    need = draw(st.integers(1, 120))
    wishes = [wish(need, *draw(sets), want=need + 20) for _ in range(draw(st.integers(1, 4)))]
    return wishes, [draw(st.integers(50, 150)) for _ in range(gpus)], residents


@given(crowds())
def test_no_gpu_is_ever_promised_twice(crowd):
    wishes, budgets, residents = crowd
    found = choose_placement(wishes, budgets, residents)

    def free(place, gone=()):
        return budgets[place] - sum(r.takes.get(place, 0) for r in residents if r.name not in gone)

    def stuck(place):
        return sum(r.takes.get(place, 0) for r in residents if r.busy or r.pinned)

    if isinstance(found, AllocationFailure):
        assert all(any(budgets[p] - stuck(p) < each.need for p in each.places) for each in wishes)
        return
    chosen = next(each for each in wishes if each.places == found.places)
    leaving = [each for each in residents if each.name in found.evict]
    assert not any(each.busy or each.pinned for each in leaving)
    assert min(free(place, found.evict) for place in found.places) == found.free >= chosen.need
    for name in found.evict:  # nobody leaves who could have stayed
        others = set(found.evict) - {name}
        assert any(free(place, others) < chosen.need for place in found.places)
    if found.evict:
        assert all(any(free(p) < each.need for p in each.places) for each in wishes)


def test_time_to_live():
    residents = [
        model("kept", 1, 0.0),
        model("soon", 1, 5.0, ttl=10.0),
        model("later", 1, 8.0, ttl=10.0),
        model("pinned", 1, 0.0, ttl=1.0, pinned=True),
        model("busy", 1, 0.0, ttl=1.0, busy=True),
    ]
    assert expired(14.9, residents) == []
    assert expired(15.0, residents) == ["soon"]
    assert expired(99.0, residents) == ["soon", "later"]
    assert next_look(9.0, residents[:4]) == 15.0
    assert next_look(9.0, residents) == 10.0
    assert next_look(9.0, residents[:1]) is None
