"""Whether a model fits, and with what context and concurrency: arithmetic only, no torch.

The engine allocates exactly what `estimate` says, and `fit` shows it: one function, so what fits never runs
out of memory later.

    total = weights + workspace + KV
    weights   = parameters · bytes of the weights' dtype, or `weights_bytes` when quantised
    KV        = blocks · block size · 2 · layers · kv_heads · head_dim · bytes of the KV dtype
    workspace = see `workspace_bytes`
"""

from dataclasses import dataclass, replace
from typing import Literal

from llmbox.kernels.cpu.build import can_build
from llmbox.kernels.quant import QUANTS, Quant

from .config import Dtype, EngineConfig, QuantChoice
from .errors import DoesNotFit
from .machine import Machine
from .model_shape import DTYPE_BYTES, ModelShape

__all__ = ["MemoryBudget", "MemoryPlan", "ModelShape", "estimate", "resolve_dtypes", "workspace_bytes"]

MIB = 1 << 20
GIB = 1 << 30

ATTENTION_SCRATCH = 64 * MIB
"""What attention may use for one mask or score matrix: the kernel takes that many queries at a time."""
PROMPT_LOGPROB_ROWS = 64
"""Rows of prompt logits made at once."""

_SMALLEST_CONTEXT = 256
# An automatic context below this would serve nobody; better to say that the model does not fit.
_FLOAT32_UP_TO = GIB
_CPU_SHARE, _CPU_MOST, _CUDA_SHARE = 0.5, 0.8, 0.85
# Of what is available, if no budget was asked for: a desktop has other things to do. A model that would not
# reach a context of _COMFORTABLE_CONTEXT within the share gets more, up to the most.
_COMFORTABLE_CONTEXT = 4096
_CUDA_RUNTIME = 512 * MIB
# Context, kernels and library workspaces, taken by CUDA itself.
_FLOPS_PER_CORE = 30e9
# What a core sustains in float32 matrix products, within a factor of two: only sizes the default step.
_STEP_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """Where the model is to live and what may be taken there."""

    device: Literal["cpu", "cuda"]
    available: int
    """Bytes free on the device now (cgroup limits counted)."""
    cores: int = 1
    native_kernels: bool = False
    """Whether the C++ kernels run, whose results do not depend on the batch in any dtype."""

    @classmethod
    def of(cls, machine: Machine, device: Literal["cpu", "cuda"]) -> "MemoryBudget":
        """`cuda` is the first visible GPU."""
        if device == "cuda":
            return cls(device=device, available=machine.gpus[0].free, cores=machine.cpu.cores)
        available, cores = machine.memory.available, machine.cpu.cores
        return cls(device=device, available=available, cores=cores, native_kernels=can_build())


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """What the engine will allocate, and what `EngineConfig` left open. Sizes in bytes."""

    device: Literal["cpu", "cuda"]
    dtype: Dtype
    kv_dtype: Dtype
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
    """What was lowered and why, to be told to the user."""

    @property
    def kv_bytes(self) -> int:
        return self.num_blocks * self.block_size * self.kv_bytes_per_token

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.workspace_bytes + self.kv_bytes

    @property
    def max_concurrency(self) -> float:
        """How many requests of full context fit in the pool at once."""
        return self.num_blocks * self.block_size / self.context


def estimate(shape: ModelShape, budget: MemoryBudget, config: EngineConfig) -> MemoryPlan:
    """Plan within the budget, or raise `DoesNotFit` with need, have, and what would fit."""
    if config.quant != "auto":
        return _Planner(shape, budget, config).plan()
    for quant in ("none", "int8"):
        try:
            return _Planner(shape, budget, replace(config, quant=quant)).plan()
        except DoesNotFit:
            continue
    return _Planner(shape, budget, replace(config, quant="int4")).plan()


def weights_bytes(shape: ModelShape, dtype: str, quant: Quant | None) -> int:
    """Norms, biases and a separate input embedding keep their dtype; the head has its own format."""
    size = DTYPE_BYTES[dtype]
    if quant is None:
        return shape.params * size
    head = shape.vocab * shape.hidden
    kept = shape.params - shape.matmul_params
    layers = shape.matmul_params - head
    return int(kept * size + head * quant.head.bytes_per_weight + layers * quant.bytes_per_weight)


def resolve_dtypes(
    shape: ModelShape, device: str, config: EngineConfig, *, native_kernels: bool
) -> tuple[Dtype, Dtype]:
    """Of weights and KV.

    On a CPU without the C++ kernels, and in float16, which those do not compute in, a model whose float32
    weights stay within 1 GiB is served in float32: stock half-precision products give a row other bits in
    another batch, float32 keeps "one request, one answer".
    """
    dtype = config.dtype
    if dtype == "auto":
        dtype = shape.dtype
        stock = device == "cpu" and not (native_kernels and dtype != "float16")
        if stock and shape.params * DTYPE_BYTES["float32"] <= _FLOAT32_UP_TO:
            dtype = "float32"
    return dtype, dtype if config.kv_dtype == "auto" else config.kv_dtype


def workspace_bytes(
    shape: ModelShape, device: str, dtype: str, *, context: int, rows: int, max_running: int
) -> int:
    """Everything that is neither weights nor KV, at the worst moment of a step of `rows` tokens.

    activations  rows · ((3 · hidden + max(2 · (heads + kv_heads) · head_dim, 3 · ffn)) · b + 2 · hidden · 4)
                 residual, normed input and output; the larger of attention's and the MLP's inner rows;
                 float32 inside the norm
    attention    a mask and scores, at most ATTENTION_SCRATCH each, and one request's K and V gathered in
                 float32, padded by at most a half: 3 · context · kv_heads · head_dim · 4
    positions    RoPE tables of cosines and sines: 2 · context · head_dim · 4
    logits       (max_running + PROMPT_LOGPROB_ROWS) · vocab · (4 + b), and the sampler's integers: 32 bytes a
                 vocabulary entry for each row it takes at once
    runtime      what CUDA takes for itself
    """
    size = DTYPE_BYTES[dtype]
    inner = max(2 * (shape.heads + shape.kv_heads) * shape.head_dim, 3 * shape.ffn)
    activations = rows * (3 * shape.hidden * size + inner * size + 2 * shape.hidden * 4)
    scores = 2 * min(ATTENTION_SCRATCH, shape.heads * rows * context * 4)
    gathered = 3 * context * shape.kv_heads * shape.head_dim * 4
    positions = 2 * context * shape.head_dim * 4
    sampled = max_running + PROMPT_LOGPROB_ROWS
    at_once = PROMPT_LOGPROB_ROWS if device == "cuda" else 1
    logits = shape.vocab * (sampled * (4 + size) + at_once * 32)
    runtime = _CUDA_RUNTIME if device == "cuda" else 0
    return activations + scores + gathered + positions + logits + runtime


class _Planner:
    """One estimate in the making: what was asked, with everything left open decided."""

    def __init__(self, shape: ModelShape, budget: MemoryBudget, config: EngineConfig) -> None:
        self.shape, self.budget, self.config = shape, budget, config
        self.dtype, self.kv_dtype = resolve_dtypes(
            shape, budget.device, config, native_kernels=budget.native_kernels
        )
        self.weights = weights_bytes(shape, self.dtype, QUANTS.get(config.quant))
        self.block_bytes = config.block_size * shape.kv_bytes_per_token(self.kv_dtype)
        self.max_running = config.max_running or _default_max_running(budget, config)
        self.token_budget = config.token_budget or _default_token_budget(shape, budget, self.max_running)
        self.notes: list[str] = []

    def plan(self) -> MemoryPlan:
        limit = self._wanted_context()
        have = self._usable()
        context = limit
        if self._need(limit) > have:
            if self.config.context is not None:
                raise DoesNotFit(self._refusal(limit, have))
            context = self._largest_context(limit, have)
            if context < min(limit, _SMALLEST_CONTEXT):
                raise DoesNotFit(self._refusal(min(limit, _SMALLEST_CONTEXT), have))
            self.notes.append(
                f"context lowered from {limit} to {context} tokens to fit in {show_bytes(have)}"
            )
        workspace = self._workspace(context)
        room = (have - self.weights - workspace) // self.block_bytes
        return MemoryPlan(
            device=self.budget.device,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            quant=self.config.quant,
            weights_bytes=self.weights,
            workspace_bytes=workspace,
            kv_bytes_per_token=self.shape.kv_bytes_per_token(self.kv_dtype),
            block_size=self.config.block_size,
            num_blocks=min(room, self._pool_blocks(context)),
            budget_bytes=have,
            context=context,
            max_running=self.max_running,
            token_budget=self.token_budget,
            notes=tuple(self.notes),
        )

    def _wanted_context(self) -> int:
        limit, asked = self.shape.context_limit, self.config.context
        if asked is not None and asked > limit:
            raise DoesNotFit(
                f"context of {asked} tokens asked, the model was made for {limit}: ask for at most that"
            )
        pool = self.config.kv_tokens
        if asked is not None and pool is not None and asked > pool:
            raise DoesNotFit(
                f"context of {asked} tokens asked, but the KV pool holds {pool} tokens: ask for at most that"
            )
        return min(asked or limit, pool or limit)

    def _usable(self) -> int:
        asked, available = self.config.memory_bytes, self.budget.available
        if asked is None:
            return self._automatic_budget()
        if asked > available:
            self.notes.append(
                f"memory budget lowered from {show_bytes(asked)} to the available {show_bytes(available)}"
            )
        return min(asked, available)

    def _automatic_budget(self) -> int:
        available = self.budget.available
        if self.budget.device == "cuda":
            return int(available * _CUDA_SHARE)
        comfortable = self._need(min(self._wanted_context(), _COMFORTABLE_CONTEXT))
        return max(int(available * _CPU_SHARE), min(comfortable, int(available * _CPU_MOST)))

    def _pool_blocks(self, context: int) -> int:
        """Blocks worth having: every request that can run at full context, or what was asked for."""
        if self.config.kv_tokens is not None:
            return self._blocks(self.config.kv_tokens)
        return self.max_running * self._blocks(context)

    def _blocks(self, context: int) -> int:
        return -(-context // self.config.block_size)

    def _workspace(self, context: int) -> int:
        rows = self.token_budget + (0 if self.config.chunked_prefill else context)
        return workspace_bytes(
            self.shape,
            self.budget.device,
            self.dtype,
            context=context,
            rows=rows,
            max_running=self.max_running,
        )

    def _need(self, context: int) -> int:
        """Bytes to serve one request of this context."""
        return self.weights + self._workspace(context) + self._blocks(context) * self.block_bytes

    def _largest_context(self, limit: int, have: int) -> int:
        """Whole blocks, 0 if none. Need grows with context, so bisection finds it."""
        low, high = 0, limit // self.config.block_size
        while low < high:
            middle = (low + high + 1) // 2
            if self._need(middle * self.config.block_size) <= have:
                low = middle
            else:
                high = middle - 1
        return low * self.config.block_size

    def _refusal(self, context: int, have: int) -> str:
        need = self._need(context)
        kv = self._blocks(context) * self.block_bytes
        return (
            f"the model needs {show_bytes(need)} and has {show_bytes(have)} "
            f"(weights {show_bytes(self.weights)} in {self.dtype}, "
            f"workspace {show_bytes(self._workspace(context))}, "
            f"KV {show_bytes(kv)} for a context of {context} tokens); {self._remedy(need, context, have)}"
        )

    def _remedy(self, need: int, context: int, have: int) -> str:
        smaller = self._largest_context(context, have)
        if smaller >= min(context, _SMALLEST_CONTEXT):
            return f"a context of {smaller} tokens would fit"
        if need <= self.budget.available:
            where = "GPU memory" if self.budget.device == "cuda" else "memory"
            return (
                f"it would fit with a {where} budget of {show_bytes(need, up=True)}: "
                f"{show_bytes(self.budget.available)} are available"
            )
        if DTYPE_BYTES[self.dtype] > 2 and need - self.weights // 2 <= self.budget.available:
            return "bfloat16 weights would fit"
        return "a smaller model, or a machine with more memory, is needed"


def _default_max_running(budget: MemoryBudget, config: EngineConfig) -> int:
    most = 32 if budget.device == "cpu" else 256 if budget.available >= 20 * GIB else 64
    return min(most, config.token_budget or most)


def _default_token_budget(shape: ModelShape, budget: MemoryBudget, max_running: int) -> int:
    """On a CPU a step of about half a second, so that decoding streams do not stall behind a long prompt."""
    if budget.device == "cuda":
        return max(max_running, 8192 if budget.available >= 40 * GIB else 2048)
    tokens = _STEP_SECONDS * budget.cores * _FLOPS_PER_CORE / (2 * shape.matmul_params)
    return max(max_running, 64, min(2048, 1 << int(tokens).bit_length() - 1 if tokens >= 1 else 0))


def show_bytes(count: int, *, up: bool = False) -> str:
    """In GB (10^9 bytes), in MB below one. `up` never shows less than there is."""
    unit, name = (10**9, "GB") if count >= 10**9 else (10**6, "MB")
    tenths = -(-count * 10 // unit) if up else round(count * 10 / unit)
    return f"{tenths / 10:.1f} {name}"
