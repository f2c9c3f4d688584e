"""Ticks and live requests made up for tests: no machine is looked at, no clock is read."""

from typing import Any

from llmbox.app.gateway.live_request import LiveRequest


def live_request(number: int, **changes: Any) -> LiveRequest:
    values: dict[str, Any] = {
        "id": f"req-{number}", "model": "qwen3-8b", "endpoint": "chat", "key": "", "client": "127.0.0.1",
        "state": "decode", "age": 3.5 + number, "stream": True, "n": 1, "prompt_tokens": 100 + number,
        "cached_tokens": 64, "output_tokens": 40 + number, "ttft": 0.21, "tokens_per_second": 48.2,
        "resumes": 0,
    }  # fmt: skip
    return LiveRequest(**values | changes)
