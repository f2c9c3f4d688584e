"""How ranks on GPUs come together and part, over a torch.distributed that only takes notes."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from llmbox.engine.distributed import torch_communicator as group
from llmbox.engine.model_config.parallel_layout import ParallelLayout

GPU = torch.device("cuda", 1)


@pytest.fixture
def notes(monkeypatch):
    made = []
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **options: made.append((args, options)))
    monkeypatch.setattr(dist, "new_group", lambda ranks=None, **_: made.append(ranks) or f"group {ranks}")
    monkeypatch.setattr(dist, "barrier", lambda: made.append("barrier"))
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD="world"))
    monkeypatch.setattr(group, "TorchCommunicator", lambda *args, **_: args)
    for name in group.SETTINGS:
        monkeypatch.delenv(name, raising=False)
    return made


def test_ranks_on_gpus_connect_at_once_and_to_their_own(notes, monkeypatch, tmp_path):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    layout = ParallelLayout(2, 1, 1)
    _, stage = group.join(layout, GPU, tmp_path / "store", ordered=True)
    (backend,), options = notes[0]
    assert (backend, options["device_id"], options["rank"], options["world_size"]) == ("nccl", GPU, 1, 2)
    assert (stage, notes[1:]) == ("world", ["barrier"]), "one stage needs no communicator of its own"
    assert group.os.environ["NCCL_SOCKET_IFNAME"] == "eth0"
    assert group.os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "0", "nobody polls a file that is gone"


def test_every_rank_makes_the_groups_of_all_stages_in_one_order(notes, tmp_path):
    for rank in range(4):
        _, stage = group.join(ParallelLayout(2, 2, rank), GPU, tmp_path / "store", ordered=True)
        assert stage == f"group {[0, 1] if rank < 2 else [2, 3]}"
        assert notes[1:] == [[0, 1], [2, 3], None, "barrier"]
        notes.clear()


@pytest.mark.parametrize(("backend", "left"), [("nccl", 0), ("gloo", 1)])
def test_nccl_is_left_to_the_end_of_the_process(monkeypatch, backend, left):
    """It would wait for graphs, which live as long as the process."""
    done = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: done.append(backend))
    group.leave()
    assert len(done) == left


@pytest.mark.parametrize("others_are", [True, False])
def test_kernels_that_wait_for_each_other_are_prepared_by_all_of_a_stage_or_none(
    notes, monkeypatch, tmp_path, others_are
):
    """A driver may tell one of them nothing of its links."""
    asked, prepared = [], []
    monkeypatch.setattr(group, "all_agree", lambda *told: asked.append(told) or others_are)
    for each in (group.OneShotAllReduce, group.FusedAllReduceRMSNorm):
        monkeypatch.setattr(each, "prepare", lambda stage, _device: prepared.append(stage))
    group.join(ParallelLayout(2, 1, 0), GPU, tmp_path / "store", ordered=False, joined=True)
    assert asked == [("world", GPU, True)]
    assert prepared == ["world"] * (2 if others_are else 0)
