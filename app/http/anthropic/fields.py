"""Types and ranges of the Messages API's fields."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from ..openai.fields import Count, Later, Name, Temperature, ToolName, TopP

TopK = Annotated[int, Meta(ge=0, lt=2**31)]


class TextBlock(Struct, kw_only=True, tag_field="type", tag="text"):
    text: str
    cache_control: Any = None
    """Has nothing to do here: every prompt's beginning is cached."""
    citations: Any = None


class ImageBlock(Struct, kw_only=True, tag_field="type", tag="image"):
    source: Any = None
    cache_control: Any = None


class DocumentBlock(Struct, kw_only=True, tag_field="type", tag="document"):
    source: Any = None
    cache_control: Any = None


class ThinkingBlock(Struct, kw_only=True, tag_field="type", tag="thinking"):
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Struct, kw_only=True, tag_field="type", tag="redacted_thinking"):
    data: str


class ToolUseBlock(Struct, kw_only=True, tag_field="type", tag="tool_use"):
    id: Name
    name: ToolName
    input: dict[str, Any]
    cache_control: Any = None


class ToolResultBlock(Struct, kw_only=True, tag_field="type", tag="tool_result"):
    tool_use_id: Name
    content: str | list[TextBlock | ImageBlock | DocumentBlock] | None = None
    is_error: bool | None = None
    cache_control: Any = None


Block = (
    TextBlock
    | ImageBlock
    | DocumentBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolUseBlock
    | ToolResultBlock
)


class MessageParam(Struct, kw_only=True):
    role: Literal["user", "assistant"]
    content: str | list[Block]


class ToolParam(Struct, kw_only=True):
    name: ToolName
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None
    cache_control: Any = None


class ToolChoice(Struct, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct, kw_only=True):
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Count | None = None


class Metadata(Struct, kw_only=True):
    user_id: str | None = None


class OutputFormat(Struct, kw_only=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class CountTokensRequest(Struct, kw_only=True):
    """What a prompt is made of."""

    model: Name
    messages: list[MessageParam]
    system: str | list[TextBlock] | None = None
    tools: list[ToolParam] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    mcp_servers: Later = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    max_tokens: Count
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    container: Later = None
    output_format: OutputFormat | None = None
