"""Modules that few tests need: importing a client library takes longer than collecting a folder of tests."""

from importlib import import_module
from typing import Any


class DeferredModule:
    """Module that is imported when one of its public names is first used, so that collection does without it.

    pytest and its plugins ask every object of a test module for private names (`__test__`, `_is_coroutine`):
    these import nothing.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(import_module(self._name), name)
