from llmbox.app.engines.restart_policy import RestartBreaker, RestartLimits, RestartPolicy


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_five_in_a_minute_are_too_many():
    clock = Clock()
    deaths = RestartPolicy(RestartLimits(), clock)
    for _ in range(4):
        deaths.add()
        assert not deaths.too_many
        clock.now += 10
    deaths.add()
    assert deaths.too_many
    clock.now += 21  # the first is 61 s old
    assert not deaths.too_many


def test_the_pause_grows_and_ends():
    deaths = RestartPolicy(RestartLimits(pauses=(0.0, 0.5, 1.0)), Clock())
    pauses = []
    for _ in range(5):
        deaths.add()
        pauses.append(deaths.pause)
    assert pauses == [0.0, 0.5, 1.0, 1.0, 1.0]


def test_explained_deaths_do_not_count_but_not_for_ever():
    clock = Clock()
    deaths = RestartPolicy(RestartLimits(max_forgiven=2), clock)
    for _ in range(2):
        deaths.add()
        deaths.forgive(0)
        assert len(deaths) == 0
    deaths.add()
    deaths.forgive(0)
    assert len(deaths) == 1
    clock.now += 61
    deaths.add()
    deaths.forgive(0)
    assert len(deaths) == 0


def test_any_number_is_explained_while_other_requests_finish():
    deaths = RestartPolicy(RestartLimits(max_forgiven=2), Clock())
    for _ in range(9):
        deaths.note_finish()
        for _ in range(2):
            deaths.add()
            deaths.forgive(0)
            assert len(deaths) == 0


def test_as_many_more_are_explained_as_passed_a_trial():
    deaths = RestartPolicy(RestartLimits(max_forgiven=2), Clock())
    for _ in range(5):
        deaths.add()
        deaths.forgive(3)
        assert len(deaths) == 0
    deaths.add()
    deaths.forgive(3)
    assert len(deaths) == 1


def test_each_failed_try_doubles_the_cooldown_up_to_a_bound():
    clock = Clock()
    breaker = RestartBreaker(RestartLimits(cooldown=30.0, longest_cooldown=200.0), clock)
    assert breaker.seconds_to_try is None
    waits = []
    for _ in range(100):
        waits.append(breaker.open())
        assert breaker.seconds_to_try == waits[-1]
        clock.now += waits[-1]
    assert waits == [30.0, 60.0, 120.0] + [200.0] * 97


def test_an_engine_that_held_out_for_long_begins_anew():
    clock = Clock()
    breaker = RestartBreaker(RestartLimits(cooldown=30.0, longest_cooldown=200.0), clock)
    assert [breaker.open(), breaker.open()] == [30.0, 60.0]
    breaker.close()
    assert breaker.seconds_to_try is None
    clock.now += 200.0
    assert breaker.open() == 120.0, "it was ready, but not for long"
    breaker.close()
    clock.now += 200.1
    assert breaker.open() == 30.0


def test_no_cooldown_means_no_try():
    breaker = RestartBreaker(RestartLimits(cooldown=0.0), Clock())
    assert breaker.open() is None
    assert breaker.seconds_to_try is None
