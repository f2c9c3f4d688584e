"""What loading takes is what was estimated: over many shapes, counted tensor by tensor."""

from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from llmbox.engine.config import EngineConfig
from llmbox.engine.errors import DeviceError
from llmbox.engine.executor import rank_engine
from llmbox.engine.executor.build import load_engine
from llmbox.engine.executor.load_model import delta_or_none, memory_in_use
from llmbox.kernels.cpu.build import NativeUnavailable
from support.real_engines import ask, load, tokens
from support.tiny_models import make_tiny_model

SHAPES: list[dict[str, Any]] = [
    {"arch": arch, "tie_word_embeddings": tied, "num_hidden_layers": layers, "num_key_value_heads": kv}
    for arch, layers, kv in (("llama", 1, 4), ("mistral", 2, 2), ("qwen2", 3, 1), ("qwen3", 2, 2))
    for tied in (False, True)
] + [
    {"arch": "llama", "hidden_size": 128, "intermediate_size": 256},
    {"arch": "qwen3", "vocab_size": 3000},
    {"arch": "qwen2", "intermediate_size": 512},
    {"arch": "llama", "attention_bias": True, "mlp_bias": True},
    {"arch": "qwen3_moe", "num_hidden_layers": 3, "mlp_only_layers": [1]},
    {"arch": "mixtral"},
    {"arch": "gemma2"},
    {"arch": "gemma3_text"},
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_weights_and_pool_are_as_planned(tmp_path: Path, shape: dict[str, Any], monkeypatch):
    monkeypatch.setenv("LLMBOX_KERNELS", "reference")
    torch.set_num_threads(1)
    place = make_tiny_model(tmp_path / "m", tokenizer=False, **shape)
    config = EngineConfig(model_path=str(place), name="m", device="cpu", kv_tokens=512, threads=1)
    engine = load_engine(config, lambda _: None)
    info = engine.info
    held = sum(tensor.untyped_storage().nbytes() for tensor in tensors(engine).values())
    assert held == pytest.approx(info.weights_bytes + info.kv_bytes, rel=0.01)
    assert info.measured_weights_bytes is not None


def test_kv_memory_is_touched_after_the_end_of_the_engines_that_leave(tmp_path: Path, monkeypatch):
    """The weights are there by then: they wait for nobody."""
    monkeypatch.setenv("LLMBOX_KERNELS", "reference")
    order: list[str] = []

    def noting(name: str, does: Any) -> Any:
        return lambda *args, **options: (order.append(name), does(*args, **options))[1]

    for name in ("load_weights", "_make_cpu_runner"):
        monkeypatch.setattr(rank_engine, name, noting(name, getattr(rank_engine, name)))
    monkeypatch.setattr(rank_engine, "await_exits", lambda pids, _: order.append(f"ends of {pids}"))
    place = make_tiny_model(tmp_path / "m", tokenizer=False)
    options = {"device": "cpu", "kv_tokens": 512, "threads": 1, "memory_after": (1234567,)}
    load_engine(EngineConfig(model_path=str(place), name="m", **options), lambda _: None)
    assert order == ["load_weights", "ends of (1234567,)", "_make_cpu_runner"]


def tensors(root: Any) -> dict[int, torch.Tensor]:
    """All that can be reached from here, each storage once."""
    found: dict[int, torch.Tensor] = {}
    seen: set[int] = set()
    todo = [root]
    while todo:
        each = todo.pop()
        if id(each) in seen or each is None or isinstance(each, type | str | bytes | int | float):
            continue
        seen.add(id(each))
        if isinstance(each, torch.Tensor):
            found[each.untyped_storage().data_ptr()] = each
        elif isinstance(each, dict):
            todo += each.values()
        elif isinstance(each, list | tuple | set):
            todo += each
        elif is_dataclass(each):
            todo += [getattr(each, item.name) for item in fields(each)]
        elif type(each).__module__.startswith("llmbox"):
            todo += vars(each).values() if hasattr(each, "__dict__") else []
    return found


def test_memory_in_use_sees_a_tensor():
    device = torch.device("cpu")
    before = memory_in_use(device)
    block = torch.ones(8 << 20)
    after = memory_in_use(device)
    assert before is not None
    assert (delta_or_none(before, after) or 0) == pytest.approx(block.nbytes, rel=0.1)
    assert delta_or_none(None, after) is None


def test_torch_kernels_do_not_promise_it(tmp_path, monkeypatch):
    monkeypatch.setenv("LLMBOX_KERNELS", "reference")
    with pytest.raises(DeviceError, match="deterministic was requested"):
        load(make_tiny_model(tmp_path), deterministic=True)


def test_our_kernels_do(tmp_path, monkeypatch):
    monkeypatch.delenv("LLMBOX_KERNELS", raising=False)
    engine = load(make_tiny_model(tmp_path), deterministic=True)
    assert engine.info.backend.startswith("cpu")
    assert len(tokens(engine, [ask("a", [5, 6, 7], 4)])["a"]) == 4


def test_slower_kernels_are_told_with_their_reason(tmp_path, monkeypatch):
    def refuse(_name):
        raise NativeUnavailable("no room")

    monkeypatch.delenv("LLMBOX_KERNELS", raising=False)
    monkeypatch.setattr("llmbox.kernels.dispatch.load_backend", refuse)
    info = load(make_tiny_model(tmp_path)).info
    assert info.kernels_problem == "no room"
    assert info.notes[-1] == "slower kernels run: no room"
