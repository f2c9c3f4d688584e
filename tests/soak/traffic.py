"""Clients of the soak: each knows what its answer must be, and says when it is not that."""

import http.client
import json
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

PROMPTS = [
    "llmbox is",
    "How do I load a model?",
    "What does llmbox down do?",
    "The key-value cache: " + " ".join(map(str, range(60))),
    "Which port is used?",
    "A request that is cancelled",
    "An engine that dies: " + " ".join(map(str, range(90))),
    "Tokens are",
]
"""Some have several blocks, which the KV cache on disk keeps."""
MODELS = ("builtin", "tiny", "builtin", "pirate", "eye", "builtin", "poet", "tiny")
"""Models of the requests, by turns."""
BASES = {"pirate": "tiny", "poet": "tiny"}
"""Models of the adapters."""
PATIENCE = 300.0
"""Seconds that one answer may take on a busy machine, a restart of the engine included."""
_FAIR = 6
"""Requests of each client that may overtake one of another: an answer is at most 80 tokens long, and 48 at
least, and one whose engine died is computed again."""


@dataclass(frozen=True, slots=True)
class SoakRequest:
    """One request of the soak, which is asked again and again."""

    number: int
    model: str
    picture: str = ""
    """`data:` URL of a picture that it shows; it is a chat then."""

    def body(self, *, stream: bool) -> dict[str, Any]:
        """Build the body: greedy and drawn by turns, long enough to be caught in the middle."""
        number = self.number
        return {
            "model": self.model,
            **self._said(PROMPTS[number % len(PROMPTS)]),
            "max_tokens": 48 + 16 * (number % 3),
            "temperature": 0.9 * (number // len(MODELS) % 2),
            "seed": 7 + number,
            "ignore_eos": True,
            "stream": stream,
        }

    def _said(self, text: str) -> dict[str, Any]:
        if not self.picture:
            return {"prompt": text}
        shown = {"type": "image_url", "image_url": {"url": self.picture}}
        return {"messages": [{"role": "user", "content": [shown, {"type": "text", "text": text}]}]}

    @property
    def route(self) -> str:
        return "/v1/chat/completions" if self.picture else "/v1/completions"

    def text_of(self, choice: dict[str, Any]) -> str:
        """Return the text of a choice, or of a part of one."""
        if not self.picture:
            return str(choice["text"])
        said = choice["delta"] if "delta" in choice else choice["message"]
        return str(said.get("content") or "")


def make_requests(count: int, picture: str) -> list[SoakRequest]:
    return [make_request(number, MODELS[number % len(MODELS)], picture) for number in range(count)]


def make_request(number: int, model: str, picture: str) -> SoakRequest:
    return SoakRequest(number, model, picture if model == "eye" else "")


class CutError(Exception):
    """An answer that ended without an end, or an error that the soak did not expect."""


def ask(url: str, request: SoakRequest, *, stream: bool, leave_after: int | None = None) -> str | None:
    """The text of an answer; None where the server refused (429, 503) or the caller left on purpose."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=PATIENCE)
    try:
        sent = json.dumps(request.body(stream=stream))
        connection.request("POST", request.route, sent, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status in (429, 503):
            return None
        if answer.status != 200:
            raise CutError(f"status {answer.status}: {answer.read(300)!r}")
        if stream:
            return _read_events(answer, request, leave_after)
        return request.text_of(json.load(answer)["choices"][0])
    except (OSError, http.client.HTTPException) as error:
        raise CutError(f"{type(error).__name__}: {error}") from error
    finally:
        connection.close()


def _read_events(
    answer: http.client.HTTPResponse, request: SoakRequest, leave_after: int | None
) -> str | None:
    text, events = "", 0
    for line in answer:
        if not line.startswith(b"data: "):
            continue
        if line.strip() == b"data: [DONE]":
            return text
        event = json.loads(line[6:])
        if "error" in event:
            raise CutError(f"error in the stream: {event['error'].get('message')}")
        text += request.text_of(event["choices"][0]) if event["choices"] else ""
        events += 1
        if events == leave_after:
            return None
    raise CutError("the stream ended without [DONE]")


class Overtaken:
    """Count of later requests of the same model that are answered before an earlier one: it tells how fair a
    model is to its callers, whatever the machine's speed.
    """

    def __init__(self) -> None:
        self.most = 0
        self._lock = threading.Lock()
        self._open: dict[int, tuple[str, int]] = {}
        """Base model and count of each open request, in the order of their beginning."""
        self._next = 0

    def begin(self, model: str) -> int:
        with self._lock:
            self._next += 1
            self._open[self._next] = BASES.get(model, model), 0
            return self._next

    def end(self, begun: int, *, answered: bool) -> None:
        with self._lock:
            model, _ = self._open.pop(begun)
            for other, (its_model, count) in self._open.items():
                if answered and other < begun and its_model == model:
                    self._open[other] = its_model, count + 1
                    self.most = max(self.most, count + 1)


class Traffic:
    """Clients that ask until told to rest. `told` counts answers; `wrong` is what broke the pass rule."""

    def __init__(
        self, url: str, requests: list[SoakRequest], expected: list[str], clients: int, seed: int
    ) -> None:
        self.url = url
        self.told: Counter[str] = Counter()
        self.of_model: Counter[str] = Counter()
        """Answers of each model or adapter."""
        self.wrong: list[str] = []
        self.overtaken = Overtaken()
        self.fair = _FAIR * clients
        """Most requests that may overtake one."""
        self.excused = False
        """The daemon itself is being killed: answers that are cut off now are no fault."""
        self._requests, self._expected = requests, expected
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
        request = self._requests[number]
        stream = chance.random() < 0.7
        leave = chance.randrange(1, 20) if stream and chance.random() < 0.3 else None
        begun, text = self.overtaken.begin(request.model), None
        try:
            text = ask(self.url, request, stream=stream, leave_after=leave)
        except CutError as cut:
            if self.excused:
                self.told["cut off or not connected while the daemon was down"] += 1
            else:
                self.wrong.append(f"request {number} of {request.model}: {cut}")
            return
        finally:
            self.overtaken.end(begun, answered=text is not None)
        if text is None:
            self.told["left or refused"] += 1
        elif text == self._expected[number]:
            self.told["same tokens"] += 1
            self.of_model[request.model] += 1
        else:
            self.wrong.append(f"request {number} of {request.model}: other text than before: {text[:60]!r}")
