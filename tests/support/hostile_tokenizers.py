"""Tokenizer files as nobody wants them: steps that double a text, that backtrack, that break the library."""

import json
from typing import Any

from .tokenizers_zoo import byte_level


def with_steps(**steps: Any) -> bytes:
    """The byte-level tokenizer with other `normalizer`, `pre_tokenizer`, `decoder` and so on."""
    return json.dumps({**json.loads(byte_level().to_str()), **steps}).encode()


def replace(pattern: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


def doubling(times: int) -> bytes:
    """Each `Z` of a text becomes 2**times of them."""
    return with_steps(
        normalizer={"type": "Sequence", "normalizers": [replace("Z", "ZZ") for _ in range(times)]}
    )


def splitting(regex: str, *, words: bool = False) -> bytes:
    """`words`: split into GPT-2's words afterwards."""
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    byte = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": words}
    return with_steps(pre_tokenizer={"type": "Sequence", "pretokenizers": [split, byte]})


HARMLESS = splitting("zzzz|qqqq", words=True)
"""A regex that nobody knows, though it does nothing."""
BACKTRACKING = splitting("(a+)+c")
"""Takes seconds for some hundred `a`."""
PANICKING = splitting("(a+)+$")
"""The library gives up on a run of `a` before a `b`: a panic."""
