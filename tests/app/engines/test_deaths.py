from llmbox.app.engines.deaths import DeathLimits, Deaths


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_five_in_a_minute_are_too_many():
    clock = Clock()
    deaths = Deaths(DeathLimits(), clock)
    for _ in range(4):
        deaths.add()
        assert not deaths.too_many
        clock.now += 10
    deaths.add()
    assert deaths.too_many
    clock.now += 21  # the first is 61 s old
    assert not deaths.too_many


def test_the_pause_grows_and_ends():
    deaths = Deaths(DeathLimits(pauses=(0.0, 0.5, 1.0)), Clock())
    pauses = []
    for _ in range(5):
        deaths.add()
        pauses.append(deaths.pause)
    assert pauses == [0.0, 0.5, 1.0, 1.0, 1.0]


def test_explained_deaths_do_not_count_but_not_for_ever():
    clock = Clock()
    deaths = Deaths(DeathLimits(pardons=2), clock)
    for _ in range(2):
        deaths.add()
        deaths.explained()
        assert len(deaths) == 0
    deaths.add()
    deaths.explained()
    assert len(deaths) == 1
    clock.now += 61
    deaths.add()
    deaths.explained()
    assert len(deaths) == 0
