"""Anthropic's Messages API as tests ask it, and models whose answers are known."""

import json
from typing import Any

import httpx

from support.deferred_module import DeferredModule

jiter = DeferredModule("jiter")

TEMPLATE = (
    "{%- if tools %}{{- '<|im_start|>system\\n' + tools | tojson + '<tool_call><|im_end|>\\n' }}{%- endif %}"
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content }}"
    "{%- for call in m.tool_calls or [] %}{{- '<tool_call>' + call.function | tojson + '</tool_call>' }}"
    "{%- endfor %}{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and not enable_thinking %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{%- endif %}"
)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
ANSWERS = {
    "thinker": "<think>\nhm\n</think>\n\nYes, 你好.",
    "caller": f"Let me look.\n{CALL}\n{CALL}",
    "plain": "one two three",
}
ASKED = {"max_tokens": 300, "messages": [{"role": "user", "content": "hello"}]}
THINKS = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
TOOLS = {"tools": [{"name": "weather", "description": "of a city", "input_schema": {"type": "object"}}]}


def ask(http: httpx.Client, model: str, path: str = "/v1/messages", **fields: Any) -> dict[str, Any]:
    answer = http.post(path, json={"model": model, **ASKED, **fields})
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def streamed(http: httpx.Client, model: str, **fields: Any) -> tuple[dict[str, Any], list[str]]:
    """The message that the events add up to, as Anthropic's client puts it together, and their names."""
    names, message = [], {}
    text = http.post("/v1/messages", json={"model": model, **ASKED, "stream": True, **fields}).text
    for event in text.removesuffix("\n\n").split("\n\n"):
        first, _, second = event.partition("\n")
        name, data = first.removeprefix("event: "), json.loads(second.removeprefix("data: "))
        assert data["type"] == name
        names.append(name)
        match name:
            case "message_start":
                message = data["message"]
            case "content_block_start":
                assert data["index"] == len(message["content"])
                message["content"].append(data["content_block"] | {"json": ""})
            case "content_block_delta":
                block, delta = message["content"][data["index"]], data["delta"]
                for field, key in (("text", "text"), ("thinking", "thinking"), ("json", "partial_json")):
                    block[field] = block.get(field, "") + delta.get(key, "")
            case "message_delta":
                message |= data["delta"] | {"usage": data["usage"]}
    for block in message["content"]:
        written = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = jiter.from_json(written.encode(), partial_mode=True) if written else {}
        for field in {"text", "thinking"} - {block["type"]}:
            block.pop(field, None)
    return message, names
