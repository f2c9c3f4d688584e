"""Who leaves for whom: the decisions alone."""

import random

import pytest

from llmbox.app.engines.room import NoRoom, Resident, Room, expired, make_room, next_look


def model(name: str, size: int, idle_since: float = 0.0, **facts) -> Resident:
    return Resident(name, size, **{"busy": False, "pinned": False, "idle_since": idle_since, **facts})


@pytest.mark.parametrize(
    ("need", "residents", "wanted"),
    [
        (100, [], Room((), 100)),
        (60, [model("a", 40)], Room((), 60)),
        (61, [model("a", 40)], Room(("a",), 100)),
        (40, [model("new", 40, 9), model("old", 40, 1)], Room(("old",), 60)),
        (80, [model("new", 40, 9), model("old", 40, 1)], Room(("old", "new"), 100)),
        (40, [model("old", 40, busy=True), model("new", 40, 9)], Room(("new",), 60)),
        (40, [model("old", 40, pinned=True), model("new", 40, 9)], Room(("new",), 60)),
        # The older of the two need not leave when the one after it frees enough.
        (70, [model("small", 10, 1), model("large", 70, 2)], Room(("large",), 90)),
        (70, [model("a", 80, busy=True)], NoRoom(70, 20, ("a",))),
        (70, [model("a", 40, busy=True), model("b", 40, pinned=True)], NoRoom(70, 20, ("a", "b"))),
        (70, [model("a", 40, busy=True), model("b", 40)], NoRoom(70, 60, ("a",))),
        (101, [], NoRoom(101, 100, ())),
        (101, [model("a", 50, busy=True)], NoRoom(101, 50, ())),
    ],
)
def test_one_decision(need: int, residents: list[Resident], wanted: Room | NoRoom):
    assert make_room(need, 100, residents) == wanted


@pytest.mark.parametrize("seed", range(200))
def test_whatever_is_there(seed: int):
    draw = random.Random(seed)
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
    outcome = make_room(need, budget, residents)
    if isinstance(outcome, NoRoom):
        stuck = sum(each.size for each in residents if each.busy or each.pinned)
        assert budget - stuck < need
        return
    leaving = [by_name[name] for name in outcome.evict]
    assert not any(each.busy or each.pinned for each in leaving)
    free = budget - sum(each.size for each in residents if each not in leaving)
    assert free == outcome.free >= need
    assert all(free - each.size < need for each in leaving)


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
