"""Combinations of formats, architectures and runners on tiny models: the tokens that plain torch draws.

Not all of them: each choice is there with several of the others, with more of them each night.
"""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from llmbox.engine.core.engine import Engine
from llmbox.kernels.quant_formats import QUANTS
from llmbox.kernels.triton.backend import triton_ops
from support.formats import cached_in, plain_torch
from support.lanes import nightly
from support.late_device import FakeCapture, device_engine
from support.paged import CPU
from support.real_engines import ask, load, run
from support.tiny_models import make_tiny_model

FP8 = torch.float8_e4m3fn
SIZES = {
    "hidden_size": 144,
    "intermediate_size": 136,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 99,
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
TIED, WINDOW = {"tie_word_embeddings": True}, {"sliding_window": 8}
OPTIONS = {"dtype": "float32", "max_running": 4, "token_budget": 16}
"""The longer prompt comes in two chunks."""
KV = {"auto": None, "int8": torch.int8, "fp8": FP8}


def prompts() -> list[Any]:
    return [ask("long", range(3, 20), 2, logprobs=0), ask("short", [5, 9, 11], 2, logprobs=0)]


def seen_by(engine: Engine) -> tuple[dict[str, list[int]], list[float]]:
    answers = run(engine, prompts())
    ids = {name: [i for output in outputs for i in output.token_ids] for name, outputs in answers.items()}
    told = [entry for outputs in answers.values() for output in outputs for entry in output.logprobs or []]
    return ids, [entry.logprob for entry in told]


@pytest.mark.parametrize(
    ("quant", "kv", "arch", "changes", "deterministic", "on_device"),
    [
        (None, "fp8", "qwen3", TIED, False, True),
        (None, "int8", "mistral", WINDOW, True, False),
        ("int8", "fp8", "mistral", WINDOW | TIED, False, True),
        ("int4", "int8", "qwen2", TIED, False, True),
        ("int4-g128", "auto", "llama", {}, True, False),
        ("w8a8", "fp8", "qwen2", TIED, True, False),
        ("fp8", "int8", "mistral", WINDOW | TIED, False, False),
        ("fp8-block", "fp8", "qwen2", {}, False, False),
        ("w8a8", "auto", "mixtral", EXPERTS, False, True),
        *(
            nightly(*combination)
            for combination in (
                ("w8a8", "auto", "qwen3", {}, False, True),
                ("fp8", "fp8", "llama", {}, True, True),
                ("fp8-block", "int8", "qwen3", TIED, True, True),
                ("int4", "auto", "qwen3_moe", EXPERTS, False, True),
                ("fp8", "int8", "qwen3_moe", EXPERTS, True, False),
            )
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:invalid value encountered")  # numpy's, of rows that only fill up
def test_tokens_are_those_of_plain_torch(
    tmp_path: Path,
    quant: str | None,
    kv: str,
    arch: str,
    changes: dict[str, object],
    deterministic: bool,
    on_device: bool,
) -> None:
    model = make_tiny_model(tmp_path, arch=arch, tokenizer=False, **SIZES, **changes)
    rounding, kv_dtype = QUANTS.get(quant or ""), KV[kv]
    kernels = triton_ops(CPU, torch.float32, rounding, deterministic=deterministic)
    with mock.patch("llmbox.engine.executor.rank_engine.select_ops") as select:
        select.return_value = cached_in(plain_torch(rounding), kv_dtype)
        expected, logprobs = seen_by(load(model, **OPTIONS))
        select.return_value = cached_in(kernels, kv_dtype)
        capture = FakeCapture()
        engine = device_engine(model, capture=capture, **OPTIONS) if on_device else load(model, **OPTIONS)
        if on_device:
            engine.prepare()
        found, told = seen_by(engine)
    assert found == expected
    # Sums in another order may be rounded to another code next.
    assert told == pytest.approx(logprobs, abs=0.02 if rounding or kv_dtype else 1e-4)
    assert bool(capture.replays) == on_device
