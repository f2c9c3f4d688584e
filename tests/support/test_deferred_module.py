"""Modules that are imported late: pytest's questions import nothing."""

import pytest

from support.deferred_module import DeferredModule


def test_what_pytest_asks_for_imports_nothing():
    missing = DeferredModule("a_module_that_is_not_there")
    assert not hasattr(missing, "__test__")
    with pytest.raises(ModuleNotFoundError):
        missing.Client()
    assert DeferredModule("json").dumps([1]) == "[1]"
