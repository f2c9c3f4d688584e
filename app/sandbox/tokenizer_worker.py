"""Tokenizer worker in a separate process: `python -P -m llmbox.app.sandbox.tokenizer_worker FILE SECONDS
MEMORY`.

The steps of a tokenizer.json may double a text again and again or never end, so the process lives under
limits and the daemon may kill it at any moment (`worker.py`). Loading the file is bounded in the same way.

job:    {"text": str} and one of {"special": bool}, {"markers": [start, end, tail]}, {"pair": str}
answer: {"ids": [...]} or {"error": str}; of a pair the first number is the start of its second type, or 0
"""

import signal
import sys
from pathlib import Path
from typing import Any

from llmbox.engine.checkpoint.files import MAX_BYTES, read_regular

from ..text.tokenizer.text_encoder import (
    MOST_TOKENS,
    SpecialTokenMarkers,
    TextEncoder,
    TokenizeError,
    load_tokenizer,
)
from .worker import Answer, run_worker

TOKENS_BESIDE = 65_536
"""Most tokens of a text above four for each character, which is one for each byte of UTF-8."""


def make_answer(path: Path, load_seconds: float) -> Answer:
    """Load the tokenizer, before the first job, and return the function that answers jobs."""
    signal.setitimer(signal.ITIMER_PROF, load_seconds)
    try:
        encoder, problem = TextEncoder(load_tokenizer(read_regular(path, MAX_BYTES)), MOST_TOKENS), ""
    except (OSError, ValueError, TokenizeError, MemoryError) as error:
        encoder, problem = None, f"{error}" or type(error).__name__
    signal.setitimer(signal.ITIMER_PROF, 0)

    def answer(message: dict[str, Any]) -> dict[str, Any]:
        if encoder is None:
            return {"error": problem}
        try:
            if "markers" in message:
                markers = SpecialTokenMarkers(*message["markers"])
                ids = encoder.encode_marked(message["text"], markers)
            elif "pair" in message:
                ids, start = encoder.encode_pair(message["text"], message["pair"])
                ids = [start or 0, *ids]
            else:
                ids = encoder.encode(message["text"], special=message["special"])
            most = 4 * len(message["text"] + message.get("pair", "")) + TOKENS_BESIDE
            return {"ids": ids} if len(ids) <= most else {"error": f"it makes more than {most} tokens"}
        except MemoryError:
            return {"error": "it takes too much memory"}
        except Exception as error:  # noqa: BLE001 - whatever a tokenizer does wrong is an answer, not a crash
            return {"error": (str(error) or type(error).__name__)[:300]}

    return answer


if __name__ == "__main__":
    file, seconds, memory = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    run_worker("tokenizer worker", lambda: make_answer(file, seconds), memory, cpu_seconds=seconds)
