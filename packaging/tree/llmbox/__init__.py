"""llmbox: serve language models on one box, on an inference engine of its own."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .app.offline import LLM as LLM

__version__ = "0.1.0"
__all__ = ["LLM", "__version__"]


def __getattr__(name: str) -> Any:
    """Import `LLM` when it is asked for: other programs of this package do without what it needs."""
    if name == "LLM":
        from .app.offline import LLM  # noqa: PLC0415

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
