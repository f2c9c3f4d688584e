"""Which GPUs a model goes on: chosen from what NVML says of their links, or refused in clear words."""

from dataclasses import replace

import pynvml
import pytest

from llmbox.engine.config import EngineConfig
from llmbox.engine.errors import DoesNotFit, ParallelError
from llmbox.engine.hardware import gpus as nvlink_module
from llmbox.engine.hardware import machine as machine_module
from llmbox.engine.hardware.gpus import islands, peers
from llmbox.engine.hardware.machine import read_machine
from llmbox.engine.model_config.shape import ModelShape
from llmbox.engine.planning.estimator import MemoryBudget, estimate, plans
from llmbox.engine.planning.placement import are_nvlink_peers
from support.fake_nvml import FakeGpu, FakeNvml

GB = 10**9
QWEN3_32B = ModelShape(
    layers=64,
    hidden=5120,
    heads=64,
    kv_heads=8,
    head_dim=128,
    ffn=25600,
    vocab=151936,
    tied=False,
    context_limit=32768,
    qk_norm=True,
)
CONFIG = EngineConfig(model_path="none", name="m")


def budget(gpus, free, *sets):
    more = tuple([free] * (gpus - 1))
    return MemoryBudget(
        device="cuda", available=free, more_gpus=more, nvlink=tuple(frozenset(one) for one in sets)
    )


def chosen(have, **options):
    plan = estimate(QWEN3_32B, have, replace(CONFIG, **options))
    return (plan.tp, plan.pp, plan.gpus), " ".join(plan.notes)


def test_what_fits_on_one_gpu_stays_there():
    alone = (1, 1, (0,))
    assert chosen(budget(8, 140 * GB, range(8))) == (alone, "on one of 8 GPUs: the rest is for others")
    assert chosen(budget(1, 140 * GB)) == (alone, "")
    assert chosen(budget(8, 140 * GB, range(8)), tp=1) == (alone, "")


def test_what_others_have_filled_is_left_to_them():
    have = replace(budget(4, 140 * GB, range(4)), available=9 * GB, more_gpus=(70 * GB, 140 * GB, 140 * GB))
    cut, reason = chosen(have)
    assert (cut, reason) == ((1, 1, (2,)), "on GPU 2, one of 4 GPUs: the rest is for others")


def test_else_as_few_nvlink_peers_as_it_takes():
    cut, reason = chosen(budget(8, 60 * GB, range(8)))
    assert cut == (2, 1, (0, 1))
    assert reason == "shared by 2 GPUs, which are NVLink peers: 0 and 1"
    cut, _ = chosen(budget(8, 30 * GB, range(8)))
    assert cut == (4, 1, (0, 1, 2, 3))


def test_the_smallest_set_of_peers_that_is_large_enough():
    cut, reason = chosen(budget(6, 60 * GB, (0, 1, 2, 3), (4, 5)))
    assert cut == (2, 1, (4, 5))
    assert "4 and 5" in reason


def test_stages_where_gpus_hang_on_pcie():
    cut, reason = chosen(budget(4, 60 * GB))
    assert cut == (1, 2, (0, 1))
    assert reason == "cut into 2 stages, on GPUs 0 and 1: they are joined by PCIe"
    cut, reason = chosen(budget(4, 38 * GB, (0, 1)))
    assert cut == (1, 3, (0, 1, 2))
    assert "NVLink does not join enough of them" in reason


def test_stages_of_peers_where_one_set_of_peers_is_too_small():
    cut, reason = chosen(budget(4, 30 * GB, (0, 2), (1, 3)))
    assert cut == (2, 2, (0, 2, 1, 3))
    assert reason == "cut into 2 stages of 2 ranks that are NVLink peers, on GPUs 0, 2, 1 and 3"
    cut, _ = chosen(budget(5, 30 * GB, (0, 1)))
    assert cut == (1, 4, (0, 1, 2, 3))
    cut, reason = chosen(budget(4, 140 * GB, (0, 2), (1, 3)), tp=2, pp=2)
    assert cut == (2, 2, (0, 2, 1, 3))
    assert "PCIe" not in reason
    cut, reason = chosen(budget(4, 140 * GB, (0, 2)), tp=2, pp=2)
    assert cut == (2, 2, (0, 1, 2, 3))
    assert "not NVLink peers" in reason


def test_what_was_asked_for_is_done_and_remarked_upon():
    four = (4, 1, (0, 1, 2, 3))
    words = "every layer shared by 4 ranks, as asked, on GPUs 0, 1, 2 and 3"
    assert chosen(budget(8, 140 * GB, range(8)), tp=4) == (four, words)
    cut, reason = chosen(budget(2, 140 * GB), tp=2)
    assert cut == (2, 1, (0, 1))
    assert "not NVLink peers: sums go over PCIe, --pp may be faster" in reason
    cut, reason = chosen(budget(4, 140 * GB, (0, 1), (2, 3)), tp=2, pp=2)
    assert cut == (2, 2, (0, 1, 2, 3))
    assert reason == "cut into 2 stages of 2 ranks, as asked, on GPUs 0, 1, 2 and 3"


def places(have, **options):
    return [plan.gpus for plan in plans(QWEN3_32B, have, replace(CONFIG, **options))]


SCATTERED = [(a, b) for a in range(8) for b in range(a + 1, 8) if a % 2 or b > a + 1]


@pytest.mark.parametrize(
    ("have", "options", "wanted"),
    [
        (budget(3, 140 * GB), {}, [(0,), (1,), (2,)]),
        (budget(3, 140 * GB), {"tp": 1}, [(0,), (1,), (2,)]),
        (budget(8, 60 * GB, range(8)), {}, [(0, 1), (2, 3), (4, 5), (6, 7), *SCATTERED]),
        (budget(16, 60 * GB, range(16)), {}, [(gpu, gpu + 1) for gpu in range(0, 16, 2)]),
        (
            budget(6, 60 * GB, (0, 1, 2, 3), (4, 5)),
            {"tp": 2},
            [(4, 5), (0, 1), (2, 3), (0, 2), (0, 3), (1, 2), (1, 3)],
        ),
        (budget(3, 60 * GB), {}, [(0, 1), (1, 2), (0, 2)]),
        (budget(8, 30 * GB, (0, 2), (1, 3), (4, 6), (5, 7)), {}, [(0, 2, 1, 3), (4, 6, 5, 7)]),
        (replace(budget(3, 140 * GB), available=9 * GB), {}, [(1,), (2,)]),
    ],
)
def test_the_same_cut_has_other_places(have, options, wanted):
    assert places(have, **options) == wanted


@pytest.mark.parametrize("peers", [(range(4),), ()])
def test_what_others_have_left_is_found_wherever_it_is(peers):
    """Models came and went: the first and the last GPU are free, each beside a full one."""
    full, free = 9 * GB, 60 * GB
    have = replace(budget(4, free, *peers), more_gpus=(full, full, free))
    cut, reason = chosen(have)
    assert cut == ((2, 1, (0, 3)) if peers else (1, 2, (0, 3)))
    assert "0 and 3" in reason


@pytest.mark.parametrize(("gpus", "cut"), [((5,), (1, 1)), ((2, 3), (2, 1)), ((0, 1, 2, 3), (4, 1))])
def test_a_place_that_was_chosen_is_taken(gpus, cut):
    (plan,) = plans(QWEN3_32B, budget(8, 140 * GB, range(8)), replace(CONFIG, gpus=gpus))
    assert (plan.gpus, (plan.tp, plan.pp)) == (gpus, cut)
    assert "as asked" not in " ".join(plan.notes)
    with pytest.raises(ParallelError, match="were chosen, but the number of visible GPUs is 1"):
        plans(QWEN3_32B, budget(1, 140 * GB), replace(CONFIG, gpus=(5,)))


def test_more_ranks_than_gpus_and_models_for_no_machine():
    with pytest.raises(ParallelError, match=r"need 4 GPUs, but 2 are visible.*CUDA_VISIBLE_DEVICES"):
        chosen(budget(2, 140 * GB, range(2)), tp=4)
    with pytest.raises(DoesNotFit, match="needs"):
        chosen(budget(2, 8 * GB, range(2)))


def test_a_cpu_is_one_rank_unless_asked():
    have = MemoryBudget(device="cpu", available=200 * GB, cores=16)
    assert chosen(have)[0] == (1, 1, ())
    plan = estimate(QWEN3_32B, have, replace(CONFIG, tp=2, memory_bytes=120 * GB))
    whole = estimate(QWEN3_32B, have, replace(CONFIG, memory_bytes=120 * GB))
    assert plan.ranks_in_memory == 2
    assert plan.notes == ("every layer shared by 2 ranks, as asked",)
    crowded = estimate(QWEN3_32B, replace(have, cores=2), replace(CONFIG, tp=4, memory_bytes=120 * GB))
    assert crowded.notes[-1] == "4 ranks share 2 cores and wait for each other: ask for fewer"
    assert plan.total_bytes * 2 <= 120 * GB
    assert plan.weights_bytes * 2 == pytest.approx(whole.weights_bytes, rel=1e-3)


def test_islands_are_sets_of_mutual_peers():
    def pairs(*groups):
        return {frozenset((a, b)) for group in groups for a in group for b in group if a != b}

    assert islands(pairs(range(8)), 8) == (frozenset(range(8)),)
    assert islands(pairs((0, 1), (2, 3)), 5) == (frozenset((0, 1)), frozenset((2, 3)))
    assert islands(pairs((2, 3, 4), (0, 1)), 5) == (frozenset((2, 3, 4)), frozenset((0, 1)))
    assert islands(pairs((0, 1), (1, 2)), 3) == (frozenset((0, 1)),), "a chain is no set of peers"
    assert islands(set(), 4) == ()


class Linked(FakeNvml):
    """Devices with names of their own and pairs of peers."""

    def __init__(self, count, pairs, **options):
        super().__init__(gpus=[FakeGpu(name=f"gpu {index}") for index in range(count)], **options)
        self.pairs = {frozenset(pair) for pair in pairs}

    def _answers(self, name, gpu, arguments):
        here = self.gpus.index(gpu)
        if name == "nvmlDeviceGetUUID":
            return f"GPU-{here}000"
        if name == "nvmlDeviceGetP2PStatus":
            other = self.gpus.index(arguments[0])
            assert arguments[1] == pynvml.NVML_P2P_CAPS_INDEX_NVLINK
            joined = frozenset((here, other)) in self.pairs
            return pynvml.NVML_P2P_STATUS_OK if joined else pynvml.NVML_P2P_STATUS_NOT_SUPPORTED
        return super()._answers(name, gpu, arguments)

    def nvmlDeviceGetHandleByUUID(self, uuid):  # noqa: N802 - NVML's name
        return next(gpu for index, gpu in enumerate(self.gpus) if uuid == f"GPU-{index}000")


@pytest.fixture
def driver(monkeypatch):
    def install(nvml):
        monkeypatch.setitem(__import__("sys").modules, "pynvml", nvml)
        monkeypatch.setattr(machine_module, "torch_has_cuda", lambda: True)
        return nvml

    assert machine_module.read_nvlink is nvlink_module.read_nvlink
    return install


def test_peers_are_read_from_the_driver_in_the_order_that_cuda_sees(driver, monkeypatch):
    driver(Linked(4, [(1, 3), (0, 2)]))
    assert read_machine().nvlink == (frozenset((0, 2)), frozenset((1, 3)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1,0")
    machine = read_machine()
    assert [gpu.name for gpu in machine.gpus] == ["gpu 3", "gpu 1", "gpu 0"]
    assert machine.nvlink == (frozenset((0, 1)),)
    assert len(MemoryBudget.of(machine, "cuda").more_gpus) == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    assert read_machine().nvlink == ()


def test_a_driver_that_does_not_know_links_knows_no_peers(driver):
    nvml = driver(Linked(2, [(0, 1)], not_available=frozenset({"nvmlDeviceGetP2PStatus"})))
    assert peers(nvml, ["GPU-0000", "GPU-1000"]) == set()
    assert read_machine().nvlink == ()


def test_gpus_are_joined_where_all_are_peers_of_all():
    islands = (frozenset({0, 1, 2, 3}), frozenset({5, 6}))
    assert are_nvlink_peers([3, 1], islands)
    assert are_nvlink_peers([5, 6], islands)
    assert not are_nvlink_peers([0, 5], islands)
    assert not are_nvlink_peers([0, 4], islands)
    assert not are_nvlink_peers([0, 1], ())
