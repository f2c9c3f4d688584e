"""How each server of a side-by-side run is started. One entry a server; all speak OpenAI's completions."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ALL = frozenset({"1", "8", "32", "512", "2048", "prefix"})
SLOTS = 32
SLOT_TOKENS = 320
"""Room of one private slot of llama.cpp: enough for the workloads with many streams."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where things lie on this machine."""

    model: Path
    gguf: Path | None
    vllm: Path | None
    llama: Path | None
    threads: int
    scratch: Path


@dataclass(frozen=True, slots=True)
class Server:
    name: str
    width: str
    """Of its weights; servers of one width are compared."""
    command: list[str]
    """`{port}` stands for the port."""
    env: dict[str, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    """Merged into every request."""
    takes: frozenset[str] = ALL
    """Workloads it is run on."""
    model: str = "bench"

    @property
    def ours(self) -> bool:
        return self.name.startswith("llmbox")


def servers(place: Place, width: str) -> list[Server]:
    """llmbox first, then every peer of this width that is installed."""
    return [*llmbox(place, width), *vllm(place, width), *llama(place, width)]


def llmbox(place: Place, width: str) -> list[Server]:
    quant = {"bf16": "none"}.get(width, width)
    return [
        Server(
            name=f"llmbox {width}",
            width=width,
            command=[
                sys.executable, "-P", "-m", "llmbox", "serve", str(place.model), "--alias", "bench",
                "--quant", quant, "--ctx", "4096", "--threads", str(place.threads), "--port", "{port}",
                "--data-dir", str(place.scratch / quant), "--speculate", "off",
            ],
        )
    ]  # fmt: skip


def vllm(place: Place, width: str) -> list[Server]:
    """As its documentation starts it on a CPU. The PyPI package is not called vllm, so it must be told."""
    if place.vllm is None or width != "bf16":
        return []
    env = {
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{place.threads - 1}",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [
        str(place.vllm), "-m", "vllm.entrypoints.openai.api_server", "--model", str(place.model),
        "--served-model-name", "bench", "--host", "127.0.0.1", "--port", "{port}", "--dtype", "bfloat16",
        "--max-model-len", "4096", "--max-num-seqs", str(SLOTS),
    ]  # fmt: skip
    return [Server("vLLM bf16", width, command, env)]


def llama(place: Place, width: str) -> list[Server]:
    """Two of each format: private slots for many streams, and a single slot for one long prompt at a time."""
    if place.llama is None or place.gguf is None:
        return []
    formats = {"bf16": ["BF16"], "int8": ["Q8_0"], "int4": ["Q4_0", "Q4_K_M"]}[width]
    many = ["-np", str(SLOTS), "-c", str(SLOTS * SLOT_TOKENS), "--no-kv-unified"]
    single = ["-np", "1", "-c", "4096"]
    return [
        Server(f"llama.cpp {name}{suffix}", width, _llama_command(place, name, options), takes=takes)
        for name in formats
        for suffix, options, takes in (
            ("", many, frozenset({"1", "8", "32"})),
            (", one slot", single, frozenset({"1", "512", "2048"})),
        )
    ]


def _llama_command(place: Place, name: str, options: list[str]) -> list[str]:
    assert place.llama is not None
    assert place.gguf is not None
    threads = str(place.threads)
    return [
        str(place.llama / "llama-server"), "-m", str(place.gguf / f"{place.model.name}-{name}.gguf"),
        "--alias", "bench", "--host", "127.0.0.1", "--port", "{port}", "-t", threads, "-tb", threads,
        "--no-webui", "--cache-ram", "0", *options,
    ]  # fmt: skip
