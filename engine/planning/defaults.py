"""Defaults of a plan: dtypes, running requests and token budget, where the configuration leaves them open."""

from ..config import Dtype, EngineConfig, KVDtype
from ..errors import DeviceError
from ..model_config.shape import DTYPE_BYTES, ModelShape
from .memory_plan import MemoryBudget

_GIB = 1 << 30
_FLOAT32_UP_TO = _GIB
_STEP_SECONDS = 0.5
_MIXED_STEP_SECONDS = 0.1
_LEAST_ROWS = 64
"""Rows from which on a step of prompts is no more than a tenth slower a token than any longer one."""


def resolve_dtypes(
    shape: ModelShape, device: str, config: EngineConfig, *, native_kernels: bool
) -> tuple[Dtype, KVDtype]:
    """Return the dtypes of weights and KV cache. Raises DeviceError for a dtype that the device or the model
    does not support.

    On a CPU without the C++ kernels, and in float16, which they do not support, a model whose float32 weights
    stay within 1 GiB is served in float32: torch's half-precision products give a row other bits in another
    batch, while float32 keeps a request's tokens independent of the batch.
    """
    if config.kv_dtype == "fp8" and device == "cpu":
        raise DeviceError("keys and values in fp8 need a GPU: on a CPU use --kv-dtype int8, as small")
    dtype = config.dtype
    if dtype == "auto":
        dtype = shape.dtype if shape.fits_float16 or shape.dtype != "float16" else "bfloat16"
        stock = device == "cpu" and not (native_kernels and dtype != "float16")
        if stock and native_kernels and shape.quant is not None:
            dtype = "bfloat16"  # float16 has no kernels for the integers that the checkpoint holds
        if stock and shape.params * DTYPE_BYTES["float32"] <= _FLOAT32_UP_TO:
            dtype = "float32"
    if dtype == "float16" and not shape.fits_float16:
        raise DeviceError(
            "what the layers of this model give goes beyond float16, so answers would be NaN: use --dtype "
            "bfloat16 or float32"
        )
    return dtype, dtype if config.kv_dtype == "auto" else config.kv_dtype


def default_max_running(shape: ModelShape, budget: MemoryBudget, config: EngineConfig) -> int:
    most = 32 if budget.device == "cpu" else 256 if budget.available >= 20 * _GIB else 64
    if shape.is_bidirectional:  # texts take no KV, and all of a step end with it
        most = 256
    return min(most, config.token_budget or most)


def default_token_budget(shape: ModelShape, budget: MemoryBudget, max_running: int) -> int:
    """Return the default token budget: on a CPU a step of about half a second, since a request that comes
    waits for the step under way.
    """
    if budget.device == "cuda":
        return max(max_running, 8192 if budget.available >= 40 * _GIB else 2048)
    return max(max_running, _rows_in(_STEP_SECONDS, shape, budget))


def default_mixed_budget(
    shape: ModelShape, budget: MemoryBudget, config: EngineConfig, max_running: int
) -> int:
    """Return the token budget of steps with decoding requests: on a CPU a step of about a tenth of a second,
    because it is the time between two tokens of every stream. 0, the same as of other steps, on GPUs and for
    a budget that the user has set.
    """
    if budget.device == "cuda" or config.token_budget is not None:
        return 0
    return max(max_running, _rows_in(_MIXED_STEP_SECONDS, shape, budget))


def _rows_in(seconds: float, shape: ModelShape, budget: MemoryBudget) -> int:
    """Return how many rows a CPU computes in a time, as a power of two of at least `_LEAST_ROWS`."""
    rows = int(seconds * budget.cores * budget.core_flops / (2 * shape.active_params))
    return max(_LEAST_ROWS, min(2048, 1 << rows.bit_length() - 1 if rows else 0))
