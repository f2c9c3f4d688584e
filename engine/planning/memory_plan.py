"""What may be taken of a device's memory, and what an engine will take of it. No torch."""

from dataclasses import dataclass
from typing import Literal

from llmbox.kernels.cpu.build import native_expected
from llmbox.kernels.cpu.isa import LEVELS, usable_levels

from ..config import Dtype, KVDtype, QuantChoice
from ..core.microbatching import share
from ..hardware.machine import Machine


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """Where the model is to live and what may be taken there."""

    device: Literal["cpu", "cuda"]
    available: int
    """Bytes free on the device now (cgroup limits counted)."""
    cores: int = 1
    native_kernels: bool = False
    """Whether the C++ kernels run, whose results do not depend on the batch in any dtype."""
    level: str = LEVELS[-1].name
    """Of instructions, that they are compiled for."""
    core_flops: float = 30e9
    """What a core sustains in matrix products, within a factor of two: only sizes the default step."""
    more_gpus: tuple[int, ...] = ()
    """Bytes free on the visible GPUs after the first."""
    nvlink: tuple[frozenset[int], ...] = ()
    """Sets of visible GPUs that are all NVLink peers of each other."""

    capabilities: tuple[tuple[int, int] | None, ...] = ()
    """Compute capability of each visible GPU, where it is known."""

    @classmethod
    def of(cls, machine: Machine, device: Literal["cpu", "cuda"]) -> "MemoryBudget":
        """`cuda` is the first visible GPU."""
        if device == "cuda":
            first, *more = machine.gpus
            return cls(
                device=device,
                available=first.free,
                cores=machine.cpu.cores,
                more_gpus=tuple(gpu.free for gpu in more),
                nvlink=machine.nvlink,
                capabilities=tuple(gpu.capability for gpu in machine.gpus),
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
            core_flops=usable_levels()[0].flops,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """What the engine will allocate, and what `EngineConfig` left open. Sizes in bytes, of each rank."""

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
    """Longest prompt + output of one request: such a request always fits in the pool."""
    max_running: int
    token_budget: int
    notes: tuple[str, ...] = ()
    """What was decided or lowered and why, to be told to the user."""
    tp: int = 1
    pp: int = 1
    gpus: tuple[int, ...] = ()
    """Visible GPU of each rank."""
    is_lowered: bool = False
    """Whether the context is less than what was wanted."""

    @property
    def kv_bytes(self) -> int:
        return self.num_blocks * self.block_size * self.kv_bytes_per_token

    @property
    def total_bytes(self) -> int:
        """Of one rank."""
        return self.weights_bytes + self.workspace_bytes + self.kv_bytes

    @property
    def ranks(self) -> int:
        return self.tp * self.pp

    @property
    def ranks_in_memory(self) -> int:
        """That live in one memory: all of them on a CPU, one on each GPU."""
        return self.ranks if self.device == "cpu" else 1

    @property
    def step_rows(self) -> int:
        """Most decoding requests of one step: the steps of several stages share them."""
        return share(self.max_running, self.pp)

    @property
    def step_tokens(self) -> int:
        """Most tokens of one step: decoding requests run whatever the budget."""
        return max(share(self.token_budget, self.pp), self.step_rows)

    @property
    def max_concurrency(self) -> float:
        """How many requests of full context fit in the pool at once."""
        return self.num_blocks * self.block_size / self.context
