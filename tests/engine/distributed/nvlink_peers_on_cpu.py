"""What NVLink peers run, by CPU processes: the real kernel over memory that all have mapped at one address,
and torch's operator with a body for CPUs. Every line of Python between `join` and the kernels.

    PYTHONPATH=tests python -P tests/engine/distributed/nvlink_peers_on_cpu.py FOLDER RANKS
"""

import os
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
import torch.distributed.tensor  # what `assert_close` imports: once, before the processes fork

from llmbox.engine.distributed import torch_communicator as group_module
from llmbox.engine.distributed.custom_all_reduce import BUFFER_BYTES, KERNEL, ROWS
from llmbox.engine.distributed.torch_communicator import sum_in_order
from llmbox.engine.model_config.parallel_layout import ParallelLayout
from llmbox.kernels.reference import REFERENCE
from support.triton_interpreter import turn_on

CPU = torch.device("cpu")
OFFSET = 64
"""Where a tensor begins in torch's block of memory."""
WIDTH = 64
calls: list[int] = []
"""Numbers that went through torch's operator."""


def sum_into(
    symm_buffer: torch.Tensor, local_input: torch.Tensor, reduce_op: str, group_name: str, out: torch.Tensor
) -> torch.Tensor:
    """As torch's kernel has it: the caller's part goes to memory of all, the sum to `out`."""
    assert reduce_op == "sum"
    assert symm_buffer.dtype == local_input.dtype == out.dtype
    assert symm_buffer.shape == local_input.shape == out.shape
    assert symm_buffer.is_contiguous()
    assert local_input.nbytes % 16 == local_input.data_ptr() % 16 == 0
    symm_buffer.copy_(local_input)
    total = symm_buffer.float()
    dist.all_reduce(total, group=dist.distributed_c10d._resolve_process_group(group_name))
    calls.append(len(out))
    return out.copy_(total)


def work(rank: int, memory: list[list[torch.Tensor]], file: Path) -> None:
    """`memory[i]`: of all ranks, for the i-th allocation."""
    ranks = len(memory[0])
    allocations = iter(memory)

    def empty(size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        parts = next(allocations)
        assert (dtype, device) == (torch.uint8, CPU)
        return parts[rank][OFFSET : OFFSET + size]

    def rendezvous(tensor: torch.Tensor, group: dist.ProcessGroup) -> SimpleNamespace:
        assert isinstance(group, dist.ProcessGroup)
        parts = next(all_ for all_ in memory if all_[rank].data_ptr() + OFFSET == tensor.data_ptr())
        return SimpleNamespace(buffer_ptrs=[part.data_ptr() for part in parts], offset=OFFSET)

    symmetric.empty, symmetric.rendezvous = empty, rendezvous
    together = group_module.join(ParallelLayout(ranks, 1, rank), CPU, file, ordered=False, joined=True)
    assert together._one_shot is not None
    assert together._fused is not None
    tried = len(calls)
    noise = torch.Generator().manual_seed(1)
    for rows in (1, 5, 5, 3):
        parts = torch.randn(ranks, rows, WIDTH, generator=noise)
        residual = torch.randn(rows, WIDTH, generator=noise)
        weight = torch.rand(WIDTH, generator=noise)
        summed = parts[rank].clone()
        together.all_reduce(summed)
        torch.testing.assert_close(summed, parts.sum(0))
        assert together.can_fuse(rows, WIDTH, torch.float32)
        wanted_residual = residual.clone()
        wanted = REFERENCE.add_rms_norm(sum_in_order(list(parts)), wanted_residual, weight, 1e-5)
        out, _ = together.all_reduce_add_rms_norm(parts[rank].clone(), residual, weight, 1e-5, None)
        assert torch.equal(residual, wanted_residual)
        torch.testing.assert_close(out, wanted)
    assert calls[tried:] == [WIDTH * rows for rows in (1, 5, 5, 3)]
    large = torch.full((BUFFER_BYTES // 4 + 4,), rank + 1.0)
    together.all_reduce(large)
    assert float(large[-1]) == ranks * (ranks + 1) / 2, "what is too large goes over the group"
    assert len(calls) == tried + 4
    group_module.leave()


def main(folder: Path, ranks: int) -> int:
    torch.set_num_threads(1)
    turn_on()
    library = torch.library.Library("symm_mem", "IMPL")
    library.impl(KERNEL, sum_into, "CPU")
    sizes = (BUFFER_BYTES, 2 * BUFFER_BYTES + 4 * ROWS * ranks)
    memory = [
        [torch.zeros(OFFSET + size, dtype=torch.uint8).share_memory_() for _ in range(ranks)]
        for size in sizes
    ]
    children = []
    for rank in range(ranks):
        if not (child := os.fork()):
            try:
                work(rank, memory, folder / "store")
            except BaseException:  # noqa: BLE001 - of a child, which is no test
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(child)
    return max(os.waitpid(child, 0)[1] for child in children)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])) and 1)
