"""How one model is to be served. Filled by the daemon from flags and settings."""

from dataclasses import dataclass
from typing import Literal

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "bfloat16", "float16", "float32"]
KVDtype = Literal["auto", "bfloat16", "float16", "float32", "int8", "fp8"]
BLOCK_SIZE = 16
"""Tokens a KV block holds: small enough that the last, partly filled one wastes little."""

QuantChoice = Literal[
    "none", "auto", "int8", "int8-g32", "int4", "int4-g128", "int4-mix", "w8a8", "fp8", "fp8-block"
]
Batching = Literal["continuous", "static"]
Speculate = Literal["auto", "on", "off"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One model on one engine. `None` means: decided at load from the model and the machine."""

    model_path: str
    name: str
    device: Device = "auto"
    dtype: Dtype = "auto"
    kv_dtype: KVDtype = "auto"
    """int8 and fp8 hold one float32 scale for each token, kv head, and of keys and values each."""
    quant: QuantChoice = "none"
    """Weights rounded at load; `auto` takes the first of none, int8 and int4 that fits."""
    context: int | None = None
    """Longest prompt + output of one request, in tokens; None takes the model's own limit or what fits."""
    max_running: int | None = None
    token_budget: int | None = None
    """Most tokens computed in one step, prefill and decode together."""
    memory_bytes: int | None = None
    """Budget for weights + workspace + KV of this model."""
    memory_is_limit: bool = False
    """`memory_bytes` is a limit that the daemon set, no size that somebody asked for: within it the KV pool
    has its default size."""
    kv_tokens: int | None = None
    """Size of the KV pool in tokens, instead of what the memory budget leaves (benchmarks, tests)."""
    block_size: int = BLOCK_SIZE
    threads: int | None = None
    """CPU threads, of all ranks together."""
    tp: int | None = None
    """Ranks that share every layer; None: as the GPUs and their links suggest, 1 on a CPU."""
    pp: int | None = None
    """Stages of layers, each on `tp` ranks; None as above."""
    gpus: tuple[int, ...] | None = None
    """Visible GPUs that were chosen for it among those that other models are on; None: chosen at load."""
    batching: Batching = "continuous"
    prefix_cache: bool = True
    chunked_prefill: bool = True
    """Off: a prompt is computed in one step, whatever the budget (for comparison)."""
    speculate: Speculate = "auto"
    """Verify guesses at the next tokens, where that cannot change them (`build.py`); `on` refuses to
    load elsewhere."""
    deterministic: bool = False
    overlap: bool | None = None
    """Launch the next step while the device works on one; None: on a GPU, where it pays."""
    cuda_graphs: bool = True
    """Replay decoding steps on a GPU from graphs."""
    premium_share: float = 0.0
    """Share of KV blocks that only requests of negative priority (premium bands) may take: it is lost to all
    others. Off by default, as premium requests take blocks of others where none is free."""
    watermark: float = 0.01
    """Share of KV blocks kept free at admission, so that running requests can grow."""
