"""Checks whether the kernels of this machine can run a model's formats.

Torch-free: `fit` asks before a download, the dispatch when a model is loaded.
"""

import os
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Final, Literal

from .cpu.isa import usable_levels
from .quant_formats import Quant

BEST_CPU = "cpu"
"""Name of the best instruction set of this machine."""
TRITON = "triton"
TORCH = ("onednn", "reference")


def known_kernels() -> list[str]:
    """List the values that this CPU can run. GPUs are ignored."""
    return [BEST_CPU, *(f"cpu {level.name}" for level in usable_levels()), *TORCH, TRITON]


NATIVE_DTYPES: Final = frozenset({"float32", "bfloat16"})
NATIVE_KV_DTYPES: Final = NATIVE_DTYPES | {"int8"}
"""KV cache dtypes of the C++ kernels."""
TRITON_SINCE: Final = (8, 0)
FLOAT8_SINCE: Final = (8, 9)
"""Minimum compute capabilities, of Triton and of FP8."""
MAX_CONV_WIDTH: Final = 8
"""Most inputs that a channel of a recurrent layer's convolution may span."""
WINDOW_MARGIN: Final = 128
"""Tokens before a sliding window that the C++ kernels may read: whole chunks of keys, partly masked."""
INTERPRETER_ONLY: Final = "on a CPU they run under TRITON_INTERPRET=1 only, for tests"


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSite:
    """Device that kernels are to run on."""

    device: Literal["cpu", "cuda"]
    has_native: bool = True
    """True if the C++ kernels can be used on this machine."""
    capability: tuple[int, int] | None = None
    """Compute capability of the GPU, the lowest of several; None: unknown, and assumed to be enough."""

    @property
    def requested(self) -> str | None:
        """Value of LLMBOX_KERNELS, if it is set."""
        return os.environ.get("LLMBOX_KERNELS") or None

    @property
    def uses_triton(self) -> bool:
        return self.requested == TRITON or (self.device == "cuda" and self.requested not in TORCH)


def is_native(dtype: str, kv_dtype: str) -> bool:
    return dtype in NATIVE_DTYPES and kv_dtype in NATIVE_KV_DTYPES


def why_unknown_kernels(site: KernelSite) -> str:
    """Return the reason why LLMBOX_KERNELS cannot be followed; empty if it can be or is not set."""
    requested = site.requested
    if requested is None or requested == TRITON or requested in TORCH:
        return ""
    if site.device == "cuda":
        return f"LLMBOX_KERNELS={requested}: not for a GPU; use one of triton, reference"
    if requested not in known_kernels():
        return f"LLMBOX_KERNELS: unknown kernels {requested!r}; llmbox doctor says which there are"
    return ""


def why_no_quant(quant: Quant, dtype: str, kv_dtype: str, site: KernelSite) -> str:
    """Return the reason why weights of this format cannot run with these dtypes; empty if they can."""
    if site.uses_triton:
        return _why_no_quant_on_gpu(quant, site)
    if site.device == "cpu" and not quant.on_cpu:
        return _why_not_on_cpu(quant)
    if site.requested in TORCH:
        return f"LLMBOX_KERNELS={site.requested} cannot run {quant.name} weights"
    if not is_native(dtype, kv_dtype):
        return (
            f"{quant.name} weights run on a CPU, with bfloat16 or float32 beside the weights and no float16 "
            "or fp8 keys and values"
        )
    return "" if site.has_native else f"{quant.name} weights need the C++ kernels, which cannot be built here"


def why_no_kv_dtype(kv_dtype: str, site: KernelSite) -> str:
    """Return the reason why the KV cache cannot have this dtype; empty if it can."""
    if kv_dtype != "fp8":
        return ""
    if not site.uses_triton:
        return (
            f"keys and values in fp8 need a GPU{'' if site.device == 'cpu' else ' with the Triton kernels'}"
        )
    if site.capability is not None and site.capability < FLOAT8_SINCE:
        return f"keys and values in fp8 need compute capability 8.9, this GPU has {_version(site.capability)}"
    return ""


def is_row_invariant(dtype: str, kv_dtype: str, site: KernelSite, *, deterministic: bool) -> bool:
    """Return whether a row's results are independent of the rows beside it."""
    if site.uses_triton:
        return deterministic and not why_no_triton(site)
    return (
        site.device == "cpu"
        and site.requested not in TORCH
        and site.has_native
        and is_native(dtype, kv_dtype)
    )


def why_no_triton(site: KernelSite) -> str:
    if find_spec("triton") is None:
        return "the triton package is not installed"
    if site.device == "cpu":
        return "" if os.environ.get("TRITON_INTERPRET") == "1" else INTERPRETER_ONLY
    if site.capability is not None and site.capability < TRITON_SINCE:
        return f"they need compute capability 8.0, this GPU has {_version(site.capability)}"
    return ""


def _why_no_quant_on_gpu(quant: Quant, site: KernelSite) -> str:
    if reason := why_no_triton(site):
        return f"{quant.name} weights on a GPU need the Triton kernels: {reason}"
    if quant.is_gguf:
        return "the blocks of GGUF files have no kernels for GPUs"
    has_float8 = site.device == "cpu" or site.capability is None or site.capability >= FLOAT8_SINCE
    if quant.is_float and not has_float8:
        return f"{quant.name} weights need compute capability 8.9: use int8 or int4"
    return ""


def _why_not_on_cpu(quant: Quant) -> str:
    if quant.is_float:
        return f"{quant.name} weights run on NVIDIA GPUs of compute capability 8.9 or newer"
    return f"{quant.name} runs on NVIDIA GPUs; on a CPU int8 weights meet int8 rows in any case, with int8"


def _version(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
