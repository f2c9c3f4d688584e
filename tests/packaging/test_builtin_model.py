"""The built-in model answers questions it has never seen, and its files are what a loader expects."""

import json
import random
import re
import sys
from itertools import islice

import pytest

from llmbox.engine.core.engine import Engine
from support.builtin_model import ASSETS, IN_SCOPE, OUT_OF_SCOPE, QUESTIONS, ROOT, answers, is_right, user
from support.real_engines import hf_model, hf_tokens, load

RECIPE = ROOT / "packaging" / "builtin_model"
# The present artefact answers 0.77: the floor only catches a loss.
IN_SCOPE_FLOOR = 0.73
OUT_OF_SCOPE_FLOOR = 0.8


@pytest.fixture(scope="module")
def engine() -> Engine:
    return load(ASSETS, memory_bytes=2 << 30, max_running=64)


def share_right(engine: Engine, questions: list[str], musts: list[list[str]]) -> float:
    texts = answers(engine, user(*questions))
    right = [is_right(text, must) for text, must in zip(texts, musts, strict=True)]
    for question, text, ok in zip(questions, texts, right, strict=True):
        if not ok:
            print(f"WRONG  {question}\n       {text}")
    print(f"{sum(right)} of {len(right)} right")
    return sum(right) / len(right)


def test_the_files_are_there_and_small() -> None:
    names = {path.name for path in ASSETS.iterdir()}
    assert names == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert (ASSETS / "model.safetensors").stat().st_size <= 10_000_000
    assert sum(path.stat().st_size for path in ASSETS.iterdir()) <= 10_500_000


def test_the_config_names_a_supported_architecture() -> None:
    config = json.loads((ASSETS / "config.json").read_text("utf-8"))
    assert config["model_type"] == "qwen3"
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["dtype"] == "bfloat16"
    assert config["tie_word_embeddings"] is True
    assert config["max_position_embeddings"] == 4096


@pytest.mark.slow
def test_held_out_questions_about_llmbox_are_answered(engine: Engine) -> None:
    assert len(IN_SCOPE) >= 120
    assert share_right(engine, [q["ask"] for q in IN_SCOPE], [q["must"] for q in IN_SCOPE]) >= IN_SCOPE_FLOOR


@pytest.mark.slow
def test_other_questions_get_the_demo_refusal(engine: Engine) -> None:
    musts = [QUESTIONS["out_of_scope"]["must"]] * len(OUT_OF_SCOPE)
    assert share_right(engine, OUT_OF_SCOPE, musts) >= OUT_OF_SCOPE_FLOOR


def test_the_answer_depends_on_the_last_question_of_a_conversation(engine: Engine) -> None:
    chat = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "Which port does llmbox use?"},
        {"role": "assistant", "content": "The default port is 7411."},
        {"role": "user", "content": "And how do I stop the server?"},
    ]
    port, stop = answers(engine, [chat[1:2], chat])
    assert is_right(port, ["7411"])
    assert is_right(stop, ["llmbox down"])


def test_answers_are_those_of_transformers(engine: Engine) -> None:
    from transformers import AutoTokenizer

    chats = user("What is TTFT?", "What is the capital of France?")
    tokenizer = AutoTokenizer.from_pretrained(ASSETS)
    reference = hf_model(ASSETS)
    expected = []
    for chat in chats:
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        expected.append(tokenizer.decode(hf_tokens(reference, ids, 20), skip_special_tokens=True))
    got = answers(engine, chats)
    assert [text.startswith(begin) for text, begin in zip(got, expected, strict=True)] == [True, True], got


def test_training_never_sees_a_held_out_question(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(RECIPE))
    import questions

    try:
        held_out = {questions.normalise(q) for q in questions.held_out()}
        assert len(held_out) == len(IN_SCOPE) + len(OUT_OF_SCOPE)
        # The seed of build.py. A prefix of its draws is enough: the guard is the same for every draw.
        writer = questions.Writer(questions.load_facts(), 7412, held_out)
        for _ in islice(writer.texts(), 20_000):
            pass
        assert not held_out & {questions.normalise(q) for q in writer.questions}
        # The written templates themselves must not hold them either: the guard is a belt beside the braces.
        unguarded = questions.Writer(questions.load_facts(), 1, set())
        for _ in islice(unguarded.texts(), 20_000):
            pass
        assert not held_out & {questions.normalise(q) for q in unguarded.questions}
    finally:
        for name in ("questions", "wording"):
            sys.modules.pop(name, None)


def test_the_perplexity_text_is_held_out_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(RECIPE))
    import questions

    try:
        text = (RECIPE / "perplexity.txt").read_text("utf-8")
        asked = re.findall(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", text, re.DOTALL)
        assert len(asked) >= 100
        assert {questions.normalise(q) for q in asked} <= {
            questions.normalise(q) for q in questions.held_out()
        }
    finally:
        for name in ("questions", "wording"):
            sys.modules.pop(name, None)


def test_the_tokenizer_gives_any_text_back() -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(ASSETS / "tokenizer.json"))
    vocab = json.loads((ASSETS / "config.json").read_text("utf-8"))["vocab_size"]
    assert tokenizer.get_vocab_size() == vocab
    draw = random.Random(5)
    for _ in range(300):
        points = (
            draw.choice((draw.randrange(0x80), draw.randrange(0xD800), draw.randrange(0xE000, 0x110000)))
            for _ in range(40)
        )
        text = "".join(map(chr, points))
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert max(ids) < vocab
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_every_byte_is_a_token() -> None:
    from tokenizers import Tokenizer, pre_tokenizers

    vocab = Tokenizer.from_file(str(ASSETS / "tokenizer.json")).get_vocab()
    assert set(pre_tokenizers.ByteLevel.alphabet()) <= set(vocab)
    assert all(name in vocab for name in ("<|endoftext|>", "<|im_start|>", "<|im_end|>"))


def test_the_chat_template_is_chatml() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(ASSETS)
    chat = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    expected = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n"
    assert tokenizer.apply_chat_template(chat, tokenize=False) == expected
    prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert prompt == expected + "<|im_start|>assistant\n"
