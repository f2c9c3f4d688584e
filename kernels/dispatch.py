"""Select the kernel backend of a model, once, when the model is loaded. The library of the C++ kernels is a
prebuilt one, or one compiled on this machine.
"""

import ctypes
import logging
import os
from dataclasses import replace
from functools import cache
from itertools import pairwise

import torch

from .cpu.backend import CPUBackend
from .cpu.build import (
    NativeUnavailable,
    find_compiler,
    find_prebuilt,
    is_built,
    layout,
    library_path,
    native_obtainable,
)
from .cpu.ffi import DeniedInstructions, open_library
from .cpu.isa import Level, cache_folder, pick_cores, usable_levels
from .onednn import ONEDNN, supports
from .ops import Ops
from .quant_formats import Quant
from .reference import REFERENCE
from .support import BEST_CPU, TRITON, KernelSite, is_native, why_no_quant, why_unknown_kernels
from .support import why_no_triton as why_triton_is_missing

log = logging.getLogger(__name__)

PREBUILT, COMPILED = "prebuilt", "compiled here"
PORTABLE_CPU = "cpu exact"
"""Name for the best level whose bits are those of all others, over int8 keys and values."""
OTHER_BITS = frozenset({"cpu amx"})
"""Attention over int8 walks chunks of another length there (kernels/cpu/native/attention/attention_dot.h)."""
TORCH_BACKENDS = {ops.name: ops for ops in (ONEDNN, REFERENCE)}


class UnknownBackend(ValueError):  # noqa: N818 - named for what the user reads
    """LLMBOX_KERNELS or another variable cannot be followed; the message says why."""


class QuantUnavailable(ValueError):  # noqa: N818 - named for what the user reads
    """No backend here runs this weight format; the message says why."""


def select_ops(
    device: torch.device,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
    threads: int = 1,
    quant: Quant | None = None,
    *,
    deterministic: bool = False,
    portable: bool = False,
) -> Ops:
    """Select the backend that LLMBOX_KERNELS names, or else the best one for this device and these dtypes.

    The C++ kernels have a thread pool of their own, so torch is set to one thread. `deterministic` asks for
    row-invariant kernels at the cost of speed; `Ops.row_invariant` says whether the selected backend is.
    `portable` leaves out C++ kernels whose results over int8 keys and values are not those of all others, and
    takes the Triton kernels that have the same.
    Raises UnknownBackend if LLMBOX_KERNELS cannot be followed, QuantUnavailable if no backend runs `quant`.
    """
    requested = os.environ.get("LLMBOX_KERNELS")
    if requested == TRITON or (device.type == "cuda" and requested not in TORCH_BACKENDS):
        return select_triton(device, dtype, quant, requested, deterministic=deterministic, portable=portable)
    site = KernelSite(device="cpu" if device.type == "cpu" else "cuda")
    if quant is not None and (why := why_no_quant(quant, _name(dtype), _name(kv_dtype or dtype), site)):
        raise QuantUnavailable(why)
    if requested in TORCH_BACKENDS:
        return TORCH_BACKENDS[requested]
    if why := why_unknown_kernels(site):
        raise UnknownBackend(why)
    if portable and requested in OTHER_BITS:
        raise UnknownBackend(
            f"LLMBOX_KERNELS={requested}: its results are not bit-identical to other kernels'; leave it unset"
        )
    problem = ""
    if runs_native(device, dtype, kv_dtype or dtype):
        try:
            return start(load_backend(requested or (PORTABLE_CPU if portable else BEST_CPU)), threads, quant)
        except NativeUnavailable as error:
            if quant is not None:
                raise QuantUnavailable(f"{quant.name} weights need the C++ kernels: {error}") from None
            if requested:
                raise UnknownBackend(f"LLMBOX_KERNELS={requested}: {error}") from None
            log.warning("the fast CPU kernels are off, PyTorch's run instead: %s", error)
            problem = str(error)
    ops = ONEDNN if supports(device, dtype) else REFERENCE
    return replace(ops, problem=problem) if problem else ops


def select_host(threads: int, quant: Quant | None) -> Ops:
    """Select the C++ kernels for a part of a model whose other kernels run on a GPU.

    LLMBOX_KERNELS names these others. Raises NativeUnavailable if the C++ kernels cannot be built or opened.
    """
    return start(load_backend(BEST_CPU), threads, quant)


def select_triton(
    device: torch.device,
    dtype: torch.dtype,
    quant: Quant | None,
    requested: str | None,
    *,
    deterministic: bool,
    portable: bool,
) -> Ops:
    """Select the Triton backend, or the reference if Triton cannot run and was not requested."""
    if requested not in {None, TRITON}:
        raise UnknownBackend(f"LLMBOX_KERNELS={requested}: not for a GPU; use one of triton, reference")
    reason = why_no_triton(device)
    if reason is None:
        # Beside the C++ kernels, so that --data-dir moves both. Triton reads the variable when it compiles.
        os.environ.setdefault("TRITON_CACHE_DIR", str(cache_folder() / "triton"))
        from .triton.backend import triton_ops, why_it_fails  # noqa: PLC0415 - needs the package, takes a second
        from .triton.linear.tile_config import has_fp8  # noqa: PLC0415

        if quant is not None and quant.is_float and not has_fp8(device):
            raise QuantUnavailable(f"{quant.name} weights need compute capability 8.9: use int8 or int4")
        reason = why_it_fails(device)
        if reason is None:
            return triton_ops(
                device,
                dtype,
                quant,
                deterministic=deterministic,
                portable=portable,
                sdpa_from=sdpa_from(),
                scaled_mm=torch_multiplies(),
            )
    if requested:
        raise UnknownBackend(f"LLMBOX_KERNELS=triton: {reason}")
    if quant is not None:
        raise QuantUnavailable(f"{quant.name} weights on a GPU need the Triton kernels: {reason}")
    log.warning("the fast GPU kernels are off, PyTorch's run instead: %s", reason)
    return REFERENCE


def sdpa_from() -> int | None:
    """Read LLMBOX_SDPA_FROM: the prompt length in tokens from which PyTorch computes attention on a GPU.

    None: never. Raises UnknownBackend if the value is not a number.
    """
    requested = os.environ.get("LLMBOX_SDPA_FROM")
    if not requested:
        return None
    if not requested.isdecimal():
        raise UnknownBackend(f"LLMBOX_SDPA_FROM={requested}: not a number of tokens; see docs/gpu-kernels.md")
    return max(2, int(requested))


def torch_multiplies() -> bool:
    """Return whether PyTorch may multiply FP8 matrices on a GPU; LLMBOX_FP8=triton forbids it."""
    requested = os.environ.get("LLMBOX_FP8")
    if requested not in {None, "", TRITON}:
        raise UnknownBackend(
            f"LLMBOX_FP8={requested}: use triton, or leave it unset; see docs/gpu-kernels.md"
        )
    return requested != TRITON


def why_no_triton(device: torch.device) -> str | None:
    """Return the reason why the Triton kernels cannot run on `device`; None if they can."""
    if device.type == "cpu":
        return why_triton_is_missing(KernelSite(device="cpu")) or None
    capability = torch.cuda.get_device_capability(device)
    return why_triton_is_missing(KernelSite(device="cuda", capability=capability)) or None


def native_ready() -> bool:
    """Return whether the C++ kernels can be used. Compiles and loads them if that has not happened yet."""
    requested = os.environ.get("LLMBOX_KERNELS")
    if requested in TORCH_BACKENDS:
        return False
    try:
        load_backend(requested or BEST_CPU)
    except NativeUnavailable:
        return False
    return True


def native_built() -> bool:
    """Return whether `native_ready` would find the best C++ kernels and compile nothing."""
    return os.environ.get("LLMBOX_KERNELS", BEST_CPU) == BEST_CPU and is_built(usable_levels()[0])


def runs_native(device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype) -> bool:
    """Return whether the C++ kernels support this device and these dtypes."""
    return device.type == "cpu" and is_native(_name(dtype), _name(kv_dtype))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def start(backend: CPUBackend, threads: int, quant: Quant | None) -> Ops:
    """Start the thread pool of the C++ kernels and return their `Ops`."""
    backend.use_threads(pick_cores(threads))
    torch.set_num_threads(1)  # torch's workers spin and would take the cores from our thread pool
    return backend.ops(quant)


# ---------------------------------------------------------------------------- libraries of the C++ kernels


def backend_name(level: Level) -> str:
    return f"cpu {level.name}"


@cache
def load_backend(name: str) -> CPUBackend:
    """Load a backend. `name` is "cpu" for the best level of this machine, PORTABLE_CPU, or a level's. Raises
    NativeUnavailable.
    """
    levels = {backend_name(level): level for level in usable_levels()}
    if name == "cpu":
        return best_backend(list(levels))
    if name == PORTABLE_CPU:
        return best_backend([level for level in levels if level not in OTHER_BITS])
    if name not in levels:
        raise NativeUnavailable(f"this machine cannot run {name!r}, only {', '.join(levels)}")
    level = levels[name]
    library, origin = open_level(level)
    log.info("CPU kernels: %s, %s", level.name, origin)
    return CPUBackend(library, name, layout(level), origin)


def best_backend(names: list[str]) -> CPUBackend:
    """Load the first level that exists and that the system allows: AMX has to be requested."""
    if not native_obtainable():
        find_compiler()  # raises
    problems = list[str]()
    for name, next_best in pairwise(names):
        try:
            backend = load_backend(name)
            break
        except NativeUnavailable as error:
            log.warning("no kernels for %s, %s instead: %s", name, next_best, error)
            problems.append(str(error))
    else:
        backend = load_backend(names[-1])
    backend.problem = "; ".join(problems)
    return backend


def open_level(level: Level) -> tuple[ctypes.CDLL, str]:
    """Open the library for `level` and say where it is from. Raises NativeUnavailable."""
    path, problem = find_prebuilt(level)
    if path:
        try:
            return open_library(path), PREBUILT
        except DeniedInstructions:
            raise  # a compiled library would be denied too
        except NativeUnavailable as error:
            problem = str(error)
    if problem:
        log.warning("%s: one is compiled here; install llmbox again", problem)
    return open_library(library_path(level)), COMPILED
