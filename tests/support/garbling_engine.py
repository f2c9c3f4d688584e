"""The fake engine with one broken frame: GARBLE says how, GARBLE_ONCE is a file that marks it as done."""

import os
import struct
import sys
from pathlib import Path

from llmbox.engine.ipc import channel
from llmbox.engine.ipc.channel import encode
from llmbox.engine.ipc.messages import StepOutputs, ToDaemon
from llmbox.engine.process.engine_main import main

sys.path.insert(0, str(Path(__file__).parent.parent))
from support.fake_engine import load_fake

_seen = 0


def _garbling(message: ToDaemon) -> bytes:
    global _seen  # noqa: PLW0603
    frame = encode(message)
    once = Path(os.environ["GARBLE_ONCE"])
    if not isinstance(message, StepOutputs) or once.exists():
        return frame
    _seen += 1
    if _seen < 5:
        return frame
    once.touch()
    return _garbled(frame, os.environ["GARBLE"])


def _garbled(frame: bytes, how: str) -> bytes:
    match how:
        case "cut":
            return frame[: len(frame) // 2]
        case "oversized":
            return struct.pack("<I", 1 << 31) + frame[4:]
        case "flipped":
            return frame[:-1] + bytes([frame[-1] ^ 1])
        case _:
            raise ValueError(how)


if __name__ == "__main__":
    channel.encode = _garbling
    sys.exit(main(load=load_fake))
