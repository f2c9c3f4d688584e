"""Interface of the collectives between ranks, and the tensor-parallel operations that layers build on them.

T rows of the step, E hidden, I inputs of a linear, R rows.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from llmbox.kernels.ops import Ops, PackedLinear

from ..checkpoint.safetensors import ShardSlice
from ..model_config.parallel_layout import ParallelLayout


def rows_of_rank(rows: int, tp: int, rank: int) -> slice:
    """Return the slice of `rows` that `rank` owns: ceil(rows / tp) each, fewer or none for the last ranks."""
    size = -(-rows // tp)
    return slice(min(rows, rank * size), min(rows, (rank + 1) * size))


class AsyncWork(Protocol):
    """Asynchronous transfer: `torch.distributed.Work`."""

    def wait(self) -> object:
        """Order all later work, also on the device, after the transfer."""
        ...


class CompletedWork:
    def wait(self) -> None:
        return


class Communicator(Protocol):
    """Collectives and transfers of one rank.

    All ranks of a stage call `all_reduce`, `all_gather` and `all_to_all_rows` together; transfers are called
    at both ends.
    """

    def all_reduce(self, x: Tensor, out: Tensor | None = None) -> None:
        """All-reduce `x` over the stage, in place or converted into `out`."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """All-gather tensors of one shape over the stage: [tp, ...]."""
        ...

    def all_to_all_rows(self, x: Tensor) -> Tensor:
        """All-to-all of rows: from shards [R, V] of every rank to this rank's rows, whole: [rows, tp V]."""
        ...

    def exchange_rows(self, rows_TKE: Tensor, owners_TK: Tensor) -> None:
        """Fill in the rows [T K, E] that other ranks of the stage own; they are zeros before."""
        ...

    def send(self, *tensors: Tensor) -> None:
        """Send to the same TP rank of the next stage."""
        ...

    def receive(self, *tensors: Tensor) -> None:
        """Receive from the previous stage into these tensors."""
        ...

    def transfer(self, x: Tensor, source: int, destination: int) -> None:
        """Copy `x` from one TP rank of the stage to another. These two call it, between steps."""
        ...

    def can_fuse(self, rows: int, width: int, dtype: torch.dtype) -> bool:
        """Return whether `all_reduce_add_rms_norm` takes tensors of this shape; the same on all ranks."""
        ...

    def all_reduce_add_rms_norm(
        self, x_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, eps: float, row_format: Any
    ) -> tuple[Tensor, Any]:
        """All-reduce, then `Ops.add_rms_norm`; return also the quantized rows for `fused_norm`, or None."""
        ...

    def all_agree(self, works: bool) -> bool:
        """Return whether `works` holds on all ranks of all stages, which call this between steps.

        Waits for the device.
        """
        ...

    def transfer_to_first_stage(self, x: Tensor) -> AsyncWork:
        """Transfer `x` from the last stage to the first, which passes the tensor to fill.

        Both stages call it, and neither blocks: other transfers do not delay it. `x` must stay untouched
        until the returned work is done.
        """
        ...


class TensorParallel:
    """Tensor-parallel linears and norms of one rank, as layers use them."""

    def __init__(self, layout: ParallelLayout, communicator: Communicator | None = None) -> None:
        """With more than one rank, steps need a `communicator`; loading does not."""
        self.layout = layout
        self._communicator = communicator
        self.sums_in_shares = False
        """Add inputs of row-parallel linears as any number of ranks does (`exact` in engine/config.py)."""

    def join(self, communicator: Communicator) -> None:
        """Set the communicator, once, before the first step."""
        assert self._communicator is None
        self._communicator = communicator

    @property
    def communicator(self) -> Communicator:
        assert self._communicator is not None
        return self._communicator

    def part(self, total: int) -> ShardSlice:
        return self.layout.equal(total)

    def row_parallel_linear(self, ops: Ops, packed: PackedLinear, x_TI: Tensor, width: int) -> Tensor:
        """Row-parallel linear to [T, width]: each rank has a shard of the inputs, results are all-reduced.

        The all-reduce may be left to `add_rms_norm` or `finish_all_reduce`, one of which must follow. On a
        CPU the float32 results of `Ops.logits` are summed and rounded once, as on a single rank. On a GPU
        that would double the bytes on the links: there each rank rounds first, as other engines do.
        """
        if self.sums_in_shares:
            return self._linear_in_shares(ops, packed, x_TI)
        if self.layout.tp == 1 or self._defers_all_reduce(len(x_TI), width, x_TI.dtype):
            return ops.linear(packed, x_TI)
        if x_TI.dtype == torch.float32 or x_TI.device.type != "cpu":
            out_TE = ops.linear(packed, x_TI)
            ops.host_callback(self.communicator.all_reduce, (out_TE,))
            return out_TE
        part_TE = ops.logits(packed, x_TI)
        out_TE = ops.scratch("sum", part_TE, part_TE.shape[1], x_TI.dtype)
        ops.host_callback(self.communicator.all_reduce, (part_TE, out_TE))
        return out_TE

    def _linear_in_shares(self, ops: Ops, packed: PackedLinear, x_TI: Tensor) -> Tensor:
        assert ops.linear_in_shares is not None
        part_TE = ops.linear_in_shares(packed, x_TI, self.layout.tp)
        if self.layout.tp == 1:
            return part_TE
        out_TE = ops.scratch("sum", part_TE, part_TE.shape[1], x_TI.dtype)
        ops.host_callback(self.communicator.all_reduce, (part_TE, out_TE))
        return out_TE

    def reduce_partial(self, ops: Ops, out_TE: Tensor) -> Tensor:
        """Do as `row_parallel_linear` for a partial result in the model's dtype, computed before."""
        if self.layout.tp > 1 and not self._defers_all_reduce(len(out_TE), out_TE.shape[1], out_TE.dtype):
            ops.host_callback(self.communicator.all_reduce, (out_TE,))
        return out_TE

    def as_partial(self, out_TE: Tensor) -> Tensor:
        """Return a sum that every rank has whole as what `add_rms_norm` takes: where an all-reduce follows,
        ranks but the first add zeros.
        """
        if self.layout.tp_rank and self._defers_all_reduce(len(out_TE), out_TE.shape[1], out_TE.dtype):
            return torch.zeros_like(out_TE)
        return out_TE

    def add_rms_norm(
        self, ops: Ops, x_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, eps: float
    ) -> Tensor:
        """Apply `Ops.add_rms_norm` to a result of `row_parallel_linear`, after its all-reduce or fused."""
        if self._defers_all_reduce(len(x_TE), x_TE.shape[1], x_TE.dtype):
            norm = partial(self.communicator.all_reduce_add_rms_norm, x_TE, residual_TE, weight_E, eps)
            return ops.fused_norm(norm)
        return ops.add_rms_norm(x_TE, residual_TE, weight_E, eps)

    def finish_all_reduce(self, ops: Ops, x_TE: Tensor) -> Tensor:
        """All-reduce a result of `row_parallel_linear` where no norm of all rows follows."""
        if self._defers_all_reduce(len(x_TE), x_TE.shape[1], x_TE.dtype):
            ops.host_callback(self.communicator.all_reduce, (x_TE,))
        return x_TE

    def map_whole_rows(
        self, shard_RV: Tensor, columns: int, compute: Callable[[Tensor, slice], Tensor]
    ) -> Tensor:
        """Compute float64 [R, columns] from logits [R, V of this rank]; every rank gets all of it.

        The rows are divided among the ranks. `compute` gets this rank's rows, whole but for padding at their
        end, and the slice of R that they are.
        """
        rows, tp = len(shard_RV), self.layout.tp
        if tp == 1:
            return compute(shard_RV, slice(0, rows))
        whole_MV = self.communicator.all_to_all_rows(shard_RV)
        most = rows_of_rank(rows, tp, 0).stop
        padded = torch.zeros(most, columns, dtype=torch.float64, device=shard_RV.device)
        if len(whole_MV):
            padded[: len(whole_MV)] = compute(whole_MV, rows_of_rank(rows, tp, self.layout.tp_rank))
        return self.communicator.all_gather(padded).flatten(0, 1)[:rows]

    def _defers_all_reduce(self, rows: int, width: int, dtype: torch.dtype) -> bool:
        return self.layout.tp > 1 and self.communicator.can_fuse(rows, width, dtype)


SINGLE = TensorParallel(ParallelLayout())
