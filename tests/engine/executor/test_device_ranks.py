"""Ranks that launch steps ahead against one that takes them in turn: same tokens, whatever is asked for."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial

import pytest
import torch

from llmbox.engine.errors import RankLost
from llmbox.engine.executor import watchdog
from llmbox.engine.runner.cuda_graphs import WANTED
from support.device_ranks import device_ranks
from support.late_device import LateDevice
from support.mixes import drawn, told
from support.real_engines import ask, load, run, tokens
from support.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("qwen3"), tokenizer=False, num_hidden_layers=3)


@pytest.fixture(autouse=True)
def _plain_kernels(monkeypatch):
    monkeypatch.setenv("LLMBOX_KERNELS", "reference")


CUTS = [{"tp": 2}, {"pp": 2}, {"pp": 3}, {"tp": 2, "pp": 2}]
MIXES = {
    "plain": {},
    "chunks": {"max_running": 3, "token_budget": 9},
    "preempted": {"kv_tokens": 112, "context": 80, "block_size": 4},
    "no cache": {"prefix_cache": False, "chunked_prefill": False},
}


def compare(model, cut, options, seed, graphs):
    rng = random.Random(seed)
    requests = [drawn(rng, number) for number in range(12)]
    expected = run(load(model, **options), requests)
    with device_ranks(model, graphs=graphs, **cut, **options) as (engine, ranks):
        while graphs and engine.prepare():
            pass
        seen = run(engine, requests)
        engine.scheduler.check()
        assert engine.scheduler.pool.num_used == 0
    for request in requests:
        assert told(seen[request.request_id]) == told(expected[request.request_id])
    if graphs:
        assert {rank.capture.replays for rank in ranks} == {ranks[0].capture.replays}
        assert ranks[0].capture.replays > 10
    return engine


@pytest.mark.parametrize(("seed", "graphs"), [(0, False), (1, True)])
@pytest.mark.parametrize("options", MIXES.values(), ids=MIXES)
def test_same_answers_from_shared_layers(model, options, seed, graphs):
    compare(model, {"tp": 2}, options, seed, graphs)


@pytest.mark.parametrize("cut", CUTS[1:], ids=str)
@pytest.mark.parametrize("mix", ["chunks", "preempted"])
def test_same_answers_from_stages(model, cut, mix):
    compare(model, cut, MIXES[mix], 3, graphs=True)


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_preempted_requests_and_shared_prefixes_go_on_exactly(model, cut):
    options = {"kv_tokens": 112, "context": 80, "block_size": 4}
    requests = [ask(f"r{n}", [*range(3, 15), n], 40, temperature=0.9, seed=n) for n in range(5)]
    expected = tokens(load(model, **options), requests)
    with device_ranks(model, **cut, **options) as (engine, _):
        assert tokens(engine, requests) == expected
        assert engine.stats().preemptions > 0
        assert tokens(engine, requests) == expected
        assert engine.stats().prefix_hits > 0


@pytest.mark.parametrize("cut", [{"tp": 2}, {"tp": 2, "pp": 2}], ids=str)
def test_sums_and_norms_in_one_change_no_token(model, cut):
    """Up to 4 rows: prompts and full batches take the other way."""
    requests = [ask(f"r{n}", range(n + 3, n + 20), 9, temperature=0.9, seed=n) for n in range(6)]
    with device_ranks(model, **cut) as (engine, _):
        apart = tokens(engine, requests)
    with device_ranks(model, fused_rows=4, **cut) as (engine, ranks):
        assert tokens(engine, requests[:3]) == {f"r{n}": apart[f"r{n}"] for n in range(3)}
        steps = ranks[0].collective.fused
        assert steps > 0
        assert tokens(engine, requests) == apart
    assert ranks[0].collective.fused == ranks[1].collective.fused


def test_the_next_step_is_launched_everywhere_before_results_are_waited_for(model):
    with device_ranks(model, tp=2) as (engine, ranks):
        engine.add(ask("a", range(5, 30), 4))
        engine.step()
        assert ranks[0].device.waits == 0
        engine.step()
        assert ranks[0].device.waits == 1
        assert len(engine._launched) == 1
        assert len(ranks[0].sizes) == 2
        while engine.has_work:
            engine.step()
    assert ranks[1].device.waits == 3, "a rank that is not asked stays as far ahead"


@pytest.mark.parametrize("pp", [2, 3])
def test_all_stages_are_busy_at_once(model, pp):
    """In a step each, by the devices' own time: one that comes last waits there until all have begun."""
    requests = [ask(f"r{n}", range(n + 3, n + 9), 20, temperature=0.9, seed=n) for n in range(2 * pp)]
    expected = tokens(load(model), requests)
    together = {step: threading.Barrier(pp, timeout=90) for step in range(6, 30)}
    begun = []
    with (
        device_ranks(model, pp=pp) as (engine, ranks),
        ExitStack() as stack,
    ):

        def begin(stage, step):
            barrier = together.get(step + stage)
            if barrier is not None:
                barrier.wait()
                begun.append((stage, step))

        for stage, rank in enumerate(ranks):
            pool = stack.enter_context(ThreadPoolExecutor(1))
            rank.work_apart(pool, partial(begin, stage))
        assert tokens(engine, requests) == expected
    assert len(begun) == pp * len(together)


@pytest.mark.parametrize("pp", [2, 3])
def test_a_stage_that_is_lost_takes_all_steps_on_their_way_with_it(model, monkeypatch, pp):
    monkeypatch.setattr(watchdog, "_LOST_SECONDS", 0.1)  # threads: no process ends

    def lost(*_):
        raise RuntimeError("lost")

    with device_ranks(model, pp=pp) as (engine, ranks):
        for number in range(6):
            engine.add(ask(f"r{number}", [5, 6, 7 + number], 40))
        while len(engine._launched) < pp or len(ranks[-1].sizes) < 12:
            engine.step()
        ranks[-1].runner.launch_sized = lost
        with pytest.raises(RankLost):
            list(iter(engine.step, None))  # what the stage had drawn before still counts
        assert "lost" in str(ranks[-1].errors.pop())
        assert len(engine._launched) == 0
        stats = engine.stats()
        assert (stats.running, stats.waiting, stats.blocks_used) == (0, 6, 0)


def test_graphs_are_captured_on_all_ranks_between_the_same_steps(model):
    """One size that steps keep asking for, then one for an idle moment."""
    with device_ranks(model, graphs=True, tp=2) as (engine, ranks):
        run(engine, [ask("a", range(5, 30), 3 * WANTED)])
        assert engine.prepare()
        run(engine, [ask("b", range(5, 30), 3)])
    assert [rank.capture.bytes_taken for rank in ranks] == [2, 2]
    assert ranks[0].capture.replays == ranks[1].capture.replays > WANTED


@pytest.mark.parametrize("cut", [{"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2}], ids=str)
def test_where_one_rank_cannot_capture_none_has_graphs(model, cut):
    """What NCCL does is in a graph on all ranks that meet there, or on none."""
    requests = [ask(f"r{n}", range(n + 3, n + 20), 9, temperature=0.9, seed=n) for n in range(3)]
    expected = tokens(load(model, max_running=8), requests)
    with device_ranks(model, graphs=True, fail_at={1: 1}, **cut, max_running=8) as (engine, ranks):
        while engine.prepare():
            pass
        assert tokens(engine, requests) == expected
    assert [rank.capture.bytes_taken for rank in ranks] == [2, 1, 2, 2][: len(ranks)]
    assert {rank.capture.replays for rank in ranks} == {0}
    assert not any(rank.runner.graphs.has(rank.runner.graphs._sizes[-1]) for rank in ranks)
    assert {rank.runner.next_capture for rank in ranks} == {None}


def test_a_rank_whose_warm_up_breaks_ends(model, monkeypatch):
    """Others are waiting for sums that it did not make."""

    def broken(_size):
        raise RuntimeError("out of memory")

    with device_ranks(model, graphs=True, tp=2) as (engine, ranks):
        monkeypatch.setattr(ranks[1].runner.graphs, "_body", broken)
        with pytest.raises((RankLost, threading.BrokenBarrierError)):
            engine.prepare()
        assert "out of memory" in str(ranks[1].errors.pop())


def test_a_lost_rank_ends_the_step(model):

    def lost(*_):
        raise RuntimeError("lost")

    with device_ranks(model, tp=2) as (engine, ranks):
        engine.add(ask("a", [5, 6, 7], 9))
        engine.step()
        ranks[1].runner.launch_sized = lost
        with pytest.raises((RankLost, threading.BrokenBarrierError)):
            engine.step()
        assert "lost" in str(ranks[1].errors.pop())


def test_rows_fail_alone(model):
    with device_ranks(model, tp=2) as (engine, ranks):
        table = ranks[1].runner._model.embedding.packed.weight_OI
        with torch.inference_mode():
            table[101] = torch.nan  # id 261 of 320
        outputs = run(engine, [ask("good", [5, 6, 7], 6), ask("bad", [5, 261, 7], 6, top_k=3, temperature=1)])
    assert outputs["bad"][-1].error_code == "invalid_logits"
    assert outputs["good"][-1].finish_reason == "length"


def test_what_a_launch_does_asks_the_device_nothing(model):
    """All ways to draw in one step, and log-probabilities of more rows than are computed at once."""
    ways = [
        {},
        {"temperature": 1.0},
        {"top_k": 5},
        {"top_p": 0.9},
        {"repetition_penalty": 1.3},
        {"logprobs": 2},
    ]
    requests = [ask(f"r{n}", [5, 6, 7], 6, **{"temperature": 0.8, **way}) for n, way in enumerate(ways)]
    requests += [
        ask("greedy", [5, 6, 7], 6),
        ask("told", range(3, 150), 2, prompt_logprobs=2),
        ask("told briefly", [7, 5, 9], 2, prompt_logprobs=0),
    ]
    expected = run(load(model), requests)
    with device_ranks(model, tp=2) as (engine, ranks):
        for rank in ranks:
            rank.forbid_questions()
        seen = run(engine, requests)
    assert len(ranks[0].sizes) > 5
    for request in requests:
        assert told(seen[request.request_id]) == told(expected[request.request_id])


class EmptiedMeanwhile(list):
    """Another thread waits for all of it as soon as somebody has asked how much there is."""

    def __len__(self):
        count = super().__len__()
        self.clear()
        return count


def test_an_event_is_recorded_while_a_thread_that_answers_waits_for_an_older_one():
    """Only with stages a thread answers: a fault of the late device, seen once as a rank that had failed."""
    device = LateDevice()
    device.under_way = EmptiedMeanwhile([lambda: None])
    event = device.record()
    event.wait()
    assert device.waits == 1
