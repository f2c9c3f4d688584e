"""A GPU as it was before this process opened it: what its context takes is only seen from there.

CUDA makes the context at the first call that needs memory, `torch.cuda.mem_get_info` itself among them: what
that says first has the context in it already. NVML tells without one.
"""

import logging

import torch

from ..cuda_order import cuda_machine
from ..memory_plan import show_bytes
from ..memory_use import CUDA_CONTEXT

log = logging.getLogger("llmbox.engine")


def open_gpu(number: int) -> int:
    """Makes it this process's GPU -> bytes that were free there before.

    Where NVML does not tell, what is free now and `CUDA_CONTEXT`. Of a GPU that was opened long before (by a
    benchmark that loads several models), what is free now: its context is no part of this load.
    """
    before = next((gpu.free for gpu in cuda_machine().gpus if gpu.index == number), None)
    torch.cuda.set_device(number)
    free, _total = torch.cuda.mem_get_info(number)
    if before is None:
        return free + CUDA_CONTEXT
    log.info("the CUDA context takes %s of GPU %d", show_bytes(max(0, before - free)), number)
    return max(before, free)
