"""What a capture asks of CUDA, over one that only takes notes: streams, memory, and what a failure leaves."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from llmbox.engine.runner.cuda_graphs import CudaCapture

GPU = torch.device("cuda", 1)
KEPT, WORKSPACE, GRAPH = 50, 32, 10
"""Bytes: what the allocator keeps, what a library takes for each new stream, what a graph takes."""


class FakeCuda:
    """`fails`: CUDA refuses to end the capture."""

    def __init__(self, *, fails: bool = False) -> None:
        self.default = self.current = "default"
        self.free, self.kept = 1000, KEPT
        self.seen: set[str] = set()
        self.ran: list[tuple[str, bool]] = []
        self.capturing = False
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

    @contextmanager
    def graph(self, graph, pool, stream, capture_error_mode):
        assert (pool, capture_error_mode) == ((0, 1), "thread_local")
        self.empty_cache()
        self.current, self.capturing = stream.name, True  # as torch's: put back only where all went well
        before = "default"
        try:
            yield
        finally:
            self.capturing = False
            if self._fails:
                raise RuntimeError("operation failed due to a previous error during capture")
            self.free -= GRAPH
            self.current = before

    def empty_cache(self) -> None:
        self.free, self.kept = self.free + self.kept, 0

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
        "CUDAGraph": lambda: SimpleNamespace(replay="replay"),
        "graph": fake.graph,
        "stream": fake.stream,
        "current_stream": lambda _: current,
        "current_device": lambda: GPU.index,
        "synchronize": lambda _: None,
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
