"""Prompts with a gap, in the order and with the tokens of each family."""

from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer

from llmbox.app.errors import ApiError
from llmbox.app.text.fim import FAMILIES, FimTokens, fim_prompt, fim_stop_ids
from llmbox.app.text.tokenizer.text_loader import load_model_text
from llmbox.app.text.tokenizer.tokenizer import TextModel
from support.tokenizers_zoo import byte_level, llama2, metaspace, write_text_files


def text_with(folder: Path, tokenizer: Tokenizer, *tokens: str) -> TextModel:
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])
    return load_model_text(write_text_files(folder, tokenizer))


def names(family: FimTokens) -> list[str]:
    return [name for name in (family.prefix, family.suffix, family.middle) if name]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_order_of_each_family(tmp_path: Path, family: FimTokens) -> None:
    text = text_with(tmp_path, byte_level(), *names(family))
    ids = fim_prompt(text, "def f():\n", "\n    return x")
    written = text.decode(ids, skip_special=False)
    before, after = f"{family.prefix}def f():\n", f"{family.suffix}\n    return x"
    assert written == (after + before if family.suffix_first else before + after) + family.middle
    assert all(text.tokenizer.token_to_id(name) in ids for name in names(family))
    assert set(fim_stop_ids(text)) >= {text.tokenizer.token_to_id(name) for name in names(family)}


@pytest.mark.parametrize("tokenizer", [llama2, metaspace])
def test_no_space_is_put_before_the_suffix(tmp_path: Path, tokenizer) -> None:
    """Tokenizers of the Llama 2 kind put one before every text that they are given (CodeLlama)."""
    text = text_with(tmp_path, tokenizer(), "▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>")
    ids = fim_prompt(text, "quick", "dog")
    suffix = ids[ids.index(text.tokenizer.token_to_id("▁<SUF>")) + 1 : -1]
    assert text.decode(suffix, begins=False) == "dog"
    assert text.decode(text.encode("dog", add_special_tokens=False), begins=False) == " dog"
    assert text.tokenizer.token_to_id("▁<EOT>") in fim_stop_ids(text)


def test_the_text_begins_as_every_other(tmp_path: Path) -> None:
    text = text_with(tmp_path, llama2(), "<fim_prefix>", "<fim_suffix>", "<fim_middle>")
    start = text.encode("a")[:1]
    assert text.encode("a", add_special_tokens=False)[:1] != start
    assert fim_prompt(text, "a", "b")[:1] == start
    assert fim_prompt(text, "a", "b", add_special_tokens=False)[:1] != start
    assert fim_prompt(text, "", "b")[0] == start[0]


def test_a_model_without_such_tokens_says_so(tmp_path: Path) -> None:
    text = text_with(tmp_path, byte_level())
    with pytest.raises(ApiError) as refused:
        fim_prompt(text, "a", "b")
    assert (refused.value.status, refused.value.code, refused.value.param) == (
        400,
        "suffix_not_supported",
        "suffix",
    )
