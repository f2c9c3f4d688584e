"""Which backend runs: decided once, when a model is loaded."""

import os

import torch

from .onednn import ONEDNN, supports
from .ops import Ops
from .reference import REFERENCE

BACKENDS = {ops.name: ops for ops in (ONEDNN, REFERENCE)}


class UnknownBackend(ValueError):  # noqa: N818 - named for what the user reads
    pass


def select_ops(device: torch.device, dtype: torch.dtype) -> Ops:
    """The best backend for this device and dtype, or the one that LLMBOX_KERNELS in the environment names."""
    name = os.environ.get("LLMBOX_KERNELS") or best(device, dtype)
    if name not in BACKENDS:
        raise UnknownBackend(f"LLMBOX_KERNELS: unknown kernels {name!r}; use one of {', '.join(BACKENDS)}")
    return BACKENDS[name]


def best(device: torch.device, dtype: torch.dtype) -> str:
    return ONEDNN.name if supports(device, dtype) else REFERENCE.name
