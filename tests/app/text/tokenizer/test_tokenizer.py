import asyncio
import json
import re
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from llmbox.app.errors import ApiError
from llmbox.app.sandbox.pool import TemplatePool
from llmbox.app.text.chat_template import Chat, number_calls
from llmbox.app.text.tokenizer import text_encoder, tokenizer
from llmbox.app.text.tokenizer.text_encoder import (
    SpecialTokenMarkers,
    TextEncoder,
    TokenizeError,
    load_tokenizer,
)
from llmbox.app.text.tokenizer.text_loader import load_model_text
from llmbox.app.text.tokenizer.tokenizer import vocabulary_warnings
from llmbox.app.util.threads import TENANT, FairSlots
from llmbox.engine.errors import ModelError
from llmbox.engine.hardware.machine import Memory
from support.odd_files import KINDS, make_odd, no_hanging
from support.tiny_models import make_tiny_model
from support.tokenizers_zoo import CHATML, FAMILIES, LLAMA3, write_text_files


@pytest.fixture
def model(tmp_path):
    return write_text_files(tmp_path / "model", FAMILIES["byte_level"]())


def write(model, name: str, value) -> None:
    (model / name).write_text(value if isinstance(value, str) else json.dumps(value))


def test_a_missing_tokenizer_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing"):
        load_model_text(tmp_path)


@pytest.mark.process
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("content", ["{", "[]", '"x"'])
def test_a_broken_file_is_named(model, name, content):
    write(model, name, content)
    with pytest.raises(ModelError, match=name.replace(".", r"\.")):
        load_model_text(model)


def test_end_tokens_come_from_every_file_and_the_template(model):
    tokenizer = FAMILIES["byte_level"]()
    write(model, "generation_config.json", {"eos_token_id": [7, 3]})
    text = load_model_text(model)
    ids = [tokenizer.token_to_id(t) for t in ("</s>", "<|im_end|>")]
    assert text.eos_token_ids == (ids[0], 7, 3, ids[1])


def test_generation_defaults_are_taken_where_they_make_sense(model):
    write(
        model,
        "generation_config.json",
        {"temperature": 0.6, "top_k": 20, "top_p": 7, "max_new_tokens": 5, "min_p": "x"},
    )
    assert load_model_text(model).generation_defaults == {"temperature": 0.6, "top_k": 20}


def test_a_model_that_does_not_sample_is_greedy(model):
    write(model, "generation_config.json", {"do_sample": False, "temperature": 0.6, "top_k": 20})
    assert load_model_text(model).generation_defaults == {"temperature": 0.0}


def test_a_template_file_goes_over_the_config(model):
    assert load_model_text(model).chat_template == CHATML
    write(model, "chat_template.jinja", LLAMA3)
    assert load_model_text(model).chat_template == LLAMA3


def test_the_default_of_several_templates_is_taken(tmp_path):
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": CHATML}]
    model = write_text_files(tmp_path, FAMILIES["byte_level"](), None, chat_template=named)
    assert load_model_text(model).chat_template == CHATML


async def test_no_template_is_said(tmp_path):
    text = load_model_text(write_text_files(tmp_path, FAMILIES["byte_level"](), None))
    with pytest.raises(ApiError, match="no chat template"):
        await text.render_chat(None, Chat(messages=[]))


def test_raw_prompts_may_hold_special_tokens_and_get_the_bos(tmp_path):
    text = load_model_text(write_text_files(tmp_path, FAMILIES["llama2"]()))
    bos, end = (text.tokenizer.token_to_id(t) for t in ("<s>", "<|im_end|>"))
    assert text.encode("the<|im_end|>")[0] == bos
    assert text.encode("the<|im_end|>", add_special_tokens=False)[-1] == end


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name",
    [
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "config.json",
        "chat_template.jinja",
    ],
)
def test_what_is_no_file_is_named_and_not_waited_for(model, name, kind):
    make_odd(model / name, kind)
    with no_hanging(), pytest.raises(ModelError, match=rf"{re.escape(name)} cannot be read: it is {kind}"):
        load_model_text(model)


@pytest.mark.process
def test_a_deep_tokenizer_is_refused(model):
    file = json.loads((model / "tokenizer.json").read_text())
    text = json.dumps({**file, "normalizer": "DEEP"}).replace(
        '"DEEP"', '{"type":"Sequence","normalizers":[' * 2000 + "]}" * 2000
    )
    write(model, "tokenizer.json", text)
    with pytest.raises(
        ModelError, match=r"tokenizer\.json is not a tokenizer: .*(nested deeper|recursion limit)"
    ):
        load_model_text(model)


@pytest.mark.parametrize("depth", [100, 4000])
@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json", "config.json"])
def test_deep_nesting_is_an_error_that_names_the_file(model, name, depth):
    write(model, name, '{"x": ' + "[" * depth + "]" * depth + "}")
    with pytest.raises(ModelError, match=rf"{re.escape(name)} is not valid JSON: it is nested deeper"):
        load_model_text(model)


@pytest.mark.parametrize("value", [-1, 3.0, True, "5", {"a": 1}, 2**31, 10**400, [-1, 7], [[7], 7]])
def test_an_end_token_that_is_none_is_ignored_with_a_warning(model, value):
    write(model, "generation_config.json", {"eos_token_id": value})
    text = load_model_text(model)
    assert all(type(id_) is int and 0 <= id_ < 2**31 for id_ in text.eos_token_ids)
    assert (7 in text.eos_token_ids) == isinstance(value, list)
    (warning,) = text.warnings
    assert warning.startswith("generation_config.json: eos_token_id ")
    assert len(warning) < 150


def test_a_list_of_end_tokens_is_bounded(model):
    write(model, "generation_config.json", {"eos_token_id": list(range(64))})
    assert load_model_text(model).warnings == ()
    write(model, "generation_config.json", {"eos_token_id": [1] * 1_000_000})
    with pytest.raises(ModelError, match=r"generation_config\.json: eos_token_id lists 1000000 ids"):
        load_model_text(model)


def test_an_embedding_padded_or_just_as_large_is_fine(model):
    text = load_model_text(model)
    for rows in (text.vocab_size, text.vocab_size + 100):
        assert vocabulary_warnings(text, rows) == []


def test_added_tokens_without_a_row_are_warned_of(model):
    text = load_model_text(model)
    last = max(text.tokenizer.get_added_tokens_decoder())
    (warning,) = vocabulary_warnings(replace(text, chat_template=None, eos_token_ids=()), last)
    assert f"embedding of {last} rows: 1 from {last} (" in warning


def test_a_template_that_writes_a_token_without_a_row_is_warned_of(model):
    text = load_model_text(model)
    rows = text.tokenizer.token_to_id("<|im_start|>")
    assert any("the chat template writes <|im_start|>" in each for each in vocabulary_warnings(text, rows))


def test_a_tokenizer_of_another_model_is_warned_of_with_both_numbers(model):
    text = load_model_text(model)
    size = text.tokenizer.get_vocab_size(with_added_tokens=False)
    warnings = vocabulary_warnings(text, 100)
    assert any(f"has {size} tokens and the embedding 100 rows" in each for each in warnings)
    assert any("end token" in each and "vocabulary of 100" in each for each in warnings)


async def test_a_template_for_tools_takes_conversations_with_tools(model):
    config = json.loads((model / "tokenizer_config.json").read_text())
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ tools }}<tool_call>"},
    ]
    write(model, "tokenizer_config.json", {**config, "chat_template": named})
    text = load_model_text(model)
    assert text.output_format.name == "hermes"
    pool = TemplatePool()
    messages = [{"role": "user", "content": "x"}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    try:
        assert (await text.render_chat(pool, Chat(messages=messages))).text == "plain"
        assert "<tool_call>" in (await text.render_chat(pool, Chat(messages=messages, tools=tools))).text
    finally:
        await pool.close()


def test_kimi_s_calls_are_numbered_by_their_names():
    def call(name, id_):
        return {"id": id_, "type": "function", "function": {"name": name, "arguments": {}}}

    messages = [
        {"role": "assistant", "content": "", "tool_calls": [call("f", "x1"), call("g", "x2")]},
        {"role": "tool", "content": "1", "tool_call_id": "x2"},
        {"role": "assistant", "content": "", "tool_calls": [call("f", "x3")]},
        {"role": "tool", "content": "1", "tool_call_id": "other"},
    ]
    seen = number_calls(messages)
    assert [each["id"] for each in seen[0]["tool_calls"]] == ["functions.f:0", "functions.g:1"]
    assert seen[1]["tool_call_id"] == "functions.g:1"
    assert seen[2]["tool_calls"][0]["id"] == "functions.f:2"
    assert seen[3] == messages[3]
    assert messages[0]["tool_calls"][0]["id"] == "x1"


def test_merges_are_never_left_out_at_random(tmp_path: Path) -> None:
    """`dropout` of a tokenizer.json is for training: texts have the ids of one without it."""
    model = make_tiny_model(tmp_path)
    source = json.loads((model / "tokenizer.json").read_text())
    wanted = load_tokenizer(json.dumps(source).encode()).encode("the quick brown fox").ids
    source["model"]["dropout"] = 0.9
    found = load_tokenizer(json.dumps(source).encode())
    assert {tuple(found.encode("the quick brown fox").ids) for _ in range(20)} == {tuple(wanted)}


@pytest.mark.parametrize("length", [300, 5000])
def test_a_text_of_too_many_tokens_is_refused_before_it_takes_much_memory(model, monkeypatch, length):
    monkeypatch.setattr(text_encoder, "_PIECE", 50)
    encoder = TextEncoder(load_tokenizer((model / "tokenizer.json").read_bytes()), most_tokens=1000)
    markers = SpecialTokenMarkers.absent_from("")
    for encode in (
        lambda text: encoder.encode(text, special=True),
        lambda text: encoder.encode_marked(f"{text}{markers.start}</s>{markers.end}", markers),
        lambda text: encoder.encode_pair("a", text),
    ):
        if length < 1000:
            assert encode("\u00e9 " * (length // 2))
            continue
        whole = []
        with monkeypatch.context() as patch:
            patch.setattr(text_encoder, "_encode", counting(text_encoder._encode, whole))
            with pytest.raises(TokenizeError, match="more than 1,000 tokens"):
                encode("\u00e9 " * (length // 2))
        assert max(whole) <= 50


@pytest.mark.parametrize(("memory", "most"), [(700_000_000, 291_666), (16 << 30, 1 << 20)])
def test_the_most_tokens_of_a_text_follow_from_the_memory(model, monkeypatch, memory, most):
    found = Memory(memory, memory, limited_by_cgroup=True)
    monkeypatch.setattr(text_encoder, "read_memory", lambda: found)
    encoder = TextEncoder(load_tokenizer((model / "tokenizer.json").read_bytes()))
    assert encoder._most_tokens == most


async def test_a_short_text_does_not_wait_for_long_ones_of_its_caller(model, monkeypatch):
    monkeypatch.setattr(tokenizer, "_ENCODING", FairSlots(2, most_per_caller=1))
    text, go_on = load_model_text(model), threading.Event()
    slow = [asyncio.create_task(text.off_loop(1_000_000, lambda: go_on.wait(60))) for _ in range(3)]
    try:
        await asyncio.sleep(0)
        async with asyncio.timeout(60):
            assert await text.off_loop(10_000, lambda: "done") == "done"
        assert not any(task.done() for task in slow)
    finally:
        go_on.set()
    assert all(await asyncio.gather(*slow))


def counting(encode, sizes):
    def count(tokenizer, text, *, special):
        sizes.append(len(text))
        return encode(tokenizer, text, special=special)

    return count


async def test_long_texts_of_one_caller_leave_a_thread_to_others(model, monkeypatch):
    monkeypatch.setattr(tokenizer, "_ENCODING", FairSlots(2, most_per_caller=1))
    text, go_on = load_model_text(model), threading.Event()

    async def encode(caller, work):
        TENANT.set(caller)
        return await text.off_loop(1_000_000, work)

    slow = [asyncio.create_task(encode("greedy", lambda: go_on.wait(60))) for _ in range(50)]
    try:
        await asyncio.sleep(0)
        async with asyncio.timeout(60):
            assert await asyncio.create_task(encode("other", lambda: "done")) == "done"
        assert not any(task.done() for task in slow)
    finally:
        go_on.set()
    assert all(await asyncio.gather(*slow))
