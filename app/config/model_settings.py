"""Settings of models: how each is loaded, the memory of all, their caches on disk."""

from dataclasses import dataclass
from typing import Literal

from llmbox.engine.config import is_pair

from .entries import key, live_key


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """Defaults for every model; flags of `load` override them. A reload affects later loads."""

    device: Literal["auto", "cpu", "cuda"] = live_key(
        "auto", "Device that models run on; auto uses a GPU if there is one."
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = live_key(
        "auto", "Type of weights and activations; auto follows the checkpoint."
    )
    kv_dtype: Literal["auto", "bfloat16", "float16", "float32", "int8", "fp8"] = live_key(
        "auto",
        "Type of the KV cache; auto follows dtype. int8 and fp8 take half the memory of bfloat16; fp8 needs "
        "a GPU.",
    )
    quant: Literal[
        "none", "auto", "int8", "int8-g32", "int4", "int4-g128", "int4-mix", "w8a8", "fp8", "fp8-block"
    ] = live_key(
        "none",
        "Format that weights are quantized to at load; auto picks the first of none, int8, int4 that fits. "
        "w8a8, fp8 and fp8-block need a GPU.",
    )
    quant_head: Literal["none", "int8"] = live_key(
        "none",
        "Format that the output head of a quantized checkpoint (and a tied embedding table) is quantized to "
        "at load if the checkpoint left it unquantized, as AWQ and GPTQ do; int8 needs a CPU.",
    )
    ctx: int | None = live_key(
        None,
        "Context length: maximum prompt plus output in tokens; auto: the model's limit, or what fits in "
        "memory.",
        low=16,
        high=1 << 26,
    )
    max_running: int | None = live_key(
        None, "Maximum number of sequences running at once.", low=1, high=65_536
    )
    token_budget: int | None = live_key(
        None,
        "Maximum number of tokens in one step; with --pp the stages share it. auto: on a CPU, half a second "
        "of work, or a tenth of a second while other requests stream.",
        low=16,
        high=1 << 20,
    )
    memory: float | None = live_key(
        None, "Memory budget in GB (10^9 bytes) for weights, KV and workspace.", low=0.05, high=100_000
    )
    kv_tokens: int | None = key(
        None, "Size of the KV cache in tokens; auto: the rest of the memory budget.", low=16, high=1 << 30
    )
    kv_host_memory: float | None = live_key(
        None,
        "Main memory in GB for KV blocks evicted from a GPU; auto: a fifth of the free memory; 0: none.",
        low=0,
        high=100_000,
    )
    threads: int | None = live_key(
        None, "CPU threads of the engine; auto: one for each physical core.", low=1, high=4096
    )
    tp: int | None = live_key(
        None,
        "Tensor parallel size: processes or GPUs that share every layer of a model; auto: one GPU, or as "
        "many NVLink peers as the model needs.",
        low=1,
        high=16,
    )
    pp: int | None = live_key(
        None,
        "Pipeline parallel size: stages that the layers of a model are divided into; auto: one, or more if a "
        "model needs several GPUs without NVLink.",
        low=1,
        high=16,
    )
    expert_parallel: bool = live_key(
        False,
        "Expert parallelism: give each rank of --tp whole experts of a mixture-of-experts model instead of "
        "a part of each.",
    )
    redundant_experts: int = live_key(
        0,
        "With --expert-parallel: extra copies of busy experts in each layer, on other ranks, which share "
        "their tokens (expert parallel load balancing).",
        low=0,
        high=16384,
    )
    cpu_experts: Literal["auto", "on", "off"] = live_key(
        "auto",
        "Keep the experts of a mixture-of-experts model in main memory, computed by the CPU, and everything "
        "else on the GPU. auto: when the model does not fit on the GPUs.",
    )
    disaggregate: str = live_key(
        "",
        "Cores of a separate prefill engine and of the decode engine, as P:D (1:1), so that long prompts do "
        "not slow down streams. auto: two engines while prompts measurably slow down streams. Empty: one "
        "engine.",
        each=(is_pair, "two numbers of cores with a colon between, such as 1:1, or auto"),
    )
    batching: Literal["continuous", "static"] = live_key(
        "continuous",
        "Batching of requests; static runs a batch until its longest request has ended (for comparison).",
    )
    premium_share: float = live_key(
        0.0,
        "Share of the KV cache reserved for requests of premium keys (priority below 0).",
        low=0,
        high=0.9,
    )
    prefix_cache: bool = live_key(
        True, "Prefix caching: keep the KV cache of prompts and reuse it for prompts with the same beginning."
    )
    chunked_prefill: bool = live_key(
        True, "Chunked prefill: compute long prompts in chunks, between the tokens of other requests."
    )
    speculate: Literal["auto", "on", "off"] = live_key(
        "auto",
        "Speculative decoding: draft tokens from earlier text and verify several in one step; same tokens, "
        "faster where answers repeat text. auto: on the C++ kernels, and on GPUs with deterministic. on: "
        "refuse to load elsewhere.",
    )
    draft: str = live_key(
        "",
        "Draft model with the same vocabulary, or EAGLE-3 or Medusa head, for speculative decoding. "
        "mtp: the checkpoint's own layer for multi-token prediction, which is also the default if it can "
        "be used; none: no draft model, head or layer.",
    )
    lora_memory: float = live_key(
        0.5, "Memory in GB for a model's LoRA adapters; the least recently used ones are evicted.", low=0.001
    )
    deterministic: bool = live_key(
        False,
        "Refuse to run on kernels whose results may depend on the batch (the results of the C++ kernels "
        "never do).",
    )
    exact: Literal["machine", "portable"] = live_key(
        "machine",
        "Where results agree bit for bit. machine: on this machine; portable: on every CPU and with --tp 1, "
        "2 and 4, which needs integer weights (--quant int8) and --kv-dtype int8, or the model is refused.",
    )
    overlap: bool = live_key(
        True, "On a GPU, schedule the next step while the current one is computed; no effect on CPUs."
    )
    cuda_graphs: bool = live_key(
        True, "On a GPU, replay decoding steps from captured CUDA graphs; off saves their memory."
    )
    overrides: tuple[str, ...] = live_key(
        (),
        "Settings of this section for single models, as MODEL:KEY=VALUE (qwen*:max_running=24); MODEL may be "
        "a glob, and the first match counts.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySettings:
    """Settings of all models together."""

    budget: float | None = live_key(
        None,
        "Memory in GB (10^9 bytes) for all models together; auto: 80 % of RAM, 90 % of a GPU's memory.",
        low=0.05,
        high=100_000,
    )
    ttl: float = live_key(
        1800.0,
        "Seconds without requests after which a model that was loaded on request is unloaded; 0: never.",
        low=0,
        high=10_000_000,
    )
    spare_engine: bool = key(
        True,
        "Keep a process ready that has imported the engine, so that loads and restarts are faster: on a "
        "CPU, engines are forked from it (0.1 GB); with a GPU, the next engine takes it over (0.15 GB).",
    )
    load_on_request: bool = live_key(
        True, "Load a model on disk when a request names it. Downloads: see hub.pull_on_request."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSettings:
    repacked_gb: float = key(
        50.0, "Disk space in GB for weights packed for the CPU kernels.", low=0, high=1e6
    )
    kv_disk_gb: float | None = key(
        None, "Disk space in GB for KV blocks; auto: a fifth of the free space, at most 50.", low=0, high=1e6
    )
    kv_key_share: float = key(0.5, "Share of cache.kv_disk_gb that one API key may use.", low=0.01, high=1)
