"""How each server of a side-by-side run is started. One entry a server; all speak OpenAI's completions."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ALL = frozenset({"1", "8", "32", "512", "2048", "8192", "chat", "prefix"})
SLOTS = 32
SLOT_TOKENS = 320
"""Room of one private slot of llama.cpp: enough for the workloads with many streams."""
FORMATS = {"bf16": "BF16", "int8": "Q8_0", "int4": "Q4_0", "q4_k_m": "Q4_K_M"}
"""GGUF formats of the peers, by width."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where things lie on this machine."""

    model: Path
    """Folder, or a GGUF file that every server reads."""
    gguf: Path | None
    vllm: Path | None
    llama: Path | None
    ik: Path | None
    threads: int
    scratch: Path
    context: int = 4608
    """Longest request, in tokens, of servers that take the long prompts."""

    def file(self, width: str) -> Path | None:
        """GGUF file of a width, if there is one."""
        if self.model.is_file():
            return self.model
        return self.gguf / f"{self.model.name}-{FORMATS[width]}.gguf" if self.gguf else None


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
    return [*llmbox(place, width), *vllm(place, width), *llama(place, width), *ik_llama(place, width)]


def llmbox(place: Place, width: str) -> list[Server]:
    """The model quantized at load, and the peers' own file computed in its blocks."""
    found = []
    if width in {"bf16", "int8", "int4"} and not place.model.is_file():
        quant = {"bf16": "none"}.get(width, width)
        found.append(_llmbox(place, width, f"llmbox {width}", place.model, ["--quant", quant]))
    file = place.file(width)
    if file is not None and width not in {"bf16", "int4"}:
        name = "llmbox" if place.model.is_file() else f"llmbox, {FORMATS[width]} file"
        found.append(_llmbox(place, width, name, file, []))
    return found


def _llmbox(place: Place, width: str, name: str, model: Path, more: list[str]) -> Server:
    command = [
        sys.executable, "-P", "-m", "llmbox", "serve", str(model), "--alias", "bench", *more,
        "--ctx", str(place.context), "--threads", str(place.threads), "--port", "{port}",
        "--data-dir", str(place.scratch / ("file" if model.is_file() else "folder")), "--speculate", "off",
    ]  # fmt: skip
    return Server(name, width, command)


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
        "--max-model-len", str(place.context), "--max-num-seqs", str(SLOTS),
    ]  # fmt: skip
    return [Server("vLLM bf16", width, command, env)]


def llama(place: Place, width: str) -> list[Server]:
    """Private slots for many streams; one slot for one request at a time; eight for shared beginnings."""
    file = place.file(width)
    if place.llama is None or file is None:
        return []
    own = ["--no-webui", "--cache-ram", "0", "--no-kv-unified"]
    return _slotted(place, width, "llama.cpp", place.llama, own, [])


def ik_llama(place: Place, width: str) -> list[Server]:
    """The same of ik_llama.cpp, weights repacked. Its flash attention asserts on random weights where there
    are several sequences, so it is off there.
    """
    if place.ik is None or place.file(width) is None:
        return []
    return _slotted(place, width, "ik_llama.cpp", place.ik, ["-rtr", "--cache-ram", "0"], ["-fa", "off"])


def _slotted(
    place: Place, width: str, name: str, folder: Path, own: list[str], together: list[str]
) -> list[Server]:
    threads, file = str(place.threads), str(place.file(width))
    command = [
        str(folder / "llama-server"), "-m", file, "--alias", "bench", "--host", "127.0.0.1",
        "--port", "{port}", "-t", threads, "-tb", threads, *own,
    ]  # fmt: skip
    label = name if place.model.is_file() else f"{name} {FORMATS[width]}"
    kinds = [
        ("", SLOTS, SLOTS * SLOT_TOKENS, {"8", "32"}),
        (", one slot", 1, place.context, {"1", "512", "2048", "8192", "chat"}),
        (", eight slots", 8, 9216, {"prefix"}),
    ]
    return [
        Server(
            label + suffix,
            width,
            [*command, "-np", str(slots), "-c", str(tokens), *(together if slots > 1 else [])],
            takes=frozenset(takes),
        )
        for suffix, slots, tokens, takes in kinds
    ]
