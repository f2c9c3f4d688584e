"""Configuration of one engine, and of its scheduler with every value decided at load.

The daemon fills `EngineConfig` from command-line flags and settings.
"""

import re
from dataclasses import dataclass
from typing import Final, Literal

from .errors import EngineError, ParallelError

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "bfloat16", "float16", "float32"]
KVDtype = Literal["auto", "bfloat16", "float16", "float32", "int8", "fp8"]
BLOCK_SIZE = 16
"""Tokens per KV block: small, so that the last, partly filled block of a request wastes little."""

LORA_BYTES = 500_000_000

DRAFT_MODEL_ROWS = 512
"""Maximum rows of one forward pass of a draft model: a long prompt takes several."""

QuantChoice = Literal[
    "none", "auto", "int8", "int8-g32", "int4", "int4-g128", "int4-mix", "w8a8", "fp8", "fp8-block"
]
QuantHeadChoice = Literal["none", "int8"]
Batching = Literal["continuous", "static"]
Speculate = Literal["auto", "on", "off"]
CPUExpertsChoice = Literal["auto", "on", "off"]
UseMTP = Literal["auto", "on", "off"]
Exact = Literal["machine", "portable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillRole:
    """Place of a prefill engine beside its decode engine."""

    segment: int
    """Descriptor of the shared memory that blocks are handed over in."""
    cores: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options of one model on one engine. `None` means: decided at load from the model and the machine."""

    model_path: str
    name: str
    device: Device = "auto"
    dtype: Dtype = "auto"
    kv_dtype: KVDtype = "auto"
    """KV cache dtype. int8 and fp8 add one float32 scale per token and KV head, for keys and values each."""
    quant: QuantChoice = "none"
    """Weight format to quantize to at load; `auto` takes the first of none, int8 and int4 that fits."""
    quant_head: QuantHeadChoice = "none"
    """Format to which the output head of a quantized checkpoint, and a table tied to it, is rounded at load
    where the checkpoint leaves it unquantized; on CPUs."""
    context: int | None = None
    """Maximum prompt + output of one request, in tokens; None takes the model's limit, or less if memory
    is short."""
    max_running: int | None = None
    """Maximum number of requests that run at the same time."""
    token_budget: int | None = None
    """Maximum tokens computed in one step, prefill and decode together."""
    memory_bytes: int | None = None
    """Memory budget for weights, workspace and KV cache, in bytes."""
    memory_is_limit: bool = False
    """Treat `memory_bytes` as an upper limit set by the daemon, not as a size the user asked for: the KV pool
    then keeps its default size within the limit."""
    memory_after: tuple[int, ...] = ()
    """Processes that end while this engine starts. It touches the memory of its KV cache after their end: new
    pages are theirs then, which a virtual machine need not get from its host.
    """
    kv_tokens: int | None = None
    """Size of the KV pool in tokens, instead of what the memory budget leaves (benchmarks, tests)."""
    kv_host_bytes: int | None = None
    """Main memory for KV blocks that a GPU evicts; None: by what is free. 0: they are not kept."""
    kv_share: float = 1.0
    """Share of the planned KV pool to take, one whole context in any case: less after the kernel killed the
    engine for memory."""
    block_size: int = BLOCK_SIZE
    threads: int | None = None
    """Number of CPU threads, summed over all ranks."""
    tp: int | None = None
    """Tensor-parallel size: ranks that share every layer. None: derived from the GPUs and their
    interconnect; 1 on a CPU."""
    pp: int | None = None
    """Pipeline-parallel size: number of stages, each on `tp` ranks. None as for `tp`."""
    expert_parallel: bool = False
    """Divide the experts of a mixture among the ranks of `tp`, whole, instead of a part of each."""
    redundant_experts: int = 0
    """Copies of experts in each layer beyond one of each, on all ranks together, with `expert_parallel`."""
    cpu_experts: CPUExpertsChoice = "auto"
    """Keep the experts of a mixture in main memory, where the CPU computes them, and all else on the GPU;
    `auto` does so where the model does not fit on the GPUs."""
    host_bytes_limit: int | None = None
    """Main memory that the daemon leaves a model on a GPU, for experts and evicted KV blocks; None: what is
    free."""
    gpus: tuple[int, ...] | None = None
    """Indices of visible GPUs that the daemon chose, next to other models; None: chosen at load."""
    disaggregate: tuple[int, int] | None = None
    """Cores of a prefill engine and of a decode engine, each with its own; None: one engine does both."""
    auto_disaggregate: bool = False
    """Have the daemon choose between the two by what steps take (`app/engines/pair_switch.py`); it then sets
    `disaggregate` of each start."""
    prefill_role: PrefillRole | None = None
    """Set in the prefill engine of a pair."""
    batching: Batching = "continuous"
    prefix_cache: bool = True
    chunked_prefill: bool = True
    """Split long prompts over several steps. Off: a prompt takes one step, whatever the budget (a
    baseline)."""
    speculate: Speculate = "auto"
    """Speculative decoding, where verification cannot change the tokens (`executor/drafting.py`); `on`
    refuses to load elsewhere."""
    draft_path: str | None = None
    """Directory of a draft model with the same vocabulary, or of an EAGLE-3 or Medusa head. As `on`, it
    refuses to load where drafts cannot be verified."""
    mtp: UseMTP = "auto"
    """Drafts of the layer for multi-token prediction that the checkpoint may have: where there is no
    `draft_path` and they can be verified; `on` refuses to load elsewhere."""
    deterministic: bool = False
    exact: Exact = "machine"
    """`portable`: logits have the same bits on every CPU and for `tp` 1, 2 and 4, or the model is refused."""
    lora_bytes: int = LORA_BYTES
    """Most memory of LoRA adapters."""
    plans_adapters: bool = False
    """Make that memory part of the plan: the model has adapters."""
    overlap: bool | None = None
    """Launch the next step while the device still computes one; None: only on a GPU, where it pays."""
    cuda_graphs: bool = True
    """Run decoding steps on a GPU as CUDA graphs."""
    premium_share: float = 0.0
    """Fraction of KV blocks reserved for requests of negative priority (premium bands); no other request can
    use it. Off by default, because premium requests preempt others when no block is free."""
    watermark: float = 0.01
    """Fraction of KV blocks kept free at admission, so that running requests can grow."""

    def overlaps_on(self, device: str) -> bool:
        """Return True if steps are launched before the results of older ones: on `cuda` or `cpu`."""
        return device == "cuda" if self.overlap is None else self.overlap

    def shrink_pool(self, planned: int, context: int) -> int:
        """Return the blocks to take of those that were planned. `context`: blocks of one whole context."""
        return max(min(context, planned), int(planned * self.kv_share))


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits and policies of the scheduler. Fields that `EngineConfig` has too mean the same."""

    context: int
    max_running: int
    token_budget: int
    mixed_budget: int = 0
    """Maximum tokens of a step with decoding requests; 0: `token_budget`."""
    batching: Batching = "continuous"
    chunked_prefill: bool = True
    premium_share: float = 0.0
    watermark: float = 0.01
    ageing_seconds: float = 10.0
    """Seconds after which a waiting priority band is lifted by one, for one request."""
    state_slots: int = 0
    """Slots of recurrent state, of running sequences and of the prefix cache together; 0 for a model
    without."""
    short_context: int = 0
    """Longest sequence with the short factors of LongRoPE: one that grows beyond it is computed again with
    the long ones. 0: the model has one set of factors."""
    window: int = 0
    """Tokens behind which blocks of sliding-window layers are freed; 0: never."""
    window_blocks: int = 0
    """Blocks of these layers."""
    draft_rows: int = 0
    """Maximum rows of a step with draft tokens (`draft_scheduler.py`); 0 turns drafts off. Only for executors
    whose rows are independent of each other."""
    draft_row_price: float = 0.0
    """Price of a row more, in times of a step, before any was measured (`speculation/draft_choice.py`)."""

    def __post_init__(self) -> None:
        # A decoding request takes one token in every step: a smaller budget would stall streams.
        assert not self.mixed_budget or self.max_running <= self.mixed_budget <= self.token_budget
        if self.token_budget < self.max_running:
            raise EngineError(
                f"token_budget {self.token_budget} is below max_running {self.max_running}: "
                "every running request needs one token a step; raise one or lower the other"
            )


def parse_disaggregate(text: str) -> tuple[int, int] | None:
    """Return the cores of `P:D`; None for one engine: an empty text, or `auto`, which begins with one. Raises
    ParallelError.
    """
    if text in {"", AUTO}:
        return None
    if not is_pair(text):
        raise ParallelError(
            f"--disaggregate takes P:D, two numbers of cores such as 1:1, or {AUTO}, not {text!r}"
        )
    prefill, decode = text.split(":")
    return int(prefill), int(decode)


AUTO: Final = "auto"
"""Value of `--disaggregate` that leaves the choice to the daemon."""


def is_pair(text: str) -> bool:
    return text in {"", AUTO} or re.fullmatch(r"[1-9][0-9]{0,3}:[1-9][0-9]{0,3}", text) is not None
