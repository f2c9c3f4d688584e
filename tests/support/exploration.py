"""Every order of events of a few small requests, over engine, scheduler and block pool as they are.

From each state that can be reached, each event is tried: a request arrives, one is aborted, one is preempted,
a step runs. States that differ in the numbers of blocks alone are one state, and are kept as digests. After
each event `check()` proves the bookkeeping, and the fake runner proves what every slot holds.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from llmbox.engine.core.request import Request
from support.fake_runner import expected_output
from support.scheduling import FakeEngine

Event = tuple[str, str]
"""(`add`, `abort`, `preempt` or `step`, id of the request)."""
Path = tuple["Path", Event] | None
"""Events that lead to a state: those before, and the last one."""


@dataclass(slots=True)
class Exploration:
    """Result: number of states and transitions, and the most steps that end all requests of a state."""

    states: int
    transitions: int
    longest: int


def events_of(path: Path) -> list[Event]:
    events = []
    while path is not None:
        path, event = path
        events.append(event)
    return events[::-1]


class Explorer:
    """Depth-first search over the states of one small engine."""

    def __init__(
        self, requests: Mapping[str, Request], *, aborts: int, preemptions: int, **config: Any
    ) -> None:
        """`aborts`, `preemptions`: most of them on one path. `config`: of `FakeEngine`."""
        self._requests = requests
        self._limits = {"abort": aborts, "preempt": preemptions}
        self._config = config
        self._engine = FakeEngine(**config)
        self._path: Path = None
        self._used = dict.fromkeys(self._limits, 0)

    def run(self) -> Exploration:
        """Visit every state. Raises AssertionError with the events that lead to what is wrong."""
        seen: set[bytes] = set()
        after_step: dict[bytes, bytes] = {}
        done: set[bytes] = set()
        transitions = 0
        todo: list[tuple[Path, bytes]] = [(None, b"")]
        while todo:
            path, before = todo.pop()
            try:
                self._go_to(path)
                state = self._digest()
                transitions += 1
                if path is not None and path[1][0] == "step":
                    after_step[before] = state
                if state in seen:
                    continue
                seen.add(state)
                self._check_answers()
                if not self._engine.scheduler.has_work:
                    done.add(state)
            except Exception as error:
                raise AssertionError(f"{error!r} after {events_of(path)}") from error
            todo += [((path, event), state) for event in self._events()]
        return Exploration(len(seen), transitions, _longest(seen, after_step, done))

    def _go_to(self, path: Path) -> None:
        """Bring the engine to the end of a path: from where it is, if that is the state before."""
        if path is None:
            return
        if path[0] is not self._path:
            self._engine = FakeEngine(**self._config)
            self._used = dict.fromkeys(self._limits, 0)
            for event in events_of(path[0]):
                self._apply(event)
        self._path = path
        self._apply(path[1])
        self._engine.scheduler.check()

    def _apply(self, event: Event) -> None:
        kind, name = event
        engine = self._engine
        if kind in self._used:
            self._used[kind] += 1
        if kind == "add":
            engine.add(self._requests[name])
        elif kind == "abort":
            engine.abort(name)
        elif kind == "preempt":
            engine.scheduler.active.preempt(engine.scheduler._requests[name])
        else:
            engine.runner.plans.clear()
            engine.step()
            assert engine.runner.plans, "a deadlock: work is left, but no step was scheduled"

    def _events(self) -> Iterator[Event]:
        """Yield what can happen now; the last one is tried first."""
        engine, scheduler = self._engine, self._engine.scheduler
        for name in self._requests:
            if name not in engine.answers:
                yield "add", name
        if self._used["abort"] < self._limits["abort"]:
            yield from (("abort", name) for name in scheduler._requests)
        if self._used["preempt"] < self._limits["preempt"]:
            yield from (("preempt", each.request_id) for each in scheduler.active.preemptible())
        if scheduler.has_work:
            yield "step", ""

    def _check_answers(self) -> None:
        scheduler = self._engine.scheduler
        for name, answer in self._engine.answers.items():
            request = self._requests[name]
            expected = expected_output(request.cache_namespace, request.prompt_ids, request.params)
            assert answer.token_ids == expected[: len(answer.token_ids)], f"{name} got {answer.token_ids}"
            assert (
                name in scheduler._requests or answer.finish_reason == "abort" or answer.token_ids == expected
            ), f"{name} ended early"
        if not scheduler.has_work:
            assert scheduler.pool.num_used == 0, "a block is leaked"

    def _digest(self) -> bytes:
        """Digest of all that later events depend on, whatever the numbers of the blocks are."""
        engine, scheduler, pool = self._engine, self._engine.scheduler, self._engine.scheduler.pool
        numbers: dict[int, int] = {}

        def name_of(block: int) -> int:
            return numbers.setdefault(block, len(numbers))

        present = [
            (
                name,
                name in scheduler._running,
                request.num_computed,
                request.num_output,
                request.preemptions,
                request.displacements,
                request.num_charged,
                request.num_protected,
                [name_of(block) for block in request.block_table],
            )
            for name, request in scheduler._requests.items()
        ]
        idle = [name_of(block) for block in pool._cache.idle]
        index = sorted((name_of(block), key) for block, key in pool._cache._hash_of.items())
        flows = [(band, [(f.tenant, f.tokens) for f in each]) for band, each in scheduler._flows.bands]
        aside = sorted(scheduler._waiting._standing_aside & scheduler._waiting._present.keys())
        order = list(scheduler._running)
        whole = (present, idle, index, flows, order, aside, sorted(engine.answers), scheduler._was_express)
        return blake2b(repr((whole, self._used)).encode(), digest_size=16).digest()


def _longest(seen: set[bytes], after_step: Mapping[bytes, bytes], done: set[bytes]) -> int:
    """Return the most steps that end every request of a state. Raises AssertionError for a round of steps."""
    steps = dict.fromkeys(done, 0)
    for first in seen:
        way, state = [], first
        while state not in steps:
            way.append(state)
            steps[state] = -1
            state = after_step[state]
        assert steps[state] >= 0, "steps go round without an end: requests starve"
        for number, each in enumerate(reversed(way), steps[state] + 1):
            steps[each] = number
    return max(steps.values())
