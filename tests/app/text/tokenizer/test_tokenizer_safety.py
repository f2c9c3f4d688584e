"""Steps that are known to take time in proportion to a text, and everything else."""

import json
from pathlib import Path

import pytest

from llmbox.app.text.tokenizer.gguf_tokenizer import _PATTERNS
from llmbox.app.text.tokenizer.tokenizer_safety import KNOWN_REGEXES, find_unsafe_part, find_unsafe_step
from support.hostile_tokenizers import BACKTRACKING, PANICKING, doubling, replace, splitting, with_steps
from support.tokenizers_zoo import FAMILIES

BUILTIN = Path(__file__).parents[4] / "app/assets/builtin/tokenizer.json"


@pytest.mark.parametrize("family", FAMILIES)
def test_usual_tokenizers_work_in_the_daemon(family):
    tokenizer = FAMILIES[family]()
    assert find_unsafe_step(tokenizer.to_str().encode()) == ""
    assert find_unsafe_part(tokenizer) == ""


def test_so_does_the_built_in_model():
    assert find_unsafe_step(BUILTIN.read_bytes()) == ""


@pytest.mark.parametrize("regex", sorted(KNOWN_REGEXES))
def test_known_regexes_compile_and_are_taken(regex):
    assert find_unsafe_step(splitting(regex)) == ""


def test_qwen_and_llama_3_are_among_them():
    digits = r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    llama3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+" + digits
    assert llama3 in KNOWN_REGEXES
    assert llama3.replace("{1,3}", "") in KNOWN_REGEXES


@pytest.mark.parametrize(
    "source",
    [
        doubling(20),
        doubling(3),
        BACKTRACKING,
        PANICKING,
        with_steps(normalizer=replace("", "ab")),
        with_steps(normalizer={"type": "Prepend", "prepend": "a" * 1000}),
        with_steps(normalizer={"type": "Sequence", "normalizers": [{"type": "NFC"}] * 17}),
        with_steps(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
        with_steps(normalizer={"type": "Replace", "pattern": {"Regex": "(a*)*b"}, "content": ""}),
        with_steps(
            post_processor={
                "type": "TemplateProcessing",
                "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 9,
                "pair": [],
                "special_tokens": {},
            }
        ),
        with_steps(model={"type": "Unigram", "unk_id": 0, "vocab": [["a" * 600, 0.0]]}),
        with_steps(model={"type": "WordPiece", "max_input_chars_per_word": 10**9, "vocab": {}}),
        with_steps(model={"type": "WordPiece", "max_input_chars_per_word": 1000, "vocab": {}}),
        with_steps(model={"type": "WordPiece", "continuing_subword_prefix": "#" * 200, "vocab": {}}),
        with_steps(model={"type": "BPE", "end_of_word_suffix": "w" * 200, "vocab": {}, "merges": []}),
        with_steps(
            post_processor={
                "type": "TemplateProcessing",
                "single": [
                    {"SpecialToken": {"id": "a", "type_id": 0}},
                    {"Sequence": {"id": "A", "type_id": 0}},
                ],
                "pair": [],
                "special_tokens": {"a": {"id": "a", "ids": [1] * 1000, "tokens": ["a"] * 1000}},
            }
        ),
        with_steps(normalizer={"type": "Sequence"}),
        with_steps(pre_tokenizer=7),
        b"",
        b"[]",
        b"[" * 100_000,
        json.dumps({"model": None}).encode(),
    ],
)
def test_everything_else_works_behind_the_wall(source):
    assert find_unsafe_step(source)


@pytest.mark.parametrize("name", _PATTERNS)
def test_tokenizers_from_gguf_files_are_known(name):
    assert set(_PATTERNS[name]) <= KNOWN_REGEXES
