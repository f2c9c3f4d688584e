"""The nearest of the names that there are, for a word that is none of them."""

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(word: str, names: Iterable[str]) -> str | None:
    """None where nothing is like it. Case does not count."""
    by_lower = {name.lower(): name for name in names}
    found = get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[found[0]] if found else None


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """`did you mean NAME? `, or nothing."""
    found = nearest(word, names)
    return f"did you mean {found}? " if found else ""
