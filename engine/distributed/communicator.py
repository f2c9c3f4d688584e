"""Rows dealt out to the ranks of a stage: each has a run of them, as equal as can be."""

from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from llmbox.kernels.ops import Ops, PackedLinear

from ..model_config.parallel_layout import ParallelLayout
from ..partition import ShardSlice


def dealt(rows: int, tp: int, rank: int) -> slice:
    """Those of `rank`. The first ones have one size, the rest what is left, which may be nothing."""
    size = -(-rows // tp)
    return slice(min(rows, rank * size), min(rows, (rank + 1) * size))


class AsyncWork(Protocol):
    """What was begun and goes on beside other work: `torch.distributed.Work`."""

    def wait(self) -> object:
        """What is done next, on the device too, finds it done."""
        ...


class CompletedWork:
    def wait(self) -> None:
        return


class Communicator(Protocol):
    """Each call is made by all ranks of a stage (`sum`, `gather`) or by both ends (the others)."""

    def sum(self, x: Tensor, out: Tensor | None = None) -> None:
        """In place, or rounded into `out`."""
        ...

    def gather(self, x: Tensor) -> Tensor:
        """[tp, ...] of all ranks' tensors, which have one shape."""
        ...

    def deal(self, x: Tensor) -> Tensor:
        """Of x [R, ...] of one shape: [tp, those of the R that are `dealt` to this rank, ...]."""
        ...

    def send(self, *tensors: Tensor) -> None:
        """To the next stage."""
        ...

    def receive(self, *tensors: Tensor) -> None:
        """From the stage before, into these."""
        ...

    def fuses(self, rows: int, width: int, dtype: torch.dtype) -> bool:
        """Whether `sum_add_norm` is there for tensors of this shape: the same answer on all ranks."""
        ...

    def sum_add_norm(
        self, x_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, eps: float, row_format: Any
    ) -> tuple[Tensor, Any]:
        """`sum`, then `Ops.add_rms_norm`; and the rows that `Ops.norm_by` wants, or None."""
        ...

    def agree(self, works: bool) -> bool:
        """Whether it does on all ranks of all stages, which call it between steps. Waits for the device."""
        ...

    def hand_back(self, x: Tensor) -> AsyncWork:
        """From the last stage to the first, into this: called by both. Neither waits here, nor for what else
        they exchange; `x` is left alone until it is there.
        """
        ...


class TensorParallel:
    def __init__(self, layout: ParallelLayout, collective: Communicator | None = None) -> None:
        """Where there is more than one rank, steps need a `collective`: loading does without."""
        self.layout = layout
        self._collective = collective

    def join(self, collective: Communicator) -> None:
        """Once, before the first step."""
        assert self._collective is None
        self._collective = collective

    @property
    def collective(self) -> Communicator:
        assert self._collective is not None
        return self._collective

    def part(self, total: int) -> ShardSlice:
        return self.layout.equal(total)

    def linear(self, ops: Ops, packed: PackedLinear, x_TI: Tensor) -> Tensor:
        """Of shared inputs: summed over the ranks of this stage.

        What `Ops.logits` gives in float32 is summed so and rounded once, as one rank alone would have done.
        On a GPU that would double what goes over the links: there each rank rounds first, as others do too.
        """
        if self.layout.tp == 1:
            return ops.linear(packed, x_TI)
        return self._summed(ops, packed, x_TI)

    def partial(self, ops: Ops, packed: PackedLinear, x_TI: Tensor, width: int) -> Tensor:
        """As `linear`, to [T, width], for `add_norm` or `complete` next: the sum may be left to those."""
        if self._leaves_sum(len(x_TI), width, x_TI.dtype):
            return ops.linear(packed, x_TI)
        return self.linear(ops, packed, x_TI)

    def partial_sum(self, ops: Ops, out_TE: Tensor) -> Tensor:
        """As `partial`, of this rank's part of a result that is there already, in the model's dtype."""
        if self.layout.tp > 1 and not self._leaves_sum(len(out_TE), out_TE.shape[1], out_TE.dtype):
            ops.call(self.collective.sum, (out_TE,))
        return out_TE

    def add_norm(self, ops: Ops, x_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
        """`Ops.add_rms_norm` of what `partial` gave."""
        if self._leaves_sum(len(x_TE), x_TE.shape[1], x_TE.dtype):
            norm = partial(self.collective.sum_add_norm, x_TE, residual_TE, weight_E, eps)
            return ops.norm_by(norm, weight_E)
        return ops.add_rms_norm(x_TE, residual_TE, weight_E, eps)

    def complete(self, ops: Ops, x_TE: Tensor) -> Tensor:
        """What `partial` gave, summed: where no norm of all rows follows."""
        if self._leaves_sum(len(x_TE), x_TE.shape[1], x_TE.dtype):
            ops.call(self.collective.sum, (x_TE,))
        return x_TE

    def _leaves_sum(self, rows: int, width: int, dtype: torch.dtype) -> bool:
        return self.layout.tp > 1 and self.collective.fuses(rows, width, dtype)

    def _summed(self, ops: Ops, packed: PackedLinear, x_TI: Tensor) -> Tensor:
        if x_TI.dtype == torch.float32 or x_TI.device.type != "cpu":
            out_TE = ops.linear(packed, x_TI)
            ops.call(self.collective.sum, (out_TE,))
            return out_TE
        part_TE = ops.logits(packed, x_TI)
        out_TE = ops.states("sum", part_TE, part_TE.shape[1], x_TI.dtype)
        ops.call(self.collective.sum, (part_TE, out_TE))
        return out_TE


SINGLE = TensorParallel(ParallelLayout())
