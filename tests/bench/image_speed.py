"""Pictures: time to the first token, and of a second question, beside llama.cpp's server on the same files.

    python -P tests/bench/image_speed.py --out DIR [--llama BIN] [--rounds 4] [--side 448] [--threads 2]

Writes random weights in the shape of Qwen3-VL-2B to DIR once, as two GGUF files: the language model in Q8_0,
the vision tower (mmproj) in F16. Every round asks each server about a picture that none has seen, and then
another question about the same one; the order turns. Times are those of whole answers of one token. BIN holds
`llama-server`; without it llmbox is measured alone.
"""

import argparse
import base64
import io
import json
import secrets
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from PIL import Image
from tokenizers import pre_tokenizers

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.peer_servers import Server
from bench.peers import Started, say
from support.vision_models import SEEING_TEMPLATE

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 28, 2048, 6144, 16, 8, 128, 151936
TOWER_LAYERS, TOWER, TOWER_INNER, TOWER_HEADS, PATCH = 24, 1024, 4096, 16, 16
DEEPSTACK = (5, 11, 17)
MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
QUESTIONS = ("What is it?", "Where is it?")
TIMEOUT_S = 120


class Answering(Started):
    """Server that has answered a question without a picture."""

    def _wait(self, until: float) -> None:
        while self.process.poll() is None and time.perf_counter() < until:
            try:
                ask(self.target.url, "", "Hello?")
            except OSError:  # not listening yet, or still loading: 503
                time.sleep(0.2)
            else:
                return
        raise SystemExit(f"{self.server.name} did not start:\n{self._last_words()}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--llama", type=Path)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--side", type=int, default=448, help="pixels of an edge; multiples of 32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--scratch", type=Path, help="logs and packed weights: a second run starts faster")
    options = parser.parse_args()
    model, projector = write_files(options.out)
    with tempfile.TemporaryDirectory(prefix="llmbox-image-speed-") as temporary:
        scratch = options.scratch or Path(temporary)
        scratch.mkdir(parents=True, exist_ok=True)
        servers = list_servers(options, model, projector, str(scratch))
        times = measure(servers, scratch, options.rounds, options.side)
    for name, found in times.items():
        first, second = (statistics.median(each) for each in zip(*found, strict=True))
        print(f"{name:10} first {first:6.2f} s, second {second:6.3f} s: {first / second:.1f}x")
    if len(times) == 2:
        ours, theirs = times.values()
        for number, what in enumerate(("first", "second")):
            ratios = [b[number] / a[number] for a, b in zip(ours, theirs, strict=True)]
            print(
                f"{what}: {statistics.median(ratios):.2f}x as fast ({', '.join(f'{r:.2f}' for r in ratios)})"
            )


def list_servers(options: argparse.Namespace, model: Path, projector: Path, scratch: str) -> list[Server]:
    threads = str(options.threads)
    ours = [
        sys.executable, "-P", "-m", "llmbox", "serve", str(model), "--alias", "bench", "--ctx", "4096",
        "--threads", threads, "--port", "{port}", "--data-dir", f"{scratch}/data", "--speculate", "off",
    ]  # fmt: skip
    found = [Server("llmbox", "int8", ours)]
    if options.llama is not None:
        theirs = [
            str(options.llama / "llama-server"), "-m", str(model), "--mmproj", str(projector),
            "--alias", "bench", "--host", "127.0.0.1", "--port", "{port}", "-t", threads, "-tb", threads,
            "-np", "1", "-c", "4096", "--no-webui", "--cache-ram", "0",
        ]  # fmt: skip
        found.append(Server("llama.cpp", "int8", theirs))
    return found


def measure(
    servers: list[Server], scratch: Path, rounds: int, side: int
) -> dict[str, list[tuple[float, float]]]:
    """Return the seconds of the first and the second question of each round, by server."""
    started: list[Answering] = []
    first_seed = secrets.randbits(32)  # a picture of an earlier run may still be cached on disk
    times: dict[str, list[tuple[float, float]]] = {server.name: [] for server in servers}
    try:
        for server in servers:
            started.append(Answering(server, scratch))
            say(f"{server.name}: started in {started[-1].seconds:.1f} s")
        for number in range(rounds + 1):
            turn = number % len(started)
            for one in started[turn:] + started[:turn]:
                url = draw(side, first_seed + number)
                first, second = (ask(one.target.url, url, question) for question in QUESTIONS)
                say(f"round {number}: {one.server.name} {first:.2f} s, {second:.3f} s")
                if number:  # the first one warms up
                    times[one.server.name].append((first, second))
    finally:
        for one in started:
            one.stop()
    return times


def draw(side: int, seed: int) -> str:
    """Return a picture as a data URL."""
    noise = np.random.default_rng(seed)
    small = Image.fromarray(noise.integers(0, 256, (8, 8, 3), dtype=np.uint8))
    out = io.BytesIO()
    small.resize((side, side), Image.Resampling.BICUBIC).save(out, "PNG")
    return f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"


def ask(server: str, picture: str, question: str) -> float:
    """Return the seconds of an answer of one token. `picture`: data URL; empty: a question alone."""
    content: list[dict[str, Any]] = [{"type": "text", "text": question}]
    if picture:
        content.insert(0, {"type": "image_url", "image_url": {"url": picture}})
    messages = [{"role": "user", "content": content}]
    body = {"model": "bench", "max_tokens": 1, "temperature": 0, "messages": messages}
    request = urllib.request.Request(
        f"{server}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    began = time.perf_counter()
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
        usage = json.load(response)["usage"]
    seconds = time.perf_counter() - began
    if usage["completion_tokens"] != 1:
        raise SystemExit(f"{server} gave {usage}")
    return seconds


def write_files(folder: Path) -> tuple[Path, Path]:
    model, projector = folder / "qwen3-vl-2b-Q8_0.gguf", folder / "mmproj-qwen3-vl-2b-F16.gguf"
    folder.mkdir(parents=True, exist_ok=True)
    for file, write in ((model, write_model), (projector, write_projector)):
        if not file.exists():
            part = file.with_suffix(".part")
            write(part)
            part.rename(file)
    return model, projector


def write_model(file: Path) -> None:
    writer = gguf.GGUFWriter(file, "qwen3vl")
    writer.add_context_length(262144)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(5e6)
    writer.add_rope_dimension_sections([24, 20, 20, 0])
    writer.add_num_deepstack_layers(len(DEEPSTACK))
    add_vocabulary(writer)
    blocks = random_blocks()
    for name, shape in model_shapes():
        if len(shape) == 1:
            writer.add_tensor(name, np.ones(shape, np.float32))
        else:
            raw = np.resize(blocks, (shape[0], shape[1] // 32 * 34))
            writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    finish(writer)


def model_shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "token_embd.weight", (VOCABULARY, HIDDEN)
    yield "output_norm.weight", (HIDDEN,)
    inside: dict[str, tuple[int, ...]] = {
        "attn_norm": (HIDDEN,),
        "ffn_norm": (HIDDEN,),
        "attn_q": (HEADS * HEAD_DIM, HIDDEN),
        "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
        "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
        "attn_output": (HIDDEN, HEADS * HEAD_DIM),
        "attn_q_norm": (HEAD_DIM,),
        "attn_k_norm": (HEAD_DIM,),
        "ffn_gate": (INNER, HIDDEN),
        "ffn_up": (INNER, HIDDEN),
        "ffn_down": (HIDDEN, INNER),
    }
    for layer in range(LAYERS):
        for name, shape in inside.items():
            yield f"blk.{layer}.{name}.weight", shape


def add_vocabulary(writer: gguf.GGUFWriter) -> None:
    words = [*MARKS, *sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġw"]
    words += [f"Ġw{number}" for number in range(VOCABULARY - len(words))]
    kinds = [gguf.TokenType.CONTROL if word in MARKS else gguf.TokenType.NORMAL for word in words]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(words)
    writer.add_token_types(kinds)
    writer.add_token_merges(["Ġ w"])
    writer.add_eos_token_id(MARKS.index("<|im_end|>"))
    writer.add_add_bos_token(False)
    writer.add_chat_template(SEEING_TEMPLATE)


def write_projector(file: Path) -> None:
    writer = gguf.GGUFWriter(file, "clip")
    writer.add_type(gguf.GGUFType.MMPROJ)
    writer.add_clip_has_vision_encoder(True)
    writer.add_clip_projector_type("qwen3vl_merger")
    writer.add_vision_projection_dim(HIDDEN)
    writer.add_vision_image_size(768)
    writer.add_vision_patch_size(PATCH)
    writer.add_vision_embedding_length(TOWER)
    writer.add_vision_feed_forward_length(TOWER_INNER)
    writer.add_vision_block_count(TOWER_LAYERS)
    writer.add_vision_head_count(TOWER_HEADS)
    writer.add_vision_attention_layernorm_eps(1e-6)
    writer.add_vision_spatial_merge_size(2)
    writer.add_vision_image_mean([0.5] * 3)
    writer.add_vision_image_std([0.5] * 3)
    writer.add_vision_use_gelu(True)
    writer.add_vision_is_deepstack_layers([layer in DEEPSTACK for layer in range(TOWER_LAYERS)])
    noise = np.random.default_rng(5)
    for name, shape in projector_shapes():
        if len(shape) == 1:
            value = 1.0 if "ln" in name or "norm" in name else 0.0
            writer.add_tensor(name, np.full(shape, value if name.endswith("weight") else 0.0, np.float32))
        else:
            array = noise.standard_normal(shape, np.float32) * 0.02
            writer.add_tensor(name, array if "position" in name else array.astype(np.float16))
    finish(writer)


def projector_shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    def both(name: str, *shape: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{name}.weight", shape
        yield f"{name}.bias", shape[:1]

    yield from both("v.patch_embd", TOWER, 3, PATCH, PATCH)
    yield "v.patch_embd.weight.1", (TOWER, 3, PATCH, PATCH)
    yield "v.position_embd.weight", (2304, TOWER)
    for layer in range(TOWER_LAYERS):
        at = f"v.blk.{layer}"
        yield from both(f"{at}.ln1", TOWER)
        yield from both(f"{at}.ln2", TOWER)
        yield from both(f"{at}.attn_qkv", 3 * TOWER, TOWER)
        yield from both(f"{at}.attn_out", TOWER, TOWER)
        yield from both(f"{at}.ffn_up", TOWER_INNER, TOWER)
        yield from both(f"{at}.ffn_down", TOWER, TOWER_INNER)
    merged = 4 * TOWER
    yield from both("v.post_ln", TOWER)
    yield from both("mm.0", merged, merged)
    yield from both("mm.2", HIDDEN, merged)
    for layer in DEEPSTACK:
        yield from both(f"v.deepstack.{layer}.norm", merged)
        yield from both(f"v.deepstack.{layer}.fc1", merged, merged)
        yield from both(f"v.deepstack.{layer}.fc2", HIDDEN, merged)


def random_blocks() -> np.ndarray:
    """Return blocks of Q8_0 whose weights have a deviation of 0.02."""
    raw = np.random.default_rng(3).integers(0, 256, (1 << 18, 34), dtype=np.uint8)
    raw[:, :2] = np.full(1, 0.02 / 74, np.float16).view(np.uint8)
    return raw


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
