"""KV cache on disk: the next turn from disk beside computing it, what writing costs decoding, the disk's cap.

    OMP_NUM_THREADS=1 python -P tests/bench/kv_disk.py MODEL [--tokens 4096] [--rounds 20] [--quant int8]

turns    Seconds to the first token of a chat's next turn on a new engine, wall and processor, computed and
         from disk, and whether all tokens are the same.
writing  Rounds of decoding in one process, by turns with a write-behind that has blocks to write and without
         one. Ratio of the medians of tokens per second, processor seconds, bytes written beside the steps.
cap      Most bytes of files during writes of many times the cap, as a share of it.
"""

import argparse
import os
import resource
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from llmbox.engine.config import EngineConfig
from llmbox.engine.core.engine import Engine
from llmbox.engine.executor.build import load_engine
from llmbox.engine.ipc.messages import AddRequest
from llmbox.engine.kv_store import environment
from llmbox.engine.kv_store.folder import KVFolder
from llmbox.engine.kv_store.store import BlockStore
from llmbox.engine.kv_store.store_threads import BlockWrite
from llmbox.engine.kv_store.usage_file import UsageFile
from llmbox.engine.sampling_params import SamplingParams

SHOWN = 16
"""Tokens that are compared."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--quant", default="int8")
    parser.add_argument("--only", choices=["turns", "writing", "cap"])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="llmbox-kv-bench-") as folder:
        for part in (cap, turns, writing):
            if options.only in {None, part.__name__}:
                part(options, Path(folder) / part.__name__)


def load(options: argparse.Namespace) -> Engine:
    config = EngineConfig(
        model_path=str(options.model),
        name="m",
        device="cpu",
        quant=options.quant,
        context=options.tokens + 1024,
        kv_tokens=2 * options.tokens + 2048,
    )
    return load_engine(config, lambda _: None)


def ask(name: str, prompt: list[int], tokens: int) -> AddRequest:
    params = SamplingParams(max_tokens=tokens, min_tokens=tokens, temperature=0.0)
    return AddRequest(request_id=name, prompt_ids=prompt, params=params)


def processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def run(engine: Engine, request: AddRequest) -> tuple[list[int], float, float, int]:
    """Return the tokens, the seconds to the first one (wall, processor), and the prompt tokens from disk."""
    wall, cpu = time.perf_counter(), processor_seconds()
    first, tokens, found = (0.0, 0.0), list[int](), 0
    refused = engine.add(request)
    assert refused is None, refused
    while engine.has_work:
        for output in engine.step().outputs:
            if output.token_ids and not tokens:
                first = time.perf_counter() - wall, processor_seconds() - cpu
                found = output.disk_tokens or 0
            tokens += output.token_ids
    return tokens, *first, found


def use_disk(folder: Path | None) -> None:
    os.environ.pop(environment.FOLDER, None)
    if folder is not None:
        os.environ |= environment.variables(folder, 20 * 10**9, 1.0)


def turns(options: argparse.Namespace, folder: Path) -> None:
    prompt = [1000 + i * 7919 % 50000 for i in range(options.tokens)]
    use_disk(folder)
    first = load(options)
    answer, *cold, _ = run(first, ask("first", prompt, SHOWN))
    while first.prepare():
        pass
    first.close()
    turn = [*prompt, *answer, *range(2000, 2030)]
    use_disk(None)
    expected, *computed, _ = run(load(options), ask("computed", turn, SHOWN))
    use_disk(folder)
    second = load(options)
    tokens, *stored, found = run(second, ask("stored", turn, SHOWN))
    second.close()
    show = "{:.2f} s wall, {:.2f} s processor".format
    print(f"first turn       {show(*cold)}")
    print(f"next, computed   {show(*computed)}")
    print(f"next, from disk  {show(*stored)}, {found} tokens from disk; same tokens: {tokens == expected}")
    print(f"                 {computed[0] / stored[0]:.1f}x wall, {computed[1] / stored[1]:.1f}x processor")


def writing(options: argparse.Namespace, folder: Path) -> None:
    use_disk(folder)
    engine = load(options)
    kv_cache = engine._scheduler.kv_cache
    tiers, seen = kv_cache.tiers, dict[bool, list[tuple[float, float]]]()
    assert tiers is not None
    written = 0
    for round_ in range(2 * options.rounds):
        is_on = round_ % 2 == (round_ // 2) % 2
        kv_cache.tiers = tiers if is_on else None
        engine.add(ask(f"r{round_}", [round_ + i * 31 % 40000 for i in range(256)], 64))
        while not engine.step().outputs:
            pass
        before = tiers.store.counters.written_bytes
        wall, cpu, tokens = time.perf_counter(), processor_seconds(), 0
        while engine.has_work:
            tokens += sum(len(output.token_ids) for output in engine.step().outputs)
        seconds = time.perf_counter() - wall, processor_seconds() - cpu
        written += (tiers.store.counters.written_bytes - before) * is_on
        seen.setdefault(is_on, []).append((tokens / seconds[0], seconds[1]))
        kv_cache.tiers = tiers
        while engine.prepare():
            pass
    rate = {on: statistics.median(each for each, _ in rounds) for on, rounds in seen.items()}
    cpu_seconds = {on: statistics.median(each for _, each in rounds) for on, rounds in seen.items()}
    print(f"decoding         {rate[False]:.1f} tok/s without, {rate[True]:.1f} with writing: ", end="")
    print(f"{rate[True] / rate[False]:.3f}; {written / 1e6 / options.rounds:.1f} MB a round beside steps")
    print(
        f"                 {cpu_seconds[False]:.3f} s processor without, {cpu_seconds[True]:.3f} s with: ",
        end="",
    )
    print(f"{cpu_seconds[True] / cpu_seconds[False]:.3f}")
    engine.close()


def cap(_options: argparse.Namespace, folder: Path) -> None:
    size, most = 100_000, 20_000_000
    kv = KVFolder(folder, most)
    kv.open()
    stores = [BlockStore(kv, bytes([n] * 16), {"origins": []}) for n in range(2)]
    peak, is_over = 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not is_over.wait(0.01):
            with UsageFile.locked(folder / "usage"):  # nothing is evicted meanwhile
                peak = max(peak, sum(block.size for block in kv.blocks()))

    watcher = threading.Thread(target=watch)
    watcher.start()
    for number in range(2000):
        store: Any = stores[number % 2]
        assert store.wait(30, lambda store=store: store.accepts(size))
        address = store.address(kv.owner(""), "kv", number.to_bytes(4, "big"))
        store.write(BlockWrite(address, store.take_buffer(size), has_quota=False, is_turn_end=False))
    for store in stores:
        store.close(60)
    is_over.set()
    watcher.join(10)
    share, end = peak / most, sum(block.size for block in kv.blocks()) / most
    print(f"cap              most {share:.4f} of it during 10 times as many bytes, {end:.4f} at the end")


if __name__ == "__main__":
    main()
