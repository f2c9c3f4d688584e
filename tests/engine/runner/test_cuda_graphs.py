"""CUDA graphs: which one a step runs from, when one is captured, and what a capture asks of CUDA."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from llmbox.engine.planning.memory_model import capture_sizes
from llmbox.engine.runner.cuda_graphs import NEAR, WANTED, CudaCapture, DecodeGraphs
from support.late_device import FakeCapture, device_engine
from support.real_engines import ask, run
from support.tiny_models import make_tiny_model

GPU = torch.device("cuda", 1)
KEPT, WORKSPACE, GRAPH = 50, 32, 10
"""Bytes: what the allocator keeps, what a library takes for each new stream, what a graph takes."""
ROOM = 1 << 30


class FakeCuda:
    """`fails`: CUDA refuses to end the capture."""

    def __init__(self, *, fails: bool = False) -> None:
        self.default = self.current = "default"
        self.free, self.kept = 1000, KEPT
        self.seen: set[str] = set()
        self.ran: list[tuple[str, bool]] = []
        self.capturing = self.serving = False
        self.ended: list[tuple[int, int]] = []
        self._fails = fails
        self._streams = 0

    def new_stream(self, device: torch.device) -> SimpleNamespace:
        assert device == GPU
        self._streams += 1
        return SimpleNamespace(name=f"side {self._streams}", wait_stream=lambda _: None)

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream.name
        try:
            yield
        finally:
            self.current = before

    def graph(self) -> SimpleNamespace:
        return SimpleNamespace(capture_begin=self.begin, capture_end=self.end, replay="replay")

    def begin(self, pool, capture_error_mode) -> None:
        assert (pool, capture_error_mode) == ((0, 1), "thread_local")
        assert self.current != self.default
        self.capturing = True

    def end(self) -> None:
        self.capturing = False
        if self._fails:
            raise RuntimeError("operation failed due to a previous error during capture")
        self.free -= GRAPH

    def empty_cache(self) -> None:
        assert not self.serving
        self.free, self.kept = self.free + self.kept, 0

    def synchronize(self, device: torch.device) -> None:
        assert device == GPU
        assert not self.serving

    def body(self) -> None:
        self.ran.append((self.current, self.capturing))
        if self.current not in self.seen:
            self.free -= WORKSPACE
        self.seen.add(self.current)

    def end_allocation(self, device: int, _pool: object) -> None:
        self.ended.append(device)


@pytest.fixture
def cuda(monkeypatch, request):
    fake = FakeCuda(fails=getattr(request, "param", False))
    current = SimpleNamespace(wait_stream=lambda _: None)
    stand_ins = {
        "graph_pool_handle": lambda: (0, 1),
        "Stream": fake.new_stream,
        "CUDAGraph": fake.graph,
        "stream": fake.stream,
        "current_stream": lambda _: current,
        "current_device": lambda: GPU.index,
        "synchronize": fake.synchronize,
        "empty_cache": fake.empty_cache,
        "mem_get_info": lambda _: (fake.free, 2000),
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", fake.end_allocation, raising=False)
    return fake


def test_graphs_share_a_stream_and_what_libraries_keep_for_it(cuda):
    capture = CudaCapture(GPU)
    assert [capture.capture(cuda.body) for _ in range(3)] == ["replay"] * 3
    assert cuda.ran == [("side 1", False), ("side 1", True)] * 3, "each warmed up where it is captured"
    assert capture.bytes_taken == WORKSPACE + 3 * GRAPH, "memory that was only kept hides nothing"
    assert cuda.ended == []


def test_a_capture_while_requests_run_waits_for_nothing_and_keeps_the_cache(cuda):
    capture = CudaCapture(GPU)
    capture.capture(cuda.body)
    cuda.ran.clear()
    cuda.free, cuda.kept, cuda.serving = cuda.free - KEPT, KEPT, True
    taken = capture.bytes_taken
    assert capture.capture(cuda.body, is_warm=True) == "replay"
    assert cuda.ran == [("side 1", True)], "no second warm-up"
    assert capture.bytes_taken == taken + GRAPH


@pytest.mark.parametrize("cuda", [True], indirect=True)
def test_a_capture_that_cannot_end_leaves_stream_and_allocator_as_they_were(cuda):
    with pytest.raises(RuntimeError, match="previous error"):
        CudaCapture(GPU).capture(cuda.body)
    assert cuda.current == cuda.default
    assert cuda.ended == [GPU.index]


def test_a_body_that_raises_is_told(cuda):
    def broken() -> None:
        if cuda.capturing:
            raise ValueError("no room")

    with pytest.raises(ValueError, match="no room"):
        CudaCapture(GPU).capture(broken)
    assert cuda.current == cuda.default


def graphs(most=64, budget=ROOM, **options):
    ran = []
    return DecodeGraphs(FakeCapture(**options), ran.append, most, budget), ran


def capture_all(subject):
    order = []
    while (size := subject.next_size) is not None:
        subject.capture(size)
        order.append(size)
    return order


@pytest.mark.parametrize("most", [1, 2, 3, 8, 60, 64, 256, 300, 1000])
def test_sizes_end_with_the_most_and_waste_little(most):
    sizes = capture_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == most
    for rows in range(1, most + 1):
        filled = next(size for size in sizes if size >= rows)
        assert filled - rows <= max(7, rows // 4)


def test_the_largest_is_captured_first_then_those_that_are_near_every_step():
    subject, ran = graphs(96)
    assert capture_all(subject) == ran == [96, 1, 2, 4, 8, 16, 32, 64, 24, 40, 48, 56, 80]
    late, _ = graphs(96)
    while (size := late.early_size) is not None:
        late.capture(size)
    assert late.next_size == 24, "it can wait"
    assert {rows: late.size_for(rows) for rows in (3, 17, 33, 65)} == {3: 4, 17: 32, 33: 64, 65: 96}
    few, ran = graphs(3)
    assert capture_all(few) == ran == [3, 1, 2]


def test_a_near_larger_graph_is_used_until_the_right_one_is_there():
    subject, _ = graphs(64)
    subject.capture(64)
    assert subject.size_for(64) == subject.size_for(60) == 64
    assert subject.size_for(32) == NEAR * 32
    assert subject.size_for(20) is None
    subject.capture(24)
    assert subject.size_for(20) == 24
    assert subject.size_for(65) is None


def test_a_size_that_steps_keep_asking_for_is_captured_in_between():
    """Right after a step of this size that ran without a graph."""
    subject, ran = graphs()
    for _ in range(WANTED - 1):
        assert subject.size_for(3) is None
    assert subject.urgent_size is None
    assert subject.size_for(4) == subject.urgent_size == 4
    assert not subject.has(4)
    assert subject.size_for(9) is None
    assert subject.urgent_size is None, "another step has run since"
    assert subject.size_for(3) == subject.urgent_size == 4
    subject.capture(4, is_warm=True)
    assert ran == [], "it was warm"
    assert subject.urgent_size is None
    assert subject.size_for(3) == 4


def test_draws_are_a_second_graph():
    ran = []
    subject = DecodeGraphs(FakeCapture(), ran.append, 4, ROOM, draw=lambda size: ran.append(-size))
    subject.capture(4)
    assert ran == [4, -4]
    assert subject.draws(4)
    assert not subject.draws(2)
    ran.clear()
    subject.replay(4)
    assert ran == [4]
    subject.replay_draw(4)
    assert ran == [4, -4]
    ran.clear()
    subject.capture(2, is_warm=True)
    assert ran == [-2], "its step may have been drawn otherwise"
    assert not graphs()[0].draws(4)


def test_a_failure_turns_graphs_off_and_says_why(caplog):
    subject, _ = graphs(16, fail_at=2)
    for _ in range(3):
        subject.capture(subject.next_size)
    assert "no room for this graph" in caplog.text
    assert subject.next_size is None
    assert subject.size_for(16) is None


def test_no_more_is_captured_than_the_budget_has():
    subject, _ = graphs(16, budget=2)  # each takes one
    while (size := subject.next_size) is not None:
        subject.capture(size)
    assert subject.bytes_taken == 2
    assert subject.size_for(16) == 16


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("qwen3"), tokenizer=False)


def test_capturing_between_steps_changes_no_token(model, monkeypatch):
    """A warm-up over the rows of the last step would write KV of the next token where the last one's is."""
    monkeypatch.setenv("LLMBOX_KERNELS", "reference")
    request = ask("a", range(5, 30), 3 * WANTED)
    plain = run(device_engine(model), [request])["a"]
    engine = device_engine(model, capture=FakeCapture(), graphs_bytes=ROOM)
    captured = run(engine, [request])["a"]
    assert [o.token_ids for o in captured if o.token_ids] == [o.token_ids for o in plain if o.token_ids]
    assert engine.executor.graphs.bytes_taken == 1


def test_prepare_ends(model, monkeypatch):
    monkeypatch.setenv("LLMBOX_KERNELS", "reference")
    engine = device_engine(model, capture=FakeCapture(), graphs_bytes=ROOM, max_running=4, token_budget=64)
    assert [engine.prepare() for _ in range(4)] == [True, True, True, False]
    assert device_engine(model).prepare() is False
