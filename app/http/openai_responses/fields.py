"""Types and ranges of the Responses API's fields."""

from typing import Any, Literal

from msgspec import Struct

from ..openai.effort import Effort
from ..openai.fields import Count, Later, Name, Never, StreamOptions, Temperature, ToolName, TopP


class Part(Struct, kw_only=True):
    type: str
    text: str | None = None
    refusal: str | None = None


class MessageItem(Struct, kw_only=True):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Part]


class FunctionCallItem(Struct, kw_only=True):
    call_id: Name
    name: ToolName
    arguments: str


class FunctionOutputItem(Struct, kw_only=True):
    call_id: Name
    output: str | list[Part]


class ReasoningItem(Struct, kw_only=True):
    content: list[Part] | None = None
    summary: list[Part] | None = None


class FunctionTool(Struct, kw_only=True):
    """The only type that is run by the caller, which is the only kind here."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionChoice(Struct, kw_only=True):
    type: Literal["function"]
    name: ToolName


class Reasoning(Struct, kw_only=True):
    effort: Effort | None = None
    summary: str | None = None
    generate_summary: str | None = None


class TextFormat(Struct, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    """Answers always follow the schema."""


class TextOptions(Struct, kw_only=True):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponseRequest(Struct, kw_only=True):
    input: str | list[dict[str, Any]]
    """Items: `message` (also without a type), `function_call`, `function_call_output`, `reasoning`."""
    model: Name | None = None
    instructions: str | None = None
    max_output_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    truncation: Never = None
    service_tier: Never = None
    store: bool | None = None
    previous_response_id: Name | None = None
    background: bool | None = None
    conversation: Later = None
    prompt: Later = None
    top_logprobs: Later = None
    max_tool_calls: Later = None
