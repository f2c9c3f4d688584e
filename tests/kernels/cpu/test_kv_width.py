"""What is counted for keys and values is what the library takes."""

from pathlib import Path

import pytest
import torch

from llmbox.kernels.cpu.isa import kv_width
from llmbox.kernels.dispatch import load_backend
from llmbox.kernels.op_types import KVShape
from support.kernel_backends import backends

BLOCKS, HEADS = 8000, 2
HUGE = 2 << 20


def mapped() -> int:
    """Bytes of address space."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * 4096


@pytest.mark.parametrize("name", [name for name in backends() if name.startswith("cpu ")])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8"])
@pytest.mark.parametrize("head_dim", [64, 72, 80])
def test_heads_are_padded_to_what_the_kernels_read(name, dtype, head_dim):
    backend = load_backend(name)
    shape = KVShape(1, BLOCKS, 16, HEADS, head_dim, getattr(torch, dtype), torch.bfloat16)
    before = mapped()
    cache = backend.ops().make_kv_cache(shape, torch.device("cpu"))
    taken = mapped() - before
    size = {"bfloat16": 2, "float32": 4, "int8": 1}[dtype]
    scale = 4 if dtype == "int8" else 0
    width = kv_width(head_dim, dtype, name.removeprefix("cpu "))
    counted = 2 * BLOCKS * 16 * HEADS * (width * size + scale)
    assert counted <= taken <= counted + 2 * HUGE, "begins and ends at huge pages"
    assert counted - 2 * BLOCKS * 16 * HEADS * (width - 16) * size > 2 * HUGE, "a step less would be seen"
    del cache
