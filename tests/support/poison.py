"""Memory that nobody wrote is told apart: NaN, or the smallest integer."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def poisoned_memory() -> Iterator[None]:
    empty = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = empty(*args, **kwargs)
        if tensor.dtype == torch.float8_e4m3fn:
            tensor.view(torch.uint8).fill_(0x7F)
            return tensor
        return tensor.fill_(torch.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min)

    torch.empty = poisoned
    try:
        yield
    finally:
        torch.empty = empty
