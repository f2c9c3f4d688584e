"""`deterministic` is a promise of the kernels: loading fails where they cannot keep it."""

import pytest

from llmbox.engine.errors import DeviceError
from support.real_engines import ask, load, tokens
from support.tiny_models import make_tiny_model


def test_torch_kernels_do_not_promise_it(tmp_path, monkeypatch):
    monkeypatch.setenv("LLMBOX_KERNELS", "reference")
    with pytest.raises(DeviceError, match="deterministic was asked for"):
        load(make_tiny_model(tmp_path), deterministic=True)


def test_our_kernels_do(tmp_path, monkeypatch):
    monkeypatch.delenv("LLMBOX_KERNELS", raising=False)
    engine = load(make_tiny_model(tmp_path), deterministic=True)
    assert engine.info.backend.startswith("cpu")
    assert len(tokens(engine, [ask("a", [5, 6, 7], 4)])["a"]) == 4
