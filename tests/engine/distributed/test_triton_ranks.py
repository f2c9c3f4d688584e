"""Ranks over the Triton kernels in their interpreter, launched ahead, with and without `--deterministic`: the
tokens that one rank draws with the same kernels.

Not all combinations: each choice is there with several of the others.
"""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from support.device_ranks import device_ranks
from support.late_device import device_engine
from support.real_engines import ask, tokens
from support.tiny_models import make_tiny_model
from support.triton_interpreter import turn_on

turn_on()
from triton.runtime import interpreter

from llmbox.kernels.triton.backend import triton_ops

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 67,
}
REQUESTS = [
    ask("chunks", range(3, 13), 2, temperature=0.8, top_k=9, top_p=0.9, seed=3),
    ask("nucleus", [7, 8], 1, temperature=1.1, top_p=0.9, seed=5),
]


@pytest.fixture(autouse=True)
def _one_kernel_at_a_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The interpreter has one set of globals for all threads, and so has Python 3.11's parser, which reads
    each kernel once. No kernel here waits for another rank's.
    """
    lock = threading.RLock()

    def alone(work: Callable[..., object]) -> Callable[..., object]:
        def locked(*args: object, **options: object) -> object:
            with lock:
                return work(*args, **options)

        return locked

    for owner, name in ((interpreter.GridExecutor, "__call__"), (interpreter.InterpretedFunction, "rewrite")):
        monkeypatch.setattr(owner, name, alone(getattr(owner, name)))
    with mock.patch("llmbox.engine.executor.rank_engine.backend") as backend:
        backend.side_effect = lambda _device, dtype, _kv, _threads, _quant, config, _plan: triton_ops(
            CPU, dtype, deterministic=config.deterministic
        )
        yield


@pytest.mark.parametrize(
    ("cut", "dtype", "deterministic", "graphs", "fused_rows"),
    [
        ({"tp": 2}, "float32", False, True, 8),
        ({"tp": 2}, "float16", True, False, 0),
        ({"pp": 2}, "float16", True, True, 0),
        ({"tp": 2, "expert_parallel": True}, "float16", True, True, 0),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:invalid value encountered")  # numpy's, of rows that only fill up
@pytest.mark.filterwarnings("ignore:overflow encountered")  # and of those whose experts another rank has
def test_tokens_are_those_of_one_rank(
    tmp_path: Path, cut: dict[str, Any], dtype: str, deterministic: bool, graphs: bool, fused_rows: int
) -> None:
    arch = "mixtral" if "expert_parallel" in cut else "qwen3"
    layers = cut.get("pp", 1)
    model = make_tiny_model(tmp_path, arch=arch, tokenizer=False, num_hidden_layers=layers, **SIZES)
    options = {"dtype": dtype, "deterministic": deterministic, "max_running": 2, "token_budget": 8}
    options["speculate"] = "off"  # its rows would make the only graph that is captured too large for these
    expected = tokens(device_engine(model, **options), REQUESTS)
    with device_ranks(model, graphs=graphs, fused_rows=fused_rows, **cut, **options) as (engine, ranks):
        if graphs:
            engine.prepare()
        assert tokens(engine, REQUESTS) == expected
    assert all(rank.runner._ops.row_invariant == deterministic for rank in ranks)
    assert all(rank.capture.replays > 0 for rank in ranks if rank.capture is not None)
    assert (ranks[0].collective.fused > 0) == (fused_rows > 0)
