"""Formats of weights and keys with ranks and ways to schedule, in plain torch: the tokens of one rank alone.

Not all combinations: each choice is there with several of the others. Rows of E4M3 with one scale each are
rounded in parts where ranks share a layer, so those run in stages only. What the kernels make of each format
is in `tests/kernels/triton/test_matrix.py`.
"""

from pathlib import Path
from unittest import mock

import pytest
import torch

from llmbox.kernels.quant_formats import QUANTS
from support.device_ranks import device_ranks
from support.formats import cached_in, plain_torch
from support.real_engines import ask, load, tokens
from support.tiny_models import make_tiny_model

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "head_dim": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 99,
}
"""What a rank of two has of each is a whole number of groups and blocks: rounded as for one rank."""
KV = {"auto": None, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
WAYS = {
    "whole": {"prefix_cache": False, "chunked_prefill": False},
    "chunks": {"token_budget": 16, "prefix_cache": False},
    "chunks and prefixes": {"token_budget": 16},
}
REQUESTS = [
    ask("long", range(3, 43), 6),
    ask("short", [5, 9, 11], 6, temperature=0.8, seed=3),
    ask("cut", range(7, 30), 6, temperature=0.9, top_k=9, top_p=0.9, seed=5),
]


@pytest.mark.parametrize(
    ("quant", "kv", "cut", "way"),
    [
        (None, "int8", {"tp": 2}, "chunks and prefixes"),
        (None, "fp8", {"tp": 2, "pp": 2}, "chunks"),
        ("int8", "auto", {"tp": 2}, "whole"),
        ("int8-g32", "int8", {"pp": 2}, "chunks and prefixes"),
        ("int4", "fp8", {"pp": 2}, "whole"),
        ("int4", "auto", {"tp": 2, "pp": 2}, "chunks and prefixes"),
        ("int4-g128", "int8", {"tp": 2}, "chunks"),
        ("w8a8", "auto", {"tp": 2, "pp": 2}, "chunks and prefixes"),
        ("w8a8", "fp8", {"tp": 2}, "whole"),
        ("fp8", "int8", {"pp": 2}, "chunks"),
        ("fp8", "fp8", {"pp": 2}, "chunks and prefixes"),
        ("fp8-block", "fp8", {"tp": 2}, "chunks and prefixes"),
        ("fp8-block", "int8", {"tp": 2, "pp": 2}, "whole"),
    ],
)
def test_ranks_give_the_tokens_of_one(
    tmp_path: Path, quant: str | None, kv: str, cut: dict[str, int], way: str
) -> None:
    """Steps launched ahead, from graphs at last; each request a second time, to find its prefix."""
    model = make_tiny_model(tmp_path, tokenizer=False, **SIZES)
    options = {"dtype": "float32", "max_running": 4}
    with mock.patch("llmbox.engine.executor.rank_engine.select_ops") as select:
        select.return_value = cached_in(plain_torch(QUANTS.get(quant or "")), KV[kv])
        expected = tokens(load(model, **options), REQUESTS)
        with device_ranks(model, graphs=True, **cut, **options, **WAYS[way]) as (engine, ranks):
            assert tokens(engine, REQUESTS) == expected
            while engine.prepare():
                pass
            assert tokens(engine, REQUESTS) == expected
            assert (engine.stats().prefix_hits > 0) == ("prefixes" in way)
    assert len(ranks) == cut.get("tp", 1) * cut.get("pp", 1)
    assert all(rank.capture is not None and rank.capture.replays > 0 for rank in ranks)
