"""Which backend runs: decided once, when a model is loaded."""

import logging
import os

import torch

from .cpu.backend import CPUBackend
from .cpu.cache_folder import cache_folder
from .cpu.compiling import NativeUnavailable
from .cpu.cores import pick_cores
from .cpu.isa import usable_levels
from .cpu.library import backend_name, load_backend
from .onednn import ONEDNN, supports
from .ops import Ops
from .quant_formats import Quant
from .reference import REFERENCE
from .registry import BEST_CPU, TRITON
from .support import KernelSite, is_native, why_no_quant, why_unknown_kernels
from .support import why_no_triton as why_triton_is_missing

log = logging.getLogger(__name__)

TORCH_BACKENDS = {ops.name: ops for ops in (ONEDNN, REFERENCE)}


class UnknownBackend(ValueError):  # noqa: N818 - named for what the user reads
    pass


class QuantUnavailable(ValueError):  # noqa: N818 - named for what the user reads
    pass


def backends() -> list[str]:
    """Names that LLMBOX_KERNELS may have, as far as this machine can run them."""
    gpu = [TRITON] if torch.cuda.is_available() and why_no_triton(torch.device("cuda")) is None else []
    return [*gpu, *(backend_name(level) for level in usable_levels()), *TORCH_BACKENDS]


def select_ops(
    device: torch.device,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
    threads: int = 1,
    quant: Quant | None = None,
    *,
    deterministic: bool = False,
) -> Ops:
    """The best backend for this device and these dtypes, or the one that LLMBOX_KERNELS names.

    The C++ kernels bring their own threads and leave torch one. `deterministic`: row invariant kernels are
    wanted at the cost of speed; whether those that run here are is in `Ops.row_invariant`.
    """
    asked = os.environ.get("LLMBOX_KERNELS")
    if asked == TRITON or (device.type == "cuda" and asked not in TORCH_BACKENDS):
        return select_triton(device, dtype, quant, asked, deterministic=deterministic)
    site = KernelSite(device="cpu" if device.type == "cpu" else "cuda")
    if quant is not None and (why := why_no_quant(quant, _name(dtype), _name(kv_dtype or dtype), site)):
        raise QuantUnavailable(why)
    if asked in TORCH_BACKENDS:
        return TORCH_BACKENDS[asked]
    if why := why_unknown_kernels(site):
        raise UnknownBackend(why)
    if runs_native(device, dtype, kv_dtype or dtype):
        try:
            return start(load_backend(asked or BEST_CPU), threads, quant)
        except NativeUnavailable as error:
            if quant is not None:
                raise QuantUnavailable(f"{quant.name} weights need the C++ kernels: {error}") from None
            if asked:
                raise UnknownBackend(f"LLMBOX_KERNELS={asked}: {error}") from None
            log.warning("the fast CPU kernels are off, PyTorch's run instead: %s", error)
    return ONEDNN if supports(device, dtype) else REFERENCE


def select_triton(
    device: torch.device, dtype: torch.dtype, quant: Quant | None, asked: str | None, *, deterministic: bool
) -> Ops:
    if asked not in {None, TRITON}:
        raise UnknownBackend(f"LLMBOX_KERNELS={asked}: not for a GPU; use one of triton, reference")
    reason = why_no_triton(device)
    if reason is None:
        # Beside the C++ kernels, and so where --data-dir says. Triton reads it as it compiles.
        os.environ.setdefault("TRITON_CACHE_DIR", str(cache_folder() / "triton"))
        from .triton.backend import triton_ops  # noqa: PLC0415 - needs the package, takes a second
        from .triton.probe import why_it_fails  # noqa: PLC0415
        from .triton.tile_config import has_fp8  # noqa: PLC0415

        if quant is not None and quant.is_float and not has_fp8(device):
            raise QuantUnavailable(f"{quant.name} weights need compute capability 8.9: use int8 or int4")
        reason = why_it_fails(device)
        if reason is None:
            return triton_ops(
                device,
                dtype,
                quant,
                deterministic=deterministic,
                sdpa_from=sdpa_from(),
                scaled_mm=torch_multiplies(),
            )
    if asked:
        raise UnknownBackend(f"LLMBOX_KERNELS=triton: {reason}")
    if quant is not None:
        raise QuantUnavailable(f"{quant.name} weights on a GPU need the Triton kernels: {reason}")
    log.warning("the fast GPU kernels are off, PyTorch's run instead: %s", reason)
    return REFERENCE


def sdpa_from() -> int | None:
    """LLMBOX_SDPA_FROM: tokens of a prompt from which on PyTorch computes its attention on a GPU."""
    asked = os.environ.get("LLMBOX_SDPA_FROM")
    if not asked:
        return None
    if not asked.isdecimal():
        raise UnknownBackend(f"LLMBOX_SDPA_FROM={asked}: not a number of tokens; see docs/gpu-kernels.md")
    return max(2, int(asked))


def torch_multiplies() -> bool:
    """LLMBOX_FP8=triton keeps products of 8-bit floats on a GPU out of PyTorch."""
    asked = os.environ.get("LLMBOX_FP8")
    if asked not in {None, "", TRITON}:
        raise UnknownBackend(f"LLMBOX_FP8={asked}: use triton, or leave it unset; see docs/gpu-kernels.md")
    return asked != TRITON


def why_no_triton(device: torch.device) -> str | None:
    """What keeps the Triton kernels from running there; None if nothing does."""
    if device.type == "cpu":
        return why_triton_is_missing(KernelSite(device="cpu")) or None
    capability = torch.cuda.get_device_capability(device)
    return why_triton_is_missing(KernelSite(device="cuda", capability=capability)) or None


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


def runs_native(device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype) -> bool:
    return device.type == "cpu" and is_native(_name(dtype), _name(kv_dtype))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def start(backend: CPUBackend, threads: int, quant: Quant | None) -> Ops:
    backend.use_threads(pick_cores(threads))
    torch.set_num_threads(1)  # its spinning workers would take the cores from ours
    return backend.ops(quant)
