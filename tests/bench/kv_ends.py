"""KV cache on disk through HTTP: the next turn after each kind of end, other keys' guesses, models by turns.

    python -P tests/bench/kv_ends.py MODEL [--tokens 4096] [--only ends|keys|swaps|many]

ends   Seconds to the first token of a chat's next turn, from disk and computed (with another `cache_salt`),
       and whether the text is the same: after kill -9 of the engine and of the daemon, after unload and load,
       after another model took its place, and after an unload where the request itself loads the model.
keys   Key A asks prompts, key B asks these and prompts that nobody asked. Area under the ROC curve of B's
       times to the first token, 0.5 where they tell nothing: A's blocks in memory, and on disk alone.
swaps  Two models by turns, of which one fits in memory, each going on with its conversation: a turn for which
       the model is loaded, then one on the model that stays. Seconds by which the first token of the first is
       later, and whether the last answers are those of a conversation computed anew. On a slow CPU a short
       `--turn` leaves less of the prompt to compute, whose time varies too.
many   Ten models by turns, where two fit in memory beside the built-in one. Memory of the engines beside what
       was planned for them (PSS: a shared page counts once), failed requests and changed answers.

The last two wait until the weights of all models are packed, as they are after a model's first minutes.
"""

import argparse
import contextlib
import http.client
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmbox.kernels.cpu.isa import KERNEL_CACHE, cache_folder

PATIENCE = 120.0


class Box:
    """Daemon in folders of its own."""

    def __init__(self, folder: Path, **settings: object) -> None:
        self.folder = folder
        kept = {name: value for name, value in os.environ.items() if not name.startswith("LLMBOX_")}
        kernels = {KERNEL_CACHE: str(cache_folder())}
        told = {f"LLMBOX_{name.upper()}": str(value) for name, value in settings.items()}
        self._env = kept | kernels | told | {"HF_HOME": str(folder / "hf")}
        self.port = 0

    def llmbox(self, *words: str) -> Any:
        command = [sys.executable, "-P", "-m", "llmbox", *words, "--data-dir", str(self.folder)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=self._env, timeout=PATIENCE)
        return json.loads(done.stdout) if "--json" in words else None

    def up(self, *models: str) -> None:
        self.llmbox("up", "--port", "0", *models)
        self.port = int(self.llmbox("status", "--json")["url"].rsplit(":", 1)[1])

    def down(self) -> None:
        self.llmbox("down", "--now")

    def pids(self, title: str = "llmbox") -> list[int]:
        """Return the daemon and its processes, those whose title begins so."""
        daemon = self.llmbox("status", "--json")["pid"]
        found = [daemon, *children(daemon)]
        return [pid for pid in found if title_of(pid).startswith(title)]

    def ask(
        self, model: str, prompt: list[int] | str, tokens: int = 16, *, key: str = "", salt: str = ""
    ) -> tuple[str, float]:
        """Return the text and the seconds to the first token."""
        body: dict[str, Any] = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        body |= {"ignore_eos": True, "stream": True} | ({"cache_salt": salt} if salt else {})
        head = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        began, first, text = time.perf_counter(), 0.0, ""
        with contextlib.closing(connection):
            connection.request("POST", "/v1/completions", json.dumps(body), head)
            answer = connection.getresponse()
            if answer.status != 200:
                raise RuntimeError(answer.read().decode())
            for line in answer:
                if line.startswith(b"data: {"):
                    choices = json.loads(line[6:]).get("choices")
                    first = first or time.perf_counter() - began
                    text += choices[0]["text"] if choices else ""
        return text, first

    def release(self, model: str) -> None:
        """Unload a model as its time to live would."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        with contextlib.closing(connection):
            connection.request("POST", "/api/generate", json.dumps({"model": model, "keep_alive": 0}))
            answer = connection.getresponse()
            if answer.status != 200:
                raise RuntimeError(answer.read().decode())

    def loaded(self) -> list[str]:
        """Return the names of the models in memory."""
        return [each["name"] for each in self.llmbox("ps", "--json")["models"]]

    def settle(self) -> None:
        """Wait until no more blocks are written."""
        self.until(lambda: self.num_files() == (time.sleep(0.7) or 0) + self.num_files() > 0)

    def num_files(self) -> int:
        return sum(1 for path in self.folder.rglob("kv/*/*/*") if path.suffix != ".part")

    def until(self, condition: Callable[[], object]) -> None:
        end = time.monotonic() + PATIENCE
        while True:
            with contextlib.suppress(OSError, RuntimeError, subprocess.SubprocessError):
                if condition():
                    return
            if time.monotonic() > end:
                raise TimeoutError
            time.sleep(0.05)


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(each) for path in found for each in path.read_text().split()]


def title_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--asked", type=int, default=600, help="requests of each kind for `keys`")
    parser.add_argument("--rounds", type=int, default=20, help="turns of each model for `swaps` and `many`")
    parser.add_argument("--turn", type=int, default=32, help="new tokens of a turn for `swaps`")
    parser.add_argument("--only", choices=["ends", "keys", "swaps", "many"])
    options = parser.parse_args()
    for part in (ends, keys, swaps, many):
        if options.only in {None, part.__name__}:
            with tempfile.TemporaryDirectory(prefix="llmbox-kv-ends-") as folder:
                part(options, Path(folder))


def twins(model: Path, folder: Path, count: int = 2) -> list[str]:
    """Put copies of a model into the hub's cache of a box; return the names by which requests load them."""
    made = []
    for number in range(count):
        name = chr(97 + number)
        place = folder / "hf" / "hub" / f"models--bench--{name}"
        (place / "refs").mkdir(parents=True)
        (place / "refs" / "main").write_text("0" * 40)
        shutil.copytree(model, place / "snapshots" / ("0" * 40), copy_function=link_or_copy)
        made.append(f"bench/{name}")
    return made


def link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


def numbers(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000, 50_000) for _ in range(count)]


def small_numbers(seed: int, count: int) -> list[int]:
    """Return token ids that the vocabulary of the built-in model has too."""
    return [each % 1700 + 300 for each in numbers(seed, count)]


def ends(options: argparse.Namespace, folder: Path) -> None:
    one, other = twins(options.model, folder / "data")
    kv = options.tokens * 2 + 2048
    box = Box(folder / "data", model_quant="int8", model_ctx=options.tokens + 1024, model_kv_tokens=kv)
    box.up(one)
    try:
        box.ask(one, numbers(0, 300))

        def engine_killed() -> None:
            (engine,) = box.pids(f"llmbox: engine {one}")
            os.kill(engine, signal.SIGKILL)
            ready()

        def ready() -> None:
            box.until(lambda: box.ask(one, numbers(1, 20), 1))

        def daemon_killed() -> None:
            os.kill(box.pids()[0], signal.SIGKILL)
            box.up(one)
            ready()

        def loaded_again() -> None:
            box.llmbox("unload", one)
            box.llmbox("load", one)
            ready()

        def unloaded() -> None:
            # An owner's model is not unloaded without a key, so a request loads it. It leaves once its last
            # request has ended, which is after its last token.
            box.llmbox("unload", one)
            box.ask(one, numbers(3, 20), 1)
            box.release(one)
            box.until(lambda: one not in box.loaded())

        def swapped() -> None:
            box.llmbox("unload", one)
            box.llmbox("load", other)
            box.ask(other, numbers(2, 300))
            box.llmbox("unload", other)
            box.llmbox("load", one)
            ready()

        kinds = (engine_killed, daemon_killed, loaded_again, swapped, unloaded)
        for number, end in enumerate(kinds, start=10):
            prompt = numbers(number, options.tokens)
            box.ask(one, prompt)
            turn = [*prompt, *numbers(number + 100, 46)]
            box.settle()
            end()
            text, kept = box.ask(one, turn)
            if end is unloaded:
                box.release(one)
                box.until(lambda: one not in box.loaded())
            computed, cold = box.ask(one, turn, salt=f"anew {number}")
            name = end.__name__.replace("_", " ") + (", loaded by the request" if end is unloaded else "")
            print(f"{name:34} {cold:6.2f} s computed, {kept:5.2f} s kept: {cold / kept:5.1f}x; ", end="")
            print(f"same text: {text == computed}", flush=True)
    finally:
        box.down()


def keys(options: argparse.Namespace, folder: Path) -> None:
    box = Box(folder / "data")
    a, b = (box.llmbox("key", "add", name, "--json")["secret"] for name in "ab")
    box.up("builtin")
    asked = options.asked

    def area(known: list[float], unknown: list[float]) -> str:
        wins = sum((k < u) + 0.5 * (k == u) for k in known for u in unknown)
        return f"{wins / len(known) / len(unknown):.3f} of {len(known)} and {len(unknown)}"

    def prompt(number: int) -> list[int]:
        return small_numbers(number, 1200)

    def guesses(first: int, *, ask_before: bool) -> None:
        """Have B ask prompts from number `first` on, half of them prompts that A has asked."""
        seen: dict[bool, list[float]] = {True: [], False: []}
        for number in range(first, first + 2 * asked):
            if ask_before:
                box.ask("builtin", prompt(number), 1, key=a)
            is_known = random.Random(number).random() < 0.5
            asks = number if is_known else number + 10_000_000
            seen[is_known].append(box.ask("builtin", prompt(asks), 1, key=b)[1])
        own = [box.ask("builtin", prompt(first + number), 1, key=a)[1] for number in range(asked // 4)]
        name = "memory" if ask_before else "disk"
        print(f"{name:6} another key's guess: AUC {area(seen[True], seen[False])}; ", end="")
        print(f"the key's own: {area(own, seen[False])}", flush=True)

    try:
        for number in range(2 * asked):  # for the second part
            box.ask("builtin", prompt(2_000_000 + number), 1, key=a)
        guesses(1_000_000, ask_before=True)
        box.settle()
        box.llmbox("unload", "builtin")
        box.llmbox("load", "builtin")
        for number in range(20):
            box.ask("builtin", prompt(3_000_000 + number), 1, key=b)
        guesses(2_000_000, ask_before=False)
    finally:
        box.down()


def swaps(options: argparse.Namespace, folder: Path) -> None:
    models = twins(options.model, folder / "data")
    told: dict[str, object] = {"model_quant": "int8", "model_ctx": 4096, "model_kv_tokens": 8192}
    box = Box(folder / "data", **told, memory_budget=1.25 * pack_weights(folder / "data", told, models) / 1e9)
    box.up("builtin")
    try:
        box.llmbox("unload", "builtin")  # it would stay, as the owner's model
        chats = {name: small_numbers(number, 512) for number, name in enumerate(models)}

        def turn(name: str, salt: str = "") -> tuple[str, float]:
            if not salt:
                chats[name] = chats[name][-3000:] + small_numbers(len(chats[name]), options.turn)
            return box.ask(name, chats[name], salt=salt)

        for name in models:
            turn(name)
        loads, stays, last = list[float](), list[float](), dict[str, str]()
        for _ in range(options.rounds):
            for name in models:
                loads.append(turn(name)[1])
                require(box.loaded() == [name], f"the models in memory are {box.loaded()}, not {name}")
                last[name], seconds = turn(name)
                stays.append(seconds)
        for name, text in last.items():  # now: an engine that has computed so much writes it when it leaves
            print(f"{name}: the conversation is intact: {text == turn(name, salt='anew')[0]}")
        added = sorted(load - stay for load, stay in zip(loads, stays, strict=True))
        print(f"first token on a model that stays {statistics.median(stays) * 1e3:.0f} ms (median), ", end="")
        print(
            f"on one that is loaded {statistics.median(loads) * 1e3:.0f} ms; added, {len(added)} swaps: ",
            end="",
        )
        print(f"median {statistics.median(added) * 1e3:.0f} ms, p95 {late(added) * 1e3:.0f} ms, ", end="")
        print(f"{added[0] * 1e3:.0f} to {added[-1] * 1e3:.0f} ms")
        for pid in box.pids():
            print(f"  {title_of(pid):36} {pss(pid) / 1e6:5.0f} MB PSS")
    finally:
        box.down()


def require(condition: object, otherwise: str) -> None:
    """Raise where a run would not show what it is for."""
    if not condition:
        raise RuntimeError(otherwise)


def late(ordered: list[float]) -> float:
    """Return the 95th percentile of sorted values."""
    return ordered[min(len(ordered) - 1, int(len(ordered) * 0.95))]


def pack_weights(folder: Path, told: dict[str, object], models: list[str]) -> int:
    """Load all models, until the weights of each are packed. Returns the bytes that one has in the plan."""
    box, found = Box(folder, **told), 0
    box.up(models[0])

    def packed() -> int:
        return sum(1 for _ in folder.glob("cache/repacked/*.weights"))

    try:
        for number, name in enumerate(models, start=1):
            box.ask(name, small_numbers(0, 20), 1)
            box.until(lambda wanted=number: packed() >= wanted)
            found = max(found, planned(box)[name])
            box.llmbox("unload", name)
    finally:
        box.down()
    return found


def planned(box: Box) -> dict[str, int]:
    """Return the bytes of each model in memory as they were planned."""
    parts = ("weights_bytes", "kv_bytes", "workspace_bytes")
    models = box.llmbox("ps", "--json")["models"]
    return {each["name"]: sum(each["info"][part] for part in parts) for each in models}


def many(options: argparse.Namespace, folder: Path) -> None:
    models = twins(options.model, folder / "data", 10)
    told: dict[str, object] = {"model_quant": "int8", "model_ctx": 1024, "model_kv_tokens": 4096}
    one = pack_weights(folder / "data", told, models)
    box = Box(folder / "data", **told, memory_budget=2.5 * one / 1e9)
    box.up("builtin")
    try:
        box.llmbox("unload", "builtin")
        box.ask(models[0], small_numbers(0, 20), 1)
        (daemon,) = box.pids("llmbox: daemon")
        whole, beyond, texts, failed = list[int](), list[float](), dict[str, str](), 0
        most, times = 0, list[float]()
        for number in range(options.rounds):
            name = models[number % 10]
            try:
                text, seconds = box.ask(name, small_numbers(number % 10, 64))
                times.append(seconds)
                failed += texts.setdefault(name, text) != text
            except (OSError, RuntimeError) as error:
                failed += 1
                print(error)
            whole.append(sum(pss(pid) for pid in (daemon, *children(daemon))))
            if number % 10 == 0 or number == options.rounds - 1:
                plan = planned(box)
                most = max(most, len(plan))
                beyond += [
                    pss(pid) / plan[title_of(pid).removeprefix("llmbox: engine ")]
                    for pid in box.pids("llmbox: engine bench/")
                ]
        require(most == 2, f"{most} models were in memory at once, not two")
        half = len(whole) // 2
        print(f"{options.rounds} turns of ten models, {failed} failed or changed; first token ", end="")
        print(f"median {statistics.median(times):.2f} s, p95 {late(sorted(times)):.2f} s; ", end="")
        print(f"an engine takes {min(beyond):.2f} to {max(beyond):.2f} of its plan; all processes ", end="")
        print(f"{statistics.median(whole[:half]) / 1e6:.0f} MB in the first half (median), ", end="")
        print(f"{statistics.median(whole[half:]) / 1e6:.0f} MB in the second, most {max(whole) / 1e6:.0f} MB")
    finally:
        box.down()


def pss(pid: int) -> int:
    """Return the resident bytes of a process, those shared with others divided by their number."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)
    return 0


if __name__ == "__main__":
    main()
