"""torch.distributed between processes, as on GPUs: the same sums bit by bit, whatever way they go."""

import subprocess
import sys

SCRIPT = """
import os, sys, tempfile
from pathlib import Path
import torch
import torch.distributed as dist
from llmbox.engine.distributed import custom_all_reduce
from llmbox.engine.distributed import torch_communicator as collective
from llmbox.engine.distributed.communicator import rows_of_rank
from llmbox.engine.distributed.torch_communicator import join, leave
from llmbox.engine.model_config.parallel_layout import ParallelLayout

def numbers(rank, size):
    return torch.randn(size, generator=torch.Generator().manual_seed(rank)).bfloat16()

def sums(rank, ranks):
    together = join(ParallelLayout(ranks, 1, rank), torch.device("cpu"), ranks_file, ordered=True)
    parts = [numbers(each, 4001) for each in range(ranks)]
    wanted = collective.sum_in_order(parts)
    for limit in (1 << 20, 1):
        collective.GATHER_UP_TO = limit
        x = parts[rank].clone()
        together.all_reduce(x)
        assert torch.equal(x, wanted)
    assert torch.equal(together.all_gather(parts[rank].view(-1, 1)), torch.stack(parts).unsqueeze(2))
    for rows in (1, ranks, ranks + 1):  # one row is whole on the first rank: the others get none
        whole = torch.arange(rows * ranks * 5.0).view(rows, -1)
        mine = together.all_to_all_rows(whole[:, 5 * rank : 5 * rank + 5])
        assert torch.equal(mine, whole[rows_of_rank(rows, ranks, rank)])
    out = torch.empty(4001, dtype=torch.bfloat16)
    together.all_reduce(parts[rank].float(), out)
    assert torch.equal(out, sum(part.float() for part in parts).bfloat16())
    leave()

def stages(rank, ranks):
    layout = ParallelLayout(2, 2, rank)
    together = join(layout, torch.device("cpu"), stages_file, ordered=True)
    x, residual = torch.full((3, 4), float(rank)), torch.full((3, 4), rank + 0.5)
    if layout.stage:
        together.receive(x, residual)
    else:
        together.send(x, residual)
    assert (float(x[0, 0]), float(residual[0, 0])) == (rank % 2, rank % 2 + 0.5)
    together.all_reduce(x)
    assert float(x[2, 3]) == 1.0
    ids = torch.tensor([rank, 7]) if layout.stage else torch.zeros(2, dtype=torch.int64)
    together.transfer_to_first_stage(ids).wait()
    assert ids.tolist() == [rank % 2 + 2, 7]
    assert together.all_agree(True)
    assert not together.all_agree(rank != 3)
    leave()

def right(x_TE, residual_TE, weight_E, eps, row_format, group, compile_only=False):
    if not compile_only:
        total = x_TE.float()
        dist.all_reduce(total, group=group)
        residual_TE += total.bfloat16()
        total = residual_TE.float()
        normed = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + eps)
        return normed.bfloat16(), row_format

def wrong(x_TE, residual_TE, *rest, **options):
    right(x_TE, residual_TE, *rest, **options)
    return residual_TE, None

def refused(*_, **options):
    raise OSError("no compiler")

def unlaunchable(*_, compile_only=False, **options):
    if not compile_only:
        raise OSError("too many registers")

def one_shot(rank, ranks):
    join(ParallelLayout(ranks, 1, rank), torch.device("cpu"), one_shot_file, ordered=True)
    group, cpu = dist.group.WORLD, torch.device("cpu")
    buffer = torch.zeros(custom_all_reduce.BUFFER_BYTES, dtype=torch.uint8)
    custom_all_reduce.shared_memory = lambda *_: (buffer, None)
    assert custom_all_reduce.OneShotAllReduce.prepare(group, cpu) is None, "torch refuses its kernel here"
    ran = []
    def agrees(*_):
        ran.append(rank)
        return rank == 0
    custom_all_reduce.OneShotAllReduce.agrees_with_nccl = agrees
    custom_all_reduce.shared_memory = lambda *_: (None, None)
    assert custom_all_reduce.OneShotAllReduce.prepare(group, cpu) is None, "one of them finds other sums"
    assert ran == [rank]
    def refused(*_):
        raise RuntimeError("no peers")
    if rank:
        custom_all_reduce.shared_memory = refused
    assert custom_all_reduce.OneShotAllReduce.prepare(group, cpu) is None
    assert ran == [rank], "nobody runs a kernel that not all can run"
    leave()

def mapped(rank, ranks):
    import torch.distributed._symmetric_memory as symmetric
    join(ParallelLayout(ranks, 1, rank), torch.device("cpu"), mapped_file, ordered=True)
    met = []
    def empty(size, **options):
        if refuses == rank:
            raise RuntimeError("no peers")
        return torch.empty(size, **options)
    symmetric.empty, symmetric.rendezvous = empty, lambda buffer, group: met.append(len(buffer))
    for refuses in (1, None):
        try:
            custom_all_reduce.shared_memory(64, dist.group.WORLD, torch.device("cpu"))
        except RuntimeError as error:
            assert str(error) == ("no peers" if rank else "another rank has none")
    assert met == [64], "nobody waits for a rank that will not come"
    leave()

def fused(rank, ranks):
    together = join(ParallelLayout(ranks, 1, rank), torch.device("cpu"), fused_file, ordered=True)
    group, cpu = dist.group.WORLD, torch.device("cpu")
    x = torch.full((3, 1024), rank + 1.0).bfloat16()
    for runs in ((right, right), (right, wrong), (refused, right), (unlaunchable, unlaunchable)):
        custom_all_reduce._over_symmetric_memory = lambda *_: (runs[rank], group)
        found = custom_all_reduce.FusedAllReduceRMSNorm.prepare(group, cpu)
        assert (found is None) == (runs != (right, right)), runs
        if found is not None:
            layout = ParallelLayout(ranks, 1, rank)
            together = collective.TorchCommunicator(layout, group, ordered=True, device=cpu, fused=found)
            assert together.can_fuse(3, 1024, torch.bfloat16)
            assert not together.can_fuse(300, 1024, torch.bfloat16), "too large"
            residual = torch.ones_like(x)
            out, eight = together.all_reduce_add_rms_norm(x, residual, torch.ones(1024), 1e-5, "8 bits")
            assert eight == "8 bits"
            assert (float(residual[0, 0]), float(out[2, 9])) == (4.0, 1.0)
    leave()

def all_ranks(work, ranks):
    children = []
    for rank in range(ranks):
        if not (child := os.fork()):
            try:
                work(rank, ranks)
            except BaseException:
                import traceback
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(child)
    return all(os.waitpid(child, 0)[1] == 0 for child in children)

torch.set_num_threads(1)
folder = Path(sys.argv[1])
ranks_file, stages_file = folder / "ranks", folder / "stages"
fused_file, one_shot_file, mapped_file = folder / "fused", folder / "one_shot", folder / "mapped"
works = ((sums, 3), (stages, 4), (fused, 2), (one_shot, 2), (mapped, 2))
sys.exit(0 if all(all_ranks(work, ranks) for work, ranks in works) else 1)
"""


def test_sums_gathers_stages_and_what_is_tried_before_it_is_used(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
