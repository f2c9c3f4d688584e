import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from llmbox.app.text.tokenizer.detokenizer import Detokenizer, TokenBytes, decode
from llmbox.engine.errors import ModelError
from support.lanes import examples
from support.tokenizers_zoo import FAMILIES

ZOO = {name: make() for name, make in FAMILIES.items()}
TOKENS = {name: TokenBytes(t, json.loads(t.to_str())["decoder"]) for name, t in ZOO.items()}


def random_ids(family: str) -> st.SearchStrategy[list[int]]:
    size = ZOO[family].get_vocab_size()
    tail = st.integers(size - 20, size + 3)  # special tokens, and ids that the tokenizer does not know
    return st.lists(st.integers(0, size - 1) | tail, max_size=40)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("skip_special", [True, False])
@settings(max_examples=examples(300))
@given(data=st.data())
def test_streamed_text_is_the_text_of_all_ids(family, skip_special, data):
    ids = data.draw(random_ids(family))
    expected = ZOO[family].decode(ids, skip_special_tokens=skip_special)
    detokenizer = Detokenizer(TOKENS[family], skip_special=skip_special)
    streamed = "".join([*map(detokenizer.push, ids), detokenizer.finish()])
    assert streamed == decode(TOKENS[family], ids, skip_special=skip_special)
    if family == "byte_level" or "\ufffd" not in expected:
        assert streamed == expected


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=examples(200))
@given(text=st.text(max_size=30) | st.text("你好é😀 the.<think></s>\n", max_size=30))
def test_round_trip_of_text(family, text):
    ids = ZOO[family].encode(text, add_special_tokens=False).ids
    detokenizer = Detokenizer(TOKENS[family])
    pieces = [*map(detokenizer.push, ids), detokenizer.finish()]
    assert "".join(pieces) == ZOO[family].decode(ids)
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


def test_bytes_of_a_split_character_are_held_back():
    tokens = TOKENS["metaspace"]
    ids = [3 + byte for byte in "😀".encode()]
    detokenizer = Detokenizer(tokens)
    assert [detokenizer.push(i) for i in ids] == ["", "", "", "😀"]
    assert [tokens[i] for i in ids] == [b"\xf0", b"\x9f", b"\x98", b"\x80"]


def test_a_continued_text_keeps_its_leading_space():
    tokens = TOKENS["llama2"]
    ids = ZOO["llama2"].encode("the", add_special_tokens=False).ids
    assert decode(tokens, ids) == "the"
    assert decode(tokens, ids, begins=False) == " the"


def test_an_unfinished_character_ends_as_a_replacement():
    detokenizer = Detokenizer(TOKENS["llama2"])
    assert detokenizer.push(3 + 0xE4) == ""
    assert detokenizer.finish() == "\ufffd"


def test_an_unknown_decoder_is_refused_by_name():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.decoder = decoders.CTC()
    with pytest.raises(ModelError, match="CTC"):
        TokenBytes(tokenizer, json.loads(tokenizer.to_str())["decoder"])
