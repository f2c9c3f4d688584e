"""Which backend runs: decided once, when a model is loaded."""

import logging
import os

import torch

from .cpu.backend import Backend
from .cpu.build import NativeUnavailable
from .cpu.cores import pick_cores
from .cpu.levels import usable_levels
from .cpu.load import backend_name, load_backend
from .onednn import ONEDNN, supports
from .ops import Ops
from .quant import Quant
from .reference import REFERENCE

log = logging.getLogger(__name__)

TORCH_BACKENDS = {ops.name: ops for ops in (ONEDNN, REFERENCE)}
BEST_CPU = "cpu"
"""Stands for the best instruction set of this machine."""


class UnknownBackend(ValueError):  # noqa: N818 - named for what the user reads
    pass


class QuantUnavailable(ValueError):  # noqa: N818 - named for what the user reads
    pass


def backends() -> list[str]:
    """Names that LLMBOX_KERNELS may have, as far as this machine can run them."""
    return [*(backend_name(level) for level in usable_levels()), *TORCH_BACKENDS]


def select_ops(
    device: torch.device,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
    threads: int = 1,
    quant: Quant | None = None,
) -> Ops:
    """The best backend for this device and these dtypes, or the one that LLMBOX_KERNELS names.

    The C++ kernels bring their own threads and leave torch one.
    """
    asked = os.environ.get("LLMBOX_KERNELS")
    if asked in TORCH_BACKENDS:
        if quant is not None:
            raise QuantUnavailable(f"LLMBOX_KERNELS={asked} cannot run {quant.name} weights")
        return TORCH_BACKENDS[asked]
    if asked and asked not in {BEST_CPU, *backends()}:
        names = ", ".join([BEST_CPU, *backends()])
        raise UnknownBackend(f"LLMBOX_KERNELS: unknown kernels {asked!r}; use one of {names}")
    if runs_native(device, {dtype, kv_dtype or dtype}):
        try:
            return start(load_backend(asked or BEST_CPU), threads, quant)
        except NativeUnavailable as error:
            if quant is not None:
                raise QuantUnavailable(f"{quant.name} weights need the C++ kernels: {error}") from None
            if asked:
                raise UnknownBackend(f"LLMBOX_KERNELS={asked}: {error}") from None
            log.warning("the fast CPU kernels are off, PyTorch's run instead: %s", error)
    if quant is not None:
        kinds = "on a CPU, with bfloat16 or float32 beside the weights"
        raise QuantUnavailable(f"{quant.name} weights run {kinds}")
    return ONEDNN if supports(device, dtype) else REFERENCE


def native_ready() -> bool:
    """Whether the C++ kernels can be used: compiled and loaded now, if they were not before."""
    asked = os.environ.get("LLMBOX_KERNELS")
    if asked in TORCH_BACKENDS:
        return False
    try:
        load_backend(asked or BEST_CPU)
    except NativeUnavailable:
        return False
    return True


def runs_native(device: torch.device, dtypes: set[torch.dtype]) -> bool:
    return device.type == "cpu" and dtypes <= {torch.float32, torch.bfloat16}


def start(backend: Backend, threads: int, quant: Quant | None) -> Ops:
    backend.use_threads(pick_cores(threads))
    torch.set_num_threads(1)  # its spinning workers would take the cores from ours
    return backend.ops(quant)
