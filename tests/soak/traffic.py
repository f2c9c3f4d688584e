"""Clients of the soak: each knows what its answer must be, and says when it is not that."""

import http.client
import json
import random
import threading
import time
from collections import Counter
from urllib.parse import urlsplit

PROMPTS = [
    "llmbox is",
    "How do I load a model?",
    "What does llmbox down do?",
    "The key-value cache",
    "Which port is used?",
    "A request that is cancelled",
    "An engine that dies",
    "Tokens are",
]
PATIENCE = 300.0
"""Seconds that one answer may take on a busy machine, a restart of the engine included."""


def body(number: int, *, stream: bool) -> dict[str, object]:
    """Greedy and drawn requests by turns; `ignore_eos` makes them long enough to be caught in the middle."""
    return {
        "model": "builtin",
        "prompt": PROMPTS[number % len(PROMPTS)],
        "max_tokens": 48 + 16 * (number % 3),
        "temperature": 0.9 * (number % 2),
        "seed": 7 + number,
        "ignore_eos": True,
        "stream": stream,
    }


class CutError(Exception):
    """An answer that ended without an end, or an error that the soak did not expect."""


def ask(url: str, number: int, *, stream: bool, leave_after: int | None = None) -> str | None:
    """The text of an answer; None where the server refused (429, 503) or the caller left on purpose."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=PATIENCE)
    try:
        sent = json.dumps(body(number, stream=stream))
        connection.request("POST", "/v1/completions", sent, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status in (429, 503):
            return None
        if answer.status != 200:
            raise CutError(f"status {answer.status}: {answer.read(300)!r}")
        if stream:
            return _read_events(answer, leave_after)
        return str(json.load(answer)["choices"][0]["text"])
    except (OSError, http.client.HTTPException) as error:
        raise CutError(f"{type(error).__name__}: {error}") from error
    finally:
        connection.close()


def _read_events(answer: http.client.HTTPResponse, leave_after: int | None) -> str | None:
    text, events = "", 0
    for line in answer:
        if not line.startswith(b"data: "):
            continue
        if line.strip() == b"data: [DONE]":
            return text
        event = json.loads(line[6:])
        if "error" in event:
            raise CutError(f"error in the stream: {event['error'].get('message')}")
        text += event["choices"][0]["text"] if event["choices"] else ""
        events += 1
        if events == leave_after:
            return None
    raise CutError("the stream ended without [DONE]")


class Traffic:
    """Clients that ask until told to rest. `told` counts answers; `wrong` is what broke the pass rule."""

    def __init__(self, url: str, expected: list[str], clients: int, seed: int) -> None:
        self.url = url
        self.told: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.excused = False
        """The daemon itself is being killed: answers that are cut off now are no fault."""
        self._expected = expected
        self._go = threading.Event()
        self._ended = threading.Event()
        self._busy: Counter[int] = Counter()
        for number in range(clients):
            random_of_one = random.Random(f"{seed}/{number}")
            threading.Thread(target=self._run, args=(number, random_of_one), daemon=True).start()

    def start(self) -> None:
        self._go.set()

    def rest(self) -> bool:
        """No new requests; whether those under way ended."""
        self._go.clear()
        deadline = time.monotonic() + PATIENCE
        while any(self._busy.values()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return not any(self._busy.values())

    def end(self) -> None:
        self._ended.set()
        self._go.set()

    def _run(self, client: int, chance: random.Random) -> None:
        while not self._ended.is_set():
            self._busy[client] = 0
            self._go.wait()
            self._busy[client] = 1
            if self._go.is_set() and not self._ended.is_set():
                self._ask_one(chance)
                time.sleep(chance.uniform(0, 0.3))

    def _ask_one(self, chance: random.Random) -> None:
        number = chance.randrange(len(self._expected))
        stream = chance.random() < 0.7
        leave = chance.randrange(1, 20) if stream and chance.random() < 0.3 else None
        try:
            text = ask(self.url, number, stream=stream, leave_after=leave)
        except CutError as cut:
            if self.excused:
                self.told["cut off or not connected while the daemon was down"] += 1
            else:
                self.wrong.append(f"request {number}: {cut}")
            return
        if text is None:
            self.told["left or refused"] += 1
        elif text == self._expected[number]:
            self.told["same tokens"] += 1
        else:
            self.wrong.append(f"request {number}: other text than before: {text[:60]!r}")
