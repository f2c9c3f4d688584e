"""The kernel that sums, adds and norms, in Triton's interpreter: every rank's part, one after another."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support.triton_interpreter import turn_on

turn_on()

from llmbox.engine.distributed.fused_allreduce_rmsnorm_kernel import (
    Peers,
    all_reduce_add_rms_norm,
    sum_norm_rows,
)
from llmbox.engine.distributed.torch_communicator import sum_in_order
from llmbox.kernels.reference import REFERENCE
from llmbox.kernels.triton.elementwise import norm_rows
from llmbox.kernels.triton.linear.linear import FP8_BLOCKS, FP8_ROWS
from llmbox.kernels.triton.linear.quantize_activations import RowFormat, quantize_rows

ROWS, ROOM = 5, 1024
GIVEN = FP8_ROWS._replace(given=torch.tensor([0.02]))


class Group:
    """All ranks' memory in one process. What a rank waits for must have been told before it runs."""

    def __init__(self, ranks, dtype):
        self.ranks = ranks
        self.buffers = [torch.full((2, ROOM), torch.nan, dtype=dtype) for _ in range(ranks)]
        self.flags = [torch.zeros(ROWS, ranks, dtype=torch.int32) for _ in range(ranks)]
        self.epochs = [torch.zeros(ROWS, dtype=torch.int32) for _ in range(ranks)]

    def start_at(self, epoch):
        for tensor in (*self.flags, *self.epochs):
            tensor.fill_(epoch)

    def peers(self, rank):
        addresses = [torch.tensor([each.data_ptr() for each in all_]) for all_ in (self.buffers, self.flags)]
        return Peers(rank, *addresses, self.epochs[rank], ROOM * self.buffers[0].element_size())

    def others_tell(self, rank, parts):
        """As if all other ranks' programs had come as far as their waiting."""
        rows, width = parts[0].shape
        epoch = self.epochs[rank][:rows] + 1
        for other in set(range(self.ranks)) - {rank}:
            for row in range(rows):
                half = self.buffers[other][int(epoch[row]) & 1]
                half[row * width : (row + 1) * width] = parts[other][row]
            self.flags[rank][:rows, other] = epoch


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize(("rows", "width", "dtype"), [(1, 64, torch.float16), (5, 96, torch.float32)])
def test_every_rank_finds_the_ordered_sum_its_residual_and_the_norm(ranks, rows, width, dtype):
    group, weight = Group(ranks, dtype), torch.randn(width, dtype=dtype)
    for _turn in range(3):
        parts = [torch.randn(rows, width, dtype=dtype) for _ in range(ranks)]
        residual = torch.randn(rows, width, dtype=dtype)
        wanted_residual = residual.clone()
        wanted = REFERENCE.add_rms_norm(sum_in_order(parts), wanted_residual, weight, 1e-5)
        for rank in range(ranks):
            group.others_tell(rank, parts)
            mine = residual.clone()
            out = all_reduce_add_rms_norm(parts[rank], mine, weight, 1e-5, group.peers(rank))
            assert torch.equal(mine, wanted_residual), "bit by bit, in the order of ranks"
            torch.testing.assert_close(out, wanted)


@pytest.mark.parametrize(("rows", "width"), [(1, 64), (4, 200)])
@pytest.mark.parametrize("row_format", [FP8_ROWS, FP8_BLOCKS, GIVEN, RowFormat(torch.int8, 128)])
def test_rows_for_the_next_linear_are_those_of_a_pass_of_their_own(rows, width, row_format):
    group, weight = Group(3, torch.float32), torch.randn(width)
    parts = [torch.randn(rows, width) for _ in range(3)]
    parts[1][0, 5] = 1000.0
    residual = torch.randn(rows, width)
    for rank in range(3):
        group.others_tell(rank, parts)
        given = parts[rank], residual.clone(), weight, 1e-5
        out, eight = sum_norm_rows(*given, row_format, group.peers(rank))
        wanted = norm_rows(sum_in_order(parts), residual.clone(), weight, 1e-5, None)[0]
        assert torch.equal(out, wanted)
        for ours, theirs in zip(eight, quantize_rows(wanted, row_format), strict=True):
            assert torch.equal(ours.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8))


def test_halves_take_turns_and_all_ranks_are_told():
    group = Group(3, torch.float32)
    parts = [torch.full((2, 8), float(rank)) for rank in range(3)]
    for turn in (1, 2, 3):
        group.others_tell(1, parts)
        all_reduce_add_rms_norm(parts[1], torch.zeros(2, 8), torch.ones(8), 1e-5, group.peers(1))
        written = group.buffers[1][turn & 1]
        assert torch.equal(written[:16], parts[1].view(-1))
        assert [flags[:2, 1].tolist() for flags in group.flags] == [[turn, turn]] * 3
        assert not group.flags[0][2:].any()
        assert group.epochs[1].tolist() == [turn, turn, 0, 0, 0]
        group.buffers[1][turn & 1] = torch.nan
        assert group.buffers[1][1 - (turn & 1)].isnan().all()


@pytest.mark.parametrize("ahead", [0, 1])
def test_epochs_may_wrap_around_and_a_rank_may_be_one_call_ahead(ahead):
    group = Group(2, torch.float32)
    group.start_at(torch.iinfo(torch.int32).max)
    parts = [torch.ones(1, 8), torch.full((1, 8), 2.0)]
    group.others_tell(0, parts)
    group.flags[0][0, 1] += ahead
    residual = torch.zeros(1, 8)
    all_reduce_add_rms_norm(parts[0], residual, torch.ones(8), 1e-5, group.peers(0))
    assert residual.tolist() == [[3.0] * 8]
    assert group.epochs[0][0] == torch.iinfo(torch.int32).min


COMPILE = """
import torch
from support.triton_compile import compiling, zeros
from llmbox.engine.distributed.fused_allreduce_rmsnorm_kernel import Peers, sum_norm_rows
from llmbox.kernels.triton.linear.linear import FP8_BLOCKS, FP8_ROWS
GIVEN = FP8_ROWS._replace(given=torch.ones(1))
with compiling() as kernels:
    rounded = ((2, 4096, each) for each in (FP8_ROWS, FP8_BLOCKS, GIVEN))
    for ranks, width, row_format in ((2, 4096, None), (8, 8192, None), *rounded):
        addresses = torch.zeros(ranks, dtype=torch.int64)
        peers = Peers(1, addresses, addresses, torch.zeros(8, dtype=torch.int32), 1 << 18)
        x, weight = zeros(4, width), zeros(width)
        for only in (True, False):
            sum_norm_rows(x, zeros(4, width), weight, 1e-5, row_format, peers, compile_only=only)
for kernel in kernels:
    text = kernel.asm["ptx"]
    written, told, known = (text.index(word) for word in ("st.global.v4", "sys.release", "sys.acquire"))
    assert "bar.sync" in text[written:told]
    assert "bar.sync" in text[known:text.rindex("ld.global.v4")]
    assert "global.b16" not in text, "rows move in whole words"
assert len(kernels) == 5
"""


def outside_the_interpreter(cache, *arguments):
    root = Path(__file__).parents[3]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = os.pathsep.join(map(str, (root / "packaging/tree", root / "tests")))
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": paths}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.mark.slow
def test_it_compiles_with_what_it_tells_behind_what_it_wrote(tmp_path):
    done = outside_the_interpreter(tmp_path, "-c", COMPILE)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; two ranks share it")
def test_two_ranks_that_wait_for_each_other(tmp_path):
    done = outside_the_interpreter(tmp_path, Path(__file__).with_name("two_ranks_one_gpu.py"))
    assert done.returncode == 0, done.stderr[-3000:]
