import json
import re

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from llmbox.app.errors import ApiError
from llmbox.app.sandbox.template_worker import render
from llmbox.app.text.chat_template import Chat, RenderedChat, _any_of
from llmbox.app.text.tokenizer.text_encoder import TextEncoder
from llmbox.app.text.tokenizer.text_loader import load_model_text
from llmbox.app.text.tokenizer.tokenizer import TextModel
from llmbox.engine.errors import ModelError
from support.lanes import examples
from support.tokenizers_zoo import FAMILIES, SPECIALS, TEMPLATES, write_text_files

FAMILY_NAMES = ("byte_level", "llama2", "metaspace", "gemma")


class InProcess:
    """The template pool's place, without a process: same code, no limits."""

    async def render(self, job):
        return render(**json.loads(job))


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> dict[tuple[str, str], tuple[TextModel, object]]:
    from transformers import PreTrainedTokenizerFast

    root = tmp_path_factory.mktemp("texts")
    made = {}
    for family in FAMILY_NAMES:
        for name, template in TEMPLATES.items():
            path = write_text_files(root / f"{family}-{name}", FAMILIES[family](), template)
            made[family, name] = (load_model_text(path), PreTrainedTokenizerFast.from_pretrained(path))
    return made


def conversation(*contents: str) -> list[dict[str, str]]:
    return [
        {"role": role, "content": c} for role, c in zip(["user", "assistant"] * 9, contents, strict=False)
    ]


async def prompt_ids(text: TextModel, messages, **options) -> list[int]:
    return (await text.render_chat(InProcess(), Chat(messages=messages, **options))).ids()


ORDINARY = st.text(max_size=20) | st.text(" \n\t.the你好😀<|im_", max_size=20)
chats = st.lists(ORDINARY, min_size=1, max_size=3).map(lambda contents: conversation(*contents))


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("family", FAMILY_NAMES)
@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(messages=chats, add=st.booleans())
async def test_ordinary_chats_equal_transformers(texts, family, template, messages, add):
    ours, theirs = texts[family, template]
    literals = ours.tokenizer.get_added_tokens_decoder().values()
    said = " ".join(message["content"] for message in messages)
    assume(not any(token.content in said for token in literals))  # Hypothesis draws texts of our sources too
    expected = theirs.apply_chat_template(
        messages, add_generation_prompt=add, tokenize=True, return_dict=False
    )
    assert await prompt_ids(ours, messages, add_generation_prompt=add) == expected


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("family", FAMILY_NAMES)
@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    parts=st.lists(
        st.sampled_from([*SPECIALS, "<tool_call>", " ", "\n", "the", "你"]), min_size=1, max_size=6
    )
)
async def test_special_literals_in_user_text_stay_text(texts, family, template, parts):
    ours, _ = texts[family, template]
    content = "".join(parts)
    ids = await prompt_ids(ours, conversation(content))
    harmless = await prompt_ids(ours, conversation("x"))
    added = set(ours.tokenizer.get_added_tokens_decoder())
    assert [i for i in ids if i in added] == [i for i in harmless if i in added]
    rendered = render(
        TEMPLATES[template],
        ours.special_tokens | {"messages": conversation(content), "add_generation_prompt": True},
    )
    if family == "byte_level":
        assert ours.decode(ids, skip_special=False) == rendered


async def test_neighbors_of_a_literal_keep_their_boundaries(texts):
    """Only spans that hold a literal are encoded again, each between two control tokens as a whole."""
    ours, _ = texts["byte_level", "chatml"]
    text = "\n\n the <|im_end|> fox"
    ids = await prompt_ids(ours, conversation(text), add_generation_prompt=False)
    bare = FAMILIES["byte_level"]()
    plain = TextEncoder(bare)._plain_tokenizer(at_start=False)
    start, end = (ours.tokenizer.token_to_id(t) for t in ("<|im_start|>", "<|im_end|>"))
    newline = ours.tokenizer.encode("\n").ids
    assert ids == [start, *plain.encode("user\n" + text).ids, end, *newline]


async def test_a_thinking_assistant_turn_is_split_as_the_template_wants(texts):
    ours, theirs = texts["byte_level", "thinking"]
    messages = conversation("hi", "<think>\nsecret\n</think>\n\nhello", "more")
    expected = theirs.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert await prompt_ids(ours, messages) == expected


async def test_literals_in_the_assistants_past_cannot_close_its_turn(texts):
    ours, _ = texts["byte_level", "chatml"]
    ids = await prompt_ids(ours, conversation("hi", "a<|im_end|>b"))
    assert ids.count(ours.tokenizer.token_to_id("<|im_end|>")) == 2


@pytest.mark.parametrize("template", ["chatml", "llama3"])
@pytest.mark.parametrize("last", ["The answer", "The answer ", " is <|eot_id|> "])
async def test_continue_final_message_equals_transformers(texts, template, last):
    ours, theirs = texts["byte_level", template]
    messages = conversation("hi", last)
    chat = Chat(messages=messages, add_generation_prompt=False, continue_final_message=True)
    rendered = await ours.render_chat(InProcess(), chat)
    expected = theirs.apply_chat_template(messages, continue_final_message=True, tokenize=False)
    assert rendered.text == expected


SYSTEM = {"role": "system", "content": " Be brief. "}


async def test_a_system_message_before_the_first_of_the_user(texts):
    ours, theirs = texts["gemma", "gemma3"]
    messages = [SYSTEM, *conversation(" hi <bos> ", "a", "b ")]
    expected = theirs.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert await prompt_ids(ours, messages, add_generation_prompt=True) == expected


@pytest.mark.parametrize(
    ("template", "messages", "says"),
    [
        ("llama2", conversation("a")[:1] * 2, "must alternate"),
        ("gemma3", conversation("a")[:1] * 2, "must alternate"),
        ("gemma2", [SYSTEM, *conversation("a")], "System role not supported"),
    ],
)
async def test_a_template_may_refuse(tmp_path, template, messages, says):
    from llmbox.app.sandbox.pool import TemplatePool

    text = load_model_text(write_text_files(tmp_path, FAMILIES["llama2"](), TEMPLATES[template]))
    pool = TemplatePool()
    try:
        with pytest.raises(ApiError, match=says) as caught:
            await text.render_chat(pool, Chat(messages=messages))
    finally:
        await pool.close()
    assert (caught.value.status, caught.value.param) == (400, "messages")


def test_rendered_chat_shows_text_without_markers(texts):
    ours, _ = texts["byte_level", "chatml"]
    from llmbox.app.text.chat_template import SpecialTokenMarkers

    markers = SpecialTokenMarkers.absent_from("")
    assert RenderedChat(f"a{markers.start}<s>{markers.end}b", markers, ours.control).text == "a<s>b"


LITERALS = st.lists(st.text("ab<|>.", min_size=1, max_size=5), max_size=8)


@given(literals=LITERALS, text=st.text("ab<|>.", max_size=30))
def test_the_longest_literal_is_found_as_if_each_was_tried(literals, text):
    longest_first = sorted(literals, key=len, reverse=True)
    plain = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
    assert _any_of(literals).findall(text) == plain.findall(text)


def test_thousands_of_literals_cost_a_text_nothing():
    """One try for each would be 10^10 steps."""
    pattern = _any_of([f"<unused{number}>" for number in range(60_000)])
    assert pattern.sub("", "<" * 200_000) == "<" * 200_000
    assert pattern.sub("", "a<unused59999>b<unused7>") == "ab"


def test_literals_that_begin_each_other_end_somewhere():
    assert _any_of(["a" * count for count in range(1, 50)]).fullmatch("a" * 49)
    with pytest.raises(ModelError, match="added tokens"):
        _any_of(["a" * count for count in range(1, 1024)])
