"""KV blocks get their pages while nothing runs, ahead of their use, and keep what they hold."""

from types import SimpleNamespace

import pytest
import torch

from llmbox.engine.core.step import StepPlan
from llmbox.engine.runner import cpu_runner
from llmbox.engine.runner.cpu_runner import CPUModelRunner
from llmbox.kernels.cpu.library import load_backend
from llmbox.kernels.op_types import KVShape


class Populating:
    """The memory of a cache of two layers with 100 blocks, and which of them were given pages."""

    def __init__(self, *, works=True):
        self.works, self.given, self.then = works, [], lambda: None

    def block_tensors(self, _cache):
        return [torch.empty(2, 100, 512, dtype=torch.uint8)]

    def populate_blocks(self, _cache, layer, blocks):
        self.given.append((layer, blocks.start, blocks.stop))
        self.then()
        return self.works

    def whole(self):
        """Return the blocks that have pages in both layers."""
        layers = [
            [n for layer, *ends in self.given if layer == each for n in range(*ends)] for each in (0, 1)
        ]
        assert layers[0] == layers[1], "each layer once"
        return layers[0]


def make_runner(ops):
    names = {"adapters": None, "dtype": torch.bfloat16, "rank": None}
    model = SimpleNamespace(ops=ops, config=SimpleNamespace(windows=()), **names)
    return CPUModelRunner(model, None, "cache", None, block_size=16, device=torch.device("cpu"))


def prepare(runner):
    """Have blocks populated, and wait for it."""
    assert not runner.prepare(), "nothing is left for the engine's thread"
    if runner._populating is not None:
        runner._populating.join(60)
        assert not runner._populating.is_alive()


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(cpu_runner, "POPULATED_AHEAD", 10 * 1024)
    monkeypatch.setattr(cpu_runner, "POPULATED_AT_ONCE", 4 * 1024)


@pytest.mark.usefixtures("small")
def test_blocks_ahead_of_those_in_use_get_pages_in_slices():
    ops = Populating()
    runner = make_runner(ops)
    prepare(runner)
    assert [last - first for _, first, last in ops.given] == [8, 8, 3, 3], "some of one layer at a time"
    assert ops.whole() == list(range(11))
    prepare(runner)
    assert ops.whole() == list(range(11))
    runner._begun_blocks = 95
    prepare(runner)
    assert ops.whole() == [*range(11), *range(95, 100)]


@pytest.mark.usefixtures("small")
def test_a_step_stops_the_thread_which_goes_on_when_idle_again():
    ops = Populating()
    runner = make_runner(ops)

    def begin_step():
        with pytest.raises(AttributeError):  # the model is none
            runner.execute(StepPlan([]))

    ops.then = begin_step
    prepare(runner)
    assert ops.given == [(0, 0, 8)]
    ops.then = lambda: None
    prepare(runner)
    assert ops.given[1:] == [(layer, *ends) for ends in ((0, 8), (8, 11)) for layer in (0, 1)]


@pytest.mark.usefixtures("small")
def test_a_system_that_cannot_is_asked_once():
    ops = Populating(works=False)
    runner = make_runner(ops)
    prepare(runner)
    prepare(runner)
    assert len(ops.given) == 1


@pytest.mark.process  # a compiler, where the kernels are not in the cache
def test_a_block_keeps_what_it_holds():
    ops = load_backend("cpu").ops()
    assert ops.populate_blocks is not None
    shape = KVShape(2, 8, 16, 2, 32, torch.bfloat16, torch.bfloat16)
    cache = ops.make_kv_cache(shape, torch.device("cpu"))
    (memory,) = ops.block_tensors(cache)
    memory.fill_(7)
    for layer in range(2):
        assert ops.populate_blocks(cache, layer, range(1, 8))
    assert (memory == 7).all()
    ops.clear_blocks(cache, [1, 6])
    assert [int(memory[:, block].sum() == 0) for block in range(8)] == [0, 1, 0, 0, 0, 0, 1, 0]
    ops.clear_blocks(cache, [])
