"""Spelling suggestions: the nearest valid name for an unknown word."""

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(word: str, names: Iterable[str]) -> str | None:
    """Nearest name, ignoring case; None if nothing is similar."""
    by_lower = {name.lower(): name for name in names}
    found = get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[found[0]] if found else None


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """Return `did you mean NAME? `, or an empty string."""
    found = nearest(word, names)
    return f"did you mean {found}? " if found else ""
