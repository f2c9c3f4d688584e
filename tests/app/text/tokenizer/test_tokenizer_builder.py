"""Tokenizers built from other files than tokenizer.json give the ids of their own libraries."""

import base64
import contextlib
import io
import json
import random
import struct

import pytest
import sentencepiece
import tiktoken
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from llmbox.app.text.tokenizer import tokenizer_builder
from llmbox.app.text.tokenizer.sentencepiece_file import SentencePieceFile
from llmbox.app.text.tokenizer.text_loader import load_model_text
from llmbox.app.text.tokenizer.tokenizer_safety import TEKKEN
from llmbox.engine.errors import ModelError

COMMON = (
    "the of and to in a is that for it as was with be by on not he his but at are this have from or had "
    "they Straße naïve 東京 Москва don't they're 12 2026 3.14 x=f(y); for(i) {}"
)
WORDS = [*COMMON.split(), "\t", "\n\n"]
TEXTS = [
    "Hello world",
    " leading and  double   spaces ",
    "",
    " ",
    "\n\n\tcode(x)\n    y",
    "Ünïcödé 東京 🙂",
    "don't they're I'M",
    "1234567 3.14",
    "a<s>b",
    "▁x",
    "\ufb01\u2460\u212b",
    "\u00a0nbsp",
]


def random_texts(count=300):
    source = random.Random(5)
    letters = "abc the_ .,\n\t éß東🙂0123'()"
    for _ in range(count):
        words = source.choices(WORDS, k=source.randrange(8))
        noise = "".join(source.choices(letters, k=source.randrange(12)))
        yield source.choice([" ", "", "  "]).join(words) + noise


def corpus():
    source = random.Random(1)
    return [" ".join(source.choices(WORDS, k=12)) for _ in range(400)]


def piece_model(**options) -> bytes:
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus()), model_writer=out, vocab_size=360, hard_vocab_limit=False,
        minloglevel=2, num_threads=1, character_coverage=0.9995, **options,
    )  # fmt: skip
    return out.getvalue()


LLAMA = {"byte_fallback": True, "normalization_rule_name": "identity", "remove_extra_whitespaces": False}
MODELS = {
    "llama": {"model_type": "bpe", **LLAMA},
    "gemma": {
        "model_type": "bpe",
        **LLAMA,
        "add_dummy_prefix": False,
        "user_defined_symbols": ["<turn>", "▁▁", "▁▁▁"],
    },
    "unigram": {"model_type": "unigram", **LLAMA},
    "unigram without bytes": {"model_type": "unigram", "normalization_rule_name": "identity"},
    "t5": {"model_type": "unigram"},
}


@pytest.mark.process
@pytest.mark.parametrize("name", MODELS)
def test_a_sentencepiece_model_alone(tmp_path, name):
    data = piece_model(**MODELS[name])
    (tmp_path / "tokenizer.model").write_bytes(data)
    theirs = sentencepiece.SentencePieceProcessor(model_proto=data)
    text = load_model_text(tmp_path)
    try:
        for said in [*TEXTS, *random_texts()]:
            if "<s>" in said:
                continue  # a control token that is typed: sentencepiece spells it, tokenizer.json finds it
            ids = theirs.encode(said)
            assert text.encode(said, add_special_tokens=False) == ids, said
            if "bytes" not in name and name != "t5":
                assert text.decode(ids) == theirs.decode(ids)
        assert text.encode("a") == [theirs.bos_id(), *theirs.encode("a")]
        assert text.tokenizer.token_to_id("<s>") in text.tokens.special_ids
    finally:
        text.close()


def byte_pairs(size=500) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer


@pytest.mark.process
@pytest.mark.parametrize("kind", ["GPT2Tokenizer", "Qwen2Tokenizer"])
def test_vocab_and_merges(tmp_path, kind):
    import transformers

    byte_pairs().model.save(str(tmp_path))
    size = len(json.loads((tmp_path / "vocab.json").read_text()))
    added = {
        size + 1: {"content": "<|im_end|>", "special": True},
        size + 3: {"content": "<tool>", "special": False},
    }
    config = {"tokenizer_class": kind, "eos_token": "<|im_end|>", "added_tokens_decoder": added}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    text = load_model_text(tmp_path)
    vocab = json.loads((tmp_path / "vocab.json").read_text())
    merges = [
        tuple(line.split(" ")) for line in (tmp_path / "merges.txt").read_text().split("\n")[1:] if line
    ]
    other = getattr(transformers, kind)(vocab=vocab, merges=merges)
    for said in [*TEXTS, *random_texts()]:
        ids = other.encode(said, add_special_tokens=False)
        assert text.encode(said) == ids, said
        assert text.decode(ids) == other.decode(ids, clean_up_tokenization_spaces=False)
    assert text.encode("a<|im_end|><tool>")[-2:] == [size + 1, size + 3]
    assert size + 1 in text.tokens.special_ids
    assert text.eos_token_ids == (size + 1,)


@pytest.mark.process
@pytest.mark.parametrize(
    "changes", [{}, {"do_lower_case": False}, {"tokenizer_class": "DistilBertTokenizer"}]
)
def test_words_of_bert(tmp_path, changes):
    """The ids and types of transformers, from vocab.txt."""
    from transformers import AutoTokenizer

    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        "fox",
        "Fox",
        "##es",
        "cafe",
        "caf\u00e9",
        "\u6771",
        "!",
        "a",
    ]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    config = {"tokenizer_class": "BertTokenizer", "do_lower_case": True} | changes
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    text = load_model_text(tmp_path)
    for each in ("Foxes! caf\u00e9 \u6771a", "fox [MASK] xyz", ""):
        assert text.encode(each) == theirs(each)["input_ids"]
    pair = theirs("fox", "foxes a")
    types = pair.get("token_type_ids", [0, 0, 0, 1, 1, 1, 1])
    assert text.encode_pairs([("fox", "foxes a")]) == ([pair["input_ids"]], [types.index(1)])


@pytest.mark.process
@pytest.mark.parametrize("is_listed", [False, True])
def test_tekken(tmp_path, is_listed):
    trained = byte_pairs()
    order = sorted(trained.get_vocab().items(), key=lambda each: each[1])
    bytes_of = {char: byte for byte, char in tokenizer_builder.BYTE_ALPHABET.items()}
    words = sorted(
        {bytes(bytes_of[char] for char in word) for word, _ in order}, key=lambda word: len(word) > 1
    )
    file = {
        "config": {
            "pattern": TEKKEN,
            "default_vocab_size": len(words) + 30,
            "default_num_special_tokens": 30,
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(word).decode(), "token_str": None}
            for rank, word in enumerate([*words, b"beyond the size"])
        ],
    }
    if is_listed:
        names = ["<unk>", "<s>", "</s>", "[INST]"]
        file["special_tokens"] = [
            {"rank": i, "token_str": name, "is_control": True} for i, name in enumerate(names)
        ]
    (tmp_path / "tekken.json").write_text(json.dumps(file))
    text = load_model_text(tmp_path)
    ranks = {word: rank for rank, word in enumerate(words)}
    theirs = tiktoken.Encoding("x", pat_str=TEKKEN, mergeable_ranks=ranks, special_tokens={})
    for said in [*TEXTS, *random_texts()]:
        if "<s>" not in said:
            ids = [30 + rank for rank in theirs.encode(said, disallowed_special=())]
            assert text.encode(said, add_special_tokens=False) == ids, said
            assert text.decode(ids) == said
    assert text.encode("[INST]a")[:2] == [1, 3]
    assert text.tokenizer.id_to_token(29) == "<SPECIAL_29>"


def message(*fields: tuple[int, bytes]) -> bytes:
    return b"".join(bytes([number << 3 | 2, len(data)]) + data for number, data in fields)


PIECE = message((1, b"a")) + b"\x15" + struct.pack("<f", -1.0)


@pytest.mark.process
@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("tokenizer.model", b"", "no pieces"),
        ("tokenizer.model", b"version https://git-lfs.github.com/spec/v1", "not a SentencePiece model"),
        ("tokenizer.model", message((1, PIECE), (1, PIECE)), "twice"),
        ("tokenizer.model", message((1, PIECE), (2, b"\x18\x03")), "model type is word or char"),
        ("tokenizer.model", message((1, PIECE))[:-2], "truncated"),
        ("tekken.json", b"{}", "config"),
        ("tekken.json", b"[]", "JSON object"),
    ],
)
def test_broken_files_are_refused_with_the_reason(tmp_path, name, content, why):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError, match=why) as refused:
        load_model_text(tmp_path)
    assert name in str(refused.value)


@given(
    st.lists(
        st.sampled_from([PIECE, b"\x08\x01", b"\x0a", b"\x12\x02\x18\x02", b"\xff"]) | st.binary(max_size=9)
    )
)
def test_whatever_a_model_file_holds_is_read_or_refused(parts):
    with contextlib.suppress(ValueError):
        assert SentencePieceFile(b"".join(parts)).words


@pytest.mark.process
def test_a_class_whose_cuts_are_not_known_is_named(tmp_path):
    byte_pairs(300).model.save(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "StrangeTokenizer"}')
    with pytest.raises(ModelError, match=r"vocab\.json .*StrangeTokenizer"):
        load_model_text(tmp_path)


@pytest.mark.process
def test_a_file_that_takes_too_long_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer_builder, "_SECONDS", 0.001)
    words = {f"word{number}": number for number in range(200_000)}  # some hundred times that
    (tmp_path / "vocab.json").write_text(json.dumps(words))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    with pytest.raises(ModelError, match="CPU time"):
        load_model_text(tmp_path)


@pytest.mark.parametrize(
    ("files", "default", "tools"),
    [
        ({"chat_template.jinja": "j", "chat_template.json": {"chat_template": "x"}}, "j", None),
        ({"chat_template.json": {"chat_template": "x"}}, "x", None),
        ({"tokenizer_config.json": {"chat_template": "c"}}, "c", None),
        (
            {
                "tokenizer_config.json": {
                    "chat_template": [
                        {"name": "default", "template": "d"},
                        {"name": "tool_use", "template": "t"},
                        {"name": "rag", "template": "r"},
                    ]
                }
            },
            "d",
            "t",
        ),
        ({"chat_template.jinja": "j", "additional_chat_templates/tool_use.jinja": "t"}, "j", "t"),
    ],
)
def test_templates_are_found_where_transformers_finds_them(tmp_path, files, default, tools):
    byte_pairs(300).save(str(tmp_path / "tokenizer.json"))
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    text = load_model_text(tmp_path)
    assert (text.chat_template, text.tool_template) == (default, tools)
