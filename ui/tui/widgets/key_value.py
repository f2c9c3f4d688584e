"""Details in two columns, one request in full, and the result of a fit."""

import time
from collections.abc import Mapping
from typing import Any

from ..rendering import Glyphs, Line, clean, heading, seconds, size, wrap
from .request_rows import time_bar

_MOST_SHOWN = 4000
"""Most characters shown of a prompt and of an answer."""
_WORDS = {
    "id": "request", "n": "choices", "stream": "streamed", "prompt_tokens": "prompt tokens",
    "cached_tokens": "cached prompt tokens", "output_tokens": "output tokens", "ttft": "TTFT",
    "ttft_s": "TTFT", "tpot_s": "TPOT", "e2e_s": "end-to-end latency", "queue_s": "time in queue",
    "tokens_per_second": "tokens/s", "http_status": "HTTP status", "finish_reasons": "finish reason",
    "error_code": "error", "tier": "priority class", "params": "parameters", "resumes": "resumed",
}  # fmt: skip
"""Labels of a request's fields."""
_IN_WORDS = {"seq", "prefix_end", "looked_up_tokens", "output_hash", "fingerprint", "content"}


def fact_lines(
    facts: Mapping[str, Any], prefix: str = "", names: Mapping[str, str] | None = None
) -> list[Line]:
    """Format facts as lines of name and value.

    Nested facts are prefixed with their name. `names` maps keys to labels. Empty values are left out.
    """
    lines: list[Line] = []
    for key, value in facts.items():
        name = f"{prefix}{(names or {}).get(key, key)}"
        if isinstance(value, Mapping):
            lines += fact_lines(value, f"{name}.")
        elif value not in (None, "", [], False):
            lines.append(((f"{clean(name):<24}", "muted"), (clean(_format_value(key, value)), "")))
    return lines


def request_lines(answer: Mapping[str, Any], width: int, glyphs: Glyphs) -> list[Line]:
    """Format the admin API's response for a request; missing parts are left out."""
    detail = answer.get("request") or answer["in_flight"]
    facts = {key: value for key, value in detail.items() if key not in _IN_WORDS and value != "{}"}
    parts = [
        time_bar(detail, width, glyphs),
        wrap(answer.get("prefix_note", ""), width),
        fact_lines(facts, names=_WORDS),
        *_texts(answer, width, glyphs),
        wrap(answer.get("content_note", ""), width),
    ]
    lines: list[Line] = []
    for part in filter(None, parts):
        lines += [(), *part] if lines else part
    return lines


def fit_lines(answer: Mapping[str, Any], width: int) -> list[Line]:
    """Format the admin API's response for a fit."""
    words = dict(answer["words"])
    lines: list[Line] = [*wrap(words.pop("verdict"), width), ()]
    rows = [
        *words.items(),
        *(("would fit", remedy) for remedy in answer["remedies"]),
        *(("note", note) for note in answer["notes"]),
    ]
    for name, text in rows:
        for number, line in enumerate(wrap(text, width - 12)):
            lines.append(((f"{'' if number else clean(name):<12}", "muted"), *line))
    return lines


def _texts(answer: Mapping[str, Any], width: int, glyphs: Glyphs) -> list[list[Line]]:
    content = answer.get("content")
    if content is None:
        return []
    blocks = []
    for title, texts in (("Prompt", content["prompts"]), ("Answer", content["outputs"])):
        for text in texts:
            shown = text if len(text) <= _MOST_SHOWN else text[:_MOST_SHOWN] + glyphs.more
            paragraphs = [line for each in shown.split("\n") for line in wrap(each, width) or [()]]
            blocks.append([heading(title, width, glyphs), *paragraphs])
    return blocks


def _format_value(key: str, value: object) -> str:
    if value is True:
        return "yes"
    if isinstance(value, float) and (key.endswith("_s") or key in {"age", "ttft"}):
        return seconds(value)
    if isinstance(value, float) and key in {"created", "time", "loaded_at", "last_used", "modified"}:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value))
    if isinstance(value, int) and key.endswith("_bytes"):
        return size(value)
    if isinstance(value, float):
        return f"{value:.4g}"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
