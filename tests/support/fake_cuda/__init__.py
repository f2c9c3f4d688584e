"""CUDA without a GPU: what the engine asks of `torch.cuda` and of tensors there, over tensors of the CPU.

tensors.py   tensors that say they are on the GPU, and what operations do with them
scaled_mm.py  products of 8-bit floats, as CUDA takes them
queue.py     what is under way, who waits for it, graphs
card.py      memory as the driver and the allocator count it
runtime.py   `torch.cuda`'s own names in their place: `fake_cuda`

What it knows and a CPU does not: operations refuse tensors of both devices, copies arrive when they are
waited for, every wait is noted with the place it comes from, a graph runs again what was recorded and no
Python, and what it wrote while it was recorded is gone. Kernels run in Triton's interpreter.
"""

from .card import Card
from .runtime import fake_cuda

__all__ = ["Card", "fake_cuda"]
