"""Memory budget of a device and the memory plan of an engine, with the dtypes, running requests and token
budget that it has where its configuration leaves them open.
"""

from dataclasses import dataclass
from typing import Literal

from llmbox.kernels.cpu.build import native_expected, native_obtainable
from llmbox.kernels.cpu.isa import LEVELS, core_flops, usable_levels

from ..config import Dtype, EngineConfig, KVDtype, QuantChoice
from ..core.executor_interface import ceil_div
from ..core.kv_cache.state_manager import pool_blocks
from ..core.speculation.proposer import DraftMethod
from ..errors import DeviceError
from ..hardware.machine import Machine
from ..model_config.parallel_layout import ExpertPlacement, ParallelLayout
from ..model_config.shape import DTYPE_BYTES, ModelShape
from ..model_config.vision.config import NO_TOWER

_GIB = 1 << 30
_FLOAT32_UP_TO = _GIB
_STEP_SECONDS = 0.5
_MIXED_STEP_SECONDS = 0.1
_LEAST_ROWS = 64
"""Rows from which on a step of prompts is no more than a tenth slower a token than any longer one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """Device to place a model on, its free memory and its properties."""

    device: Literal["cpu", "cuda"]
    available: int
    """Bytes free on the device now (cgroup limits counted)."""
    cores: int = 1
    native_kernels: bool = False
    """True if the C++ kernels run, whose results do not depend on the batch in any dtype."""
    level: str = LEVELS[-1].name
    """Instruction-set level that the C++ kernels are compiled for."""
    core_flops: float = 30e9
    """Sustained FLOP/s of a core in matrix products, within a factor of two: it only sizes the default
    step."""
    more_gpus: tuple[int, ...] = ()
    """Bytes free on the visible GPUs after the first."""
    nvlink: tuple[frozenset[int], ...] = ()
    """Sets of visible GPUs that are all NVLink peers of each other."""

    capabilities: tuple[tuple[int, int] | None, ...] = ()
    """Compute capability of each visible GPU, None if not known."""
    host_available: int = 0
    """Bytes of main memory that are free beside a GPU."""
    host_native: bool = False
    """True if the C++ kernels can compute a part of a model beside a GPU."""

    @classmethod
    def of(cls, machine: Machine, device: Literal["cpu", "cuda"]) -> "MemoryBudget":
        """Make the budget of a machine; for `cuda`, `available` is that of the first visible GPU."""
        if device == "cuda":
            first, *more = machine.gpus
            return cls(
                device=device,
                available=first.free,
                cores=machine.cpu.cores,
                more_gpus=tuple(gpu.free for gpu in more),
                nvlink=machine.nvlink,
                capabilities=tuple(gpu.capability for gpu in machine.gpus),
                host_available=machine.memory.available,
                host_native=native_obtainable(),
            )
        available, cores = machine.memory.available, machine.cpu.cores
        if not native_expected():
            return cls(device=device, available=available, cores=cores)
        return cls(
            device=device,
            available=available,
            cores=cores,
            native_kernels=True,
            level=usable_levels()[0].name,
            core_flops=core_flops(),
        )

    def default_max_running(self, shape: ModelShape, config: EngineConfig) -> int:
        """Return the default number of requests that run at once."""
        most = 32 if self.device == "cpu" else 256 if self.available >= 20 * _GIB else 64
        if shape.is_bidirectional:  # texts take no KV, and all of a step end with it
            most = 256
        return min(most, config.token_budget or most)

    def default_token_budget(self, shape: ModelShape, max_running: int) -> int:
        """Return the default token budget: on a CPU a step of about half a second, since a request that
        comes waits for the step under way.
        """
        if self.device == "cuda":
            return max(max_running, 8192 if self.available >= 40 * _GIB else 2048)
        return max(max_running, self._rows_in(_STEP_SECONDS, shape))

    def default_mixed_budget(self, shape: ModelShape, config: EngineConfig, max_running: int) -> int:
        """Return the token budget of steps with decoding requests: on a CPU a step of about a tenth of a
        second, because it is the time between two tokens of every stream. 0, the same as of other steps, on
        GPUs and for a budget that the user has set.
        """
        if self.device == "cuda" or config.token_budget is not None:
            return 0
        return max(max_running, self._rows_in(_MIXED_STEP_SECONDS, shape))

    def _rows_in(self, seconds: float, shape: ModelShape) -> int:
        """Return how many rows a CPU computes in a time, as a power of two of at least `_LEAST_ROWS`."""
        rows = int(seconds * self.cores * self.core_flops / (2 * shape.active_params))
        return max(_LEAST_ROWS, min(2048, 1 << rows.bit_length() - 1 if rows else 0))


@dataclass(frozen=True, slots=True)
class DraftModelSizes:
    """Draft model or draft head as it is planned beside its target."""

    shape: ModelShape
    quant: QuantChoice
    method: DraftMethod = "draft_model"
    name: str = "draft model"
    features: int = 0
    """Numbers that a head keeps of each row of a step."""

    @property
    def has_layers(self) -> bool:
        """True for draft models and heads whose passes are CUDA graphs; False for Medusa heads."""
        return self.method != "medusa"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Allocations of an engine, and the values that `EngineConfig` left open. Sizes are bytes per rank."""

    device: Literal["cpu", "cuda"]
    dtype: Dtype
    kv_dtype: KVDtype
    quant: QuantChoice
    weights_bytes: int
    workspace_bytes: int
    kv_bytes_per_token: int
    block_size: int
    num_blocks: int
    budget_bytes: int
    context: int
    """Maximum prompt + output of one request in tokens: such a request always fits in the pool."""
    max_running: int
    token_budget: int
    mixed_budget: int = 0
    """Maximum tokens of a step with decoding requests; 0: `token_budget`."""
    notes: tuple[str, ...] = ()
    """Decisions and lowered values with their reasons, for the user."""
    tp: int = 1
    pp: int = 1
    expert_parallel: bool = False
    redundant_experts: int = 0
    """Copies of hot experts in each layer, on all ranks together."""
    expert_placement: ExpertPlacement = ()
    """Ranks of each expert where there are copies: chosen when the model is loaded."""
    gpus: tuple[int, ...] = ()
    """Index of the visible GPU of each rank."""
    state_slots: int = 0
    """Slots of recurrent state, of running sequences and of the prefix cache; 0 for a model without."""
    slot_bytes: int = 0
    window: int = 0
    """Tokens behind which blocks of sliding-window layers are freed; 0: never."""
    window_blocks: int = 0
    window_bytes_per_token: int = 0
    """Bytes of keys and values of these layers, which then are not in `kv_bytes_per_token`."""
    least_window_blocks: int = 0
    """Blocks of these layers that one request needs."""
    is_lowered: bool = False
    """True if the context is smaller than wanted."""
    draft_quant: QuantChoice = "none"
    """Weight format of the draft model or head, whose weights and KV cache are counted with the model's."""
    draft_method: DraftMethod | None = None
    """Proposer of draft tokens that is loaded beside the model; None: there is none."""
    image_problem: str = NO_TOWER
    """Reason why no images are read; empty if they are."""
    vision_bytes: int = 0
    """Part of `weights_bytes` that the vision tower takes."""
    image_cache_bytes: int = 0
    """Part of `workspace_bytes` that keeps embeddings of images."""

    buffer_bytes: int = 0
    """Main memory for blocks on their way to and from disk, on a CPU."""
    host_bytes: int = 0
    """Main memory for blocks that a GPU evicts, which is not in `total_bytes`."""
    expert_bytes: int = 0
    """Main memory of experts that the CPU computes beside a GPU, with their workspace, which is not in
    `total_bytes` either; 0: experts are on the device."""
    expert_quant: QuantChoice = "none"
    """Weight format of these experts."""
    prefill_bytes: int = 0
    """Memory of a prefill engine beside this one, and of the segment between them."""

    @property
    def kv_bytes(self) -> int:
        return self.block_size * (
            self.num_blocks * self.kv_bytes_per_token + self.window_blocks * self.window_bytes_per_token
        )

    @property
    def total_bytes(self) -> int:
        """Bytes of one rank."""
        parts = self.weights_bytes, self.workspace_bytes, self.kv_bytes, self.state_bytes, self.buffer_bytes
        return sum(parts) + self.prefill_bytes

    @property
    def state_bytes(self) -> int:
        return self.state_slots * self.slot_bytes

    def layout(self, rank: int) -> ParallelLayout:
        """Return the layout of one rank."""
        placement = tuple(tuple(map(tuple, layer)) for layer in self.expert_placement)
        return ParallelLayout(self.tp, self.pp, rank, self.expert_parallel, placement)

    @property
    def exchanges_results(self) -> bool:
        """Return whether ranks exchange the results of single experts (`kernels/ops.py::expert_results`)."""
        return self.expert_parallel and self.device == "cpu"

    @property
    def ranks(self) -> int:
        return self.tp * self.pp

    @property
    def ranks_in_memory(self) -> int:
        """Number of ranks in one memory: all of them on a CPU, one on each GPU."""
        return self.ranks if self.device == "cpu" else 1

    @property
    def step_rows(self) -> int:
        """Maximum decoding requests of one step: the steps of several stages share them."""
        return ceil_div(self.max_running, self.pp)

    @property
    def step_tokens(self) -> int:
        """Maximum tokens of one step: decoding requests run whatever the budget."""
        return max(ceil_div(self.token_budget, self.pp), self.step_rows)

    @property
    def running_window_blocks(self) -> int:
        """Most blocks of sliding-window layers that a decoding request keeps."""
        return pool_blocks(self.window, self.block_size, 1, 0) if self.window else 0

    @property
    def max_concurrency(self) -> float:
        """Number of requests of full context that fit in the pool at once."""
        return self.num_blocks * self.block_size / self.context


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
        raise DeviceError("a KV cache in fp8 needs a GPU: on a CPU use --kv-dtype int8, which is as small")
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
            "the values of this model's layers exceed float16, so answers would be NaN: use --dtype "
            "bfloat16 or float32"
        )
    return dtype, dtype if config.kv_dtype == "auto" else config.kv_dtype
