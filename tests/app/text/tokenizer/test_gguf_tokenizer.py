"""Tokenizers of GGUF files: the ids and texts of the tokenizer that the file was made of."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from llmbox.app.text.tokenizer.gguf_tokenizer import SPACE, write_tokenizer
from llmbox.app.text.tokenizer.text_loader import load_model_text
from llmbox.app.text.tokenizer.tokenizer_safety import find_unsafe_step
from llmbox.engine.errors import ModelError
from llmbox.engine.gguf.reader import read_gguf
from support.gguf_models import write_gguf
from support.tiny_models import make_tiny_model

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)
PIECES = {
    SPACE: -1.0,
    "a": -2.0,
    "b": -3.0,
    "ab": -0.5,
    f"{SPACE}a": -0.7,
    "ba": -0.6,
    "abab": -0.9,
    "bb": -0.4,
}
PIECES |= {f"{SPACE}ab": -0.55, "c": -4.0, "aba": -1.1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def written(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    write_tokenizer(read_gguf(write_gguf(model, folder / "tiny.gguf")).metadata, folder)
    return folder


@given(
    text=st.text(max_size=60)
    | st.sampled_from(["the <|im_start|>quick<|im_end|> fox", "it's 1234 dogs\n\n  x"])
)
def test_byte_pairs_as_the_original(model: Path, written: Path, text: str) -> None:
    original = Tokenizer.from_file(str(model / "tokenizer.json"))
    found = Tokenizer.from_file(str(written / "tokenizer.json"))
    ids = original.encode(text).ids
    assert found.encode(text).ids == ids
    assert found.decode(ids, skip_special_tokens=False) == original.decode(ids, skip_special_tokens=False)


def test_the_text_side_of_the_model(model: Path, written: Path) -> None:
    for name in ("config.json", "generation_config.json"):
        (written / name).write_bytes((model / name).read_bytes())
    wanted, found = load_model_text(model), load_model_text(written)
    assert found.chat_template == wanted.chat_template
    assert found.eos_token_ids == wanted.eos_token_ids
    assert found.encode("<|im_start|>user") == wanted.encode("<|im_start|>user")


def tokenizer_of(folder: Path, **values: Any) -> Tokenizer:
    write_tokenizer({f"tokenizer.ggml.{key}": value for key, value in values.items()}, folder)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def of_bytes(folder: Path, pre: str, **values: Any) -> Tokenizer:
    tokens = ["<s>", "a", "ab", "b", "Ġ", "1", "<tool>", "[PAD7]"]
    kinds = [CONTROL, NORMAL, NORMAL, NORMAL, NORMAL, NORMAL, USER, UNUSED]
    base = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": kinds,
        "merges": ["a b"],
        "bos_token_id": 0,
    }
    return tokenizer_of(folder, **base | values)


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("llama-bpe", ["It", "'S", "Ġ", "123", "4", "Ġé", "!!Ċ", "Ġx"]),
        ("qwen2", ["It", "'S", "Ġ", "1", "2", "3", "4", "Ġé", "!!Ċ", "Ġx"]),
        ("tekken", ["It", "'S", "Ġ", "1", "2", "3", "4", "Ġé", "!!Ċ", "Ġx"]),
        ("qwen35", ["It", "'S", "Ġ", "1", "2", "3", "4", "Ġé", "!!Ċ", "Ġx"]),
        ("gpt-4o", ["It'S", "Ġ", "123", "4", "Ġé", "!!Ċ", "Ġx"]),
        ("glm4", ["It", "'S", "Ġ", "123", "4", "Ġé", "!!Ċ", "Ġx"]),
        ("deepseek-v3", ["It", "'S", "Ġ", "123", "4", "Ġé", "!!Ċ", "Ġx"]),
        ("seed-coder", ["It", "'S", "Ġ", "1", "2", "3", "4", "Ġé", "!!", "Ċ", "Ġx"]),
        ("lfm2", ["It", "'S", "Ġ", "123", "4", "Ġé", "!!Ċ", "Ġx"]),
        ("kimi-k2", ["It'S", "Ġ", "123", "4", "Ġé", "!!Ċ", "Ġx"]),
        ("youtu", ["It'S", "Ġ", "1", "2", "3", "4", "Ġé", "!!Ċ", "Ġx"]),
        ("deepseek-coder", ["It", "'", "S", "Ġ", "1", "2", "3", "4", "Ġé", "!!", "Ċ", "Ġx"]),
        ("deepseek-llm", ["It", "'", "S", "Ġ", "1", "2", "3", "4", "Ġé", "!!", "Ċ", "Ġx"]),
        ("smollm", ["It", "'", "S", "Ġ", "1", "2", "3", "4", "Ġé", "!!", "Ċ", "Ġx"]),
        ("gpt-2", ["It", "'", "S", "Ġ1234", "Ġé", "!!", "Ċ", "Ġx"]),
    ],
)
def test_how_texts_are_cut(tmp_path: Path, pre: str, pieces: list[str]) -> None:
    found = of_bytes(tmp_path, pre).pre_tokenizer.pre_tokenize_str("It'S 1234 é!!\n x")
    assert [piece.replace("Ã©", "é") for piece, _ in found] == pieces


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("kimi-k2", ["Ab", "漢字", "かなc", "\uff0c", "中", "Д"]),
        ("youtu", ["Ab", "漢字かな", "c", "\uff0c", "中", "Д"]),
        ("deepseek-coder", ["Ab", "漢字かな", "c", "\uff0c", "中", "Д"]),
        ("deepseek-llm", ["Ab", "漢字かな", "c", "\uff0c", "中", "Д"]),
        ("deepseek-v3", ["Ab", "漢字かな", "c", "\uff0c", "中", "Д"]),
    ],
)
def test_how_scripts_are_cut(tmp_path: Path, pre: str, pieces: list[str]) -> None:
    letters = {each: byte for byte, each in _bytes_of_letters().items()}
    found = of_bytes(tmp_path, pre).pre_tokenizer.pre_tokenize_str("Ab漢字かなc\uff0c中Д")
    assert [bytes(letters[each] for each in piece).decode() for piece, _ in found] == pieces


def _bytes_of_letters() -> dict[int, str]:
    """The letter of each byte, as GPT-2 has them."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + n) for n, byte in enumerate(others)}


@pytest.mark.parametrize("pre", ["kimi-k2", "youtu", "deepseek-coder", "deepseek-llm"])
def test_they_are_cut_in_the_daemon(tmp_path: Path, pre: str) -> None:
    of_bytes(tmp_path, pre)
    assert find_unsafe_step((tmp_path / "tokenizer.json").read_bytes()) == ""


def test_special_words_stay_whole_and_unused_ones_are_left_out(tmp_path: Path) -> None:
    found = of_bytes(tmp_path, "llama-bpe")
    assert found.encode("ab<tool>a").tokens == ["<s>", "ab", "<tool>", "a"]
    assert found.decode(found.encode("ab<tool>").ids) == "ab<tool>"
    assert found.token_to_id("[PAD7]") is None
    assert of_bytes(tmp_path, "llama-bpe", add_bos_token=False).encode("ab").tokens == ["ab"]
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert (config["bos_token"], config["eos_token"], config["add_bos_token"]) == ("<s>", None, False)


def of_pieces(folder: Path, **values: Any) -> Tokenizer:
    odd = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(PIECES)]
    base = {
        "model": "llama",
        "tokens": [*odd, *PIECES],
        "scores": [*[0.0] * len(odd), *PIECES.values()],
        "token_type": kinds,
        "bos_token_id": 1,
        "unknown_token_id": 0,
    }
    return tokenizer_of(folder, **base | values)


def sentencepiece(text: str) -> list[str]:
    """Its algorithm: neighbors that make the best scored piece are merged, the first of equals first."""
    parts = list(text)
    while pairs := [(PIECES[a + b], -i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in PIECES]:
        _, at = max(pairs)
        parts[-at : 2 - at] = ["".join(parts[-at : 2 - at])]
    return parts


@given(text=st.text("abc ", max_size=24))
def test_pieces_as_sentencepiece_finds_them(pieces: Tokenizer, text: str) -> None:
    wanted = sentencepiece(SPACE + text.replace(" ", SPACE)) if text else []
    assert pieces.encode(text).tokens == ["<s>", *wanted]
    assert pieces.decode(pieces.encode(text).ids) == text


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return of_pieces(tmp_path_factory.mktemp("pieces"))


def test_what_no_piece_has_is_spelt_in_bytes(pieces: Tokenizer, tmp_path: Path) -> None:
    assert pieces.encode("é").tokens == ["<s>", SPACE, "<0xC3>", "<0xA9>"]
    assert pieces.decode(pieces.encode("aé b").ids) == "aé b"
    assert of_pieces(tmp_path, add_space_prefix=False).encode("ab").tokens == ["<s>", "ab"]


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"model": "rwkv"}, "of kind 'rwkv', only gpt2, llama, gemma4, bert, t5"),
        ({"pre": "viking"}, "its pre-tokenizer 'viking'"),
        ({"tokens": []}, "its vocabulary is empty"),
        ({"tokens": ["a", "a"], "token_type": [1, 1]}, "a word twice"),
        ({"token_type": [1]}, "lacks the types of words"),
        ({"merges": ["x y"]}, "its merges do not match its vocabulary"),
        ({"merges": ["x"]}, "its merges do not match its vocabulary"),
        ({"merges": [1]}, "not a list of the expected type"),
        ({"model": "llama"}, "no scores"),
    ],
)
def test_what_cannot_be_read_is_said(tmp_path: Path, values: dict[str, Any], why: str) -> None:
    base: dict[str, Any] = {
        "model": "gpt2",
        "tokens": ["a", "b", "ab"],
        "token_type": [1, 1, 1],
        "merges": ["a b"],
    }
    with pytest.raises(ModelError, match=rf"(?s){why}.*--tokenizer FOLDER"):
        tokenizer_of(tmp_path, **base | values)


def test_pieces_merge_in_the_order_of_a_gemma_4(tmp_path: Path) -> None:
    """Its merges are in the file: "b a" comes before "a b", whatever the scores say."""
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), SPACE, "a", "b", "ba", "ab", f"{SPACE}a"]
    kinds = [UNKNOWN, *[BYTE] * 256, *[NORMAL] * 6]
    merges = ["b a", "a b", f"{SPACE} a"]
    found = tokenizer_of(
        tmp_path,
        model="gemma4",
        tokens=tokens,
        scores=[0.0] * len(tokens),
        token_type=kinds,
        merges=merges,
        unknown_token_id=0,
        add_space_prefix=False,
        add_bos_token=False,
    )
    assert found.encode("aba ab").tokens == ["a", "ba", SPACE, "ab"]
    assert found.decode(found.encode("aba é a").ids) == "aba é a"


def encoder_metadata(kind: str, words: list[str], **values: Any) -> dict[str, Any]:
    own = {"model": kind, "tokens": words, **values}
    return {f"tokenizer.ggml.{key}": value for key, value in own.items()}


@pytest.mark.parametrize("begin", [True, False])
def test_the_end_token_of_models_for_embeddings(tmp_path: Path, begin: bool) -> None:
    ends = {"eos_token_id": 6, "add_bos_token": begin, "add_eos_token": True}
    found = of_bytes(tmp_path, "default", **ends)
    start = [0] if begin else []
    assert found.encode("ab").ids == [*start, 2, 6]
    assert found.encode("ab", "b").ids == [*start, 2, 6, *start, 3, 6]
    assert found.encode("ab", add_special_tokens=False).ids == [2]
    with pytest.raises(ModelError, match="around a text"):
        of_bytes(tmp_path, "default", **ends, tokens=["<s>", "a", "ab", "b", "Ġ", "1", "a:b", "[PAD7]"])


@pytest.mark.parametrize("is_cased", [False, True])
def test_words_of_bert_as_the_original(tmp_path: Path, is_cased: bool) -> None:
    """A file marks beginnings of words, and does not say whether capitals matter."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = [
        *special,
        "un",
        "##want",
        "##ed",
        "runn",
        "##ing",
        "the",
        ",",
        "!",
        *(["The"] if is_cased else []),
    ]
    original = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    original.normalizer = normalizers.BertNormalizer(lowercase=not is_cased)
    original.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    original.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    stored = [
        word if word in special else word.removeprefix("##") if word.startswith("##") else SPACE + word
        for word in words
    ]
    kinds = [CONTROL] * 5 + [NORMAL] * (len(words) - 5)
    ids = {"bos_token_id": 2, "seperator_token_id": 3, "unknown_token_id": 1, "padding_token_id": 0}
    write_tokenizer(encoder_metadata("bert", stored, token_type=kinds, **ids), tmp_path)
    found = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in ("The unwanted, running", "THE runn!ing", "ün wanted", "", "strange the"):
        assert found.encode(text).ids == original.encode(text).ids, text
    pair = found.encode("the", "running")
    assert (pair.ids, pair.type_ids) == ([2, 10, 3, 8, 9, 3], [0, 0, 0, 1, 1, 1])


def test_unigrams_of_xlm_r(tmp_path: Path) -> None:
    pieces = {"<s>": 0.0, "<pad>": 0.0, "</s>": 0.0, "<unk>": 0.0, **PIECES}
    kinds = [CONTROL, CONTROL, CONTROL, UNKNOWN] + [NORMAL] * len(PIECES)
    ids = {"bos_token_id": 0, "eos_token_id": 2, "unknown_token_id": 3}
    values = {"scores": list(pieces.values()), "token_type": kinds, **ids}
    write_tokenizer(encoder_metadata("t5", list(pieces), **values), tmp_path)
    found = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    words = list(pieces)
    assert [words[i] for i in found.encode("abab   ba").ids] == [
        "<s>",
        f"{SPACE}ab",
        "ab",
        SPACE,
        "ba",
        "</s>",
    ]
    assert found.decode(found.encode("abab   ba").ids) == "abab ba"
    assert [words[i] for i in found.encode("ab", "ba").ids] == [
        "<s>", f"{SPACE}ab", "</s>", "</s>", SPACE, "ba", "</s>",
    ]  # fmt: skip


def test_byte_pairs_of_roberta(tmp_path: Path) -> None:
    ends = {"add_bos_token": True, "add_eos_token": True, "add_sep_token": True}
    found = of_bytes(tmp_path, "roberta-bpe", eos_token_id=6, **ends)
    assert found.encode("ab").ids == [0, 2, 6]
    assert found.encode("ab", "b").ids == [0, 2, 6, 6, 3, 6]


def test_byte_pairs_of_modernbert(tmp_path: Path) -> None:
    """One token parts a pair, and letters are composed, as in the original."""
    values = {"bos_token_id": 300, "eos_token_id": 301, "add_bos_token": True, "add_eos_token": True}
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*letters, *(f"[unused{number}]" for number in range(300 - len(letters))), "[CLS]", "[SEP]"]
    kinds = [NORMAL] * 300 + [CONTROL] * 2
    more = {"pre": "modern-bert", "merges": [], "token_type": kinds, "add_sep_token": True}
    write_tokenizer(encoder_metadata("gpt2", words, **values, **more), tmp_path)
    found = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert found.encode("a").tokens == ["[CLS]", "a", "[SEP]"]
    assert found.encode("a", "b").tokens == ["[CLS]", "a", "[SEP]", "b", "[SEP]"]
    assert found.encode("e\u0301").ids == found.encode("é").ids
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config["add_bos_token"] is True


def test_encoders_with_a_damaged_vocabulary_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not name the tokens around a text"):
        write_tokenizer(encoder_metadata("bert", ["[UNK]", "▁a"]), tmp_path)
    with pytest.raises(ModelError, match="has no token for unknown words"):
        write_tokenizer(encoder_metadata("bert", ["a", "b"]), tmp_path)
    table = {"scores": [0.0], "precompiled_charsmap": [9, 9, 9]}
    with pytest.raises(ModelError, match="table of normalization cannot be read"):
        write_tokenizer(encoder_metadata("t5", ["a"], **table), tmp_path)
    with pytest.raises(ModelError, match="two of its words are the same"):
        write_tokenizer(encoder_metadata("bert", ["a", f"{SPACE}##a"]), tmp_path)
