"""Grammars of answers that may be words or calls, in each way of writing calls."""

import json
from types import SimpleNamespace

import pytest
from llguidance import LLMatcher, LLTokenizer

from llmbox.app.text.grammar.grammars import calls, free_text, grammars, json_input
from llmbox.app.text.grammar.json_lark import lark_in_json
from llmbox.app.text.output_parser import HERMES, LLAMA, MISTRAL, ToolSyntax

TOOL = {"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}
INPUTS = {"run": json_input("input0", lark_in_json("[ab]+\\n", "regex"), "input")}
TEXT = SimpleNamespace(
    tokenizer=SimpleNamespace(token_to_id=lambda mark: None), tokens=SimpleNamespace(special_ids=())
)


def takes(syntax: ToolSyntax, answer: str) -> bool:
    made = calls(TEXT, syntax, [TOOL], INPUTS, several=syntax.most != 1)
    grammar = json.dumps({"grammars": grammars(free_text(TEXT, syntax), made)})
    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = list(answer.encode())
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def called(field: str, text: str) -> str:
    return f'{{"name": "run", "{field}": {{"input": {json.dumps(text)}}}}}'


@pytest.mark.parametrize(
    ("syntax", "field", "around"),
    [
        (HERMES, "arguments", "<tool_call>\n{}\n</tool_call>"),
        (MISTRAL, "arguments", "[TOOL_CALLS][{}]"),
        (LLAMA, "parameters", "{}"),
    ],
)
def test_words_or_calls_whose_input_follows(syntax: ToolSyntax, field: str, around: str):
    good, bad = (around.format(called(field, text)) for text in ("ab\n", "abc\n"))
    assert takes(syntax, "Some words, é\n and < others, <<tool <t<to_call, [TOOL [[")
    assert takes(syntax, good)
    assert not takes(syntax, bad)
    if not syntax.bare:
        assert takes(syntax, f"I will < run it.\n{good}")
        assert takes(syntax, f"I will run it: {syntax.opener[:3]}")
        assert not takes(syntax, f"I will run it.\n{bad}")


def test_several_calls_where_a_model_writes_several():
    one = "<tool_call>\n{}\n</tool_call>".format(called("arguments", "a\n"))
    assert takes(HERMES, f"{one}\n{one}")
