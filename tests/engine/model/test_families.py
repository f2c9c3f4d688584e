"""Families whose checkpoints transformers writes: both spellings of config.json, shards, parameters."""

from math import prod
from pathlib import Path

import pytest

from llmbox.engine.checkpoint.index import list_tensors
from llmbox.engine.model_config.config import parse_config
from support.families import (
    FAMILIES,
    make_family,
    make_mistral_that_sees,
    make_qwen_that_sees,
    spell_as_before,
    stack_experts,
)
from support.real_engines import ask, hf_tokens, load, tokens

PROMPT = ask("a", range(3, 40), 6)


@pytest.mark.parametrize("arch", FAMILIES)
def test_a_family_is_read_whole(tmp_path: Path, arch: str) -> None:
    model = make_family(tmp_path / "one", arch)
    config = parse_config(model)
    assert config.num_parameters == sum(prod(entry.shape) for entry in list_tensors(model).values())
    sharded = make_family(tmp_path / "sharded", arch, shards=3)
    assert len(list(sharded.glob("*.safetensors"))) > 1
    spell_as_before(sharded)
    assert parse_config(sharded) == config
    assert tokens(load(sharded), [PROMPT]) == tokens(load(model), [PROMPT])


@pytest.mark.parametrize("arch", FAMILIES)
@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_a_family_is_quantized_at_load(tmp_path: Path, arch: str, quant: str) -> None:
    engine = load(make_family(tmp_path, arch), quant=quant, dtype="bfloat16")
    alone = tokens(engine, [PROMPT])
    others = [ask(str(i), range(5 + i, 20), 6) for i in range(3)]
    assert tokens(engine, [PROMPT, *others])["a"] == alone["a"], "one request, one answer"


@pytest.mark.parametrize("arch", ["mistral", "ministral3"])
def test_the_language_part_of_a_mistral_3(tmp_path: Path, arch: str) -> None:
    from transformers import Mistral3ForConditionalGeneration

    model = make_mistral_that_sees(tmp_path, arch)
    assert parse_config(model).model_type == arch
    theirs = Mistral3ForConditionalGeneration.from_pretrained(model).eval()
    assert tokens(load(model), [PROMPT])["a"] == hf_tokens(theirs, PROMPT.prompt_ids, 6)


def test_the_language_part_of_a_qwen_3_5(tmp_path: Path) -> None:
    from transformers import Qwen3_5ForConditionalGeneration

    model = make_qwen_that_sees(tmp_path)
    theirs = Qwen3_5ForConditionalGeneration.from_pretrained(model).eval()
    assert tokens(load(model), [PROMPT])["a"] == hf_tokens(theirs, PROMPT.prompt_ids, 6)


def test_experts_of_a_qwen_3_5_in_one_tensor(tmp_path: Path) -> None:
    model = make_family(tmp_path, "qwen3_5_moe_text")
    apart = tokens(load(model), [PROMPT])
    stack_experts(model)
    assert tokens(load(model), [PROMPT]) == apart
