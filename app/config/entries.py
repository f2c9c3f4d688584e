"""Declaration of settings. Entries of those that are lists: how they are checked, and what those of the form
`MODEL=A/B` say.

`MODEL` may be a glob such as `qwen*`; the first entry that matches a model's name counts.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from ipaddress import ip_network
from typing import Any
from urllib.parse import urlsplit

_NUMBER = r"\d{1,9}(?:\.\d{1,6})?"
_ENTRY = re.compile(rf"(?P<model>[^=\s,]{{1,200}})=(?P<first>{_NUMBER})/(?P<second>{_NUMBER})")
is_entry = _ENTRY.fullmatch
EntryCheck = tuple[Callable[[str], object], str]
"""Check of a list entry, and the description of valid entries for error messages."""


def is_network(text: str) -> bool:
    """Return whether `text` is an IP address or network."""
    try:
        ip_network(text, strict=False)
    except ValueError:
        return False
    return True


def is_collector(text: str) -> bool:
    """Return whether `text` is empty or the URL of a collector: http or https, a host, no user, no query."""
    if not text:
        return True
    try:
        parts = urlsplit(text)
        is_whole = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        return False
    is_plain = re.fullmatch(r"[\x21-\x7e]+", text) is not None and not {"?", "#", "@"} & set(text)
    return is_whole and is_plain and parts.scheme in {"http", "https"}


COLLECTOR: EntryCheck = (
    is_collector,
    "the URL of a collector such as http://127.0.0.1:4318, without user, query and fragment",
)
ORIGIN: EntryCheck = (
    re.compile(r"https?://(?:[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)*|\[[0-9A-Fa-f:.]+\])(?::\d{1,5})?").fullmatch,
    "origins such as https://chat.example or http://localhost:3000; '*' is not one: name each",
)
PRICE: EntryCheck = (
    is_entry,
    "prices such as qwen*=0.10/0.40: a model, a million tokens of input, a million of output",
)
TARGET: EntryCheck = (is_entry, "targets such as qwen*=800/50: a model, milliseconds to a token, per token")
NETWORK: EntryCheck = (is_network, "IP addresses or networks such as 127.0.0.1, 10.0.0.0/8 or fd00::/8")


Scalar = bool | int | float | str | tuple[str, ...] | None


def key(
    default: Scalar,
    doc: str,
    *,
    low: float | None = None,
    high: float | None = None,
    each: EntryCheck | None = None,
    live: bool = False,
) -> Any:
    """Declare a setting. `live` keys take effect on reload (SIGHUP); others at the next start.

    `each`: check for the entries of a list.
    """
    return field(default=default, metadata={"doc": doc, "low": low, "high": high, "each": each, "live": live})


live_key = partial(key, live=True)
"""Declare a setting that takes effect on reload."""


@dataclass(frozen=True, slots=True)
class TokenPrice:
    """Price of a million tokens, in the currency of `usage.currency`."""

    input: float
    output: float

    def cost(self, tokens_in: int, tokens_out: int) -> float:
        return (tokens_in * self.input + tokens_out * self.output) / 1e6


@dataclass(frozen=True, slots=True)
class LatencyTarget:
    """Longest time to first token and time per output token of a good answer, in seconds."""

    ttft: float
    tpot: float


def find_price(entries: Sequence[str], model: str) -> TokenPrice | None:
    """Find the price of a model's tokens in `usage.prices`."""
    found = _find(entries, model)
    return None if found is None else TokenPrice(*found)


def find_target(entries: Sequence[str], model: str) -> LatencyTarget | None:
    """Find the latency target of a model in `usage.targets`, which is in milliseconds."""
    found = _find(entries, model)
    return None if found is None else LatencyTarget(found[0] / 1000, found[1] / 1000)


def _find(entries: Sequence[str], model: str) -> tuple[float, float] | None:
    for entry in entries:
        parts = is_entry(entry)
        if parts is not None and fnmatchcase(model, parts["model"]):
            return float(parts["first"]), float(parts["second"])
    return None
