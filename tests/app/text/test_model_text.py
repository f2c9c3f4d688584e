import json

import pytest

from llmbox.app.errors import ApiError
from llmbox.app.text.chat_prompt import Chat
from llmbox.app.text.model_text import load_model_text
from llmbox.engine.errors import ModelError
from support.tokenizers_zoo import CHATML, FAMILIES, LLAMA3, write_text_files


@pytest.fixture
def model(tmp_path):
    return write_text_files(tmp_path / "model", FAMILIES["byte_level"]())


def write(model, name: str, value) -> None:
    (model / name).write_text(value if isinstance(value, str) else json.dumps(value))


def test_a_missing_tokenizer_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing"):
        load_model_text(tmp_path)


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
