"""What `llmbox fit` says against what a load takes: `python -P tests/bench/fit_error.py [CASE]...`

Each case is a model with random weights in a shape of its own, loaded by the real engine in a process of its
own. Measured are the process's own pages (RssAnon), from before the load to after it, and their highest point
while prompts fill the whole pool and all requests decode. Predicted are the weights, and weights + KV +
workspace: the latter is what the memory budget counts with, the worst moment of any step.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

BASE: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 10,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
WIDE_VOCABULARY = {"vocab_size": 151_936, "num_hidden_layers": 6}
DEEP = {"num_hidden_layers": 24, "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 2048}

DECODED = 64
"""Tokens of each answer: long enough that all requests hold their prompts at the same time."""

Case = tuple[str, dict[str, Any], dict[str, Any]]
CASES: dict[str, Case] = {
    # name: (architecture, changes of the shape, engine options)
    "llama bf16": ("llama", {}, {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}, {}),
    "llama f32": ("llama", {}, {"dtype": "float32"}),
    "llama int8": ("llama", {}, {"quant": "int8"}),
    "llama int4": ("llama", {}, {"quant": "int4"}),
    "mistral GQA 8": ("mistral", {"num_key_value_heads": 2}, {}),
    "mistral int8-g32": ("mistral", {}, {"quant": "int8-g32"}),
    "qwen2 bias": ("qwen2", {}, {}),
    "qwen2 wide, tied": ("qwen2", {**WIDE_VOCABULARY, "tie_word_embeddings": True}, {}),
    "qwen2 wide, int8": ("qwen2", WIDE_VOCABULARY, {"quant": "int8"}),
    "qwen3 long context": ("qwen3", {"max_position_embeddings": 4096}, {"context": 4096, "max_running": 1}),
    "qwen3 KV int8": ("qwen3", {}, {"kv_dtype": "int8", "max_running": 8}),
    "qwen3 deep": ("qwen3", DEEP, {}),
    "qwen3 deep, int4-g128": ("qwen3", DEEP, {"quant": "int4-g128"}),
    "qwen3 MHA": ("qwen3", {"num_key_value_heads": 16}, {"context": 512}),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        measure(Path(options.one[0]), json.loads(options.one[1]))
        return
    rows = []
    print("| shape | weights predicted | measured | error | all predicted | highest | of it |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for name in options.cases or CASES:
        row = {"name": name, **run(*CASES[name])}
        rows.append(row)
        print(line(row), flush=True)
    worst = max(abs(row["measured"] / row["weights"] - 1) for row in rows)
    print(f"\n{len(rows)} shapes, largest error of the weights {worst:.1%}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


def line(row: dict[str, Any]) -> str:
    error = row["measured"] / row["weights"] - 1
    return (
        f"| {row['name']} | {megabytes(row['weights'])} | {megabytes(row['measured'])} | {error:+.1%} | "
        f"{megabytes(row['total'])} | {megabytes(row['peak'])} | {row['peak'] / row['total']:.0%} |"
    )


def megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB"


def run(architecture: str, changes: dict[str, Any], options: dict[str, Any]) -> dict[str, int]:
    from random_model import write_model

    config = {**BASE, "model_type": architecture, "architectures": [ARCHITECTURES[architecture]], **changes}
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder) / "model", config)
        command = [sys.executable, "-P", __file__, "--one", f"{folder}/model", json.dumps(options)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def measure(model: Path, options: dict[str, Any]) -> None:
    """In the child: one load, and one run that fills the pool."""
    import torch

    from llmbox.engine.config import EngineConfig
    from llmbox.engine.executor.build import load_engine, open_kernels
    from llmbox.engine.executor.load_model import memory_in_use

    open_kernels()
    defaults = {"context": 1024, "max_running": 4, "token_budget": 256, "device": "cpu", "threads": 2}
    config = EngineConfig(model_path=str(model), name="m", prefix_cache=False, **{**defaults, **options})
    before = memory_in_use(
        torch.device("cpu")
    )  # what freed buffers kept goes back first, or it would be reused
    assert before is not None
    engine = load_engine(config, lambda _: None)
    info = engine.info
    peak = fill(engine)
    total = info.weights_bytes + info.kv_bytes + info.workspace_bytes
    told = {
        "weights": info.weights_bytes,
        "measured": info.measured_weights_bytes,
        "total": total,
        "peak": peak - before,
    }
    print(json.dumps(told))


def fill(engine: Any) -> int:
    """Every request at its longest; the most pages of our own at any moment that a watcher saw."""
    from llmbox.engine.ipc.messages import AddRequest
    from llmbox.engine.sampling_params import SamplingParams

    info = engine.info
    requests = min(info.max_running, info.num_blocks * info.block_size // info.context_window)
    for number in range(requests):
        ids = [3 + (number * 7919 + i * 31) % 1000 for i in range(info.context_window - DECODED)]
        # The worst moment has log-probabilities of a prompt in it: many rows of logits at once.
        scored = 1 if number == requests - 1 else None
        params = SamplingParams(
            max_tokens=DECODED, min_tokens=DECODED, temperature=0.0, prompt_logprobs=scored
        )
        engine.add(AddRequest(request_id=str(number), prompt_ids=ids, params=params))
    seen, ended = [own_pages()], threading.Event()

    def watch() -> None:
        while not ended.wait(0.001):
            seen.append(own_pages())

    watcher = threading.Thread(target=watch)
    watcher.start()
    while engine.has_work:
        engine.step()
    ended.set()
    watcher.join()
    return max(seen)


def own_pages() -> int:
    """Bytes of this process's own memory (RssAnon), what is mapped from files left out."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(text.split()[1]) * 1024 for text in lines if text.startswith("RssAnon:"))


if __name__ == "__main__":
    main()
