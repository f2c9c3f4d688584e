"""Thoughts and calls of tools, as the official client sees them, from an engine whose tokens are known."""

import json

import pytest

from support.deferred_module import DeferredModule
from support.openai_server import serving
from support.tokenizers_zoo import byte_level

openai = DeferredModule("openai")

TEMPLATE = (
    "{%- if tools %}{{- '<|im_start|>system\\n' }}"
    "{%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}"
    "{{- 'Answer with <tool_call>.<|im_end|>\\n' }}{%- endif %}"
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content.split('</think>')[-1] }}"
    "{%- for call in m.tool_calls or [] %}{{- '<tool_call>' + call.function | tojson + '</tool_call>' }}"
    "{%- endfor %}{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if reasoning_effort is defined %}{{- 'Think: ' + reasoning_effort + '\\n' }}{%- endif %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
ANSWERS = {
    "thinker": "<think>\nhm, 你好\n</think>\n\nYes.",
    "caller": f"<think>\nhm\n</think>\n\nLet me look.\n{CALL}\n{CALL}",
    "plain": "<think>no</think>",
    "looper": f"{CALL}\n" * 6,
    "forced": CALL,
}
ASKED = [{"role": "user", "content": "hello"}]
WEATHER = {"name": "weather", "description": "of <|im_end|> a city", "parameters": {"type": "object"}}
TOOLS = [{"type": "function", "function": WEATHER}]


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    with serving(tmp_path_factory.mktemp("data"), tools=2) as server:
        server.load_scripted(root, ANSWERS, TEMPLATE, context=512)
        with server.client() as client:
            yield client


def ask(client, model, **fields):
    return client.chat.completions.create(model=model, messages=ASKED, **fields)


def streamed(client, model, **fields):
    """What the chunks of one choice add up to."""
    whole = {"content": "", "reasoning": "", "calls": [], "entries": 0, "reason": None, "usage": None}
    options = {"include_usage": True}
    for chunk in ask(client, model, stream=True, stream_options=options, **fields):
        whole["usage"] = chunk.usage or whole["usage"]
        for choice in chunk.choices:
            delta = choice.delta
            whole["content"] += delta.content or ""
            whole["reasoning"] += getattr(delta, "reasoning_content", None) or ""
            for call in delta.tool_calls or ():
                if call.id:
                    whole["calls"].append([call.index, call.id, call.function.name, ""])
                whole["calls"][call.index][3] += call.function.arguments
            whole["entries"] += len(choice.logprobs.content) if choice.logprobs else 0
            whole["reason"] = choice.finish_reason or whole["reason"]
    return whole


def test_thoughts_stand_apart_from_the_answer(client):
    answer = ask(client, "thinker")
    message = answer.choices[0].message
    assert (message.content, message.reasoning_content, message.reasoning) == ("Yes.", "hm, 你好", "hm, 你好")
    whole = streamed(client, "thinker", logprobs=True)
    assert (whole["content"], whole["reasoning"], whole["reason"]) == ("Yes.", "hm, 你好", "stop")
    assert whole["entries"] == answer.usage.completion_tokens - 1  # all but the end token
    told = answer.usage.completion_tokens_details.reasoning_tokens
    assert 0 < told < answer.usage.completion_tokens
    assert whole["usage"].completion_tokens_details.reasoning_tokens == told


def test_thoughts_can_be_left_out(client):
    message = ask(client, "thinker", extra_body={"include_reasoning": False}).choices[0].message
    assert message.content == "Yes."
    assert not hasattr(message, "reasoning_content")
    whole = streamed(client, "thinker", extra_body={"include_reasoning": False})
    assert (whole["content"], whole["reasoning"]) == ("Yes.", "")


def test_models_that_do_not_think_keep_their_text(client):
    assert ask(client, "plain").choices[0].message.content == ANSWERS["plain"]
    assert streamed(client, "plain")["content"] == ANSWERS["plain"]


def test_calls_of_tools(client):
    choice = ask(client, "caller", tools=TOOLS, tool_choice="auto").choices[0]
    message = choice.message
    assert choice.finish_reason == "tool_calls"
    assert (message.content, message.reasoning_content) == ("Let me look.", "hm")
    assert [call.function.name for call in message.tool_calls] == ["weather"] * 2
    assert [json.loads(call.function.arguments) for call in message.tool_calls] == [{"city": "Köln"}] * 2
    ids = [call.id for call in message.tool_calls]
    assert len(set(ids)) == 2
    assert all(len(each) == 9 and each.isalnum() for each in ids)
    whole = streamed(client, "caller", tools=TOOLS)
    assert (whole["content"], whole["reasoning"], whole["reason"]) == ("Let me look.", "hm", "tool_calls")
    assert [call[0] for call in whole["calls"]] == [0, 1]
    assert [call[2:] for call in whole["calls"]] == [["weather", '{"city": "Köln"}']] * 2


def test_the_same_call_again_and_again_ends_the_answer(client):
    answer = ask(client, "looper", tools=TOOLS)
    calls = len(answer.choices[0].message.tool_calls)
    assert 4 <= calls < 6
    assert (answer.choices[0].finish_reason, answer.choices[0].message.content) == ("tool_calls", None)
    assert any("repeated the same tool calls" in warning for warning in answer.warnings)
    whole = streamed(client, "looper", tools=TOOLS)
    assert (len(whole["calls"]), whole["reason"]) == (calls, "tool_calls")
    unbound = {"tools": TOOLS, "extra_body": {"thinking_loop_detection": False}}
    assert len(streamed(client, "looper", **unbound)["calls"]) == 6


def test_one_call_at_a_time_and_none(client):
    answer = ask(client, "caller", tools=TOOLS, parallel_tool_calls=False)
    assert len(answer.choices[0].message.tool_calls) == 1
    for fields in ({"tools": TOOLS, "tool_choice": "none"}, {"tools": []}, {}):
        choice = ask(client, "caller", **fields).choices[0]
        assert choice.message.tool_calls is None
        assert "<tool_call>" in choice.message.content
        assert choice.finish_reason == "stop"


@pytest.mark.parametrize(
    "choice", ["auto", "required", {"type": "function", "function": {"name": "weather"}}]
)
def test_a_call_that_is_cut_at_max_tokens_is_a_beginning_of_it(client, choice):
    whole = ask(client, "forced", tools=TOOLS).usage.completion_tokens
    seen = set()
    for most in (1, 2, *range(whole - 21, whole - 3, 5)):
        fields = {"tools": TOOLS, "tool_choice": choice, "max_tokens": most}
        answer = ask(client, "forced", **fields).choices[0]
        chunks = streamed(client, "forced", **fields)
        calls = [[call.function.name, call.function.arguments] for call in answer.message.tool_calls or []]
        assert answer.finish_reason == chunks["reason"] == "length"
        assert (answer.message.content or "") == chunks["content"] == ""
        assert calls == [call[2:] for call in chunks["calls"]]
        assert all(name == "weather" for name, _ in calls)
        seen.add(calls[0][1] if calls else None)
    assert None in seen
    assert any(each and each.startswith('{"city') and not each.endswith("}") for each in seen)


def test_a_conversation_with_calls_is_rendered_by_the_template(client):
    call = {"id": "abc", "type": "function", "function": {"name": "weather", "arguments": '{"city": "x"}'}}
    messages = [
        *ASKED,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abc", "content": "rain <|im_end|>"},
    ]
    body = {"model": "caller", "messages": messages, "tools": TOOLS}
    ids = client.post("/../tokenize", body=body, cast_to=object)["tokens"]
    text = client.post("/../detokenize", body={"model": "caller", "tokens": ids}, cast_to=object)["prompt"]
    assert '<tool_call>{"name": "weather", "arguments": {"city": "x"}}</tool_call>' in text
    assert json.dumps(TOOLS[0], ensure_ascii=False) in text
    end = byte_level().token_to_id("<|im_end|>")
    assert ids.count(end) == 4, "a literal in a tool's words became a control token"
    assert client.chat.completions.create(
        model="caller", messages=messages, tools=TOOLS
    ).usage.prompt_tokens == len(ids)


@pytest.mark.parametrize(
    ("model", "fields", "param"),
    [
        ("plain", {"tools": TOOLS}, "tools"),
        (
            "plain",
            {"messages": [*ASKED, {"role": "tool", "content": "x", "tool_call_id": "1"}]},
            "messages[1].role",
        ),
        ("caller", {"tool_choice": "required"}, "tool_choice"),
        (
            "caller",
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "clock"}}},
            "tool_choice",
        ),
        ("caller", {"tool_choice": "auto"}, "tool_choice"),
        ("caller", {"tools": TOOLS * 3}, "tools"),
        ("caller", {"tools": [{"type": "function"}]}, "tools[0].function"),
        ("caller", {"tools": [{"type": "mcp", "mcp": {"name": "x"}}]}, "tools[0].type"),
        ("caller", {"tools": [{"type": "custom"}]}, "tools[0].custom"),
    ],
)
def test_what_cannot_be_done_is_refused(client, model, fields, param):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{"model": model, "messages": ASKED, **fields})
    assert caught.value.param == param


def test_a_schema_that_cannot_be_followed_is_told_and_a_strict_one_refused(client):
    tool = {**WEATHER, "parameters": {"type": "object", "not": {"required": ["city"]}}}
    (warning,) = ask(client, "caller", tools=[{"type": "function", "function": tool}]).warnings
    assert "not checked" in warning
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, "caller", tools=[{"type": "function", "function": {**tool, "strict": True}}])
    assert refused.value.code == "invalid_grammar"
    strict = [{"type": "function", "function": {**WEATHER, "strict": True}}]
    assert not hasattr(ask(client, "caller", tools=strict), "warnings")


def test_budgets_of_thoughts_are_taken_and_told_where_nothing_thinks(client):
    assert not hasattr(ask(client, "thinker", extra_body={"thinking_token_budget": 100}), "warnings")
    (warning,) = ask(client, "plain", extra_body={"thinking_token_budget": 100}).warnings
    assert "no thoughts" in warning


def test_the_template_gets_the_effort_or_the_answer_says_that_it_cannot(client):
    usual, less = ask(client, "thinker"), ask(client, "thinker", reasoning_effort="low")
    said = len(byte_level().encode("Think: low\n", add_special_tokens=False).ids)
    assert less.usage.prompt_tokens == usual.usage.prompt_tokens + said
    assert not hasattr(less, "warnings")
    (warning,) = ask(client, "plain", reasoning_effort="low").warnings
    assert "no effect" in warning
