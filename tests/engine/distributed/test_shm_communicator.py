"""Exchanges between ranks: right for all sizes, in the order of ranks, and over when one is lost."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from llmbox.engine.distributed import shm_communicator as mesh
from llmbox.engine.distributed.shm_communicator import ShmCommunicator, make_ends
from llmbox.engine.errors import RankLost
from llmbox.engine.model_config.parallel_layout import ParallelLayout


def open_mesh(tp, pp=1):
    ends = make_ends(ParallelLayout(tp, pp))
    return [ShmCommunicator(ParallelLayout(tp, pp, rank), each) for rank, each in enumerate(ends)]


def together(collectives, work):
    with ThreadPoolExecutor(len(collectives)) as pool:
        return list(pool.map(work, range(len(collectives)), collectives))


def numbers(rank, size, dtype=torch.float32):
    return torch.randn(size, generator=torch.Generator().manual_seed(rank)).to(dtype)


@pytest.mark.parametrize("size", [1, 63, 64, 65, 1000])
@pytest.mark.parametrize("tp", [2, 3, 5])
def test_sums_and_gathers_of_any_size(monkeypatch, tp, size):
    monkeypatch.setattr(mesh, "SLOT", 256)

    def work(rank, collective):
        results = []
        for turn in range(6):
            x = numbers(rank + 10 * turn, size)
            gathered = collective.all_gather(x.view(-1, 1))
            collective.all_reduce(x)
            results.append((gathered, x))
        return results

    for turn, found in enumerate(zip(*together(open_mesh(tp), work), strict=True)):
        parts = [numbers(rank + 10 * turn, size) for rank in range(tp)]
        totals = parts
        while len(totals) > 1:
            totals = [sum(totals[i + 1 : i + 2], totals[i]) for i in range(0, len(totals), 2)]
        for gathered, summed in found:
            assert torch.equal(gathered, torch.stack(parts).unsqueeze(2))
            assert torch.equal(summed, totals[0]), "bit by bit, in pairs"


@pytest.mark.parametrize("rows", [1, 2, 7])
@pytest.mark.parametrize("tp", [2, 3])
def test_each_rank_gets_its_rows_whole(monkeypatch, tp, rows):
    monkeypatch.setattr(mesh, "SLOT", 256)
    whole = numbers(0, (rows, tp * 90))

    def work(rank, collective):
        found = collective.all_to_all_rows(whole[:, 90 * rank : 90 * (rank + 1)])
        return found, float(collective.all_gather(torch.ones(1)).sum())

    found, after = zip(*together(open_mesh(tp), work), strict=True)
    assert torch.equal(torch.cat(found), whole)
    assert after == (float(tp),) * tp


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 9, 40])
@pytest.mark.parametrize("tp", [2, 3])
def test_each_row_comes_from_its_owner(monkeypatch, tp, rows, dtype):
    """Few rows and many, more than fit in a slot; rows wider than one; a rank that owns none."""
    monkeypatch.setattr(mesh, "ADD_UP_TO", 512)
    chance = torch.Generator().manual_seed(rows)
    for slot, width, most in ((256, 30, tp), (256, 150, tp), (1 << 20, 30, tp), (256, 30, tp - 1)):
        monkeypatch.setattr(mesh, "SLOT", slot)
        owners = torch.randint(0, most, (rows, 4), generator=chance, dtype=torch.int32)
        whole = numbers(1, (rows * 4, width), dtype)

        def work(rank, collective, owners=owners, whole=whole):
            mine = whole.masked_fill((owners.flatten() != rank).unsqueeze(1), 0.0).view(len(owners), -1)
            collective.exchange_rows(mine, owners)
            return mine.view(whole.shape)

        assert all(torch.equal(found, whole) for found in together(open_mesh(tp), work))


def test_a_sum_does_not_depend_on_what_stands_beside_it():
    """As the ring of gloo's or NCCL's all_reduce would: it sums each piece of a tensor in another order."""
    rows = [numbers(rank, (40, 64), torch.bfloat16) for rank in range(3)]

    def whole(rank, collective):
        out = torch.empty(40, 64, dtype=torch.bfloat16)
        collective.all_reduce(rows[rank].float(), out)
        return out

    def one_by_one(rank, collective):
        out = torch.empty(40, 64, dtype=torch.bfloat16)
        for row in range(40):
            collective.all_reduce(rows[rank][row].float(), out[row])
        return out

    assert torch.equal(together(open_mesh(3), whole)[0], together(open_mesh(3), one_by_one)[2])


def test_stages_hand_on_to_the_same_place_of_the_next(monkeypatch):
    def work(rank, collective):
        x, residual = torch.full((300, 64), float(rank)), torch.full((300, 64), rank + 0.5)
        if rank >= 2:
            collective.receive(x, residual)
        if rank < 4:
            collective.send(x, residual)
        return float(x.sum()) / x.numel(), float(residual.sum()) / x.numel()

    assert together(open_mesh(2, 3), work) == [(0.0, 0.5), (1.0, 1.5)] * 3


def test_a_rank_that_is_gone_ends_the_wait_of_the_others():
    first, second, third = open_mesh(3)
    failures = []

    def wait(collective):
        with pytest.raises(RankLost):
            collective.all_reduce(torch.ones(4))
        failures.append(collective)

    waiting = [threading.Thread(target=wait, args=(each,)) for each in (first, second)]
    for thread in waiting:
        thread.start()
    for end in third._sockets.values():
        end.close()
    for thread in waiting:
        thread.join(60)
    assert len(failures) == 2


@pytest.mark.parametrize("pp", [1, 3])
def test_all_stages_agree(pp):
    def work(rank, collective):
        return [collective.all_agree(rank != no) for no in (0, 2 * pp - 1, -1)]

    assert together(open_mesh(2, pp), work) == [[False, False, True]] * 2 * pp


def test_nothing_stays_open():
    def open_files():
        return {entry.name for entry in Path("/proc/self/fd").iterdir()}

    before = open_files()
    collectives = open_mesh(2, 2)
    assert len(open_files()) > len(before)
    del collectives
    assert open_files() == before
    for ends in make_ends(ParallelLayout(2, 2)):
        ends.close()
    assert open_files() == before


@pytest.mark.parametrize("pp", [2, 3])
def test_drawn_ids_come_back_from_the_last_stage_to_the_first(pp):
    def work(rank, collective):
        layout = ParallelLayout(2, pp, rank)
        ids = torch.tensor([rank, 7]) if layout.is_last else torch.zeros(2, dtype=torch.int64)
        if layout.is_first or layout.is_last:
            collective.transfer_to_first_stage(ids).wait()
        return ids.tolist()

    found = together(open_mesh(2, pp), work)
    assert found[:2] == [[2 * pp - 2, 7], [2 * pp - 1, 7]]
