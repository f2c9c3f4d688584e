"""The KV pool is what a trial step leaves of the budget."""

import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from llmbox.engine.config import DRAFT_MODEL_ROWS, EngineConfig
from llmbox.engine.errors import DoesNotFit
from llmbox.engine.executor import profile
from llmbox.engine.executor.profile import (
    EARLY_SECONDS,
    CudaMeter,
    MemoryProfile,
    capture_early,
    profile_kv_blocks,
    select_gpu,
)
from llmbox.engine.executor.warmup import DRAWS, largest_step, run_warmup, warmup_steps
from llmbox.engine.planning.estimator import MemoryPlan
from llmbox.engine.planning.memory_model import CUDA_CONTEXT, graphs_reserve
from llmbox.engine.runner.cuda_graphs import GraphSize
from support.fake_nvml import FakeGpu, FakeNvml

PLAN = MemoryPlan(
    device="cuda", dtype="bfloat16", kv_dtype="bfloat16", quant="none", weights_bytes=1000,
    workspace_bytes=500, kv_bytes_per_token=1, block_size=10, num_blocks=1, budget_bytes=5000,
    context=200, max_running=4, token_budget=64,
)  # fmt: skip


class FakeMeter:
    """Weights of 1000, a step that needs `step` beside its blocks, a runtime of 300."""

    def __init__(self, step: int) -> None:
        self.step, self.most = step, 0

    def allocated(self) -> int:
        return 1000

    def peak(self) -> int:
        return self.most

    def reserved_peak(self) -> int:
        return self.most + 50

    def reset_peak(self) -> None:
        self.most = 0

    def runtime(self) -> int:
        return 300


class FakeRunner:
    proposers = ()
    images = None

    def __init__(self, meter: FakeMeter, plan: MemoryPlan) -> None:
        blocks = (plan.num_blocks + 1) * plan.kv_bytes_per_token
        blocks += (plan.window_blocks + 1) * plan.window_bytes_per_token
        meter.most = 1000 + meter.step + blocks * plan.block_size

    def launch(self, plan):
        return plan

    def collect(self, handle):
        assert handle.num_tokens == PLAN.token_budget


def fit(step: int = 700, graphs: int = 100, plan: MemoryPlan = PLAN, **config: object) -> MemoryPlan:
    meter = FakeMeter(step)
    options = EngineConfig(model_path="m", name="m", **config)
    return profile_kv_blocks(options, plan, meter, graphs, lambda plan: FakeRunner(meter, plan))


def test_blocks_fill_what_is_left():
    plan = fit(step=3100)
    # 5000 - 1000 weights - 3100 step - 300 runtime - 100 graphs = 500: 50 blocks, one of them spare
    assert (plan.num_blocks, plan.workspace_bytes) == (49, 3500)


def test_the_log_has_the_peak_with_what_the_allocator_cannot_use(monkeypatch, caplog):
    monkeypatch.setattr(profile, "show_bytes", str)
    caplog.set_level(logging.INFO)
    fit(step=3100)
    assert "a step 3100 (3150 with unused pieces)" in caplog.text


def test_early_captures_end_with_their_time_or_where_one_rank_has_none_left():
    captured, left = list[int](), [256, 1, 2, 4]

    class Runner:
        @property
        def early_capture(self) -> GraphSize | None:
            return GraphSize(left[0], is_adapted=False) if left else None

        def capture(self, size: GraphSize) -> None:
            captured.append(left.pop(0))
            assert captured[-1] == size.rows

    runner = Runner()

    def after(calls: int) -> Callable[[], float]:
        times = iter([0.0] * calls)
        return lambda: next(times, EARLY_SECONDS + 1.0)

    capture_early(runner, clock=after(3))
    assert captured == [256, 1]
    capture_early(runner, agree=lambda rows: rows * (rows < 4), clock=after(9))
    assert captured == [256, 1, 2]
    capture_early(runner, clock=after(9))
    assert captured == [256, 1, 2, 4]


def test_blocks_of_windows_are_kept_free():
    """Their number is planned: they hold the windows of all that run."""
    plan = replace(PLAN, window=32, window_blocks=29, window_bytes_per_token=1)
    meter = FakeMeter(2800)
    options = EngineConfig(model_path="m", name="m")
    found = profile_kv_blocks(options, plan, meter, 100, lambda plan: FakeRunner(meter, plan))
    # 800 are left, of which 300 are for 29 blocks of windows and a spare one.
    assert (found.num_blocks, found.window_blocks, found.workspace_bytes) == (49, 29, 3200)


def test_recurrent_state_is_beside_the_step():
    plan = fit(step=3100, plan=replace(PLAN, state_slots=4, slot_bytes=50))
    assert (plan.num_blocks, plan.workspace_bytes, plan.state_bytes) == (49, 3300, 200)
    with pytest.raises(DoesNotFit, match=r"recurrent state .* MB, KV for a context"):
        fit(step=4000, plan=replace(PLAN, state_slots=4, slot_bytes=50))


def test_no_more_blocks_than_are_of_use():
    assert fit().num_blocks == 4 * 20
    assert fit(kv_tokens=95).num_blocks == 10


def test_what_does_not_hold_one_context_is_refused_with_what_would():
    with pytest.raises(DoesNotFit, match="a context of 190 tokens would fit"):
        fit(step=3400)
    with pytest.raises(DoesNotFit, match="smaller model"):
        fit(step=4000)


def test_the_trial_step_is_the_largest_there_can_be():
    trial = largest_step(PLAN)
    assert trial.num_tokens == PLAN.token_budget
    assert len(trial.rows) == PLAN.max_running
    assert all(row.samples for row in trial.rows)


def test_stages_try_steps_of_their_share():
    """Of the tokens and, where only decoding requests are in a step, of those."""
    trial = largest_step(replace(PLAN, pp=3))
    assert trial.num_tokens >= 22 == replace(PLAN, pp=3).step_tokens
    assert trial.num_tokens < PLAN.token_budget // 2
    for stages, most in ((1, 300), (2, 150), (4, 75)):
        plan = replace(PLAN, pp=stages, max_running=300)
        assert (plan.step_rows, plan.step_tokens) == (most, most)
        assert max(step.num_tokens for step in warmup_steps(plan, (1, 3, 16))) == most


def test_whole_prompts_are_tried_where_they_are_not_cut():
    seen = []

    class Noting(FakeRunner):
        def collect(self, handle):
            seen.append(handle.num_tokens)

    meter = FakeMeter(700)
    options = EngineConfig(model_path="m", name="m", chunked_prefill=False)
    profile_kv_blocks(options, replace(PLAN, pp=2), meter, 100, lambda plan: Noting(meter, plan))
    assert max(seen) >= PLAN.token_budget // 2 + PLAN.context


def test_trial_steps_of_a_draft_model_have_blocks_too():
    """Its passes may have more rows than a step of the target."""
    meter, blocks = FakeMeter(700), []

    def make(plan):
        blocks.append(plan.num_blocks)
        return FakeRunner(meter, plan)

    plan = replace(PLAN, max_running=1, budget_bytes=9000)
    for method in (None, "draft_model"):
        profile_kv_blocks(
            EngineConfig(model_path="m", name="m"), replace(plan, draft_method=method), meter, 100, make
        )
    rows = min(DRAFT_MODEL_ROWS, PLAN.context - 1)
    assert blocks == [7, -(-rows // PLAN.block_size)]


def test_graphs_off_reserve_nothing():
    assert graphs_reserve(0) == 0
    assert graphs_reserve(20) > graphs_reserve(1) > 0


def test_sums():
    measured = MemoryProfile(weights=1, workspace=2, runtime=3, graphs=4)
    assert measured.total == 10
    assert measured.blocks(100, 9, 1000) == 9
    assert [measured.blocks(budget, 0, 1000) for budget in (10, 9)] == [1000, 0]


def test_trial_steps_meet_all_counts_of_rows_and_end_with_the_largest():
    steps = list(warmup_steps(PLAN, (1, 3, 16, 300)))
    alone = [step for step in steps if all(row.num_tokens == 1 for row in step.rows)]
    assert [len(step.rows) for step in alone] == [1, 3, 4, *[1] * len(DRAWS)]
    counts = {step.num_tokens for step in steps if step not in alone}
    assert {3, 16, PLAN.token_budget} <= counts
    assert max(counts) == PLAN.token_budget
    assert any(step.copies for step in steps)
    longest = max(row.end for step in steps for row in step.rows)
    assert longest == PLAN.context - 1
    for row in (row for step in steps for row in step.rows):
        assert row.end <= len(row.request.block_table) * PLAN.block_size
        assert max(row.request.block_table) < 2


def test_without_kernels_that_compile_only_the_largest_steps_run():
    assert len(list(warmup_steps(PLAN, ()))) == 2


def test_trial_sequences_leave_their_rows():
    seen = []

    class Runner:
        images = None

        def launch(self, step):
            seen.append([row.admission == row.request.admissions for row in step.rows])
            return step

        def collect(self, handle):
            left.extend(handle.rows)

    left = []
    count = run_warmup(Runner(), PLAN, (1,))
    assert count == len(seen)
    assert all(all(row) for row in seen)
    assert all(row.admission != row.request.admissions for row in left)


class Card:
    """One GPU as the driver and torch see it: the first call that needs memory makes a context of 400."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, nvml: bool = True) -> None:
        self.gpu = FakeGpu(total=10_000, used=1000)
        self.opened = False
        self.tensors = 0
        fake = FakeNvml([self.gpu], init_error=None if nvml else "NVMLError_LibraryNotFound")
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        monkeypatch.setattr("llmbox.engine.hardware.machine.torch_has_cuda", lambda: True)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        cuda = {
            "device_count": lambda: 1,
            "get_device_properties": lambda _: SimpleNamespace(uuid="1234"),
            "set_device": lambda _: self.open(),
            "mem_get_info": lambda _: (self.open(), (self.gpu.total - self.gpu.used, self.gpu.total))[1],
            "memory_reserved": lambda _: self.tensors,
        }
        for name, call in cuda.items():
            monkeypatch.setattr(torch.cuda, name, call)

    def open(self) -> None:
        self.gpu.used += 0 if self.opened else 400
        self.opened = True

    def take(self, tensors: int, others: int) -> None:
        self.gpu.used += tensors + others
        self.tensors += tensors


def test_the_context_counts_as_memory_taken(monkeypatch: pytest.MonkeyPatch):
    card = Card(monkeypatch)
    free = select_gpu(0)
    card.take(2000, 150)
    assert (free, CudaMeter(torch.device("cuda", 0), free).runtime()) == (9000, 400 + 150)


def test_without_nvml_the_context_is_what_is_planned_with(monkeypatch: pytest.MonkeyPatch):
    card = Card(monkeypatch, nvml=False)
    free = select_gpu(0)
    card.take(2000, 150)
    assert CudaMeter(torch.device("cuda", 0), free).runtime() == CUDA_CONTEXT + 150


def test_a_gpu_that_was_open_before_has_no_context_to_pay_for(monkeypatch: pytest.MonkeyPatch):
    card = Card(monkeypatch)
    card.open()
    free = select_gpu(0)
    card.take(2000, 150)
    assert CudaMeter(torch.device("cuda", 0), free).runtime() == 150


def test_where_one_request_runs_no_step_of_the_warm_up_has_two():
    steps = warmup_steps(replace(PLAN, max_running=1), (1, 3, 16, 300))
    assert max(len(step.rows) for step in steps) == 1
