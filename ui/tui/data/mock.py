"""Made-up admin API behind `llmbox top --mock`: a demonstration without a daemon. Nothing can be changed."""

import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import msgspec

from llmbox.app.admin_client import AnswerPiece
from llmbox.app.errors import CliError, Exit
from llmbox.app.telemetry.history import series_of
from llmbox.app.telemetry.snapshot import EngineSnapshot, Tick

from .api import Item
from .mock_box import GB, MODELS, MockBox

PAST_S = 600
ANSWER = (
    "A **KV cache** keeps the keys and values of all earlier tokens, so that each new token costs one row of "
    "attention instead of the whole prompt.\n\n"
    "- *Prefill* fills it: the prompt in one go. Its time is most of the **TTFT**.\n"
    "- *Decode* reads it: one token at a time. Its time is the **TPOT**.\n\n"
    "```python\nkv_bytes = 2 * layers * kv_heads * head_dim * bytes * tokens\n```\n"
)
THOUGHT = "The user wants a short explanation. Name prefill and decode, and give the size."


class MockApi:
    """Implements `Api`. `live` ticks each second; otherwise there is one tick of a fixed moment."""

    def __init__(self, seed: int = 7, *, start: float | None = None, live: bool = True) -> None:
        begin = time.time() if start is None else start
        self._box = MockBox(seed, begin - PAST_S)
        self._live = live
        self._ended, self._stopped = threading.Event(), threading.Event()
        self._past: deque[tuple[int, dict[str, float]]] = deque(maxlen=PAST_S)
        self._lock = threading.Lock()
        self._begin = begin
        for _ in range(PAST_S):
            self._step()

    def _step(self) -> Tick:
        with self._lock:
            tick = self._box.advance()
            self._past.append((int(tick.time), series_of(tick)))
            return tick

    # ------------------------------------------------------------------ Api

    def events(self) -> Iterator[Item]:
        yield "tick", msgspec.to_builtins(self._box.tick())
        while not self._ended.wait(1.0):
            if not self._live:
                continue
            tick = self._step()
            for row in self._box.ended:
                yield "request.finished", row
            yield "tick", msgspec.to_builtins(tick)

    def close(self) -> None:
        self._ended.set()
        self._stopped.set()

    def stop(self) -> None:
        self._stopped.set()

    def post(self, path: str, body: object) -> dict[str, Any]:  # noqa: ARG002 - as the protocol has it
        raise CliError("this is a demonstration: there is no daemon to change", path)

    def ask(self, body: dict[str, Any]) -> Iterator[AnswerPiece]:  # noqa: ARG002 - as above
        self._stopped.clear()
        for is_thought, text in ((True, THOUGHT), (False, ANSWER)):
            for word in text.split(" "):
                if self._live and self._stopped.wait(0.03):
                    return
                yield AnswerPiece(is_thought, f"{word} ")

    def get(self, path: str) -> dict[str, Any]:
        url = urlsplit(path)
        name, _, rest = url.path.partition("/")
        read = getattr(self, f"_get_{name}", None)
        if read is None:
            raise CliError(f"the demonstration has no {path}", exit=Exit.NOT_FOUND)
        with self._lock:
            answer: dict[str, Any] = read(unquote(rest), parse_qs(url.query))
        return answer

    # ------------------------------------------------------------------ answers

    def _get_tick(self, *_: Any) -> dict[str, Any]:
        answer: dict[str, Any] = msgspec.to_builtins(self._box.tick())
        return answer

    def _get_status(self, *_: Any) -> dict[str, Any]:
        return {"url": "http://127.0.0.1:7411"}

    def _get_requests(self, request_id: str, query: dict[str, list[str]]) -> dict[str, Any]:
        live = self._box.tick().requests
        if not request_id:
            limit = int(query.get("limit", ["50"])[0])
            rows = list(self._box.records)[:limit]
            return {"in_flight": msgspec.to_builtins(live), "requests": rows, "dropped": 0, "problem": ""}
        for request in live:
            if request.id == request_id:
                return {"in_flight": msgspec.to_builtins(request), "request": None}
        for row in self._box.records:
            if row["id"] == request_id:
                note = "Prompts and answers are not kept in the demonstration."
                curl = "curl http://127.0.0.1:7411/v1/chat/completions"
                return {"in_flight": None, "request": row, "prefix_note": "", "content": None,
                        "content_note": note, "curl": curl}  # fmt: skip
        raise CliError(f"No request {request_id!r} is known.", exit=Exit.NOT_FOUND)

    def _get_telemetry(self, _: str, query: dict[str, list[str]]) -> dict[str, Any]:
        names = query["series"][0].split(",")
        series = {name: [values.get(name) for _, values in self._past] for name in names}
        return {"step": 1, "times": [at for at, _ in self._past], "series": series}

    def _get_models(self, *_: Any) -> dict[str, Any]:
        loaded = [_describe(engine) for engine in self._box.tick().engines]
        return {"models": loaded, "evicted": {}}

    def _get_disk(self, *_: Any) -> dict[str, Any]:
        rows = [{"name": m.name, "size": m.weights, "servable": True, "ref": m.name} for m in MODELS]
        others = {"Qwen/Qwen3-0.6B": 1.5, "mistralai/Mistral-Small-3.2-24B-Instruct-2506": 48.0}
        rows += [{"name": n, "size": int(s * GB), "servable": True, "ref": n} for n, s in others.items()]
        return {"models": rows}

    def _get_downloads(self, *_: Any) -> dict[str, Any]:
        total = 19 * GB
        done = 9 * GB + int(self._box.now - self._begin) * 90_000_000
        error = {
            "what": "it is gated: accept its license on the hub",
            "why": "",
            "fix": "export HF_TOKEN=..., then llmbox pull google/gemma-3-27b-it",
        }
        return {"downloads": [
            {"model": "Qwen/Qwen3-32B-AWQ", "state": "downloading", "done": min(done, total), "total": total},
            {"model": "google/gemma-3-27b-it", "state": "failed", "done": 0, "total": 0, "error": error},
        ]}  # fmt: skip

    def _get_logs(self, *_: Any) -> dict[str, Any]:
        name = MODELS[0].name
        rows = [
            (590, "info", "daemon", "llmbox listens on http://127.0.0.1:7411"),
            (588, "info", "daemon", f"{name} gets 118.0 GB of the 126.9 GB for models on cuda:0"),
            (570, "info", "engines", f"{name} | Triton kernels: 41 compiled, 41 from the cache"),
            (561, "info", "engines", f"{name} | ready after 9.4 s"),
            (240, "info", "security", "key nightly-batch (infer) is made"),
            (96, "warning", "engines", f"{name} | 12 requests preempted in 10 s: the KV cache is full"),
            (41, "error", "engines", f"{name} | NaN or infinite logits in 1 request; it ended with an error"),
        ]
        return {"lines": [
            {"time": self._begin - ago, "level": level, "component": part, "message": text}
            for ago, level, part, text in rows
        ]}  # fmt: skip

    def _get_marks(self, *_: Any) -> dict[str, Any]:
        rows = [
            (96, "refusal", MODELS[0].name, "14 requests refused: queue_full"),
            (561, "load", MODELS[0].name, "ready"),
            (1210, "load", MODELS[1].name, "ready"),
            (1320, "eviction", "Qwen/Qwen3-0.6B", f"to make room for {MODELS[1].name}"),
        ]
        return {
            "marks": [{"time": self._begin - ago, "kind": k, "model": m, "text": t} for ago, k, m, t in rows]
        }

    def _get_blocks(self, *_: Any) -> dict[str, Any]:
        return {"models": [_blocks(engine) for engine in self._box.tick().engines]}

    def _get_bench(self, *_: Any) -> dict[str, Any]:
        def run(ago: float, factor: float) -> dict[str, Any]:
            levels = [
                {"concurrency": n, "output_tokens_per_s": 96.0 * n**0.8 * factor,
                 "ttft_p50": 0.09 * n**0.3 / factor,
                 "ttft_p95": 0.16 * n**0.4 / factor, "tpot_p50": 0.0104 * n**0.2 / factor}
                for n in (1, 8, 32)
            ]  # fmt: skip
            return {
                "time": self._begin - ago,
                "model": MODELS[0].name,
                "url": "http://127.0.0.1:7411",
                "levels": levels,
            }

        return {"runs": [run(7200, 1.0), run(93_600, 0.86)]}

    def _get_doctor(self, *_: Any) -> dict[str, Any]:
        rows = [
            ("python", "ok", "3.12.4", ""),
            ("gpu", "ok", "H200, 27.4 GB of 141.0 GB free", ""),
            ("disk (state)", "ok", "1.21 TB free", ""),
            ("service", "note", "llmbox does not start with the machine", "llmbox service install"),
        ]
        return {
            "ok": True,
            "findings": [{"name": n, "status": s, "message": m, "fix": f} for n, s, m, f in rows],
        }

    def _get_fit(self, _: str, query: dict[str, list[str]]) -> dict[str, Any]:
        model = query["model"][0]
        words = {"verdict": f"{model} fits on cuda:0.", "budget": "126.9 GB (27.4 GB free now)"}
        return {"fits": True, "words": words, "remedies": [], "notes": ["Figures of a demonstration."]}


def _describe(engine: EngineSnapshot) -> dict[str, Any]:
    info = {"device": engine.device, "weights_bytes": engine.weights_bytes, "kv_bytes": engine.kv_bytes,
            "context_window": engine.context_window, "generates": "bge" not in engine.model}  # fmt: skip
    return {"name": engine.model, "state": engine.state, "cause": "", "ref": engine.model, "info": info,
            "chat": "bge" not in engine.model, "progress": None,
            "open_requests": engine.running + engine.waiting, "pinned": engine.model == MODELS[0].name,
            "expires_s": None, "aliases": []}  # fmt: skip


def _blocks(engine: EngineSnapshot) -> dict[str, Any]:
    """Describe the KV blocks as 64 cells a kind: live, cached and free ones in turn."""
    each = engine.blocks_total // 512
    live, cached = engine.blocks_live // each, engine.blocks_cached // each
    runs = []
    for start in range(8):
        part_live, part_cached = (n // 8 + (start < n % 8) for n in (live, cached))
        runs += [[part_live, each, 0, 0, 1], [part_cached, 0, each, 1, 0]]
        runs += [[max(0, 64 - part_live - part_cached), 0, 0, -1, 0]]
    return {
        "model": engine.model, "block_size": engine.block_size, "num_blocks": engine.blocks_total,
        "cells": runs, "evictions": 1234, "holders": [{}] * engine.running,
        "prefixes": [{"prefix": "8b1ee740f8b1", "tokens": 2048, "blocks": 128, "hits": 31,
                      "last_request": "chatcmpl-5f2c"}],
    }  # fmt: skip
