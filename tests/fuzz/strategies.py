"""Inputs that more than one parser gets."""

from hypothesis import strategies as st

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def pieces(*words: str, most: int = 12) -> st.SearchStrategy[str]:
    """Texts made of what the parser knows, with anything between."""
    return st.lists(st.sampled_from(words) | st.text(max_size=4), max_size=most).map("".join)
