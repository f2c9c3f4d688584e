"""The rule that finds the guilty request, alone and in a simulated engine with random crashes."""

from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from llmbox.app.engines.poison_detector import PROVEN_TOKENS, PoisonDetector
from support.lanes import examples


def recalled_by_nobody(request: str) -> None:
    raise AssertionError(f"{request} is recalled")


def test_the_first_crash_resumes_everybody():
    trial = PoisonDetector(recalled_by_nobody)
    assert trial.record_crash(["a", "b", "c"]) is None
    assert trial.begin(["a", "b", "c"]) == ["a", "b", "c"]
    assert not trial.open


def on_trial(*requests: str, recall: Callable[[str], None] = recalled_by_nobody) -> PoisonDetector:
    """All were present at two crashes; the last one goes first."""
    trial = PoisonDetector(recall)
    for _ in range(2):
        assert trial.record_crash(requests) is None
    assert trial.begin(requests) == [requests[-1]]
    return trial


def test_after_the_second_crash_requests_are_tried_one_by_one():
    trial = on_trial("a", "b")
    assert trial.record_tokens("b", PROVEN_TOKENS - 1) == []
    assert trial.record_tokens("b", 1) == ["a"]
    assert trial.record_tokens("a", PROVEN_TOKENS) == []
    assert not trial.open


def test_who_dies_alone_is_guilty():
    trial = on_trial("a", "b")
    assert trial.record_crash(["b"]) == "b"
    assert trial.begin(["a"]) == ["a"]


def test_who_dies_in_company_is_tried_again_alone():
    trial = on_trial("a", "b", "c")
    trial.record_tokens("c", PROVEN_TOKENS)
    assert trial.on_trial == "b"
    assert trial.record_crash(["b", "c"]) is None
    assert trial.begin(["a", "b", "c"]) == ["b"]
    assert trial.record_crash(["b"]) == "b"
    assert trial.begin(["a", "c"]) == ["c"]


def test_who_passed_and_dies_later_is_found():
    """After one death in company each is tried alone: who passes is recalled before the next one is sent."""
    recalled: list[str] = []
    trial = on_trial("a", "b", "c", recall=recalled.append)
    trial.record_tokens("c", PROVEN_TOKENS)
    assert trial.record_crash(["b", "c"]) is None  # by c
    assert trial.narrowed
    assert trial.begin(["a", "b", "c"]) == ["b"]
    assert trial.record_tokens("b", PROVEN_TOKENS) == []
    assert recalled == ["b"]
    assert trial.record_tokens("b", 1) == []  # on its way when it was recalled
    assert trial.record_recall("b") == ["c"]
    assert trial.record_crash(["c"]) == "c"
    assert trial.begin(["a", "b"]) == ["a"]
    assert trial.record_tokens("a", PROVEN_TOKENS) == ["b"]
    assert recalled == ["b"]


def test_who_ends_before_it_is_given_back_is_over():
    trial = on_trial("a", "b", "c", recall=lambda _: None)
    trial.record_tokens("c", PROVEN_TOKENS)
    trial.record_crash(["b", "c"])
    assert trial.begin(["a", "b", "c"]) == ["b"]
    trial.record_tokens("b", PROVEN_TOKENS)
    assert trial.record_end("b") == ["c"]
    trial.record_tokens("c", PROVEN_TOKENS)
    trial.client_left("c")
    assert trial.record_end("c") == ["a"]
    assert trial.record_end("a") == []
    assert not trial.open


def test_those_seen_at_both_deaths_come_first():
    trial = PoisonDetector(recalled_by_nobody)
    trial.record_crash(["b"])
    trial.record_crash(["a", "b"])
    assert trial.begin(["a", "b"]) == ["b"]


def test_newcomers_wait_for_the_end_of_the_trial():
    trial = PoisonDetector(recalled_by_nobody)
    trial.record_crash(["a", "b"])
    trial.record_crash(["a", "b"])
    assert trial.quarantine_new("early")
    assert trial.begin(["a", "b", "early"]) == ["b"]
    assert trial.quarantine_new("late")
    assert trial.record_end("b") == ["a"]
    assert trial.record_tokens("a", PROVEN_TOKENS) == ["early", "late"]
    assert not trial.quarantine_new("next")


def test_a_death_from_outside_accuses_nobody():
    trial = on_trial("a", "b")
    trial.record_interruption()
    assert trial.begin(["a", "b"]) == ["b"]
    trial.record_tokens("b", PROVEN_TOKENS)
    trial.record_interruption()
    assert trial.begin(["a", "b"]) == ["b", "a"]


def test_one_that_left_stays_on_trial_until_the_engine_confirms():
    trial = on_trial("a", "b")
    trial.client_left("b")
    assert trial.record_crash(["b"]) == "b"
    assert trial.begin(["a"]) == ["a"]


def test_one_that_left_before_its_trial_is_not_tried():
    trial = on_trial("a", "b", "c")
    trial.client_left("b")
    assert trial.record_tokens("c", PROVEN_TOKENS) == ["a"]


def test_one_that_left_counts_as_present():
    """The neighbor must not look as if it had been alone."""
    trial = PoisonDetector(recalled_by_nobody)
    trial.record_crash(["poison", "a"])
    trial.client_left("poison")
    assert trial.record_crash(["a", "poison"]) is None
    assert trial.begin(["a"]) == ["a"]
    assert trial.on_trial == "a"


def test_a_request_alone_at_two_crashes_is_guilty():
    trial = PoisonDetector(recalled_by_nobody)
    assert trial.record_crash(["a"]) is None
    assert trial.record_crash(["a"]) == "a"


def test_old_crashes_are_forgotten():
    trial = PoisonDetector(recalled_by_nobody)
    trial.record_crash(["a"])
    trial.forget()
    assert trial.record_crash(["a"]) is None


class Simulation:
    """An engine that computes a token a step for everyone inside, and dies of poison at a given token."""

    def __init__(self, poison: dict[str, int], requests: list[str]) -> None:
        self.trial = PoisonDetector(self.recall)
        self.recalled: list[str] = []
        self.poison = poison
        self.tokens = dict.fromkeys(requests, 0)
        self.leaving: dict[str, int] = {}
        self.failed: list[str] = []
        self.inside: list[str] = []
        self.deaths = self.unexplained = 0

    def recall(self, request: str) -> None:
        """The engine gives it back with its next step, if it lives to do so."""
        self.recalled.append(request)

    def send(self, requests: list[str]) -> None:
        assert not set(requests) & set(self.inside), "handed over twice"
        assert set(requests) <= set(self.tokens), "handed over without being open"
        self.inside += requests

    def arrive(self, request: str) -> None:
        self.tokens[request] = 0
        if not self.trial.quarantine_new(request):
            self.send([request])

    def restart(self) -> None:
        self.inside, self.recalled = [], []
        self.send(self.trial.begin(list(self.tokens)))

    def step(self) -> None:
        if any(self.poison.get(r) == n for r, n in (self.tokens | self.leaving).items() if r in self.inside):
            self.deaths += 1
            self.unexplained += 1
            guilty = self.trial.record_crash(self.inside)
            if guilty is not None:
                self.failed.append(guilty)
                self.unexplained = 0
                self.tokens.pop(guilty, None)
                self.trial.client_left(guilty)
            self.leaving.clear()
            self.restart()
            return
        computed = [r for r in self.inside if r in self.tokens]
        for request in list(self.leaving):
            del self.leaving[request]
            self.inside.remove(request)
            self.send(self.trial.record_end(request))
        recalled, self.recalled = self.recalled, []
        for request in recalled:
            self.inside.remove(request)
            computed.remove(request)
            self.send(self.trial.record_recall(request))
        for request in computed:
            self.tokens[request] += 1
            self.send(self.trial.record_tokens(request, 1))

    def cancel(self, request: str) -> None:
        """The engine confirms with its next step, if it lives to do so."""
        tokens = self.tokens.pop(request)
        self.trial.client_left(request)
        if request in self.inside:
            self.leaving[request] = tokens

    def kill(self) -> None:
        self.trial.record_interruption()
        self.leaving.clear()
        self.restart()


@settings(max_examples=examples(300))
@given(
    requests=st.integers(1, 12),
    poison=st.dictionaries(st.integers(0, 11), st.integers(0, 6), max_size=8),
    events=st.lists(st.sampled_from(["step", "step", "step", "kill", "arrive", "cancel"]), max_size=60),
    data=st.data(),
)
def test_only_the_guilty_fail_and_everybody_else_goes_on(requests, poison, events, data):
    names = [f"r{i}" for i in range(requests)]
    simulation = Simulation({f"r{i}": at for i, at in poison.items()}, names)
    simulation.restart()
    for number, event in enumerate(events):
        match event:
            case "kill":
                simulation.kill()
            case "arrive":
                simulation.arrive(f"n{number}")
            case "cancel" if simulation.tokens:
                simulation.cancel(data.draw(st.sampled_from(sorted(simulation.tokens))))
            case _:
                simulation.step()
    before = dict(simulation.tokens)
    for _ in range(150):
        simulation.step()
        assert simulation.unexplained < 5 or "cancel" in events, "a model is given up"
    assert set(simulation.failed) <= set(simulation.poison)
    survivors = set(before) - set(simulation.poison)
    assert survivors <= set(simulation.tokens)
    assert all(simulation.tokens[r] > before[r] for r in survivors)
    assert set(simulation.inside) == set(simulation.tokens)
    assert simulation.deaths <= 4 * len(poison)
