"""Tiers of the KV cache: the next turn from disk beside computing it, what writing costs decoding, what
another key can tell from times, the disk's cap.

    OMP_NUM_THREADS=1 python -P tests/bench/kv_disk.py MODEL [--tokens 4096] [--rounds 20] [--quant int8]

turns    Seconds to the first token of a chat's next turn on a new engine, wall and processor, computed and
         from disk, and whether all tokens are the same.
writing  Decoding in one process, a token a step: 32 steps with a write-behind that has blocks to write, by
         turns with 32 without one. Median of the pairs' ratios of seconds and processor seconds, its error,
         bytes written beside the steps and their processor time. What the system does when it brings files to
         the disk, seconds later, is in neither.
guesses  Key A asks prompts, key B asks these and prompts that nobody asked. Area under the ROC curve of B's
         seconds to the first token, wall and processor, 0.5 where they tell nothing: A's blocks in memory,
         in the host tier as a GPU has it, and on disk alone. `kv_ends.py` asks through HTTP.
cap      Most bytes of files during writes of many times the cap, as a share of it.
"""

import argparse
import os
import random
import resource
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from llmbox.engine.config import EngineConfig
from llmbox.engine.core.engine import Engine
from llmbox.engine.core.kv_cache.host_tier import HostTier
from llmbox.engine.core.kv_cache.tiers import KVTiers
from llmbox.engine.executor.build import load_engine
from llmbox.engine.ipc.messages import AddRequest
from llmbox.engine.kv_store import usage
from llmbox.engine.kv_store.folder import KVFolder
from llmbox.engine.kv_store.store import BlockStore
from llmbox.engine.kv_store.store_threads import BlockWrite
from llmbox.engine.kv_store.usage import UsageFile
from llmbox.engine.sampling_params import SamplingParams

SHOWN = 16
"""Tokens that are compared."""
PIECE, PIECES = 32, 12
"""Steps with or without writing, and how many of these an answer has."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--quant", default="int8")
    parser.add_argument("--asked", type=int, default=800, help="guesses of each kind for `guesses`")
    parser.add_argument("--only", choices=["turns", "writing", "guesses", "cap"])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="llmbox-kv-bench-") as folder:
        for part in (cap, turns, writing, guesses):
            if options.only in {None, part.__name__}:
                part(options, Path(folder) / part.__name__)


def load(options: argparse.Namespace, speculate: Any = "auto") -> Engine:
    config = EngineConfig(
        model_path=str(options.model),
        name="m",
        device="cpu",
        quant=options.quant,
        speculate=speculate,
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
    os.environ.pop(usage.FOLDER_VARIABLE, None)
    if folder is not None:
        os.environ |= usage.cache_variables(folder, 20 * 10**9, 1.0)


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
    engine = load(options, speculate="off")
    kv_cache = engine.scheduler.kv_cache
    tiers, ratios, written, steps = kv_cache.tiers, list[tuple[float, float]](), 0, 0.0
    assert tiers is not None
    for round_ in range(options.rounds):
        engine.add(ask(f"r{round_}", [round_ + i * 31 % 40000 for i in range(512)], PIECE * PIECES + 2))
        while not engine.step().outputs:
            pass
        pieces = list[tuple[float, float]]()
        for number in range(PIECES):
            is_on = number % 4 in {1, 2}
            kv_cache.tiers = tiers if is_on else None
            tiers.writes._credit, tiers.writes._credited = 0.0, time.monotonic()  # nothing saved up before
            before = tiers.disk.store.counters.written_bytes
            wall, cpu = time.perf_counter(), processor_seconds()
            for _ in range(PIECE):
                engine.step()
            pieces.append((time.perf_counter() - wall, processor_seconds() - cpu))
            written += (tiers.disk.store.counters.written_bytes - before) * is_on
            steps += pieces[-1][0] * is_on
        for off, on in ((0, 1), (3, 2), (4, 5), (7, 6), (8, 9), (11, 10)):
            ratios.append((pieces[on][0] / pieces[off][0], pieces[on][1] / pieces[off][1]))
        kv_cache.tiers = tiers
        while engine.has_work or engine.prepare():
            engine.step()
    for number, name in enumerate(("time of steps", "processor time")):
        values = [each[number] for each in ratios]
        error = 1.25 * statistics.stdev(values) / len(values) ** 0.5
        print(f"writing          {name} {statistics.median(values):.4f} times as long (+-{error:.4f})")
    print(f"                 {written / 1e6 / steps:.1f} MB a second beside {len(ratios)} pieces of steps, ")
    print(f"                 {tiers.disk.store.seconds_per_byte * 1e9:.2f} ms of the processor a MB")
    engine.close()


def guesses(options: argparse.Namespace, folder: Path) -> None:
    def prompt(number: int) -> list[int]:
        rng = random.Random(number)
        return [rng.randrange(300, 2000) for _ in range(400)]

    def ask_as(engine: Engine, key: str, number: int) -> tuple[float, float]:
        params = SamplingParams(max_tokens=1, temperature=0.0)
        name = f"{key}{number}-{time.monotonic_ns()}"
        asked = AddRequest(
            request_id=name,
            prompt_ids=prompt(number),
            params=params,
            tenant=key,
            cache_namespace=f"{key}/",
        )
        _, wall, cpu, _ = run(engine, asked)
        return wall, cpu

    def idle(engine: Engine) -> None:
        while engine.prepare():
            pass

    for tier in ("memory", "host", "disk"):
        use_disk(folder if tier == "disk" else None)
        small = argparse.Namespace(**{**vars(options), "tokens": 1024, "quant": "none"})
        engine = load(small)
        kv_cache: Any = engine.scheduler.kv_cache
        if tier == "host":
            memory = engine.executor.runner.block_memory()
            host = HostTier(memory, dict.fromkeys(memory.sizes, options.asked * 100))
            kv_cache.tiers = KVTiers(None, memory, kv_cache, host=host)
        times: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
        own = list[tuple[float, float]]()
        if tier != "memory":
            for number in range(2 * options.asked):
                ask_as(engine, "a", number)
                idle(engine)
        if tier == "disk":
            engine.close()
            engine = load(small)
        for number in range(2 * options.asked):
            if tier == "memory":
                ask_as(engine, "a", number)
            is_known = random.Random(-number).random() < 0.5
            times[is_known].append(ask_as(engine, "b", number if is_known else number + 10_000_000))
            idle(engine)
        for number in range(options.asked // 4):
            if tier == "memory":
                ask_as(engine, "a", number)
            own.append(ask_as(engine, "a", number))
        engine.close()
        areas = [area([t[kind] for t in times[True]], [t[kind] for t in times[False]]) for kind in (0, 1)]
        its_own = area([t[0] for t in own], [t[0] for t in times[False]])
        print(f"guesses          {tier:6} AUC {areas[0]:.3f} wall, {areas[1]:.3f} processor, of ", end="")
        print(f"{len(times[True])} and {len(times[False])}; the key's own {its_own:.3f}", flush=True)


def area(known: list[float], unknown: list[float]) -> float:
    """Return the area under the ROC curve: how often a known one is sooner."""
    wins = sum((k < u) + 0.5 * (k == u) for k in known for u in unknown)
    return wins / len(known) / len(unknown)


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
