"""Hypothesis drives the engine through anything that can happen to it, in any order.

After each rule `check()` proves the bookkeeping; in each step the fake runner proves that every slot read
holds the right prefix; at the end every sequence must equal the one its request gives when served alone.
"""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from llmbox.engine.core.kv_cache.manager import MAX_PREEMPTIONS
from llmbox.engine.core.kv_cache.state_manager import pool_blocks
from support.fake_runner import RunnerError, expected_output
from support.lanes import examples
from support.scheduling import FakeEngine, make_request

PREFIXES = ([], [1] * 4, [1] * 8, [1] * 4 + [2] * 5)  # so that prompts meet in the cache
PIPELINES = ((1, 0), (1, 1), (2, 1), (3, 2), (2, 2), (3, 3))
"""(stages, depth): steps in turn, one ahead; as many as there are stages; and one more than those."""

has_work = precondition(lambda self: self.engine.engine.has_work)


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        slots=st.integers(32, 72),
        block_size=st.sampled_from([4, 3, 1]),
        config=st.fixed_dictionaries(
            {
                "cache": st.booleans(),
                "chunked_prefill": st.booleans(),
                "batching": st.sampled_from(["continuous"] * 4 + ["static"]),
                "token_budget": st.integers(4, 20),
                "max_running": st.integers(2, 4),
                "premium_share": st.sampled_from([0.0, 0.25]),
                "watermark": st.sampled_from([0.0, 0.2]),
            }
        ),
        pipeline=st.sampled_from(PIPELINES),
        draft_rows=st.sampled_from([0, 3, 9, 40]),
        window=st.sampled_from([0, 0, 1, 5]),
        state_slots=st.sampled_from([0, 0, 2, 9]),
    )
    def start(self, slots, block_size, config, pipeline, draft_rows, window, state_slots):
        stages, depth = pipeline
        config |= {"draft_rows": draft_rows, "state_slots": state_slots}
        if window and config["chunked_prefill"] and config["batching"] == "continuous":
            step = max(config["token_budget"], config["max_running"], draft_rows)
            blocks = pool_blocks(window, block_size, config["max_running"], step)
            config |= {"window": window, "window_blocks": blocks}
        sizes = {"num_blocks": slots // block_size, "block_size": block_size, "context": 60}
        self.numbers = {**sizes, "stages": stages, "depth": depth, **config}
        self.engine = FakeEngine(**self.numbers)
        self.asked = {}

    @rule(
        prefix=st.sampled_from(PREFIXES),
        tail=st.integers(1, 6),
        namespace=st.sampled_from(["", "", "alice"]),
        priority=st.integers(-2, 2),
        tenant=st.sampled_from(["", "", "bob"]),
        count=st.sampled_from([1, 1, 2, 3]),
        params=st.fixed_dictionaries(
            {
                "max_tokens": st.integers(1, 24),
                "min_tokens": st.integers(0, 3),
                "stop_token_ids": st.sampled_from([(), (3, 4, 5)]),
                "prompt_logprobs": st.sampled_from([None, None, None, 1]),
                "temperature": st.sampled_from([0.0, 1.0]),
            }
        ),
    )
    def add(self, prefix, tail, namespace, priority, tenant, count, params):
        """One call with `n = count`: the first sequence and its forks."""
        first = f"r{len(self.asked)}"
        for seed in range(count):
            request = make_request(
                f"r{len(self.asked)}",
                prefix + [2] * tail,
                namespace=namespace,
                priority=priority,
                tenant=tenant,
                fork_of=first if seed else None,
                seed=seed,
                **params,
            )
            self.asked[request.request_id] = request
            self.engine.add(request)

    @rule(steps=st.integers(1, 5))
    def step(self, steps):
        for _ in range(steps):
            self.engine.step()

    @has_work
    @rule(data=st.data())
    def cancel(self, data):
        if not self.engine.scheduler.has_work:
            return
        request_id = self._draw_present(data)
        self.engine.abort(request_id)
        assert self.engine.answers[request_id].finish_reason == "abort"

    @precondition(lambda self: any(self.engine.scheduler.active.preemptible()))
    @rule(data=st.data(), steps=st.integers(0, 2))
    def preempt(self, data, steps):
        running = list(self.engine.scheduler.active.preemptible())
        self.engine.scheduler.active.preempt(data.draw(st.sampled_from(running)))
        self.step(steps)

    @precondition(lambda self: self.engine.scheduler.pool.num_cached > 0)
    @rule(data=st.data())
    def evict(self, data):
        pool = self.engine.scheduler.pool
        pool.free(pool.allocate(data.draw(st.integers(1, pool.num_available))))

    @has_work
    @rule(data=st.data())
    def poison_one_step(self, data):
        if not self.engine.scheduler.has_work:
            return  # only surplus rows are on their way
        self.engine.runner.poisoned.add(self._draw_present(data))
        self.engine.step()
        self.engine.runner.poisoned.clear()

    @has_work
    @rule()
    def step_raises(self):
        """In the next step that is launched: while those before are collected, none may be."""
        self.engine.runner.crash_next = True
        try:
            while self.engine.engine.has_work:
                self.engine.step()
        except RunnerError:
            return
        finally:
            self.engine.runner.crash_next = False
        assert self.numbers["depth"], "work was left, but nothing was scheduled"

    @precondition(lambda self: len(self.engine.engine._launched) > 0)
    @rule()
    def results_are_lost(self):
        self.engine.runner.crash_next_collect = True
        for _ in range(self.numbers["depth"] + 2):
            try:
                self.engine.step()
            except RunnerError:
                break
        else:
            raise AssertionError("nothing was collected")

    @has_work
    @rule()
    def crash_and_resume(self):
        answers, self.engine = self.engine.answers, FakeEngine(**self.numbers)
        self.engine.answers = answers
        for request_id, answer in answers.items():
            if answer.finish_reason is None:
                self.engine.add(_resumed(self.asked[request_id], answer.token_ids))

    @invariant()
    def books_are_right(self):
        self.engine.scheduler.check()
        present = self.engine.scheduler._requests.values()
        assert all(request.preemptions <= MAX_PREEMPTIONS for request in present)

    def teardown(self):
        for request_id, answer in self.engine.run(max_steps=5000).items():
            request = self.asked[request_id]
            expected = expected_output(request.cache_namespace, request.prompt_ids, request.params)
            assert answer.token_ids == expected[: len(answer.token_ids)]
            assert answer.finish_reason in {"stop", "length", "abort", "error"}
            if answer.finish_reason in {"stop", "length"}:
                assert answer.token_ids == expected
            if answer.token_ids and request.params.prompt_logprobs is not None:
                told = [entry.token_id for entry in answer.outputs[0].prompt_logprobs[1:]]
                assert told == request.prompt_ids[1:]

    def _draw_present(self, data):
        return data.draw(st.sampled_from(list(self.engine.scheduler._requests)))


def _resumed(request, output):
    params = {name: getattr(request.params, name) for name in request.params.__slots__}
    return make_request(
        request.request_id,
        request.prompt_ids,
        output=list(output),
        priority=request.priority,
        tenant=request.tenant,
        namespace=request.cache_namespace,
        fork_of=request.fork_of,
        **params,
    )


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=examples(150),
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
