"""Streams of thoughts and calls in several output formats, chunk by chunk in the official clients' types."""

import json

import httpx
import pydantic
import pytest

from support.deferred_module import DeferredModule
from support.openai_server import serving
from support.output_examples import ARGUMENTS, EXAMPLES, SCHEMAS, template_of

anthropic = DeferredModule("anthropic")
openai = DeferredModule("openai")

THOUGHTS = {
    "harmony": ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
    "gemma4": ("<|channel>thought\n", "<channel|>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "kimi_k2": ("<think>", "</think>"),
    "glm47": ("<think>", "</think>"),
}
ASKED = [{"role": "user", "content": "hello"}]
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()
]
BODY = (
    "{%- for m in messages %}{{- m.role + m.content }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"
)


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("data")) as server:
        for name, (opener, closer) in THOUGHTS.items():
            signs = template_of(name).replace("{% if tools %}", "tools ").replace("{% endif %}", "")
            template = BODY + "{#- " + f"{signs} {opener}{closer}" + " -#}"
            answer = f"{opener}Hm, 你好.{closer}{EXAMPLES[name]}"
            server.load_scripted(tmp_path_factory.mktemp(name), {name: answer}, template, context=1024)
        yield server.url


def events(url, path, **body):
    answer = httpx.post(url + path, json={"stream": True, "messages": ASKED, **body}, timeout=60)
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize("name", THOUGHTS)
def test_openai_s_chunks(url, name):
    said = {"reasoning": "", "content": "", "name": "", "arguments": ""}
    for event in events(url, "/v1/chat/completions", model=name, tools=TOOLS):
        chunk = openai.types.chat.ChatCompletionChunk.model_validate(event, strict=True)
        for choice in chunk.choices:
            said["reasoning"] += getattr(choice.delta, "reasoning_content", None) or ""
            said["content"] += choice.delta.content or ""
            for call in choice.delta.tool_calls or ():
                said["name"] += call.function.name or ""
                said["arguments"] += call.function.arguments or ""
            reason = choice.finish_reason
    assert (said["reasoning"], said["content"], said["name"]) == ("Hm, 你好.", "", "get_weather")
    assert json.loads(said["arguments"]) == ARGUMENTS
    assert reason == "tool_calls"


@pytest.mark.parametrize("name", THOUGHTS)
def test_anthropic_s_events(url, name):
    tools = [{"name": each, "input_schema": schema} for each, schema in SCHEMAS.items()]
    thinking = {"type": "enabled", "budget_tokens": 1024}
    known = pydantic.TypeAdapter(anthropic.types.RawMessageStreamEvent)
    blocks = []
    for event in events(url, "/v1/messages", model=name, tools=tools, max_tokens=500, thinking=thinking):
        known.validate_python(event)
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"]["type"])
        if event["type"] == "message_delta":
            assert event["delta"]["stop_reason"] == "tool_use"
    assert blocks == ["thinking", "tool_use"]
