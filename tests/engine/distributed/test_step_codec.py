"""What workers are told is what rank 0 scheduled, through preemption, prefix hits, forks and resumes."""

import random

import pytest

from llmbox.engine.core.engine import Engine
from llmbox.engine.core.kv_cache.state_manager import pool_blocks
from llmbox.engine.core.step import SampledToken, StepResult
from llmbox.engine.distributed.step_codec import Frame, StepDecoder, StepEncoder, decode_result, encode_result
from llmbox.engine.ipc.messages import AddRequest, TokenLogprobs
from llmbox.engine.sampling_params import SamplingParams
from support.fake_runner import FakeOverlappingRunner
from support.real_engines import draft_at_no_price
from support.scheduling import INFO, make_scheduler

LONG = {"short_context": 19}
WINDOW = {"window": 6, "window_blocks": pool_blocks(6, 4, 8, 64)}


class Mirroring(FakeOverlappingRunner):
    """Runs what comes out at the other end, and compares it with what went in."""

    def __init__(self, num_blocks, stages=1, depth=0, *kinds):
        super().__init__(num_blocks, 4, depth, stages, *kinds)
        self.encoder, self.decoder = StepEncoder(), StepDecoder()
        self.most = 0
        self.mirrors = {}

    def execute(self, plan):
        for row in plan.rows:
            if row.request.params.seed % 2 and row.samples:
                row.request.mask = bytes([row.end % 256]) * 5
                row.draft_masks = [None, bytes([row.end % 256]) * 5][: len(row.drafts)]
        frame = self.encoder.encode(plan)
        self.most = max(self.most, len(frame.encode()))
        mirrored = self.decoder.decode(Frame(frame.kind, frame.body, frame.numbers))
        assert mirrored.copies == plan.copies
        assert mirrored.state_copies == plan.state_copies
        for row, mirror in zip(plan.rows, mirrored.rows, strict=True):
            assert (row.start, row.num_tokens, row.samples) == (
                mirror.start,
                mirror.num_tokens,
                mirror.samples,
            )
            assert list(mirror.saves) == list(row.saves)
            assert list(mirror.drafts) == list(row.drafts)
            assert mirror.draft_masks == [mask and mask + bytes(3) for mask in row.draft_masks]
            assert mirror.request.state_slot == row.request.state_slot
            window = slice(row.request.window_begin, None)
            assert mirror.request.window_table[window] == row.request.window_table[window]
            assert mirror.admission == mirror.request.admissions == row.admission
            names = "request_id", "token_ids", "block_table", "params", "num_prompt", "num_pending", "is_long"
            for name in names:
                assert getattr(row.request, name) == getattr(mirror.request, name), name
            assert mirror.request is not row.request
            if row.samples and row.request.mask is not None:
                assert mirror.request.mask == row.request.mask + bytes(3)  # whole integers
            else:
                assert mirror.request.mask is None
            self.mirrors[mirror.request] = row.request, row.admission
        for mirror, (request, admission) in self.mirrors.items():
            runs = request.admissions == admission
            assert mirror.admissions == (admission if runs else -1), "rows of those that left are free"
        return super().execute(plan)


def params(rng, number):
    return SamplingParams(
        max_tokens=rng.randrange(1, 20),
        seed=number,
        temperature=rng.choice([0.4, 0.7]),
        logit_bias={7: float("inf"), 12: -2.5} if number % 3 == 0 else {},
        bad_words=((1, 2), (3,)) if number % 4 == 0 else (),
        allowed_token_ids=(4, 5, 6) if number % 5 == 0 else None,
        stop_token_ids=(3, 4),
        logprobs=2 if number % 2 else None,
    )


@pytest.mark.parametrize(
    "options",
    [{}, {"num_blocks": 13}, {"token_budget": 8}, {"max_running": 2}, {"state_slots": 7}, LONG, WINDOW],
    ids=str,
)
@pytest.mark.parametrize(("stages", "depth"), [(1, 0), (1, 1), (2, 1), (3, 3)])
@pytest.mark.parametrize("seed", range(3))
def test_mirrors_follow_the_scheduler(options, seed, stages, depth):
    rng = random.Random(seed)
    options = {"num_blocks": 100, **options}
    scheduler = make_scheduler(**options)
    kinds = [options.get(name, 0) for name in ("state_slots", "window", "window_blocks")]
    runner = Mirroring(options["num_blocks"], stages, depth, *kinds)
    engine = Engine(scheduler, runner, INFO)
    last = None
    for number in range(16):
        prompt = [rng.randrange(9) for _ in range(rng.randrange(1, 18))]
        fork = f"r{number - 1}" if number % 4 == 3 else None
        if fork:
            prompt = last.prompt_ids
        last = AddRequest(
            request_id=f"r{number}", prompt_ids=prompt, params=params(rng, number), fork_of=fork
        )
        engine.add(last)
        if number % 3 == 0 and engine.has_work:
            engine.step()
        if number == 9:
            engine.abort("r8")
    while engine.has_work:
        engine.step()
    assert len(runner.plans) > 10
    assert runner.most_launched > depth - (options.get("max_running") == 2)
    if options["num_blocks"] == 13:
        assert scheduler.active.preemptions > 0


@pytest.mark.parametrize(("stages", "depth"), [(1, 0), (2, 1)])
def test_a_decoding_request_costs_a_few_numbers(stages, depth):
    """Also where it is not in every step."""
    scheduler = make_scheduler()
    runner = Mirroring(100, stages, depth)
    engine = Engine(scheduler, runner, INFO)
    for name in "ab":
        engine.add(AddRequest(request_id=name, prompt_ids=[5] * 40, params=SamplingParams(max_tokens=30)))
    while scheduler.prompt_tokens < 80 or engine.stats().output_tokens < 2:
        engine.step()
    runner.most = 0
    while engine.has_work:
        engine.step()
    assert runner.most < (80 if stages == 2 else 120)


@pytest.mark.parametrize("options", [{}, {"state_slots": 20}], ids=str)
def test_drafts_and_the_states_behind_them_cross(options, monkeypatch):
    draft_at_no_price(monkeypatch)
    scheduler = make_scheduler(num_blocks=100, draft_rows=24, **options)
    runner = Mirroring(100, 1, 0, options.get("state_slots", 0))
    engine = Engine(scheduler, runner, INFO)
    for number in range(4):
        params = SamplingParams(max_tokens=60, seed=number, temperature=0.0)
        engine.add(AddRequest(request_id=f"r{number}", prompt_ids=[5, 6] * 8, params=params))
    while engine.has_work:
        engine.step()
    stats = engine.stats()
    assert stats.draft_tokens > stats.accepted_tokens > 0


def test_results_cross_unchanged():
    entry = TokenLogprobs(token_id=4, logprob=-0.1234567890123456, rank=2, top=[(3, -0.1), (4, -0.2)])
    result = StepResult(
        {"a": SampledToken(4, entry), "b": SampledToken(5)}, {"c": [entry, entry]}, {"d": "NaN in logits"}
    )
    assert decode_result(encode_result(result)) == result
