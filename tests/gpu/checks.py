"""What a check of a kernel is, and how near it must come."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

LIMIT = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""||got - exact|| / ||exact||."""


@dataclass(frozen=True, slots=True)
class Setting:
    device: torch.device
    dtypes: tuple[torch.dtype, ...]
    tiny: bool
    seed: int

    def randn(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, device=self.device).to(dtype)


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    error: float
    limit: float
    note: str = ""
    """What is told of it though it is no failure."""

    @property
    def passed(self) -> bool:
        return self.error <= self.limit  # false for NaN


Checks = Iterator[Check]


class Group(NamedTuple):
    name: str
    run: Callable[[], Checks]


def distance(got: Tensor, exact: Tensor) -> float:
    exact = exact.double()
    return float((got.double() - exact).norm() / exact.norm())


def name_of(*parts: object) -> str:
    return " ".join(str(part).removeprefix("torch.") for part in parts if part is not None)
