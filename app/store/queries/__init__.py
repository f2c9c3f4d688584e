"""SQL of the request log. Its modules import SQLAlchemy, so each is imported at its first use: in the store's
threads.
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import batches, conversations, requests, stored_answers

__all__ = ["batches", "conversations", "requests", "stored_answers"]


def __getattr__(name: str) -> ModuleType:
    if name not in __all__:
        raise AttributeError(name)
    return importlib.import_module(f"{__name__}.{name}")
