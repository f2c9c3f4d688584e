"""What is particular to an architecture, cut over ranks: the tokens of one process."""

from pathlib import Path
from typing import Any

import pytest

from llmbox.engine.errors import ParallelError
from support.families import FAMILIES, SIBLINGS
from support.lanes import nightly
from support.rank_threads import load_ranks
from support.real_engines import ask, load, tokens
from support.tiny_models import make_tiny_model

REQUESTS = [
    ask("long", range(3, 43), 8),
    ask("short", [5, 9, 11], 8, temperature=0.8, seed=3),
    ask("other", range(7, 30), 8, temperature=0.9, top_k=9, seed=5),
]
PART_TURNS = {"partial_rotary_factor": 0.5, "tie_word_embeddings": True}


@pytest.mark.parametrize(
    ("arch", "config", "options"),
    [
        ("phi3", PART_TURNS, {"tp": 2}),
        ("phi3", PART_TURNS, {"pp": 2, "dtype": "bfloat16", "quant": "int8"}),
        ("smollm3", {}, {"tp": 2, "pp": 2}),
        ("granite", {}, {"tp": 2, "pp": 2}),
        ("olmo3", {}, {"pp": 2}),
        ("glm4", {}, {"tp": 2}),
        ("ministral3", {}, {"tp": 2}),
        ("gpt_oss", {}, {"tp": 2, "pp": 2}),
        ("qwen2_moe", {}, {"tp": 2}),
        ("deepseek_v3", {}, {"tp": 2, "pp": 2}),
        ("cohere2", {}, {"tp": 2, "pp": 2}),
        ("exaone4", {}, {"tp": 2, "pp": 2}),
        ("falcon_h1", {}, {"tp": 2, "pp": 2}),
        ("nemotron_h", {"moe_latent_size": 40}, {"tp": 2, "pp": 2}),
        ("kimi_linear", {}, {"tp": 2, "pp": 2}),
        ("olmo_hybrid", {}, {"pp": 2}),
        ("bamba", {}, {"tp": 2}),
        ("zamba2", {}, {"tp": 2}),
        ("lfm3", {}, {"tp": 2, "pp": 2}),
        ("mamba2", {}, {"tp": 2, "pp": 2}),
        ("jamba", {}, {"tp": 2, "pp": 2}),
        ("bailing_hybrid", {}, {"tp": 2, "pp": 2}),
        ("mistral4", {}, {"tp": 2, "pp": 2}),
        ("axk1", {}, {"tp": 2, "pp": 2}),
        ("deepseek_v32", {}, {"tp": 2, "pp": 2}),
        ("glm_moe_dsa", {}, {"tp": 2}),
        ("cohere2_moe", {}, {"tp": 2}),
        ("laguna", {}, {"tp": 2, "pp": 2}),
        ("mimo_v2_flash", {}, {"tp": 2, "pp": 2}),
        ("step3p5", {}, {"tp": 2, "pp": 2}),
        ("gpt2", {}, {"tp": 2, "pp": 2}),
        ("gpt_neox", {}, {"tp": 2}),
        ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}, {"tp": 2, "pp": 2}),
        ("cohere", {"use_qk_norm": True}, {"tp": 2}),
        ("stablelm", {"qk_layernorm": True, "use_parallel_residual": True}, {"tp": 2, "pp": 2}),
        ("opt", {}, {"tp": 2, "pp": 2}),
        ("biogpt", {}, {"tp": 2, "pp": 2}),
        ("aria_text", {}, {"tp": 2, "pp": 2}),
        ("gpt_oss", {}, {"tp": 2, "expert_parallel": True}),
        ("granitemoe", {}, {"tp": 2, "expert_parallel": True}),
        ("qwen2_moe", {}, {"tp": 2, "expert_parallel": True}),
        ("nemotron_h", {"moe_latent_size": 40}, {"tp": 2, "expert_parallel": True}),
        nightly("deepseek_v3", {}, {"tp": 2, "pp": 2, "expert_parallel": True}),
        nightly("step3p5", {}, {"tp": 2, "expert_parallel": True}),
        nightly("phimoe", {}, {"tp": 2, "expert_parallel": True}),
        nightly("llama4_text", {}, {"tp": 2, "expert_parallel": True}),
        nightly("granitemoeshared", {}, {"tp": 2, "expert_parallel": True}),
    ],
)
def test_ranks_give_the_tokens_of_one(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arch: str,
    config: dict[str, Any],
    options: dict[str, Any],
) -> None:
    model = make_tiny_model(tmp_path, arch=arch, tokenizer=False, **config)
    alone = {key: value for key, value in options.items() if key not in {"tp", "pp", "expert_parallel"}}
    found = tokens(load_ranks(model, monkeypatch, **options), REQUESTS)
    assert found == tokens(load(model, **alone), REQUESTS)


@pytest.mark.parametrize("arch", ["olmo2", "olmo3", "olmo_hybrid"])
def test_norms_over_all_heads_are_not_cut(tmp_path: Path, arch: str) -> None:
    model = make_tiny_model(tmp_path, arch=arch, tokenizer=False)
    with pytest.raises(ParallelError, match=r"over all heads together.* can take 1$"):
        load(model, tp=2)


def test_blocks_that_layers_share_are_not_cut_into_stages(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, arch="zamba2", tokenizer=False)
    with pytest.raises(ParallelError, match=r"--pp 2: layers of this model read .* weights that they share"):
        load(model, pp=2)


NOT_CUT = {
    "olmo2": "tp", "olmo3": "tp", "olmoe": "tp", "flex_olmo": "tp", "olmo_hybrid": "tp", "minimax_m2": "tp",
    "bitnet": "tp",
    "gemma4_text": "pp", "gemma3n_text": "pp", "glm_moe_dsa": "pp", "zamba2": "pp",
}  # fmt: skip
"""Families that cannot be cut one way: norms over all heads, or layers that share keys and values."""


@pytest.mark.parametrize("way", ["tp", "pp"])
@pytest.mark.parametrize("arch", [nightly(arch) for arch in (*FAMILIES, *SIBLINGS)])
def test_every_family_is_cut_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arch: str, way: str
) -> None:
    model = make_tiny_model(tmp_path, arch=arch, tokenizer=False)
    if NOT_CUT.get(arch) == way:
        with pytest.raises(ParallelError):
            load_ranks(model, monkeypatch, **{way: 2})
        return
    found = tokens(load_ranks(model, monkeypatch, **{way: 2}), REQUESTS)
    assert found == tokens(load(model), REQUESTS)
